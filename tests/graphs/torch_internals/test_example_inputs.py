"""Parts of one buffer as inputs: compiled as independent ones where no two overlap."""

from __future__ import annotations

import pytest
import torch

from graphs import capture
from graphs.store import ArtifactStore, StoredInductor
from graphs.torch_internals.example_inputs import separate_storages

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_gradients")


@torch.compiler.nested_compile_region
def region(x, y):
    return x + y


def in_region(x, y):
    return region(x, y) * 2


def parts():
    buffer = torch.zeros(16)
    return buffer, buffer[:4], buffer[4:12].view(2, 4)


def test_parts_get_storages_of_their_own_over_the_same_memory():
    _, one, other = parts()
    own, own_other, constant = separate_storages([one, other, 3])
    assert constant == 3 and own.data_ptr() == one.data_ptr()
    assert own_other.data_ptr() == other.data_ptr() and own_other.stride() == other.stride()
    assert own.untyped_storage().data_ptr() != own_other.untyped_storage().data_ptr()


def test_what_overlaps_another_or_is_alone_stays_what_it_is():
    buffer, one, other = parts()
    alone = torch.zeros(3)
    given = [one, buffer[2:6], alone, None]
    assert all(mine is theirs for mine, theirs in zip(separate_storages(given), given, strict=True))
    weight = torch.nn.Parameter(other)
    assert separate_storages([weight, one])[0] is weight


@pytest.mark.parametrize("kind", ["aot_eager", "store"])
def test_a_region_that_is_compiled_once_takes_parts_of_a_buffer(kind, tmp_path):
    """Torch refuses it inputs of one storage, though no two of them overlap."""
    _, one, other = parts()
    store = ArtifactStore(tmp_path / "store")
    for _ in range(2 if kind == "store" else 1):
        backend = StoredInductor(store) if kind == "store" else kind
        graph = capture(in_region, [one, other], backend=backend)
        one.fill_(1), other.fill_(2)
        assert graph.run(one, other).unique().tolist() == [6]
    assert kind != "store" or backend.loaded == 1


def test_what_is_written_to_a_part_is_in_the_buffer():
    def writes(x, y):
        y += 1
        return x + y

    buffer, one, other = parts()
    graph = capture(writes, [one, other], backend="aot_eager")
    buffer.zero_()
    assert graph.run(one, other).eq(1).all()
    assert buffer.tolist() == [0] * 4 + [1] * 8 + [0] * 4
