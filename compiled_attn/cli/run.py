"""The command ``run``: warm up, serve, check, report."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from transformers import PreTrainedModel

from compiled_attn.cli.demand import Texts, demand_of, texts_of
from compiled_attn.cli.errors import FAILED, INTERRUPTED, UserError, bad_input, report_error
from compiled_attn.cli.inputs import model_of, refuse_unavailable, sampling_of
from compiled_attn.cli.options import RunOptions, settings_of
from compiled_attn.cli.store import stored_backend
from compiled_attn.cli.table import print_result
from compiled_attn.contrib.context_parallel import ContextExecutor
from compiled_attn.engine import Engine, EngineConfig, EngineReport, GenerationResult, StepInfo
from compiled_attn.engine.report import block_series
from compiled_attn.errors import RankLost, RanksDisagree
from compiled_attn.models.hf.proof import CheckReport, check
from compiled_attn.ops.packed_linear import BITS_OF
from compiled_attn.ranks import RankEngine, RankExecutor, Ranks, engine_on, join_ranks
from compiled_attn.text import Grammars
from graphs import (
    BucketOverflow,
    GraphBudgetExceeded,
    InputMismatch,
    ModeMismatch,
    StaleGraph,
    from_file,
    progress_for,
)
from graphs.capture.contract import Backend
from graphs.cli.errors import refuse_unwritable
from graphs.report import write_report
from graphs.report.surroundings import surroundings

__all__ = ["ServingView", "run_job"]

_EVERY_S = 5.0

_FAILURES = (
    GraphBudgetExceeded,
    InputMismatch,
    ModeMismatch,
    StaleGraph,
    BucketOverflow,
    RankLost,
    RanksDisagree,
)


def run_job(options: RunOptions, waiting: str) -> int:
    """Runs the command and returns the exit code; raises UserError for bad input.

    Progress goes to stderr, the result to stdout. All input is checked before the warmup.
    ``waiting`` is how threads wait for each other, see `compiled_attn.waiting`.
    """
    with bad_input():
        _refuse_contradictions(options)
        texts = texts_of(options)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
    try:
        with join_ranks() as ranks:
            if options.context_parallel and ranks is None:
                raise UserError(
                    "expected several ranks for --context-parallel, got one process: start it with "
                    "torchrun --nproc-per-node N -m compiled_attn run"
                )
            with bad_input():
                model = model_of(
                    options.model, options.dtype, options.seed, options.device, options.kv_dtype
                )
            store = stored_backend(options.backend, options.store)
            with contextlib.nullcontext(options.backend) if options.no_store else store as backend:
                return _run(options, model, texts, backend, waiting, ranks)
    except RankLost as error:
        return report_error(error, FAILED)


def _run(
    options: RunOptions,
    model: PreTrainedModel,
    texts: Texts | None,
    backend: str | Backend,
    waiting: str,
    ranks: Ranks | None,
) -> int:
    leads = ranks is None or ranks.leads
    screen, facts = Console(stderr=True, quiet=not leads), _facts(options, model, waiting)
    with bad_input():
        config = _config(options, backend)
        text: dict[str, Any] = {}
        if texts is not None:
            text = {"has_stop": texts.tokenizer.has_stop, "grammars": Grammars(texts.tokenizer)}
        if ranks is not None:
            executor = ContextExecutor if options.context_parallel else RankExecutor
            engine: Engine = engine_on(ranks, model, config, executor=executor, **text)
        else:
            engine = Engine(model, config, **text)
    if isinstance(engine, RankEngine) and not leads:
        return _follow(engine)
    with bad_input():
        demand = demand_of(options, engine.sizing, texts)
        view = ServingView(len(demand.prompts), screen)
        needs: list[str] = []

        def on_step(info: StepInfo) -> None:
            view(info)
            if options.record_demand and info.step is not None:
                needs.append(json.dumps(dict(info.step.uncut_need)) + "\n")

        results = engine.generate(
            demand.prompts,
            demand.sampling,
            arrivals=demand.arrivals,
            concurrency=options.concurrency,
            on_step=on_step,
        )
        refuse_unwritable([options.json, options.record_demand], options.report)
    # After all checks: the error that refuses an input is printed alone.
    print(f"threads: {facts['threads']}; waiting: {waiting}", file=sys.stderr)
    if demand.summary is not None:
        print(demand.summary, file=sys.stderr)
    checked, code = CheckReport(), 0
    if texts is not None:
        facts["answers"] = []
    try:
        engine.warmup(progress_for(sys.stderr))
        with view:
            finished = [*results]
        if texts is not None:
            facts["answers"] = texts.print_answers(finished, engine)
        if isinstance(engine, RankEngine):
            engine.dismiss()
            if options.check:  # with all of it, as what is served is a share
                model = model_of(
                    options.model, options.dtype, options.seed, options.device, options.kv_dtype
                )
        checked = _check(options, model, engine.config, finished, screen)
        if options.check and options.weights in BITS_OF:
            own = model_of(options.model, options.dtype, options.seed)
            found = _check(options, own, engine.config, finished, screen)
            facts[f"tokens_others_in_{options.weights}"] = others = found.mismatched_tokens + len(
                found.ties
            )
            print(
                f"{options.weights}: {others} of {found.checked_tokens} tokens differ from those "
                f"of weights in {options.dtype}, in {len(found.mismatches)} of "
                f"{found.checked_requests} requests beyond ties",
                file=sys.stderr,
            )
    except KeyboardInterrupt as error:
        code = _interrupted(error, "interrupted; this is the report so far")
    except _FAILURES as error:
        code = report_error(error, FAILED)
    report = replace(
        engine.report(),
        checked_requests=checked.checked_requests,
        mismatched_tokens=checked.mismatched_tokens,
    )
    print_result(report, checked, Console())
    with bad_input():
        _write(options, facts, report, checked, engine, needs)
    late = report.compiles_after_warmup + report.graph_breaks + report.fallbacks
    wrong = report.mismatched_tokens + report.failed_requests
    return code or (FAILED if wrong or (options.strict and late) else 0)


def _facts(options: RunOptions, model: PreTrainedModel, waiting: str) -> dict[str, Any]:
    """Model, dtype, options and machine, as JSON-able values for the report."""
    values = asdict(options).items()
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in values}
    return {
        "model": {
            "class": type(model).__name__,
            "source": plain["model"] or "default",
            "parameters": sum(weight.numel() for weight in model.parameters()),
        },
        "dtype": str(model.dtype).removeprefix("torch."),
        "options": plain,
        "waiting": waiting,
        **surroundings(("transformers", "numpy", "compiled-attn")),
    }


def _follow(engine: RankEngine) -> int:
    try:
        engine.warmup()
        engine.follow()
    except KeyboardInterrupt as error:
        return _interrupted(error, "interrupted")
    except _FAILURES as error:
        return report_error(error, FAILED)
    return 0


def _interrupted(error: KeyboardInterrupt, line: str) -> int:
    # With a message another rank exited, see `join_ranks`; without, the user interrupted.
    return report_error(error, FAILED) if str(error) else report_error(line, INTERRUPTED)


def _refuse_contradictions(options: RunOptions) -> None:
    if options.trace is not None and options.demand is not None:
        raise UserError("--trace and --demand were both given: choose where requests come from")
    if options.store is not None and options.no_store:
        raise UserError("--store and --no-store were both given: choose whether to use a store")
    refuse_unavailable(options)
    if options.speed is not None and not 0 < options.speed < float("inf"):
        raise UserError(
            f"expected --speed above 0, got {options.speed}: 1 is the speed of the trace"
        )
    if options.check and options.temperature > 0:
        raise UserError(
            "--check compares greedy decoding: leave --temperature at 0, or --check out"
        )
    if options.check and sampling_of(options).changes_logits:
        raise UserError(
            "--check compares with plain generate: leave penalties and grammars, or --check, out"
        )
    asks_text = [name for name in ("stop", "json_schema", "regex", "grammar")
                 if getattr(options, name)]  # fmt: skip
    if asks_text and options.prompts is None and options.prompt is None:
        flag = asks_text[0].replace("_", "-")
        raise UserError(f"--{flag} is for answers of text: give --prompt or --prompts with it")


def _config(options: RunOptions, backend: str | Backend) -> EngineConfig:
    # The backend has its store already, if it is to have one.
    settings = settings_of(options) | {"backend": backend, "store": False}
    if options.buckets is not None:
        settings["buckets"] = from_file(options.buckets)
    if options.max_graphs is None:
        given = settings["buckets"]
        settings["max_graphs"] = EngineConfig().max_graphs if given is None else len(given)
    return EngineConfig(**settings, watch_process=True)  # it is the command's own


def _check(
    options: RunOptions,
    model: PreTrainedModel,
    config: EngineConfig,
    finished: Sequence[GenerationResult],
    screen: Console,
) -> CheckReport:
    with screen.status("checking") as status:
        return check(
            model,
            finished,
            options.check,
            on_checked=lambda done, count: status.update(f"checking {done}/{count}"),
            kv_dtype=config.cache_dtype,
        )


def _write(
    options: RunOptions,
    facts: dict[str, Any],
    report: EngineReport,
    checked: CheckReport,
    engine: Engine,
    needs: Sequence[str],
) -> None:
    differences = {name: [*map(asdict, getattr(checked, name))] for name in ("ties", "mismatches")}
    result = facts | report.to_dict() | differences
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if options.record_demand is not None:
        options.record_demand.write_text("".join(needs), encoding="utf-8")
    if engine.sizing.recorded is not None:
        engine.sizing.recorded.close()
    if options.report is not None:
        charts = {"series": block_series(engine.tally.blocks, engine.sizing.num_blocks - 1)}
        unchecked = {} if report.checked_requests else {"mismatched_tokens": None}
        write_report(options.report, result | unchecked | charts, title="compiled-attn run")


class ServingView:
    """Shows finished requests, speed, queue and blocks; called with each step.

    A terminal has one live line, anything else a line every few seconds.
    """

    def __init__(self, requests: int, console: Console) -> None:
        self._requests, self._console, self._next_s = requests, console, _EVERY_S
        self._live = console.status("serving") if console.is_terminal else None

    def __call__(self, step: StepInfo) -> None:
        """Shows a step; without a terminal only now and then."""
        if self._live is None and step.elapsed_s < self._next_s:
            return
        rate = step.generated_tokens / step.elapsed_s if step.elapsed_s > 0 else 0.0
        line = (
            f"{step.elapsed_s:.0f} s: {step.finished}/{self._requests} requests, "
            f"{rate:,.0f} tokens/s, {step.running} running, {step.waiting} waiting, "
            f"{step.blocks_used}/{step.blocks_total} blocks"
        )
        if self._live is not None:
            self._live.update(line)
            return
        self._next_s = step.elapsed_s + _EVERY_S
        self._console.print(line, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
