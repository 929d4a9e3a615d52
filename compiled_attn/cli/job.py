"""The main job: prepare, warm up, serve, check, report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from compiled_attn.cli.choices import DTYPES, refuse_unknown
from compiled_attn.cli.errors import FAILED, INTERRUPTED, UserError, bad_input, tell
from compiled_attn.cli.facts import RunFacts
from compiled_attn.cli.live import ServingView, serving_view
from compiled_attn.cli.store import stored_backend
from compiled_attn.cli.table import print_result
from compiled_attn.engine import (
    Engine,
    EngineConfig,
    EngineReport,
    GenerationResult,
    SamplingParams,
    StepInfo,
)
from compiled_attn.engine.metrics import block_series
from compiled_attn.hf.proof import CheckReport, check
from compiled_attn.models import default_model, load_model
from compiled_attn.workloads import Arrival, fit_scale, prompts, read_trace, scaled, synthetic
from graphs import (
    BucketOverflow,
    GraphBudgetExceeded,
    InputMismatch,
    ModeMismatch,
    StaleGraph,
    available_backends,
    from_file,
    progress_for,
)
from graphs.capture.contract import Backend
from graphs.cli.outputs import refuse_unwritable
from graphs.report import write_report

__all__ = ["Options", "run_job"]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``compiled-attn run``, under their names."""

    model: Path | None
    trace: Path | None
    demand: str | None
    requests: int
    scale: float | None
    seed: int
    speed: float | None
    concurrency: int | None
    temperature: float
    top_k: int
    top_p: float
    dtype: str
    backend: str
    kernel: str
    store: Path | None
    no_store: bool
    warmup_workers: int
    warmup_journal: Path | None
    max_tokens_per_step: int
    max_seqs: int
    block_size: int
    num_blocks: int | None
    defrag_waste: float
    buckets: Path | None
    max_graphs: int | None
    check: int
    strict: bool
    report: Path | None
    record_demand: Path | None
    json: Path | None


def run_job(options: Options) -> int:
    """Run the main job as the options say, and return the exit code.

    Progress goes to stderr, the result to stdout. All input is looked at before the warmup begins.

    Raises:
        UserError: the input is bad; nothing was started.
    """
    with bad_input():
        _refuse_contradictions(options)
        model = _model(options)
    if options.no_store:
        return _run(options, model, options.backend)
    with stored_backend(options.backend, options.store) as backend:
        return _run(options, model, backend)


def _run(options: Options, model: PreTrainedModel, backend: str | Backend) -> int:
    screen, facts = Console(stderr=True), RunFacts.of(model, options.model, asdict(options))
    with bad_input():
        engine = Engine(model, _config(options, backend))
        arrivals = _demand(options, engine.sizing.context, screen)
        for arrival in arrivals:
            engine.sizing.check_lengths(arrival.prompt_tokens, arrival.output_tokens)
        view = serving_view(len(arrivals), screen)
        demand: list[str] = []
        on_step = _recording(view, demand) if options.record_demand else view
        results = _offer(options, engine, arrivals, on_step)
        refuse_unwritable([options.json, options.record_demand], options.report)
    checked, code = CheckReport(), 0
    try:
        engine.warmup(progress_for(sys.stderr))
        with view:
            finished = [*results]
        checked = _check(options, model, finished, screen)
    except KeyboardInterrupt:
        code = tell("interrupted; this is the report so far", INTERRUPTED)
    except (GraphBudgetExceeded, InputMismatch, ModeMismatch, StaleGraph, BucketOverflow) as error:
        code = tell(error, FAILED)
    report = replace(
        engine.report(),
        checked_requests=checked.checked_requests,
        mismatched_tokens=checked.mismatched_tokens,
    )
    print_result(report, checked, Console())
    with bad_input():
        _write(options, facts, report, checked, engine, demand)
    return code or _verdict(report, options.strict)


def _recording(view: ServingView, demand: list[str]) -> Callable[[StepInfo], None]:
    def on_step(info: StepInfo) -> None:
        view(info)
        if info.step is not None:
            demand.append(json.dumps(dict(info.step.wanted)) + "\n")

    return on_step


def _check(
    options: Options,
    model: PreTrainedModel,
    finished: Sequence[GenerationResult],
    screen: Console,
) -> CheckReport:
    with screen.status("checking") as status:
        return check(
            model,
            finished,
            options.check,
            on_checked=lambda done, count: status.update(f"checking {done}/{count}"),
        )


def _refuse_contradictions(options: Options) -> None:
    if options.trace is not None and options.demand is not None:
        raise UserError("--trace and --demand were both given: choose where requests come from")
    if options.store is not None and options.no_store:
        raise UserError("--store and --no-store were both given: choose whether to use a store")
    backends = available_backends()
    refuse_unknown(options.dtype, options.backend, backends)
    if reason := backends[options.backend]:
        raise UserError(f"--backend {options.backend} cannot work here: {reason}")
    if options.speed is not None and not 0 < options.speed < float("inf"):
        raise UserError(f"expected --speed above 0, got {options.speed}: 1 keeps the trace's times")
    if options.check and options.temperature > 0:
        raise UserError(
            "--check compares greedy decoding: leave --temperature at 0, or --check out"
        )


def _model(options: Options) -> PreTrainedModel:
    dtype = DTYPES[options.dtype]
    if options.model is None:
        return default_model(options.seed, dtype)
    return load_model(options.model, dtype)


def _config(options: Options, backend: str | Backend) -> EngineConfig:
    config = EngineConfig(
        max_tokens_per_step=options.max_tokens_per_step,
        max_seqs=options.max_seqs,
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        defrag_waste=options.defrag_waste if options.defrag_waste != 1 else None,
        kernel=options.kernel,  # type: ignore[arg-type]  # the configuration checks it
        backend=backend,
        strict=options.strict,
        watch_process=True,  # it is the command's own
        warmup_workers=options.warmup_workers,
        warmup_journal=options.warmup_journal,
    )
    if options.buckets is not None:
        buckets = from_file(options.buckets)
        config = replace(config, buckets=buckets, max_graphs=len(buckets))
    if options.max_graphs is not None:
        config = replace(config, max_graphs=options.max_graphs)
    return config


def _demand(options: Options, context: int, screen: Console) -> list[Arrival]:
    if options.trace is not None:
        arrivals = read_trace(options.trace, options.requests)
    else:
        arrivals = synthetic(options.demand or "chat", options.requests, options.seed)
    scale = fit_scale(arrivals, context) if options.scale is None else options.scale
    arrivals = scaled(arrivals, scale)
    prompt_tokens = sum(arrival.prompt_tokens for arrival in arrivals)
    output_tokens = sum(arrival.output_tokens for arrival in arrivals)
    screen.print(
        f"{len(arrivals)} requests, lengths scaled by {scale:g}: {prompt_tokens:,} prompt tokens, "
        f"{output_tokens:,} to generate",
        highlight=False,
        soft_wrap=True,
    )
    return arrivals


def _sampling(options: Options, arrivals: Sequence[Arrival]) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_new_tokens=arrival.output_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed + index,
        )
        for index, arrival in enumerate(arrivals)
    ]


def _offer(
    options: Options,
    engine: Engine,
    arrivals: Sequence[Arrival],
    on_step: Callable[[StepInfo], None],
) -> Iterator[GenerationResult]:
    """The results to come, of requests that can all be served; none is computed yet."""
    vocab_size = engine.sizing.vocab
    texts = prompts(arrivals, vocab_size, options.seed)
    sampling = _sampling(options, arrivals)
    speed = options.speed
    return engine.generate(
        texts,
        sampling,
        arrivals=None if speed is None else [a.arrival_s / speed for a in arrivals],
        concurrency=options.concurrency,
        on_step=on_step,
    )


def _verdict(report: EngineReport, strict: bool) -> int:
    late = report.compiles_after_warmup + report.graph_breaks + report.fallbacks
    wrong = report.mismatched_tokens + report.failed_requests
    return FAILED if wrong or (strict and late) else 0


def _write(
    options: Options,
    facts: RunFacts,
    report: EngineReport,
    checked: CheckReport,
    engine: Engine,
    demand: Sequence[str],
) -> None:
    result = (
        facts.to_dict()
        | report.to_dict()
        | {
            "ties": [asdict(tie) for tie in checked.ties],
            "mismatches": [asdict(mismatch) for mismatch in checked.mismatches],
        }
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if options.record_demand is not None:
        options.record_demand.write_text("".join(demand), encoding="utf-8")
    if options.report is not None:
        charts = {"series": block_series(engine.tally.blocks, engine.sizing.num_blocks - 1)}
        unchecked = {} if report.checked_requests else {"mismatched_tokens": None}
        write_report(options.report, result | unchecked | charts, title="compiled-attn run")
