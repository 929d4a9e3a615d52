"""The base class of interfaces (signatures of paged attention that the kit can call)."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, Literal

from torch import Tensor

from compiled_attn.testing.capabilities import Capabilities, CapabilityError, unknown_feature
from compiled_attn.testing.kit.step import Step

__all__ = ["Arguments", "Interface", "lacks", "parameters_of"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


class Interface(ABC):
    """One signature: builds the arguments of a call, and reads its results.

    To test another signature, subclass it, set ``name``, ``features``, ``parameters`` and
    ``reference``, define `arguments` and `results`, and pass the class to `check` as
    ``interface=``, or its name as ``--interface module:Class``. The script of a failing case
    contains the source of these three and of what they name in their module, so `arguments` and
    `results` are static methods, and none is a lambda.

    Attributes:
        name: name in reports.
        rows: query rows per request: "any", "equal" (the same number for each) or "one".
        features: names in `compiled_attn.testing.FEATURES` that the signature can express.
        parameters: parameter names by which a callable is recognized.
        keywords: for a feature, the parameter that the callable must have.
        outputs: number of leading arguments that are output buffers.
        appends: whether a call writes new keys and values: "never", "always" or "optional".
        reference: takes the same arguments and ``dtype`` (float64 by default), returns the expected
            results on the CPU, and writes new keys and values if the call does.
    """

    name: ClassVar[str]
    rows: ClassVar[Literal["any", "equal", "one"]] = "any"
    features: ClassVar[frozenset[str]]
    parameters: ClassVar[tuple[str, ...]]
    keywords: ClassVar[Mapping[str, str]] = MappingProxyType({})
    outputs: ClassVar[int] = 0
    appends: ClassVar[Literal["never", "always", "optional"]] = "never"
    reference: ClassVar[Callable[..., Any]]

    @staticmethod
    @abstractmethod
    def arguments(s: SimpleNamespace) -> Arguments:
        """Returns the arguments of a call for the tensors of a step, see ``fields`` of `Scene`."""

    @staticmethod
    @abstractmethod
    def results(returned: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
        """Returns out ``[T, H, Dv]`` and lse ``[T, H]`` (or None) from the call's return value."""

    @classmethod
    def why_not(cls, step: Step) -> str | None:
        """Returns why the signature cannot express a step, or None."""
        return None

    @classmethod
    def matches(cls, parameters: list[str]) -> bool:
        """Whether a callable with these parameters has this signature."""
        return {*cls.parameters} <= {*parameters}

    @classmethod
    def check_claims(cls, claims: Capabilities, parameters: list[str] | None) -> None:
        """Checks that the signature can express all claims.

        Raises:
            CapabilityError: it cannot, or the callable lacks the parameter.
        """
        for feature in sorted(claims.features):
            if feature not in cls.features:
                where = f" for interface {cls.name!r}"
                raise unknown_feature(feature, sorted(cls.features), where)
            keyword = cls.keywords.get(feature)
            if keyword and parameters is not None and lacks(parameters, keyword):
                raise CapabilityError(
                    f"capability {feature!r} needs a parameter {keyword!r}, got "
                    f"({', '.join(parameters)}): add it, or drop the claim"
                )


def lacks(parameters: list[str], keyword: str) -> bool:
    """Whether a callable with these parameters does not take a keyword."""
    return keyword not in parameters and not any(each.startswith("**") for each in parameters)


def parameters_of(op: Callable[..., Any]) -> list[str] | None:
    """Returns parameter names, with the stars of ``*name`` and ``**name``.

    None: the callable takes any arguments, or has no signature.
    """
    schema = getattr(getattr(op, "default", op), "_schema", None)
    if schema is not None:  # an op of torch.ops
        return [each.name for each in schema.arguments]
    forward = getattr(op, "forward", None)  # of a module
    try:
        parameters = inspect.signature(forward or op).parameters.values()
    except (TypeError, ValueError):
        return None
    names = [f"{_STARS.get(each.kind.name, '')}{each.name}" for each in parameters]
    return None if all(each.startswith("*") for each in names) else names


_STARS = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
