"""``compiled-attn explain``: the same as ``python -m graphs explain``."""

from __future__ import annotations

import functools
from typing import Any

import graphs.cli.explain
from compiled_attn.cli.errors import UserError

__all__ = ["explain"]


@functools.wraps(graphs.cli.explain.explain)
def explain(*args: Any, **kwargs: Any) -> int:  # noqa: D103 (its text is that of the original)
    try:
        return graphs.cli.explain.explain(*args, **kwargs)
    except graphs.cli.UserError as error:
        raise UserError(str(error)) from error
