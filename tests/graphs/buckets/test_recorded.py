"""Recorded sizes: counts survive processes, kills and each other; other files are refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from graphs import BucketFileError
from graphs.buckets.recorded import RecordedSizes

NAMES = ("rows", "length")


def recorded(path, **settings):
    return RecordedSizes(path, NAMES, **settings)


def test_counts_are_added_to_those_of_the_file(tmp_path):
    path = tmp_path / "sizes.jsonl"
    for start in range(3):
        sizes = recorded(path)
        for _ in range(4 + start):
            sizes.add((3, 17))
        sizes.add((start, 1))
        sizes.close()
    assert recorded(path).counts == {(3, 17): 15, (0, 1): 1, (1, 1): 1, (2, 1): 1}
    assert sizes.counts == recorded(path).counts


def test_the_file_has_sizes_and_counts_alone(tmp_path):
    path = tmp_path / "sizes.jsonl"
    sizes = recorded(path)
    for size in (5, 5, 9):
        sizes.add((size, 2))
    sizes.write()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"need": {"rows": 5, "length": 2}, "count": 2, "window": 1},
        {"need": {"rows": 9, "length": 2}, "count": 1, "window": 1},
    ]


def test_what_drifted_away_is_forgotten_and_the_file_stays_small(tmp_path):
    path = tmp_path / "sizes.jsonl"
    sizes = recorded(path, window=100, most=20)
    for step in range(2000):
        sizes.add((step // 10, step % 3))
        if step % 50 == 49:
            sizes.write()
    assert all(rows >= 180 for rows, _ in sizes.counts)
    assert 50 <= sum(sizes.counts.values()) <= 200
    assert len(path.read_text().splitlines()) <= 2 * (20 + 50)
    windows = [json.loads(line)["window"] for line in path.read_text().splitlines()]
    assert windows == sorted(windows)


def test_it_writes_by_itself_while_it_counts(tmp_path):
    path = tmp_path / "sizes.jsonl"
    sizes = recorded(path, seconds=0.0)
    end = time.monotonic() + 20
    while not path.exists() and time.monotonic() < end:
        sizes.add((1, 1))
    assert path.exists()
    sizes.close()
    total = sum(sizes.counts.values())
    assert total == sum(recorded(path).counts.values()) > 0


def _count(path, size, times):
    sizes = RecordedSizes(path, NAMES)
    for _ in range(times):
        sizes.add((size, 1))
        sizes.write()
    sizes.close()


def test_no_count_is_lost_where_two_processes_write(tmp_path):
    path = tmp_path / "sizes.jsonl"
    start = multiprocessing.get_context("spawn").Process
    others = [start(target=_count, args=(path, size, 30)) for size in (1, 2)]
    for each in others:
        each.start()
    for each in others:
        each.join()
    assert recorded(path).counts == {(1, 1): 30, (2, 1): 30}


_UNTIL_KILLED = """
import sys
from graphs.buckets.recorded import RecordedSizes
sizes = RecordedSizes(sys.argv[1], ("rows", "length"))
for step in range(10**9):
    sizes.add((step % 200, 1))
    sizes.write()
    if step == 5:
        print("started", flush=True)
"""

_ENDS = """
import sys
from graphs.buckets.recorded import RecordedSizes
sizes = RecordedSizes(sys.argv[1], ("rows", "length"))
sizes.add((7, 1))
"""


def test_a_killed_process_leaves_a_whole_file(tmp_path):
    path = tmp_path / "sizes.jsonl"
    run = [sys.executable, "-c", _UNTIL_KILLED, str(path)]
    with subprocess.Popen(run, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    sizes = recorded(path)
    assert len(sizes.counts) >= 6
    sizes.add((1000, 1))
    sizes.write()
    assert (1000, 1) in recorded(path).counts


def test_the_end_of_a_process_writes_what_is_left(tmp_path):
    path = tmp_path / "sizes.jsonl"
    subprocess.run([sys.executable, "-c", _ENDS, str(path)], check=True)
    assert recorded(path).counts == {(7, 1): 1}


def test_a_forked_process_does_not_write_what_its_parent_counted(tmp_path):
    sizes = recorded(tmp_path / "sizes.jsonl")
    sizes.add((3, 1))
    child = os.fork()
    if not child:
        sizes.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert not sizes.path.exists()
    sizes.close()
    assert recorded(sizes.path).counts == {(3, 1): 1}


GOOD = {"need": {"rows": 1, "length": 2}, "count": 3, "window": 1}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("version: 1\naxes: rows length\n(1, 2)\n", ":1: not valid JSON"),
        ("[]\n", "expected recorded sizes such as"),
        (json.dumps(GOOD | {"count": 0}), "expected a count of at least 1, got 0"),
        (json.dumps(GOOD | {"count": True}), "expected a count of at least 1, got True"),
        (json.dumps(GOOD | {"window": 2}), "expected recorded sizes such as"),
        (json.dumps(GOOD | {"need": {"rows": 1}}), "expected sizes of rows, length, got 'rows'"),
        (json.dumps(GOOD | {"need": {"rows": -1, "length": 2}}), "expected whole sizes"),
        (json.dumps(GOOD | {"need": {"rows": 1.5, "length": 2}}), "expected whole sizes"),
        (json.dumps(GOOD | {"need": {"rows": True, "length": 2}}), "expected whole sizes"),
        (json.dumps(GOOD) + "\n" + json.dumps(GOOD)[:-9] + "\n", ":2: not valid JSON"),
        ("\udcff", "not valid JSON"),
    ],
)
def test_another_file_is_refused_in_one_line_and_stays(tmp_path, text, part):
    path = tmp_path / "sizes.jsonl"
    data = text.encode(errors="surrogateescape")
    path.write_bytes(data)
    with pytest.raises(BucketFileError) as raised:
        recorded(path)
    message = str(raised.value)
    assert message.startswith(f"{path}:") and part in message and "\n" not in message
    assert "remove it" in message and len(message) < 600 + len(str(path))
    assert path.read_bytes() == data


def test_a_missing_folder_and_a_folder_are_refused(tmp_path):
    with pytest.raises(BucketFileError, match="in an existing folder: create"):
        recorded(tmp_path / "missing" / "sizes.jsonl")
    with pytest.raises(BucketFileError, match="not readable as recorded sizes"):
        recorded(tmp_path)


def test_a_file_that_cannot_be_written_is_a_warning_and_the_counts_wait(tmp_path, caplog):
    path = tmp_path / "sizes.jsonl"
    sizes = recorded(path)
    sizes.add((1, 1))
    path.write_text("something else\n")
    with pytest.raises(BucketFileError):
        sizes.write()
    sizes.close()
    assert "sizes are not recorded" in caplog.text and path.read_text() == "something else\n"
    path.unlink()
    sizes.write()
    assert recorded(path).counts == {(1, 1): 1}
