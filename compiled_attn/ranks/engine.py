"""An engine on several ranks: rank 0 takes requests, all ranks plan and compute each step.

Before that, they check that model, settings and versions agree.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
import zlib
from collections import deque
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.engine.adapters import ServedAdapter
from compiled_attn.engine.request_state import RequestState, TokenEvent
from compiled_attn.engine.speculation.drafter import Drafter, DraftSource, Ngrams
from compiled_attn.engine.speculation.sources import source_of
from compiled_attn.errors import ConfigError, EngineStopped
from compiled_attn.ranks.drafts import RankDrafter
from compiled_attn.ranks.executor import RankExecutor, RankZeroFirst
from compiled_attn.ranks.group import Ranks

__all__ = ["RankEngine", "engine_on"]

_PER_RANK = "num_blocks", "backend", "buckets", "warmup_journal", "prefix_key"
_SAMPLE = 1 << 16  # bytes of each weight that are compared


@dataclass(frozen=True, slots=True)
class _Submitted:
    request_id: int
    prompt: list[int]
    sampling: SamplingParams
    salt: Salt


@dataclass(frozen=True, slots=True)
class _Aborted:
    request_id: int


class RankEngine(Engine):
    """An engine that leads the other ranks, or follows rank 0.

    Requests and aborts come to rank 0, which broadcasts them in order before the next step, with
    the seeds it chose. The scheduler depends only on requests, blocks and the drafts, which rank 0
    broadcasts, so every rank computes the same global plan; in strict mode they compare it.

    An exception in a step stops the engine, since its ranks could no longer agree. ``args`` and
    ``kwargs`` are those of `Engine`; the executor is a `RankExecutor`.
    """

    def __init__(self, ranks: Ranks, *args: Any, **kwargs: Any) -> None:
        self.ranks = ranks
        super().__init__(*args, **kwargs)
        self._unsent: list[_Submitted | _Aborted] = []
        self._in_step = False

    def follow(self) -> None:
        """Compute the steps of rank 0 until it calls `dismiss`.

        Raises:
            RankLost: a rank exited.
            RanksDisagree: this rank would compute another step (strict).
        """
        while (changes := self.ranks.broadcast(None)) is not None:
            for each in changes:
                self._follow(each)
            self.advance()
            self._events.clear()

    def dismiss(self) -> None:
        """End `follow` on the other ranks."""
        if self.ranks.leads:
            self.ranks.broadcast(None)

    def _follow(self, change: _Submitted | _Aborted) -> None:
        if isinstance(change, _Aborted):
            self.drop({change.request_id})  # whose submission may have been interrupted
        else:
            self._ids = itertools.count(change.request_id)
            self.submit(change.prompt, change.sampling, salt=change.salt)

    def enter(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        salt: Salt,
        arrived_s: float | None,
        events: deque[TokenEvent],
        name: tuple[int, int] | None,
        adapter: ServedAdapter | None = None,
    ) -> int:
        """See `Engine.enter`."""
        request_id = super().enter(prompt, sampling, salt, arrived_s, events, name, adapter)
        self._unsent.append(
            _Submitted(request_id, prompt, self._requests[request_id].sampling, salt)
        )
        return request_id

    def _new_drafter(self) -> Drafter | None:
        if (speculation := self.config.speculation) is None:
            return None
        source: DraftSource = Ngrams()
        backend = self.config.backend
        if self.ranks.leads:
            assert isinstance(backend, RankZeroFirst)
            config = replace(self.config, backend=backend.alone)
            source = source_of(self.executor, config, speculation)
        return RankDrafter(self.ranks, source, speculation.most)

    def _drop(self, sequence: RequestState) -> None:
        super()._drop(sequence)
        request_id = sequence.request_id
        rest = [each for each in self._unsent if each.request_id != request_id]
        # A request submitted since the last step is unknown to the other ranks.
        self._unsent = rest if len(rest) < len(self._unsent) else [*rest, _Aborted(request_id)]

    def _run_step(self) -> None:
        if self._in_step:
            raise EngineStopped(
                "expected an engine whose ranks agree, got one whose step raised an exception: "
                "start all ranks again"
            )
        self._in_step = True
        if self.ranks.leads:
            self.ranks.broadcast(self._unsent)
        self._unsent = []
        super()._run_step()
        self._in_step = False


def engine_on(
    ranks: Ranks,
    model: PreTrainedModel,
    config: EngineConfig | None = None,
    *,
    executor: type[RankExecutor] = RankExecutor,
    **others: Any,
) -> RankEngine:
    """Create an engine on several ranks; each rank calls this with the same model and settings.

    The cache of each rank is as large as that of the smallest.

    Args:
        ranks: ranks of the process group.
        model: whole; `RankExecutor` shards it in place.
        config: configuration of the engine; cache sizes are per rank.
        executor: `RankExecutor` for tensor parallelism, or
            `compiled_attn.contrib.context_parallel.ContextExecutor`, which divides contexts.
        others: passed to `compiled_attn.engine.Engine`.

    Raises:
        ConfigError: another rank has another model, other settings or versions.
        ModelRefused: the model cannot be divided, see `shard` and `ContextExecutor`; or cannot run
            on a paged cache.
        RankLost: a rank exited.
    """
    config = config or EngineConfig()
    if config.learn_buckets is not None:
        raise ConfigError(
            "expected no learn_buckets on several ranks, which must agree on their buckets: plan "
            "with `compiled-attn plan --demand FILE --out BUCKETS`, and give buckets"
        )
    if config.same_bits:
        raise ConfigError(
            "expected same_bits False on several ranks, whose sums depend on their number, got "
            "True: leave it out"
        )
    ranks.check_equal(_facts(model, config) | {"executor": executor.__name__})
    with ranks.guard():
        executor.divide(model, ranks)
        return RankEngine(ranks, executor(ranks, model, config), **others)


def _facts(model: PreTrainedModel, config: EngineConfig) -> dict[str, str]:
    settings = {
        f"setting {each.name}": str(getattr(config, each.name))
        for each in fields(config)
        if each.name not in _PER_RANK
    }
    packages = ("compiled-attn", "torch", "transformers")
    versions = {f"version of {name}": importlib.metadata.version(name) for name in packages}
    return {
        "model": type(model).__name__,
        "weights": _checksum(model),
        "backend": config.backend_name,
        "buckets": "; ".join(map(str, config.buckets or ())) or "a ladder",
        "version of python": platform.python_version(),
        **settings,
        **versions,
    }


def _checksum(model: nn.Module) -> str:
    total = 0
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        first = weight.detach().reshape(-1)[:_SAMPLE].cpu().contiguous().view(torch.uint8)
        total = zlib.crc32(f"{name} {weight.dtype} {[*weight.shape]}".encode(), total)
        total = zlib.crc32(first.numpy().tobytes(), total)
    return f"{total:08x}"
