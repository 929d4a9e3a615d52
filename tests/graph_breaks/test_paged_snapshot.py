"""What Dynamo captures of paged attention and cache writes."""

from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor

from compiled_attn.compat.paged import reshape_and_cache
from tests.graph_breaks.paged_scene import inputs, module
from tests.graph_breaks.tracing import calls, dynamo_graph, op_name

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Snapshot(expecttest.TestCase):
    """What Dynamo captures, by the names of the operations and the shapes of their results."""

    maxDiff = None

    def test_attention_in_the_packed_layout(self) -> None:
        self.assertExpectedInline(
            captured(module(), *inputs(2, 8)[:3]),
            """\
arange int64[8]
arange int64[16]
mul int64[1, 8, 1]
add int64[1, 8, 16]
lt bool[2, 1, 128]
ge bool[2, 1, 8]
lt bool[2, 1, 8]
and bool[2, 1, 8]
where int32[2, 1, 8]
to float32[2, 2, 2, 64]
getitem float32[2, 1, 8, 2, 16, 16, 4]
as_strided float32[2, 2, 2, 16, 64]
to float32[2, 1, 8, 2, 1, 16, 64]
mul float32[2, 1, 8, 2, 2, 16, 64]
sum float32[2, 1, 8, 2, 2, 64]
sum float32[2, 1, 8, 2, 2, 16]
mul float32[2, 1, 2, 2, 128]
where float32[2, 1, 2, 2, 128]
amax float32[2, 1, 2, 2]
clamp_min float32[2, 1, 2, 2]
sub float32[2, 1, 2, 2, 128]
exp float32[2, 1, 2, 2, 128]
getitem float32[2, 1, 8, 2, 64, 16]
to float32[2, 1, 8, 2, 64, 16]
where float32[2, 1, 8, 2, 64, 16]
mul float32[2, 1, 2, 2, 8, 64, 16]
sum float32[2, 1, 2, 2, 64]
sum float32[2, 1, 2, 2]
lt bool[2]
gt bool[2]
or bool[2]
arange int64[8]
mul int64[8]
lt bool[2, 8]
lt bool[2, 8]
ge bool[2, 8]
or bool[2, 8]
and bool[2, 8]
any bool[2]
or bool[2]
where float32[2, 4, 1, 64]
amax float32[2, 4, 1]
sub float32[2, 4, 1]
exp float32[2, 4, 1]
mul float32[2, 4, 1]
sum float32[2, 4, 1]
mul float32[2, 4, 1, 64]
sum float32[2, 4, 64]
clamp_min float32[2, 4, 1]
truediv float32[2, 4, 64]
to float32[2, 4, 64]""",
        )

    def test_a_write_of_the_step(self) -> None:
        attention = module()

        def write(key: Tensor, value: Tensor, slots: Tensor) -> None:
            both = attention.key_cache, attention.value_cache
            reshape_and_cache(key, value, *both, slots, "auto", 1.0, 1.0)

        self.assertExpectedInline(
            captured(write, *inputs(2, 8)[3:]),
            """\
ge bool[2]
lt bool[2]
and bool[2]
arange int64[2]
int int32[2]
argmax int64[]
where int64[2]
getitem int64[2]
where int64[2]
clamp int64[2]
floordiv int64[2]
mod int64[2]
getitem float32[2, 2, 64]
any bool[]
getitem float32[2, 2, 16, 4]
where float32[2, 2, 16, 4]
setitem
getitem float32[2, 2, 64]
any bool[]
getitem float32[2, 2, 64]
where float32[2, 2, 64]
setitem""",
        )


VIEWS = {"unsqueeze", "flatten", "unflatten", "transpose", "permute", "view", "expand", "detach"}


def captured(function: Any, *args: Any) -> str:
    """The captured operations that compute, without variables, arguments, views and modes."""
    torch._dynamo.reset()
    return "\n".join(filter(None, map(described, calls(dynamo_graph(function, *args)))))


def described(node: torch.fx.Node) -> str:
    value, name = node.meta.get("example_value"), op_name(node.target).strip("_")
    if name == "setitem":
        return name
    is_view = name in VIEWS or (name == "getitem" and len(node.all_input_nodes) == 1)
    if is_view or not isinstance(value, Tensor):
        return ""
    return f"{name} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
