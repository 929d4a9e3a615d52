"""Continuous batching over captured graphs: scheduler, executor, sampler and their engine.

Names are imported lazily, as in `compiled_attn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphs.lazy import lazy_names

if TYPE_CHECKING:
    from compiled_attn.engine.asynchronous import AsyncEngine
    from compiled_attn.engine.config import ConfigError, EngineConfig
    from compiled_attn.engine.engine import Engine
    from compiled_attn.engine.grammar import Grammar
    from compiled_attn.engine.handle import RequestHandle
    from compiled_attn.engine.logprobs import TokenLogprobs
    from compiled_attn.engine.report import EngineReport, StepInfo
    from compiled_attn.engine.request_state import (
        GenerationResult,
        RequestState,
        Status,
        TokenEvent,
    )
    from compiled_attn.engine.sampling import SamplingParams
    from compiled_attn.engine.scheduler import ScheduledStep, ScheduledTokens, Scheduler
    from compiled_attn.engine.stream import Stream
    from compiled_attn.engine.tally import Percentiles, StepRecord
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
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
        },
    )

__all__ = [
    "AsyncEngine",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineReport",
    "GenerationResult",
    "Grammar",
    "Percentiles",
    "RequestHandle",
    "RequestState",
    "SamplingParams",
    "ScheduledStep",
    "ScheduledTokens",
    "Scheduler",
    "Status",
    "StepInfo",
    "StepRecord",
    "Stream",
    "TokenEvent",
    "TokenLogprobs",
]
