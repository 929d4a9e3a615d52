"""Replaces the continuous batching of transformers with our engine: `install`, `uninstall`.

Affects ``generate_batch``, ``continuous_batching_context_manager``, ``init_continuous_batching``
and ``transformers serve --continuous-batching``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from compiled_attn.contrib.versions import check_tested, installed
from compiled_attn.engine import EngineConfig

__all__ = ["TESTED", "Installed", "install", "uninstall"]

TESTED = ("5.23", "5.24")

_HOOK = "init_continuous_batching"
_active: list[Installed] = []


class Installed:
    """A context manager that uninstalls on exit."""

    def __init__(self, config: EngineConfig | None, original: Callable[..., Any]) -> None:
        self.config, self.original = config, original

    def __enter__(self) -> Installed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self in _active:
            uninstall()


def install(config: EngineConfig | None = None) -> Installed:
    """Use our engine for the continuous batching of every model.

    The first manager of a model creates and warms up an engine, which is stored on the model and
    reused. A second call replaces the ``config`` for engines created later.

    Args:
        config: of the engines; ``ContinuousBatchingConfig`` is ignored.

    Returns:
        A context manager that uninstalls; entering it is optional.

    Raises:
        EngineUnsupported: transformers is missing, or of an untested version.

    Example::

        with install(EngineConfig(max_seqs=16)):
            outputs = model.generate_batch(prompts, GenerationConfig(max_new_tokens=32))
    """
    remedy = f"install transformers=={TESTED[-1]}.*, or another version of compiled-attn"
    check_tested("transformers", installed("transformers"), TESTED, remedy)
    from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

    from compiled_attn.contrib.transformers.manager import manager_for

    uninstall()
    state = Installed(config, getattr(ContinuousMixin, _HOOK))

    def init_continuous_batching(
        self: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        return manager_for(self, generation_config, continuous_batching_config, state.config)

    _active.append(state)  # first, so that an interrupt can be undone
    setattr(ContinuousMixin, _HOOK, init_continuous_batching)
    return state


def uninstall() -> None:
    """Restore transformers' own continuous batching, if replaced; running managers continue."""
    if not _active:
        return
    from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

    setattr(ContinuousMixin, _HOOK, _active[-1].original)
    _active.pop()
