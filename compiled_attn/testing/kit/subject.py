"""The op under test: a callable, its interface and its claims."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from compiled_attn.testing.capabilities import Capabilities, CapabilityError
from compiled_attn.testing.kit.interface import Interface, lacks, parameters_of
from compiled_attn.testing.kit.interfaces import INTERFACES
from compiled_attn.testing.kit.step import Step
from compiled_attn.testing.kit.trial import Trial
from graphs.errors import quoted

__all__ = ["Subject"]


@dataclass(frozen=True)
class Subject:
    """An op under test, its interface and its claims.

    Attributes:
        name: qualified name of the op.
        source: ``module:name`` or ``file.py:name`` to import it in a script, or None.
    """

    op: Callable[..., Any]
    interface: type[Interface]
    claims: Capabilities
    name: str
    source: str | None = None

    @classmethod
    def of(
        cls,
        op: Callable[..., Any],
        capabilities: Capabilities | Mapping[str, Any] | None = None,
        interface: str | type[Interface] | None = None,
        source: str | None = None,
        changes: Mapping[str, Any] | None = None,
        module: ModuleType | None = None,
    ) -> Subject:
        """Returns the subject of an op.

        Args:
            op: the callable.
            capabilities: its claims; None: attribute ``capabilities``, or ``CAPABILITIES`` of its
                module.
            interface: a class, or a name in `INTERFACES`; None: by its parameters.
            source: ``module:name`` or ``file.py:name`` to import it in a script.
            changes: fields of `Capabilities` that replace the declared ones; with these, nothing
                needs to be declared.
            module: module with ``CAPABILITIES``; None: the one that defines the op.

        Raises:
            CapabilityError: it is not callable, has no known signature, declares nothing, claims
                what the interface cannot express, or its device is not available.
        """
        named = getattr(op, "__qualname__", None) or getattr(op, "__name__", None)
        name = str(named or type(op).__name__)
        if not callable(op):
            raise CapabilityError(
                f"expected a callable op, got a {type(op).__name__}: name a function or an object "
                "with __call__"
            )
        parameters = parameters_of(op)
        found = _interface(name, parameters, interface)
        declared = capabilities if capabilities is not None else _declared(op, module)
        if declared is None and not changes:
            raise CapabilityError(
                f"{name} declares no capabilities: set {name}.capabilities = Capabilities(...), "
                "or CAPABILITIES in its module, or pass them (--claims window,softcap)"
            )
        claims = Capabilities.of(declared if declared is not None else Capabilities())
        claims = replace(claims, **(changes or {}))
        if found.appends == "always":  # so what it writes is tested, claimed or not
            claims = replace(claims, features=claims.features | (found.features & {"append"}))
        found.check_claims(claims, parameters)
        _check_device(claims.device)
        subject = cls(op, found, claims, name, source or _source(op))
        subject._check_signature(parameters)
        return subject

    @property
    def trial(self) -> Trial:
        """Calls the op."""
        return Trial(self.op, self.interface, self.claims.device)

    def _check_signature(self, parameters: list[str] | None) -> None:
        if parameters is None:
            return
        plain = Step(
            ((1, 2),), append=self.interface.appends == "always", block_size=4,
            dtype=self.claims.dtypes[0],
        )  # fmt: skip
        call = self.trial.call(plain)
        unknown = [name for name in call.kwargs if lacks(parameters, name)]
        is_full = not any(each.startswith("*") for each in parameters)
        if unknown or (is_full and len(call.args) > len(parameters)):
            why = f"lacks {unknown[0]}" if unknown else f"has {len(parameters)} parameters"
            raise CapabilityError(
                f"{self.name}: expected the signature of interface {self.interface.name!r}, got "
                f"({', '.join(parameters)}), which {why}: wrap it in a function that has it"
            )


def _interface(
    name: str, parameters: list[str] | None, given: str | type[Interface] | None
) -> type[Interface]:
    if isinstance(given, type) and issubclass(given, Interface):
        return given
    if given is not None:
        if given not in INTERFACES:
            raise CapabilityError(
                f"interface: expected one of {', '.join(INTERFACES)}, got {quoted(given)}"
            )
        return INTERFACES[str(given)]
    if parameters is not None:
        for each in INTERFACES.values():
            if each.matches(parameters):
                return each
    got = "any arguments" if parameters is None else f"({', '.join(parameters)})"
    raise CapabilityError(
        f"{name}: expected the signature of one of {', '.join(INTERFACES)}, got {got}: wrap it in "
        "a function that has it, or name the interface (--interface NAME or MODULE:CLASS)"
    )


def _declared(op: Any, module: ModuleType | None) -> Any:
    own = getattr(op, "capabilities", None)
    if own is not None:
        return own
    name = getattr(op, "__name__", None)
    module = module or sys.modules.get(getattr(op, "__module__", None) or "")
    declared = getattr(module, "CAPABILITIES", None)
    is_by_name = isinstance(declared, Mapping) and not any(
        key in Capabilities.__dataclass_fields__ for key in declared
    )
    return declared.get(name) if is_by_name and declared is not None else declared


def _source(op: Any) -> str | None:
    module, name = getattr(op, "__module__", None), getattr(op, "__qualname__", None)
    if not module or not name or "<" in name or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is op else None


def _check_device(device: str) -> None:
    try:
        torch.empty(1, device=device).cpu()  # which meta cannot
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CapabilityError(
            f"device {quoted(device)} is not available: {line}: choose another (--device cpu)"
        ) from error
