"""The executor of one process: a Hugging Face model, its paged cache and its captured graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from compiled_attn.cache.defrag import BlockSwap
from compiled_attn.cache.huge_pages import touched_later
from compiled_attn.cache.slot_shadow import SlotShadow
from compiled_attn.engine import same_bits
from compiled_attn.engine.adapters import adapter_pool, executor_with_adapters
from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.engine.device_steps import DeviceSteps
from compiled_attn.engine.executor import COPIES, Executor, ExecutorReport, PlannedStep
from compiled_attn.engine.graph_store import store_of
from compiled_attn.engine.host_steps import HostSteps
from compiled_attn.engine.kernel import chosen_kernel, packs
from compiled_attn.engine.logprobs import RowResult
from compiled_attn.engine.sampler import logits_needed
from compiled_attn.engine.scheduler import ScheduledStep
from compiled_attn.engine.sizing import Sizing, eos_tokens
from compiled_attn.engine.speculation.loading import load_draft
from compiled_attn.ops import load
from compiled_attn.ops.triton.register import measured_plans
from compiled_attn.ops.tuning import onednn_sizes, tuning
from compiled_attn.step import BatchBuilder, RequestTable
from compiled_attn.step.layout import Plan
from graphs import (
    Bucket,
    BucketEvent,
    BucketOverflow,
    BucketSpace,
    CaptureError,
    WarmupGroup,
    WarmupManager,
    WarmupReport,
)
from graphs.capture.capture import resolve
from graphs.capture.contract import CaptureSpec
from graphs.torch_internals.replay.replay import Replays

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compiled_attn.models.adapters import AdapterPool

__all__ = ["LocalExecutor", "executor_for"]

_log = logging.getLogger(__name__)


class LocalExecutor:
    """Computes steps in this process.

    Logs the first step that does not fit any bucket as a whole.

    Args:
        timed_runs: how often a graph is run after its capture, to time it.

    Attributes:
        draft: the draft model of ``speculate``, whose cache is counted in the sizes.
        others: executors that are closed with this one.

    Raises:
        ConfigError: the sizes do not fit each other or the model, or the draft model does not.
        graphs.CaptureError: the backend is not available.
        ValueError: the model cannot run on the paged cache, see `PagedCausalLM`.
    """

    schedules_ahead = False
    adapters: AdapterPool | None = None
    _replays: Replays | None = None
    _onednn: Collection[tuple[int, int]] = ()
    _plan_notes: Mapping[str, str] = {}
    _has_logged_cut = _is_attached = False

    def __init__(
        self, model: PreTrainedModel, config: EngineConfig | None = None, *, timed_runs: int = 3
    ) -> None:
        from compiled_attn.models.hf import PagedCausalLM, cache_for  # loads transformers

        self.config = config = config or EngineConfig()
        self._store = store_of(config.backend, config.store)
        backend = resolve(self._store.backend, "step")  # before the model is touched
        self.kernel = chosen_kernel(model, config)
        if config.same_bits:
            same_bits.check_model(model, self.kernel)
        if config.speculate is not None and self.kernel.name != "native":
            raise ConfigError(
                f"expected the native kernel with speculate {config.speculate!r}, got "
                f"{self.kernel.name} (native: {self.kernel.notes['native']}): leave speculate out"
            )
        self.draft, self.others = self._draft_for(model), list[LocalExecutor]()
        self.sizing = sizing = self._sizing_of(model)
        self.schedules_ahead = config.async_scheduling and model.device.type != "cpu"
        self.eos = eos_tokens(model)
        blocks = sizing.num_blocks if sizing.cache is None else sizing.cache.blocks
        near, size, dtype = sizing.near_blocks, sizing.block_size, config.cache_dtype
        with touched_later():  # after the measurements of packing and oneDNN
            slots = 2 if sizing.states is None else sizing.states.slots
            self.cache = cache_for(
                model, blocks, size, dtype=dtype, near_blocks=near, state_slots=slots,
                latents=not config.same_bits,
            )  # fmt: skip
            packed = packs(model, config, self.kernel)
            self.adapters = adapter_pool(model, config, sizing.buckets)
            self.module = PagedCausalLM(model, self.cache, sizing.layout, packed, self.adapters)
            options = self._backend_options(model)
        spec = CaptureSpec(backend, "step", options, strict=config.strict)
        load()  # the sampler's kernel, before the first step needs it
        on_cpu = model.device.type == "cpu"
        steps: HostSteps | DeviceSteps = (
            HostSteps(self.module, self.adapters)
            if on_cpu
            else DeviceSteps(self.module, sizing.buckets, spec)
        )
        symbolic = () if backend.why_no_symbolic() else sizing.layout.symbolic
        self._make_graphs(steps, spec, timed_runs, symbolic)

    def _make_graphs(
        self,
        steps: HostSteps | DeviceSteps,
        spec: CaptureSpec,
        timed_runs: int,
        symbolic: Sequence[str] = (),
    ) -> None:
        """Sets what follows from configuration, sizing, cache and store."""
        sizing, self._steps = self.sizing, steps
        self.graphs = WarmupManager(
            steps.module,
            sizing.buckets,
            steps.padding,
            backend=spec,
            symbolic=symbolic,
            journal=self.config.warmup_journal,
            timed_runs=timed_runs,
            order=same_bits.order(sizing.buckets) if self.config.same_bits else "largest_first",
            **steps.options,
        )
        self.sanitize(self.config.sanitize)
        self._builder = BatchBuilder(sizing.num_blocks, sizing.block_size, sizing.window)

    def _sizing_of(self, model: PreTrainedModel) -> Sizing:
        return Sizing.of(model, self.config, self.kernel.layout, draft=self.draft)

    def _draft_for(self, model: PreTrainedModel) -> PreTrainedModel | None:
        """Loads the draft model of the configuration, if there is one."""
        speculation = self.config.speculation
        if speculation is None or speculation.model is None:
            return None
        return load_draft(speculation.model, model)

    @property
    def near_of(self) -> NDArray[np.int32]:
        """See `Executor.near_of`."""
        if isinstance(self._steps, DeviceSteps):
            assert self._steps.near_of is not None
            return self._steps.near_of.numpy()
        near_of: NDArray[np.int32] = self.cache.get_buffer("near_of").numpy()
        return near_of

    def sanitize(self, is_on: bool) -> None:
        """Adds what the sanitizer needs to the cache, before the warmup, or removes it."""
        self.cache.set_shadow(self._shadow() if is_on else None)
        self.copies = self._copies()

    def _copies(self) -> BlockSwap:
        on_cpu = self.module.model.device.type == "cpu"
        # Without keys there is nothing to copy.
        nothing = [torch.zeros(self.cache.num_blocks, 1, dtype=torch.uint8)]
        return BlockSwap(
            self.cache if self.cache.num_layers else nothing,
            # Copies are bound by memory: on the CPU eager is as fast as compiled code, which costs
            # a large model seconds of its warmup.
            pad_sizes=(1, 4, COPIES) if on_cpu else (COPIES,),
            backend="eager" if on_cpu else self._store.backend,
            strict=self.config.strict,
            exchanges=False,
        )

    def _shadow(self) -> SlotShadow:
        sizing = self.sizing
        limits = [dict(bucket) for bucket in sizing.buckets]
        rows = max(max(each.get("requests", 0), each.get("logits", 0)) for each in limits)
        return SlotShadow(
            self.cache.num_layers,
            sizing.block_size,
            max(rows, self.config.max_seqs),
            max(each["tokens"] for each in limits),
            sizing.table_width,
            self.cache.device,
        )

    def _backend_options(self, model: PreTrainedModel) -> dict[str, Any]:
        """Options of the backend; sets `_onednn` and `_replays`, which `report` describes."""
        from compiled_attn.ops.fusion import FuseLinears  # loads inductor
        from graphs.backends.onednn_linear import for_cpu

        if self.config.backend_name != "inductor" or model.device.type != "cpu":
            return {}
        fused = {"post_grad_custom_pre_pass": FuseLinears()} if self.module.packed else {}
        replayer = load().replayer()
        self._replays = Replays(replayer, verify=True) if replayer else None
        replayed = {"replays": self._replays}
        if self.kernel.name != "native" or not for_cpu():
            # Measured sizes are cached with the kernels; stored graphs need them at each start.
            return {"options": for_cpu() | fused} | replayed
        self._onednn = onednn_sizes(model, tuning())
        return {"options": for_cpu(self._onednn) | fused} | replayed

    @property
    def replays(self) -> Replays | None:
        """Native replays of the graphs; None: there are none."""
        return self._replays

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Executor.copy_states`."""
        assert self.cache.states is not None
        self.cache.states.copy(pairs)

    def attach(self) -> None:
        """See `Executor.attach`."""
        if self._is_attached:
            raise RuntimeError(
                "expected an unused executor, got one that another engine uses: make another one, "
                "as two engines would write the same blocks"
            )
        self._is_attached = True

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> WarmupReport:
        """See `Executor.warmup`."""
        try:
            with (
                self._store.capturing(),
                measured_plans(self.module.model.device) as self._plan_notes,
            ):
                group = WarmupGroup(self.graphs, *self._steps.others, self.copies)
                whole = group.warmup(progress)
        except CaptureError:  # of the copies; an error of the steps says more
            if self.graphs.report is not None:
                self._captured()
            raise
        captured = self._captured()
        buckets = self.sizing.buckets
        serving = BucketSpace(buckets.names, captured, buckets.cost)
        self.sizing = replace(self.sizing, buckets=serving)
        self.module.remember()
        if self.config.same_bits:
            same_bits.prove(self)
        return whole

    def _captured(self) -> list[Bucket]:
        report = self.graphs.report or WarmupReport((), 0.0)
        captured = [result.bucket for result in report.captured]
        missing = [result for result in report.results if result.status != "captured"]
        if not captured or (missing and self.config.strict):
            raise CaptureError(
                f"step[{missing[0].bucket}]",
                f"{missing[0].error}; {len(missing)} of {len(report.results)} buckets are not "
                "captured: fix the cause, or serve from the others with strict=False",
            )
        return captured

    def close(self) -> None:
        """Frees the graphs; the executor cannot be used afterwards. A second call does nothing."""
        for graphs in (self.graphs, *self._steps.others):
            graphs.close()
        for other in self.others:
            other.close()
        self.copies.close()
        if self.adapters is not None:
            self.adapters.remove()
        self._store.close()

    def check_unchanged(self) -> None:
        """Raises `ModelChanged` unless the model is as it was at the warmup."""
        self.module.check_unchanged()

    def plan(self, step: ScheduledStep, table: RequestTable) -> PlannedStep:
        """See `Executor.plan`."""
        parts, uncut, largest = step, None, None
        while True:
            plan = self._plan(parts, table)
            uncut = uncut or plan.need
            try:
                bucket = self.graphs.bucket(**plan.need)
            except BucketOverflow as overflow:
                largest = overflow.largest
                parts = _shorter(parts)
                if not parts:
                    raise
            else:
                if parts is not step:
                    self._log_cut(uncut, largest)
                return PlannedStep(parts, plan, bucket, uncut)

    def launch(self, step: PlannedStep) -> Sequence[RowResult]:
        """See `Executor.launch`."""
        with torch.no_grad():
            return self._steps.launch(self.graphs, step)

    def report(self) -> ExecutorReport:
        """See `Executor.report`."""
        native = self.kernel.name == "native"
        return ExecutorReport(
            self.config.backend_name,
            self.kernel.name if native else self.module.kernel().name,
            {**self.kernel.notes, **self._plan_notes, **self._notes()},
            self.graphs.fallbacks + self.graphs.degraded + self.kernel.is_fallback,
            self.graphs.report,
        )

    def _notes(self) -> dict[str, str]:
        packed, widened = self.module.packed, self.module.widened
        kind = "packed"
        if quantised := self.module.quantised:
            of_these = "" if quantised == packed else f"packed, {quantised} "
            kind = f"{of_these}in {', '.join(self.module.formats)}"
        kind += f", {widened} of float32 in 16 bits, which hold them exactly" if widened else ""
        notes = {"weights": f"{packed} weights {kind}"} if packed else {}
        if self.cache.shadow is not None:
            notes["sanitizer"] = "each step checks what it reads and writes in the cache"
        if self._onednn:
            sizes = ", ".join(f"{outputs} x {inputs}" for outputs, inputs in sorted(self._onednn))
            notes["oneDNN"] = f"float32 layers of {sizes}, as measured"
        if self._replays:
            refused = self._replays.refused
            reasons = "".join(f"; {count} not: {why}" for why, count in refused.items())
            notes["replay"] = f"{self._replays.recorded} graphs run without Python{reasons}"
        return notes

    def _plan(self, step: ScheduledStep, table: RequestTable) -> Plan:
        rows = self._builder.rows(
            table,
            table.rows([sequence.request_id for sequence in step.sequences]),
            step.starts,
            step.counts,
            step.tokens(),
            logits_needed(step),
        )
        return self.sizing.layout.plan(rows)

    def _log_cut(self, uncut: dict[str, int], largest: Mapping[str, int] | None) -> None:
        if not self._has_logged_cut:
            self._has_logged_cut = True
            _log.warning(
                "no bucket fits a step that needs %s, so it is cut into smaller ones: the largest "
                "bucket is %s; plan or add larger ones",
                Bucket(**uncut),
                largest,
            )


def executor_for(model: Executor | PreTrainedModel, config: EngineConfig | None) -> Executor:
    """Returns the given executor, or makes one for a model.

    Raises:
        ConfigError: the executor was made with another configuration; or see `LocalExecutor`.
        TypeError: it is neither a model nor an executor.
    """
    if not hasattr(model, "attach"):
        return executor_with_adapters(model, config, _executor_of)
    if config is not None and config != model.config:
        raise ConfigError(
            "expected the configuration that the executor was made with, got another one: "
            "leave it out"
        )
    return model


def _executor_of(model: object, config: EngineConfig | None) -> LocalExecutor:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            "expected a causal language model of transformers or an executor, got "
            f"{type(model).__name__}: load one with compiled_attn.models.load_model"
        )
    return LocalExecutor(model, config)


def _shorter(step: ScheduledStep) -> ScheduledStep:
    """Drops the drafts of a step, its last request, or half of the tokens of its only one."""
    if step.drafts:
        return step.without_drafts()
    if len(step) > 1:
        return step[:-1]
    only = step[0]
    return ScheduledStep({only.sequence: only.count // 2} if only.count > 1 else {})
