"""Continuous batching over captured graphs: scheduler, runner, sampler and their engine."""

from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.engine.engine import Engine
from compiled_attn.engine.metrics import EngineReport, Percentiles, StepInfo, StepRecord
from compiled_attn.engine.sampling import SamplingParams, sample
from compiled_attn.engine.scheduler import ScheduledTokens, Scheduler
from compiled_attn.engine.sequence import GenerationResult, Sequence, Status, TokenEvent

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
    "TokenEvent",
    "sample",
]
