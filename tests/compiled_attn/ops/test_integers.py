"""Numbers that do not fit int32 never become numbers that do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compiled_attn import unified_attention
from compiled_attn.compat.flash import flash_attn_with_kvcache
from compiled_attn.compat.paged import paged_attention_v1
from compiled_attn.ops import KernelArgumentError, as_int32
from tests.compiled_attn.compat.flash.cases import Case
from tests.compiled_attn.ops.test_interfaces import _paged
from tests.compiled_attn.ops.test_unified import _call, _metadata

WRAPS = 2**32 + 1


pytestmark = pytest.mark.usefixtures("compiler")


def test_what_does_not_fit_is_minus_one():
    ints = torch.tensor([0, 5, -3, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, WRAPS])
    assert as_int32(ints).tolist() == [0, 5, -3, 2**31 - 1, -(2**31), -1, -1, -1]
    assert as_int32(ints).dtype == as_int32(ints.short()).dtype == torch.int32
    assert as_int32(own := ints.int()) is own


def _in_a_graph(**changed):
    torch._dynamo.reset()
    arguments = _paged("NHD") | changed

    def attend(tables, lengths, out):
        paged_attention_v1(
            out, **arguments | {"block_tables": tables, "seq_lens": lengths}, kernel="native"
        )

    out = torch.zeros(3, 4, 16)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    compiled(arguments["block_tables"], arguments["seq_lens"], out)
    return out


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"block_tables": torch.tensor([[3, WRAPS, 0], [0, 0, 0], [1, 2, 4]])}, r"table\[0, 1\]"),
        ({"seq_lens": torch.tensor([7, 0, WRAPS])}, r"seq_lens\[2\]"),
        ({"max_seq_len": 11}, r"seq_lens\[2\]"),
    ],
    ids=["block", "length", "longer than max_seq_len"],
)
def test_a_paged_graph_refuses_numbers_that_would_wrap_or_exceed_the_maximum(changed, match):
    assert _in_a_graph().any()
    # A graph that fails does not leave torch's no_grad: an outer one restores the mode.
    with torch.no_grad(), pytest.raises(RuntimeError, match=match):
        _in_a_graph(**changed)


@pytest.mark.parametrize("name", ["block_tables", "seq_lens", "query_start_loc"])
def test_unified_attention_refuses_numbers_that_would_wrap(name):
    call, metadata = _call({}), _metadata()
    bad = getattr(metadata, name).long().clone()
    bad.view(-1)[1] += 2**32
    before = call["key_cache"].clone()
    with pytest.raises(KernelArgumentError, match="paged_attention: expected"):
        unified_attention(**call, metadata=replace(metadata, **{name: bad}), kernel="native")
    assert torch.equal(call["key_cache"], before)


def test_a_flash_graph_refuses_a_page_that_would_wrap():
    torch._dynamo.reset()
    case = Case(new=1, page_size=4, causal=True, index_dtype=torch.int64, lengths=[6, 9]).make()
    case.args["block_table"] = case.args["block_table"].long()
    case.args["block_table"][case.rows[0], 0] += 2**32
    compiled = torch.compile(flash_attn_with_kvcache, backend="eager")
    with torch.no_grad(), pytest.raises(RuntimeError, match="expected"):
        case.run(compiled, kernel="native")
