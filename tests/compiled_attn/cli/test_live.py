"""The view of a serving engine, on a terminal and on none."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from compiled_attn.cli.run import ServingView
from compiled_attn.engine import StepInfo


def step(elapsed_s: float, finished: int = 1) -> StepInfo:
    return StepInfo(
        running=3,
        waiting=4,
        blocks_used=50,
        blocks_total=80,
        finished=finished,
        generated_tokens=1200,
        elapsed_s=elapsed_s,
    )


def test_without_a_terminal_it_prints_a_line_now_and_then():
    stream = StringIO()
    with ServingView(9, Console(file=stream, width=40)) as view:
        for seconds in (0.0, 0.1, 4.9, 5.0, 6.0, 9.9, 10.2):
            view(step(seconds))
    assert stream.getvalue().splitlines() == [
        "5 s: 1/9 requests, 240 tokens/s, 3 running, 4 waiting, 50/80 blocks",
        "10 s: 1/9 requests, 118 tokens/s, 3 running, 4 waiting, 50/80 blocks",
    ]


def test_a_terminal_shows_one_live_line():
    stream = StringIO()
    with ServingView(9, Console(file=stream, force_terminal=True, width=120)) as view:
        view(step(0.0))
        view(step(2.0, finished=9))
    shown = "2 s: 9/9 requests, 600 tokens/s, 3 running, 4 waiting, 50/80 blocks"
    assert shown in stream.getvalue()
