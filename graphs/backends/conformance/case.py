"""A case of the conformance suite, and the backend that it is run on."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphs.backends import BACKENDS
from graphs.capture.capture import CapturedGraph, capture
from graphs.capture.contract import Backend
from graphs.errors import CaptureError, StaleGraph, clipped, quoted

__all__ = [
    "Case",
    "NotConformant",
    "Refused",
    "Subject",
    "case",
    "expect",
    "expect_same",
    "load",
    "unless_stale",
]

_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-12}
_ROWS = 12  # of a traceback


class NotConformant(AssertionError):
    """A backend breaks a guarantee; the message has the guarantee, then what happened."""


class Refused(Exception):
    """A backend refuses what it need not support, or declares that it lacks it."""


@dataclass(frozen=True)
class Case:
    """One guarantee, and a function that checks it.

    Attributes:
        name: of the case.
        guarantee: what a backend must do, as the end of "a backend must guarantee that".
        may_refuse: whether it may refuse to capture this, with a `CaptureError`.
    """

    name: str
    guarantee: str
    may_refuse: bool
    _check: Callable[[Subject], None] = field(repr=False)

    def run(self, subject: Subject) -> None:
        """Check the guarantee.

        Raises:
            NotConformant: it does not hold.
            Refused: the backend does not support this, and need not.
        """
        torch.manual_seed(0)
        try:
            with torch.no_grad():
                self._check(subject)
        except Refused as refused:
            if self.may_refuse or refused.__cause__ is None:
                raise
            raise self._broken(subject, f"it refuses: {refused}") from refused.__cause__
        except AssertionError as error:
            raise self._broken(subject, str(error)) from error
        except Exception as error:
            rows = traceback.format_exception(error)
            raise self._broken(subject, "".join(["an error:\n", *rows[-_ROWS:]])) from error

    def _broken(self, subject: Subject, got: str) -> NotConformant:
        name = subject.backend.name
        return NotConformant(
            f"{self.name}: a backend must guarantee that {self.guarantee}; '{name}' does not: {got}"
        )


def case(guarantee: str, *, may_refuse: bool = False) -> Callable[[Callable[..., None]], Case]:
    """Make a case of a function of a :class:`Subject`, which raises AssertionError."""
    return lambda check: Case(check.__name__, guarantee, may_refuse, check)


@dataclass(frozen=True)
class Subject:
    """A backend under test, and the device of its tensors.

    Raises:
        ValueError: the backend is not available here.
    """

    backend: Backend
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        if reason := self.backend.available():
            raise ValueError(f"backend '{self.backend.name}' is not available: {reason}")

    def capture(self, function: Callable[..., Any], *inputs: Any, **options: Any) -> CapturedGraph:
        """Capture, or raise `Refused` from the backend's `CaptureError`."""
        try:
            return capture(function, inputs, backend=self.backend, **options)
        except CaptureError as error:
            raise Refused(str(error)) from error

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers between -4 and 4 on the device."""
        values = torch.rand(shape, dtype=torch.float64) * 8 - 4
        return values.to(dtype).to(self.device)

    def has_option(self, name: str) -> bool:
        """Whether its captures take this option."""
        return self.backend.options is not None and name in self.backend.options


def load(backend: str, device: str | None = None, option: str = "--graphs-backend") -> Subject:
    """The subject of a command line.

    Args:
        backend: the name of a backend here, or `module:name` of an object, or of a class or
            function that makes one.
        device: of its tensors; None: the backend's own, else the CPU.
        option: that it was given by, for errors.

    Raises:
        ValueError: there is none, or it does not work here.
    """
    module, colon, name = backend.partition(":")
    if not colon:
        if backend not in BACKENDS:
            known = ", ".join(BACKENDS)
            raise ValueError(f"{option}: expected module:name or one of {known}, got {backend!r}")
        made: Any = BACKENDS[backend]
    else:
        try:
            made = import_module(module)
            for part in name.split("."):
                made = getattr(made, part)
            made = made if isinstance(made, Backend) or not callable(made) else made()
        except Exception as error:
            raise ValueError(f"{option} {backend}: {type(error).__name__}: {error}") from error
    if not isinstance(made, Backend):
        raise ValueError(
            f"{option} {backend}: expected a graphs.capture.contract.Backend, got a "
            f"{type(made).__name__}: derive its class from Backend"
        )
    try:
        found = torch.device(device or made.device or "cpu")
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        raise ValueError(f"{option} {backend}: unknown device {device!r}: {line}") from error
    return Subject(made, found)


def expect(holds: object, otherwise: str) -> None:
    """Raise AssertionError with a text unless something holds."""
    if not holds:
        raise AssertionError(otherwise)


def expect_same(got: Any, expected: Any, what: str = "") -> None:
    """Compare pytrees: their structure, and shape, dtype, device and values of each tensor."""
    leaves, spec = pytree.tree_flatten(got)
    others, other_spec = pytree.tree_flatten(expected)
    where = f" {what}" if what else ""
    shown = [clipped(" ".join(str(each).split()), 200) for each in (other_spec, spec)]
    expect(spec == other_spec, f"expected the structure {shown[0]}{where}, got {shown[1]}")
    for leaf, other in zip(leaves, others, strict=True):
        if not isinstance(other, Tensor):
            same = type(leaf) is type(other) and leaf == other
            expect(same, f"expected {quoted(other)}{where}, got {quoted(leaf)}")
            continue
        expect(isinstance(leaf, Tensor), f"expected a tensor{where}, got {quoted(leaf)}")
        for kind in ("shape", "dtype", "device"):
            now, then = getattr(leaf, kind), getattr(other, kind)
            expect(now == then, f"expected {kind} {then}{where}, got {now}")
        here, there = leaf.cpu(), other.cpu()
        atol = _TOLERANCE.get(other.dtype, 1e-5) if other.is_floating_point() else 0
        close = torch.allclose(here.double(), there.double(), rtol=atol, atol=atol, equal_nan=True)
        expect(close, f"expected {_values(there)}{where}, got {_values(here)}")


def unless_stale(run: Callable[[], Any], expected: Any, what: str) -> None:
    """Accept the right result, or a graph that says it is stale."""
    try:
        got = run()
    except StaleGraph:
        return
    expect_same(got, expected, what)


def _values(tensor: Tensor) -> str:
    return quoted(tensor.flatten()[:6].tolist())
