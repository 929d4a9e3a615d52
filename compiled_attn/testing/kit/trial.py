"""Calls an op on the tensors of a step, and compares its results with the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_attn.arguments import overlap
from compiled_attn.testing.capabilities import CapabilityError
from compiled_attn.testing.kit.interface import Interface
from compiled_attn.testing.kit.scene import Scene
from compiled_attn.testing.kit.settings import unchanged
from compiled_attn.testing.kit.step import Step
from compiled_attn.testing.kit.tensors import bits, tensors_in
from graphs.errors import clipped

__all__ = [
    "MULTIPLE",
    "ROUNDINGS",
    "Call",
    "Measured",
    "Mismatch",
    "Trial",
    "difference",
    "raised",
    "restore",
    "tolerance",
]

MULTIPLE = 2.0
"""Allowed error, as a multiple of the error of plain torch in the op's dtype."""

ROUNDINGS = 64
"""Allowed error in addition: roundings of the accumulator."""


class Mismatch(Exception):
    """The op returned or wrote something wrong; the message is one line."""


class Measured(NamedTuple):
    """Maximum absolute error of a case, its tolerance, and a note for the report."""

    error: float = 0.0
    allowed: float = 0.0
    note: str = ""

    def or_worse(self, other: Measured) -> Measured:
        """Returns the one whose error is closer to its tolerance."""
        mine, theirs = (x.error / x.allowed if x.allowed else 0.0 for x in (self, other))
        worse = other if theirs > mine or not self.allowed else self
        return worse._replace(note=self.note or other.note)


def tolerance(
    want: Tensor, low: Tensor, requests: Sequence[range], dtype: torch.dtype, least: float = 0.0
) -> list[float]:
    """Returns the maximum allowed error of each row of float64 results ``want``.

    For a request whose largest result is m: ``m * (2 * e + eps / 2)``, where e is the largest
    relative error ``max|low - want| / m`` of all requests, which plain torch makes in the op's
    dtype (as in FlashAttention's tests), and eps / 2 a rounding of the result to that dtype; plus
    `ROUNDINGS` of the float32 accumulator (float64 for float64).

    Args:
        want: ``[n, ..]``.
        low: the same from plain torch in ``dtype``.
        requests: rows of each request.
        dtype: dtype of the op.
        least: smallest m.
    """
    finite = want.isfinite() & low.isfinite()
    errors, sizes = (
        [float(x[[*rows]].max()) if len(rows) else 0.0 for rows in requests]
        for x in (each.where(finite, 0.0) for each in ((low.double() - want).abs(), want.abs()))
    )
    sizes = [max(size, least) for size in sizes]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    relative = max((e / m for e, m in zip(errors, sizes, strict=True) if m), default=0.0)
    relative = MULTIPLE * relative + torch.finfo(dtype).eps / 2
    allowed = [relative * m + ROUNDINGS * torch.finfo(wide).eps * max(m, 1.0) for m in sizes]
    short = [float(f"{each:.4g}") for each in allowed]  # scripts print them
    return [each for rows, each in zip(requests, short, strict=True) for _ in rows]


def difference(got: Tensor, want: Tensor, allowed: Sequence[float], what: str) -> str | None:
    """Describes where rows ``[n, H, ..]`` differ most, or returns None."""
    got = got.double().cpu()
    unlike = (got.isneginf() != want.isneginf()) | got.isnan() | got.isposinf()
    error = torch.where(unlike, math.inf, (got - want).nan_to_num(0.0).abs())
    sees_nothing = (want == 0).flatten(2).all(-1) if want.dim() == 3 else None
    if sees_nothing is not None and bool(got[sees_nothing].any()):
        row = int(sees_nothing.nonzero()[0, 0])
        return f"{what}[{row}] sees no key: expected zeros, got {got[row].abs().max():.4g}"
    if not error.numel():
        return None
    excess = error / torch.tensor(allowed, dtype=torch.float64).view(-1, *[1] * (want.dim() - 1))
    if excess.max() <= 1:
        return None
    at = tuple(int(x) for x in torch.unravel_index(excess.argmax(), excess.shape))
    wrong = sorted({int(row) for row in (excess > 1).nonzero()[:, 0]})
    place = ", ".join(map(str, at))
    return (
        f"{what}[{place}]: expected {want[at]:.6g}, got {got[at]:.6g}, allowed error "
        f"{allowed[at[0]]:.3g}; wrong rows {wrong[:8]} of {len(want)}"
    )


def restore(saved: list[Tensor], *values: Any) -> None:
    """Restores the memory that `bits` copied."""
    storages = {each.untyped_storage().data_ptr(): each for each in tensors_in(values)}
    for each, old in zip(storages.values(), saved, strict=True):
        memory = torch.empty(0, dtype=torch.uint8, device=each.device)
        memory.set_(each.untyped_storage()).copy_(old)


Allowed = tuple[list[float], list[float]]
"""Tolerance of each real row of out and lse, see `tolerance`."""


class Call(NamedTuple):
    """The call of a step: its scene, tensors and arguments."""

    scene: Scene
    fields: SimpleNamespace
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def inputs(self) -> tuple[Any, ...]:
        """All arguments."""
        return self.args, self.kwargs


class Trial(NamedTuple):
    """An op under test.

    Attributes:
        op: the callable.
        interface: its signature.
        device: device of all tensors.
    """

    op: Callable[..., Any]
    interface: type[Interface]
    device: str = "cpu"

    def call(
        self, step: Step, change: Callable[[Scene, SimpleNamespace], None] | None = None
    ) -> Call:
        """Returns the call of a step; ``change`` may modify its tensors first."""
        scene = Scene(step, self.interface.rows != "any")
        fields = scene.make(self.device)
        if change is not None:
            change(scene, fields)
        args, kwargs = self.interface.arguments(fields)
        call = Call(scene, fields, args, kwargs)
        if step.append:
            _check_apart(call)
        return call

    def expected(self, call: Call, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Any]:
        """Returns out ``[T, H, Dv]`` and lse ``[T, H]`` or None of the reference.

        Writes new tokens to the caches, as the op should.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # faster for sizes this small
        try:
            returned = self.interface.reference(*call.args, **call.kwargs, dtype=dtype)
        finally:
            torch.set_num_threads(threads)
        return self.interface.results(returned, (returned,))

    def run(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Calls the op; returns out and lse.

        Raises:
            Mismatch: it raised, or returned tensors of another shape, dtype or device.
            CapabilityError: the op raised an ImportError.
        """
        try:
            with torch.no_grad(), unchanged(self.device):
                returned = self.op(*call.args, **call.kwargs)
        except ImportError as error:  # no case could pass
            raise CapabilityError(f"cannot call the op: {raised(error)}") from error
        except (Exception, SystemExit) as error:  # which would end the run with its exit code
            raise Mismatch(raised(error)) from error
        return self.results(returned, call)

    def results(self, returned: Any, call: Call) -> tuple[Tensor, Tensor | None]:
        """Returns out and lse from the op's return value; raises as `run`."""
        step, query = call.scene.step, call.fields.query
        try:
            out, lse = self.interface.results(returned, call.args)
        except Exception as error:
            raise Mismatch(f"returned {_shown(returned)}: {raised(error)}") from error
        shape = (*query.shape[:2], step.value_dim or step.head_dim)
        if not isinstance(out, Tensor) or (out.shape, out.dtype, out.device) != (
            shape, query.dtype, query.device,
        ):  # fmt: skip
            expected = f"{query.dtype} {[*shape]} on {query.device}"
            raise Mismatch(f"expected an output of {expected}, got {_shown(out)}")
        if step.lse and (not isinstance(lse, Tensor) or lse.shape != shape[:2]):
            raise Mismatch(f"expected a log-sum-exp of {[*shape[:2]]}, got {_shown(lse)}")
        return out, lse

    def want(self, call: Call) -> tuple[tuple[Tensor, Any], Allowed]:
        """Returns out and lse of the reference, and their tolerances; restores the caches."""
        saved, dtype = bits(call.inputs), call.scene.step.dtype
        want, lse = self.expected(call)
        restore(saved, call.inputs)
        low, low_lse = self.expected(call, dtype)
        restore(saved, call.inputs)
        rows, count = call.scene.real, len(call.scene.step.requests)
        requests = [call.scene.rows_of(request) for request in range(count)]
        allowed = tolerance(want[rows], low[rows], requests, dtype)
        if lse is None:
            return (want, lse), (allowed, [])
        return (want, lse), (allowed, tolerance(lse[rows], low_lse[rows], requests, dtype, 1.0))

    def compare(
        self, call: Call, got: tuple[Tensor, Tensor | None], want: Any, allowed: Allowed
    ) -> Measured:
        """Compares results with those of `want`.

        Raises:
            Mismatch: they differ, or a padding row is not finite.
        """
        rows, step = call.scene.real, call.scene.step
        out, lse = got
        found = difference(out[rows], want[0][rows], allowed[0], "out")
        if found is None and step.lse and lse is not None:
            found = difference(lse[rows], want[1][rows], allowed[1], "lse")
        rest = out[len(rows) :]
        if found is None and not bool(rest.isfinite().all()):
            found = f"out[{len(rows)}:] belongs to no request: expected finite numbers, got nan"
        if found is not None:
            raise Mismatch(found)
        measured = Measured()
        errors = (out[rows].double().cpu() - want[0][rows]).abs().flatten(1)
        for error, each in zip(errors.tolist(), allowed[0], strict=True):
            measured = measured.or_worse(Measured(max(error), each))
        return measured


def raised(error: BaseException) -> str:
    """Formats an exception in one line."""
    text = " ".join(str(error).split()) or "no message"
    return clipped(f"{type(error).__name__}: {text}", 400)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {[*value.shape]} on {value.device}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__


def _check_apart(call: Call) -> None:
    s = call.fields
    written = {"key_cache": s.key_cache, "value_cache": s.value_cache}
    read = {"query": s.query, "key": s.key, "value": s.value, "block_table": s.block_table}
    both = {"value_cache": s.value_cache}, {"key_cache": s.key_cache}
    found = overlap(written, read) or overlap(*both)
    if found is not None:
        raise CapabilityError(
            f"interface: expected {found[0]} apart from {found[1]}, got shared memory: "
            "give each its own"
        )
