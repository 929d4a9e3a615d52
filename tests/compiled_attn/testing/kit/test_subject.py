"""Bad input: one line that says what was expected, what came, and what to do."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from compiled_attn import flash_attn_with_kvcache
from compiled_attn.testing import Capabilities, CapabilityError
from compiled_attn.testing.kit import INTERFACES, Subject, check, own
from compiled_attn.testing.kit.interfaces import Flash, Op, OpWrite
from tests.compiled_attn.testing.kit.kernels import CLAIMS, Kernel, WritingKernel


def _error(op, *args, **kwargs) -> str:
    with pytest.raises(CapabilityError) as caught:
        check(op, *args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", own.CAPABILITIES)
def test_the_interface_is_found_by_the_parameters(name):
    wanted = {"flash_attn_with_kvcache": "flash", "unified_attention": "unified",
              "paged_attention": "op", "paged_attention_": "op_write"}  # fmt: skip
    found = Subject.of(getattr(own, name), own.CAPABILITIES[name]).interface.name
    assert found == wanted.get(name, name.removeprefix("paged_attention_").join(["paged_", ""]))


def test_the_op_of_torch_is_found_by_its_schema():
    from compiled_attn.ops import load

    load()
    for name, interface in (("paged_attention", Op), ("paged_attention_", OpWrite)):
        op = getattr(torch.ops.compiled_attn, name)
        assert Subject.of(op, Capabilities()).interface is interface


def test_varlen_of_torch_is_found():
    from torch.nn.attention.varlen import varlen_attn

    assert Subject.of(varlen_attn, Capabilities()).interface.name.startswith("varlen")


def test_another_signature_is_refused():
    def attention(query, key, value):
        return query

    assert "attention: expected the signature of one of flash" in _error(attention, Capabilities())
    assert "which lacks" in _error(lambda q, k_cache, v_cache: q, Capabilities(), interface="flash")
    assert "which has 1 parameters" in _error(lambda q: q, Capabilities(), interface="paged_v1")


def test_what_takes_anything_needs_the_name_of_its_interface():
    op = partial(lambda *args, **kwargs: flash_attn_with_kvcache(*args, **kwargs))
    assert "got any arguments" in _error(op, Capabilities())
    claims = Capabilities(head_dims=(16,), block_sizes=(4,), groups=(1,))
    assert check(op, claims, "flash", cases=["decode"]).ok


def test_unknown_names_are_refused():
    kernel = Kernel()
    assert "interface: expected one of" in _error(kernel, interface="flsh")
    assert "no case has 'decodr' in its name" in _error(kernel, cases=["decodr"])
    assert "unknown capability 'windw'" in _error(kernel, {"features": {"windw"}})
    assert "expected Capabilities or a dict" in _error(kernel, 3)
    assert "capabilities: expected one of features" in _error(kernel, {"feature": {"window"}})
    assert "head_dims: expected one or more positive ints" in _error(kernel, {"head_dims": (0,)})
    assert "dtypes: expected some of" in _error(kernel, {"dtypes": ("int8",)})


def test_a_claim_that_the_interface_cannot_express_is_refused():
    error = _error(own.paged_attention_v1, {"features": {"sinks"}})
    assert "unknown capability 'sinks' for interface 'paged_v1'" in error


def test_a_claim_without_its_parameter_is_refused():
    def op(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale):
        return query

    assert "'softcap' needs a parameter 'softcap'" in _error(op, {"features": {"softcap"}})


def test_an_op_must_declare_what_it_claims():
    assert "declares no capabilities" in _error(flash_attn_with_kvcache)
    assert "expected a callable op" in _error(SimpleNamespace(capabilities=CLAIMS))


def test_a_device_that_is_not_there_is_refused():
    assert "device 'nowhere' is not available" in _error(Kernel(), {"device": "nowhere"})


def test_an_op_without_its_package_is_refused():
    def op(query, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale):
        import no_such_package  # noqa: F401

    assert "cannot call the op: ModuleNotFoundError" in _error(op, Capabilities())


def test_caches_of_an_interface_that_overlap_are_refused():
    class Overlapping(OpWrite):
        @staticmethod
        def arguments(s):
            s.value_cache = s.key_cache
            return OpWrite.arguments(s)

    assert "shared memory" in _error(WritingKernel(), interface=Overlapping)


def test_claims_are_found_by_name_in_a_module():
    module = SimpleNamespace(CAPABILITIES={"flash_attn_with_kvcache": {"features": {"window"}}})
    subject = Subject.of(flash_attn_with_kvcache, module=module)
    assert subject.claims.features == {"window"} and subject.interface is Flash
    changed = Subject.of(flash_attn_with_kvcache, module=module, changes={"features": ["alibi"]})
    assert changed.claims.features == {"alibi"}
    assert set(INTERFACES) >= {"flash", "paged_v1", "paged_v2", "varlen", "unified", "op"}
