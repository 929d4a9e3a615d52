"""The result of a run as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from compiled_attn.engine import EngineReport, Percentiles
from compiled_attn.models.hf.proof import CheckReport

__all__ = ["print_result"]


def print_result(report: EngineReport, checked: CheckReport | None, console: Console) -> None:
    """Prints the report as a table of two columns, then each difference that a check found."""
    table = Table(title="compiled-attn", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, value in _rows(report, checked or CheckReport()):
        table.add_row(name, value)
    console.print(table)
    if not _is_short(note := report.kernel_notes.get("native", "")):
        console.print(f"native kernel: {' '.join(note.split())}", highlight=False, soft_wrap=True)
    if checked is not None:
        for kind, differences in (("mismatch", checked.mismatches), ("tie", checked.ties)):
            for difference in differences:
                console.print(f"{kind}: {difference}", highlight=False, soft_wrap=True)


def _rows(report: EngineReport, checked: CheckReport) -> Iterator[tuple[str, str]]:
    waste = report.padding_waste
    yield "backend", f"{report.backend}, torch {report.torch}"
    yield "torch features", _features(report.torch_features)
    yield "kernel", _kernel(report)
    yield "ranks", str(report.ranks)
    if tuning := report.kernel_notes.get("tuning"):
        yield "kernel tuning", tuning
    loaded = f", {report.graphs_loaded} from the store" if report.graphs_loaded else ""
    if size := report.kv_cache:
        yield "KV cache", _cache(size)
        yield "its size is that of", str(size["why"])
    if step := report.step_size:
        yield "tokens of a step", f"{step['tokens']:,} at most ({step['why']})"
    shared = report.compiled_graphs
    sources = f" ({shared} compiled)" if shared != report.graphs else ""
    yield "graphs captured", f"{report.graphs}{sources} in {report.warmup_seconds:.1f} s{loaded}"
    yield "compiles after warmup", str(report.compiles_after_warmup)
    yield "graph breaks", str(report.graph_breaks)
    yield "fallbacks", str(report.fallbacks)
    yield "steps cut for lack of a bucket", str(report.cut_steps)
    failed = f", {report.failed_requests} failed" if report.failed_requests else ""
    yield "requests", f"{report.requests}{failed}"
    yield "generated tokens", f"{report.generated_tokens:,}"
    if report.drafts:
        drafted, accepted = (sum(report.drafts[kind]) for kind in ("drafted", "accepted"))
        yield "accepted tokens of drafts", f"{accepted:,} of {drafted:,}"
    yield "tokens per second", f"{report.tokens_per_second:,.1f}"
    yield "time to first token", _milliseconds(report.ttft_ms)
    yield "step", _milliseconds(report.step_ms)
    yield "padding", f"{waste['tokens']:.1%} of tokens, {waste['blocks']:.1%} of blocks"
    yield "prompts from cache", f"{report.prefix_hit_ratio:.1%}"
    yield "preemptions", str(report.preemptions)
    yield "blocks high water", str(report.blocks_high_water)
    yield "blocks copied", _copies(report.memory)
    yield "checked requests", str(report.checked_requests)
    ties = f", {len(checked.ties)} ties in {checked.checked_tokens:,}" if checked.ties else ""
    wrong = f"{report.mismatched_tokens}{ties}" if report.checked_requests else "-"
    yield "mismatched tokens", wrong


def _features(states: Mapping[str, str]) -> str:
    off = [f"{name} ({why})" for name, why in states.items() if why != "on"]
    return "; off: ".join([f"{len(states) - len(off)} on", *([", ".join(off)] if off else [])])


def _kernel(report: EngineReport) -> str:
    note = report.kernel_notes.get("native", "")
    if report.kernel == "native":
        others = (report.kernel_notes.get(name) for name in ("weights", "oneDNN"))
        return ", ".join(["native", note, *filter(None, others)])
    return f"{report.kernel} (native: {note})" if _is_short(note) else f"{report.kernel}, see below"


def _cache(size: Mapping[str, Any]) -> str:
    return f"{size['dtype']}, {size['tokens']:,} tokens in {size['bytes'] / 2**20:,.1f} MiB"


def _is_short(note: str) -> bool:
    return len(note) <= 60


def _copies(memory: Mapping[str, float]) -> str:
    return f"{memory['defrag_moves']:.0f} to defragment" if "defrag_moves" in memory else "-"


def _milliseconds(times: Percentiles) -> str:
    return f"p50 {times.p50:,.0f} ms, p99 {times.p99:,.0f} ms, max {times.max:,.0f} ms"
