import io
import re
import sys
import time

import pytest

from graphs import Bucket, BucketEvent, progress_for
from graphs.warmup.progress import LiveProgress, PlainProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def event(status, index=0, total=2, **fields):
    return BucketEvent(Bucket(tokens=64 >> index), status, index, total, 1.5, **fields)


EVENTS = [
    event("started"),
    event("captured", seconds=1.52, bytes=3 << 20, eta_seconds=14.2),
    event("started", 1),
    event("failed", 1, error="graph break at [model.py:7]"),
]


def test_without_a_terminal_each_bucket_is_a_plain_line():
    stream = io.StringIO()
    display = progress_for(stream, "decode")
    assert isinstance(display, PlainProgress)
    for each in EVENTS:
        display(each)
    assert stream.getvalue().splitlines() == [
        "decode 1/2 tokens=64: 1.52 s, 3.0 MiB, about 14 s left",
        "decode 2/2 tokens=32: failed: graph break at [model.py:7]",
    ]


def test_an_interruption_is_a_line_too():
    stream = io.StringIO()
    progress_for(stream)(event("interrupted", error="KeyboardInterrupt"))
    assert stream.getvalue() == "warmup 1/2 tokens=64: interrupted: KeyboardInterrupt\n"


def test_on_a_terminal_a_live_bar_shows_bucket_seconds_time_left_and_failures():
    pytest.importorskip("rich")
    stream = Terminal()
    display = progress_for(stream, "decode")
    assert isinstance(display, LiveProgress)
    for each in EVENTS:
        display(each)
    text = stream.getvalue()
    for part in ("decode", "tokens=64", "1.5 s", "about 14 s left", "2/2"):
        assert part in text
    assert "tokens=32: failed: graph break at [model.py:7]" in text
    assert text.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


def test_the_live_bar_counts_the_seconds_of_a_long_capture():
    """No event comes meanwhile."""
    pytest.importorskip("rich")
    stream = Terminal()
    with progress_for(stream) as display:
        display(event("started"))
        shown = stream.getvalue()
        deadline = time.monotonic() + 30
        while not re.search(r" [2-9] s ", stream.getvalue()[len(shown) :]):
            assert time.monotonic() < deadline, stream.getvalue()
            time.sleep(0.05)
    assert " 0 s " in stream.getvalue()


def test_the_live_bar_gives_the_terminal_back_after_an_error():
    pytest.importorskip("rich")
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), progress_for(stream) as display:
        display(event("started"))
        raise KeyboardInterrupt
    assert "\x1b[?25h" in stream.getvalue()


def test_a_terminal_without_rich_gets_plain_lines(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    stream = Terminal()
    with progress_for(stream) as display:
        assert isinstance(display, PlainProgress)
        display(EVENTS[1])
    assert stream.getvalue().startswith("warmup 1/2 tokens=64: 1.52 s")
