"""Continuous batching over captured graphs: scheduler, executor, sampler and their engine."""

from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.engine.engine import Engine
from compiled_attn.engine.metrics import EngineReport, Percentiles, StepInfo, StepRecord
from compiled_attn.engine.sampling import SamplingParams, sample, sample_rows
from compiled_attn.engine.scheduler import ScheduledTokens, Scheduler
from compiled_attn.engine.sequence import GenerationResult, Sequence, Status, TokenEvent
from compiled_attn.engine.stream import Stream

__all__ = [
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineReport",
    "GenerationResult",
    "Percentiles",
    "SamplingParams",
    "ScheduledTokens",
    "Scheduler",
    "Sequence",
    "Status",
    "StepInfo",
    "StepRecord",
    "Stream",
    "TokenEvent",
    "sample",
    "sample_rows",
]
