"""A count of the lines that a call runs, as times only say how busy the machine is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def lines_run(call: Callable[[], object]) -> int:
    """Lines of Python that ``call`` executes, every round of a loop counted."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
