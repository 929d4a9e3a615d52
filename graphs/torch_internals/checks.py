"""Dynamo's native guards as fast checks of inputs and settings, each verified before use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from graphs.torch_internals.features import Feature, describe

__all__ = ["NATIVE_CHECKS", "native_settings_check", "native_tensor_check"]


def native_tensor_check(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return a native check that other tensors have the layouts of these.

    It may reject equal layouts, but accepts no other. None: there is no such check for these
    tensors, or in this torch.
    """
    is_plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
    are_apart = len({id(tensor) for tensor in tensors}) == len(tensors)  # it refuses others
    if not tensors or not is_plain or not are_apart or not NATIVE_CHECKS.is_on:
        return None
    try:
        from torch._C._dynamo.guards import TensorGuards

        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., bool] = guards.check
        if check(*tensors) is True and not _accepts_others(check, tensors):
            return check
        reason = "TensorGuards accepts other tensors, or rejects the same"
    except Exception as error:
        reason = describe(error)
    NATIVE_CHECKS.switch_off(reason)
    return None


def native_settings_check() -> Callable[[], bool] | None:
    """Return a check that the settings Dynamo guards are unchanged; None: this torch has none."""
    if not NATIVE_CHECKS.is_on:
        return None
    try:
        from torch._C._dynamo.guards import GlobalStateGuard

        check: Callable[[], bool] = GlobalStateGuard().check
        holds = check() is True
        with torch.set_grad_enabled(not torch.is_grad_enabled()):
            sees_changes = check() is False
        if holds and sees_changes:
            return check
        reason = "GlobalStateGuard does not see that the grad mode changed"
    except Exception as error:
        reason = describe(error)
    NATIVE_CHECKS.switch_off(reason)
    return None


def _accepts_others(check: Callable[..., bool], tensors: Sequence[Tensor]) -> bool:
    every = [*tensors]
    for place, tensor in enumerate(every):
        if check(*every[:place], tensor.unsqueeze(0), *every[place + 1 :]) is not False:
            return True
    return False


def _probe() -> str:
    from torch._C._dynamo import guards

    missing = [name for name in ("TensorGuards", "GlobalStateGuard") if not hasattr(guards, name)]
    return f"torch._C._dynamo.guards has no {', '.join(missing)}" if missing else ""


NATIVE_CHECKS = Feature(
    "native_checks",
    gain="Compares a dozen inputs, and the settings of torch, in a microsecond a step.",
    fallback="Inputs and settings are compared in Python.",
    versions="2.11 to 2.15",
    files=("graphs/torch_internals/checks.py",),
    probe=_probe,
)
