"""Models of 4 to 8 bits on a device: packed there too, with the tokens of a CPU.

The fake device computes their layers with the Triton kernels, interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.errors import ModelChanged
from compiled_attn.models import load_model
from compiled_attn.models.packed import quantised_weights, weight_bytes
from compiled_attn.models.quantised_layers import QuantisedLayer
from compiled_attn.ops.packed_linear import Packing
from tests.compiled_attn.models.test_awq_gptq import checkpoint
from tests.compiled_attn.ops.kernels import interpreted
from tests.compiled_attn.tiny import tiny_model
from tests.fake_device import NAME, open_device
from tests.slow import slow_but

CONFIG = EngineConfig(
    16, 4, block_size=4, num_blocks=40, context=64, backend="eager", max_graphs=2, kernel="native"
)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 4]]
GREEDY = SamplingParams(max_new_tokens=3)


@pytest.fixture
def device() -> Iterator[str]:
    """The fake device, with the ops in Triton, whose interpreter reads memory of the host."""
    interpreter = getattr(torch.ops, interpreted().namespace)
    open_device()
    library = torch.library.Library("compiled_attn", "FRAGMENT")
    for name in ("quantised_linear", "quantised_rows"):
        library.impl(name, partial(_on_host, getattr(interpreter, name)), "PrivateUse1")
    yield NAME
    library._destroy()


def _on_host(op: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    given = (each.cpu() if isinstance(each, torch.Tensor) else each for each in arguments)
    return op(*given).to(NAME)


def tokens(engine: Engine) -> list[list[int]]:
    engine.warmup()
    return [each.tokens for each in engine.generate(PROMPTS, GREEDY, in_order=True)]


def layers(model: torch.nn.Module) -> list[QuantisedLayer]:
    return [each for each in model.modules() if isinstance(each, QuantisedLayer)]


KINDS: tuple[Packing, ...] = ("int4", "w4a16", "int8", "w8a16")


@pytest.mark.parametrize("weights", slow_but(("int4",), KINDS))
def test_rounded_weights_give_the_tokens_of_a_cpu(device, weights):
    config = replace(CONFIG, weights=weights)
    here = Engine(tiny_model(num_hidden_layers=1), config)
    there = Engine(tiny_model(num_hidden_layers=1).to(device), config)
    assert tokens(there) == tokens(here)
    assert there.executor.module.formats == [weights]
    model = there.executor.module.model
    assert weight_bytes(model) == weight_bytes(here.executor.module.model)
    for each in layers(model):
        assert each.packed.device.type == device == each.weight.device.type
        assert each.weight.untyped_storage().nbytes() == each.weight.itemsize
    there.executor.check_unchanged()
    each.weight.data = torch.zeros(each.weight.shape, device=device)
    with pytest.raises(ModelChanged, match="a packed weight was written to"):
        there.executor.check_unchanged()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_checkpoint_stays_packed_and_gives_the_tokens_of_a_cpu(device, dtype, tmp_path):
    checkpoint(tmp_path, "gptq", bits=4, group_size=32, desc_act=True)
    here, there = load_model(tmp_path), load_model(tmp_path, dtype, device)
    assert quantised_weights(there) == quantised_weights(here) > 0
    for each in layers(there):
        assert each.weight.untyped_storage().nbytes() == each.weight.itemsize
    assert tokens(Engine(there, CONFIG)) == tokens(Engine(here, CONFIG))


def test_without_the_ops_a_checkpoint_becomes_plain(tmp_path):
    open_device()
    checkpoint(tmp_path, "awq", bits=4, group_size=32)
    assert quantised_weights(load_model(tmp_path, device=NAME)) == 0


def test_a_packed_model_computes_on_a_device_without_the_ops(tmp_path):
    open_device()
    checkpoint(tmp_path, "awq", bits=4, group_size=32)
    model, ids = load_model(tmp_path), torch.tensor([[3, 17, 5]])
    expected = model(ids).logits
    moved = model.to(NAME)
    assert quantised_weights(moved) > 0
    torch.testing.assert_close(moved(ids.to(NAME)).logits.cpu(), expected, atol=1e-3, rtol=1e-3)
