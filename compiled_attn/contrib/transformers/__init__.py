"""Replaces the continuous batching of transformers with our engine: `install`, `uninstall`.

Affects ``generate_batch``, ``continuous_batching_context_manager``, ``init_continuous_batching``
and ``transformers serve --continuous-batching``.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from compiled_attn.contrib.versions import check_tested, installed
from compiled_attn.engine import EngineConfig

__all__ = ["TESTED", "install", "uninstall"]

TESTED = ("5.23", "5.24")

_HOOK = "init_continuous_batching"
_active: list[ExitStack] = []  # the last one, which restores what transformers had


def install(config: EngineConfig | None = None) -> ExitStack:
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

    def init_continuous_batching(
        self: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        return manager_for(self, generation_config, continuous_batching_config, config)

    uninstall()
    restore = ExitStack()
    restore.callback(setattr, ContinuousMixin, _HOOK, getattr(ContinuousMixin, _HOOK))
    _active.append(restore)  # first, so that an interrupt can be undone
    setattr(ContinuousMixin, _HOOK, init_continuous_batching)
    return restore


def uninstall() -> None:
    """Restore transformers' own continuous batching, if replaced; running managers continue."""
    while _active:
        _active[-1].close()
        _active.pop()
