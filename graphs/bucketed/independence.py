"""Whether results depend on padding, and which module mixes padding into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphs.bucketed.outputs import Cut
from graphs.errors import BucketedError
from graphs.torch_internals.pytrees import container_of

__all__ = ["check_equal", "cut_outputs", "differs", "mixing_module"]


def cut_outputs(outputs: Sequence[Any], cuts: Sequence[Cut], sizes: Mapping[str, int]) -> list[Any]:
    """Cut outputs to what belongs to inputs of these sizes."""
    cut = [*outputs]
    for each in cuts:
        cut[each.output] = cut[each.output].narrow(each.dim, 0, each.size_at(sizes))
    return cut


def differs(got: Any, expected: Any) -> str:
    """Say how two outputs differ by more than rounding, or return an empty string.

    Kernels round differently at other sizes, so floating-point outputs may differ by the square
    root of the dtype's resolution, relative to the largest value.
    """
    if not isinstance(expected, Tensor):
        return "" if got == expected else f"is {got!r}, expected {expected!r}"
    if got.shape != expected.shape:
        return f"has shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return ""
    if not (expected.is_floating_point() or expected.is_complex()):
        unequal = int((got != expected).sum())
        return f"has {unequal} of {expected.numel()} values that differ" if unequal else ""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, other = got.detach().cpu().to(wide), expected.detach().cpu().to(wide)
    if not torch.equal(_kinds(one), _kinds(other)):
        return "is not finite where it was without padding, or the other way"
    largest = other.nan_to_num(0.0, 0.0, 0.0).abs().max()
    error = (one - other).nan_to_num(0.0, 0.0, 0.0).abs().max()
    limit = float(torch.finfo(expected.dtype).eps) ** 0.5 * max(float(largest), 1e-12)
    return f"differs by {float(error):.2g} of {float(largest):.2g}" if float(error) > limit else ""


def _kinds(value: Tensor) -> Tensor:
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return value.isnan() * 2 + value.isinf() * value.sign().nan_to_num()


def check_equal(
    names: Sequence[str], got: Sequence[Any], expected: Sequence[Any], why: Callable[[], str]
) -> None:
    """Compare outputs through padding with those without.

    Raises:
        BucketedError: names the first output that differs; `why` returns the cause.
    """
    for name, one, other in zip(names, got, expected, strict=True):
        if found := differs(one, other):
            raise BucketedError(f"results depend on padding: output '{name}' {found}; {why()}")


class _Seen(NamedTuple):
    name: str
    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]


def mixing_module(
    function: Callable[..., Any], real: Callable[[], object], padded: Callable[[], object]
) -> str:
    """Name the first module whose inputs agree and whose outputs do not.

    Args:
        function: the user's callable.
        real, padded: run it, without and with padding.
    """
    remedy = "pass an attention mask, mask it there, or do not pad that axis, such as exact=('x',)"
    if isinstance(function, nn.Module):
        if any(each.training for each in function.modules()):
            remedy = f"the module is in training mode: call eval(); or {remedy}"
        with _recorded(function) as one:
            real()
        with _recorded(function) as two:
            padded()
        for without, through in zip(one, two, strict=False):
            if without.module is not through.module:
                break
            if _agree(without.inputs, through.inputs) and not _agree(
                without.outputs, through.outputs
            ):
                kind = type(without.module).__name__
                where = f"'{without.name}' ({kind})" if without.name else f"{kind} itself"
                return f"{where} is the first module that mixes padding in: {remedy}"
    return f"an operation mixes padding in, such as a mean or a softmax over the axis: {remedy}"


@contextmanager
def _recorded(function: nn.Module) -> Iterator[list[_Seen]]:
    seen: list[_Seen] = []
    names = {module: name for name, module in function.named_modules()}

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = [each.detach().clone() for each in _tensors((args, kwargs))]
        outputs = [each.detach().clone() for each in _tensors(output)]
        seen.append(_Seen(names[module], module, inputs, outputs))

    handles = [each.register_forward_hook(hook, with_kwargs=True) for each in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif (container := container_of(value)) is not None:
        for child in container.children:
            yield from _tensors(child)


def _agree(without: Sequence[Tensor], through: Sequence[Tensor]) -> bool:
    return len(without) == len(through) and not any(
        differs(_like(padded, real), real) for real, padded in zip(without, through, strict=True)
    )


def _like(padded: Tensor, real: Tensor) -> Tensor:
    # The real part comes first in each dimension.
    if padded.dim() != real.dim():
        return padded
    for dim, size in enumerate(real.shape):
        if size < padded.shape[dim]:
            padded = padded.narrow(dim, 0, size)
    return padded
