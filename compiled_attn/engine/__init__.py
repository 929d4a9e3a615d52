"""Continuous batching over captured graphs: scheduler, executor, sampler and their engine.

Names are imported lazily, as in `compiled_attn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphs.lazy import lazy_names

if TYPE_CHECKING:
    from compiled_attn.engine.asynchronous import AsyncEngine as AsyncEngine
    from compiled_attn.engine.config import ConfigError as ConfigError
    from compiled_attn.engine.config import EngineConfig as EngineConfig
    from compiled_attn.engine.engine import Engine as Engine
    from compiled_attn.engine.grammar import Grammar as Grammar
    from compiled_attn.engine.handle import RequestHandle as RequestHandle
    from compiled_attn.engine.logprobs import TokenLogprobs as TokenLogprobs
    from compiled_attn.engine.report import EngineReport as EngineReport
    from compiled_attn.engine.report import StepInfo as StepInfo
    from compiled_attn.engine.request_state import GenerationResult as GenerationResult
    from compiled_attn.engine.request_state import RequestState as RequestState
    from compiled_attn.engine.request_state import Status as Status
    from compiled_attn.engine.request_state import TokenEvent as TokenEvent
    from compiled_attn.engine.sampling import SamplingParams as SamplingParams
    from compiled_attn.engine.scheduler import ScheduledStep as ScheduledStep
    from compiled_attn.engine.scheduler import ScheduledTokens as ScheduledTokens
    from compiled_attn.engine.scheduler import Scheduler as Scheduler
    from compiled_attn.engine.stream import Stream as Stream
    from compiled_attn.engine.tally import Percentiles as Percentiles
    from compiled_attn.engine.tally import StepRecord as StepRecord

_MODULES = {
    "asynchronous": "AsyncEngine",
    "config": "ConfigError EngineConfig",
    "engine": "Engine",
    "grammar": "Grammar",
    "handle": "RequestHandle",
    "logprobs": "TokenLogprobs",
    "report": "EngineReport StepInfo",
    "sampling": "SamplingParams",
    "scheduler": "ScheduledStep ScheduledTokens Scheduler",
    "request_state": "GenerationResult RequestState Status TokenEvent",
    "stream": "Stream",
    "tally": "Percentiles StepRecord",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
__all__ = sorted(" ".join(_MODULES.values()).split())
