"""What the tests of all providers share: cases, calls as if on a device, calls on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_attn.ops.call import PagedCall
from compiled_attn.ops.providers import flash
from tests.compiled_attn.ops.native_cases import CASES

BF16 = torch.bfloat16

LACKS: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": 2.0}, "has no softcap"),
    "sinks": ({"sinks": torch.zeros(4)}, "has no sinks"),
    "ALiBi and softcap": (
        {"alibi_slopes": torch.ones(4), "softcap": 2.0}, "has no softcap and no ALiBi"
    ),
    "float32": ({"dtype": torch.float32}, "not in torch.float32"),
    "codes": ({"cache_dtype": torch.int8}, "no cache of torch.int8"),
    "a large head": ({"dim": 576}, "up to 256, not 576"),
    "an odd head": ({"dim": 84}, "that 8 divides, up to 256, not 84"),
    "smaller values": ({"dim": 64, "value_dim": 32}, "head size of keys, 64, not 32"),
}  # fmt: skip
"""Options of a scene that FlashAttention does not support, and the reason."""


def cases() -> dict[str, dict[str, Any]]:
    """The cases of the op, those in float32 in bfloat16."""
    float32 = torch.float32
    return {
        name: case | {"dtype": BF16 if case.get("dtype", float32) == float32 else case["dtype"]}
        for name, case in CASES.items()
    }


def as_if_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """As if the tensors of the tests were on a device."""
    monkeypatch.setattr(flash, "_lacks_device", lambda device: None)
    monkeypatch.setattr(flash, "capability", lambda device: capability)


def no_paged(call: PagedCall) -> Any:
    raise AssertionError("expected no call of Triton's kernel")


def on_device(call: PagedCall) -> PagedCall:
    """The call with its tensors on a CUDA device."""
    tensors = {k: v.cuda() for k, v in call._asdict().items() if isinstance(v, torch.Tensor)}
    return call._replace(**tensors)
