"""The conformance kit: `check` tests every feature that a paged attention op claims.

python -m compiled_attn.testing mymodule:my_op
pytest --paged-attention mymodule:my_op
"""

from __future__ import annotations

from compiled_attn.testing.kit.cases import CASES, Case
from compiled_attn.testing.kit.interface import Interface
from compiled_attn.testing.kit.interfaces import INTERFACES
from compiled_attn.testing.kit.report import Report
from compiled_attn.testing.kit.result import Result
from compiled_attn.testing.kit.run import check
from compiled_attn.testing.kit.step import Step
from compiled_attn.testing.kit.subject import Subject

__all__ = [
    "CASES",
    "INTERFACES",
    "Case",
    "Interface",
    "Report",
    "Result",
    "Step",
    "Subject",
    "check",
]
