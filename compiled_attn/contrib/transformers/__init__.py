"""Our engine as the continuous batching of transformers: `install`, and its undoing.

From then on it answers ``generate_batch``, ``continuous_batching_context_manager``,
``init_continuous_batching`` and the server that ``transformers serve --continuous-batching`` is.
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
    """What `install` did: a context manager that undoes it when it is left.

    Args:
        config: of the engines.
        original: transformers' own method.
    """

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
    """Lets every model of transformers batch continuously on our engine.

    The first manager of a model warms an engine up, which stays with the model: later managers find
    it warm. In place of what it was told by an earlier call, ``config`` holds for engines that are
    made later.

    Args:
        config: sizes and policies of the engines. What a caller gives transformers in a
            ``ContinuousBatchingConfig`` is not looked at.

    Returns:
        a context manager that uninstalls; it need not be entered.

    Raises:
        EngineUnsupported: transformers is missing, or is a version that this is not tested with.

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
        """A manager of continuous batching on the engine of compiled-attn."""
        return manager_for(self, generation_config, continuous_batching_config, state.config)

    _active.append(state)  # first: what an interrupt leaves half done can be undone
    setattr(ContinuousMixin, _HOOK, init_continuous_batching)
    return state


def uninstall() -> None:
    """Gives transformers its own continuous batching back; managers that run go on.

    Where nothing is installed it does nothing.
    """
    if not _active:
        return
    from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

    setattr(ContinuousMixin, _HOOK, _active[-1].original)
    _active.pop()
