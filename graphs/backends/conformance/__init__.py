"""Conformance suite: what every capture backend must guarantee, as cases that any backend can run.

pytest --graphs-backend mymodule:MyBackend
"""

from __future__ import annotations

from graphs.backends.conformance import lifetime, state, values
from graphs.backends.conformance.case import Case, NotConformant, Refused, Subject, load

__all__ = ["CASES", "Case", "NotConformant", "Refused", "Subject", "load"]

CASES: tuple[Case, ...] = tuple(
    each
    for module in (values, state, lifetime)
    for each in vars(module).values()
    if isinstance(each, Case)
)
