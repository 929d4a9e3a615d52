"""Parts of a key by themselves: state, options, symbolic sizes and changed globals."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch
from torch import nn

from graphs.store import graph_factors
from graphs.store.misses import differences
from graphs.store.sources import CodeDigests


def factors(function, *inputs, dims=(), **options):
    return graph_factors(function, inputs, backend="inductor", options=options, dims=dims)


def test_state_of_another_layout_is_named_by_itself():
    x = torch.ones(2, 4)
    one, wide = (factors(nn.Linear(4, size), x) for size in (4, 8))
    assert one["state"].startswith("2 tensors ") and "state" in differences(one, wide)
    assert differences(one, factors(nn.Linear(4, 4), x)) == {}
    assert factors(torch.relu, x)["state"] == ""


@pytest.mark.parametrize(
    ("dims", "same", "other"),
    [
        ((0,), torch.ones(3, 4), torch.ones(2, 5)),
        ((1,), torch.ones(2, 5), torch.ones(3, 4)),
        ((0,), torch.ones(3, 4), torch.ones(4, 3).T),
    ],
)
def test_symbolic_sizes_and_the_strides_made_of_them_do_not_count(dims, same, other):
    expected = factors(torch.relu, torch.ones(2, 4), dims=[dims])["inputs"]
    assert factors(torch.relu, same, dims=[dims])["inputs"] == expected
    assert factors(torch.relu, other, dims=[dims])["inputs"] != expected
    assert factors(torch.relu, same)["inputs"] != factors(torch.relu, torch.ones(2, 4))["inputs"]


@pytest.mark.parametrize("nest", [lambda value: {"of": value}, lambda value: [1, value]])
def test_nested_options_count_and_what_is_unknown_in_them_means_no_key(nest):
    one, same, other = (factors(torch.relu, torch.ones(2), a=nest(n)) for n in (1, 1, 2))
    assert one == same and [*differences(one, other)] == ["options.a"]
    assert factors(torch.relu, torch.ones(2), a=nest(object())) is None


def test_globals_that_a_capture_changes_count_as_they_were_before_it(tmp_path, monkeypatch):
    (tmp_path / "my_settings.py").write_text("FACTOR, COUNT = 1, 0\ndef f(x): return x * FACTOR")
    spec = spec_from_file_location("my_settings", tmp_path / "my_settings.py")
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_settings", module)
    spec.loader.exec_module(module)
    digests = CodeDigests()
    before = digests.read([module.f])
    for module.COUNT in (1, 2):  # as two captures do
        digests.ignore_changes()
        assert digests.read([module.f]) == before
    module.FACTOR = 2  # as the program does
    assert digests.read([module.f]) != before
