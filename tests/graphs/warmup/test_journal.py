import json
from pathlib import Path

import pytest

from graphs import Bucket, BucketResult
from graphs.errors import JournalError
from graphs.warmup.journal import Journal

DONE = BucketResult(Bucket(n=4), "captured", seconds=2.5)


def journal(path, name="step", backend="eager", axes=("n",)):
    return Journal(path, name, backend, axes)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "warmup.jsonl"


def test_the_next_process_knows_what_was_captured_failed_or_cut_short(path):
    first = journal(path)
    first.start(DONE.bucket)
    first.done(DONE)
    first.done(BucketResult(Bucket(n=2), "failed", seconds=0.5, error="why"))
    first.start(Bucket(n=1))
    first.done(BucketResult(Bucket(n=9), "skipped"))
    for known in (first, journal(path), journal(path)):
        assert known.seconds == {Bucket(n=4): 2.5}
        assert known.previously_failed == [Bucket(n=2), Bucket(n=1)]


def test_a_bucket_that_succeeds_later_did_not_fail(path):
    journal(path).done(BucketResult(Bucket(n=4), "failed"))
    journal(path).done(DONE)
    assert journal(path).previously_failed == []


def test_a_journal_that_is_read_again_loses_no_result(path):
    journal(path).done(BucketResult(Bucket(n=4), "captured", 2.5, bytes=7, run_seconds=0.1))
    before = path.read_text()
    journal(path)
    assert path.read_text() == before


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_last_line_that_is_cut_off_is_ignored_and_written_over(path, cut):
    written = journal(path)
    written.done(DONE)
    written.done(BucketResult(Bucket(n=2), "captured", seconds=1.0))
    path.write_text(path.read_text()[:-cut])
    again = journal(path)
    assert again.seconds[Bucket(n=4)] == 2.5
    again.done(BucketResult(Bucket(n=1), "captured", seconds=0.5))
    assert journal(path).seconds[Bucket(n=1)] == 0.5
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize("text", ["my diary\n", "[1, 2]\n", '{"form": "other"}\n', "3\n"])
def test_another_file_is_refused_and_left_as_it_is(path, text):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(JournalError, match="is not a warmup journal"):
        journal(path)
    assert path.read_text() == text
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "swap"}, "has name 'step', expected 'swap'"),
        ({"backend": "inductor"}, "has backend 'eager', expected 'inductor'"),
        ({"axes": ("n", "m")}, "has axes"),
    ],
)
def test_the_journal_of_another_warmup_is_refused(path, change, text):
    journal(path).done(DONE)
    before = path.read_text()
    with pytest.raises(JournalError, match=text):
        journal(path, **change)
    assert path.read_text() == before


def test_a_newer_version_is_refused(path):
    journal(path)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(JournalError, match="has version 2, expected 1"):
        journal(path)


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(path):
    journal(path).done(DONE)
    path.write_text(path.read_text() + "oops\n" + path.read_text().splitlines()[1] + "\n")
    with pytest.raises(JournalError, match=r"warmup.jsonl:3 is not readable"):
        journal(path)


def test_a_full_disk_stops_no_warmup_and_is_logged_once(path, monkeypatch, caplog):
    known = journal(path)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    known.start(DONE.bucket)
    known.done(DONE)
    monkeypatch.undo()
    assert known.seconds == {DONE.bucket: 2.5}
    assert caplog.text.count("No space left on device") == 1
    assert journal(path).seconds == {}


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, '{"bucket": ' * 50_000, '{"bucket": {"n": 1}, "status": "", "seconds": 1%s}'],
)
def test_a_line_that_python_cannot_hold_is_an_error_with_its_number(path, line):
    journal(path).done(DONE)
    line = line % ("0" * 400) if "%s" in line else line
    path.write_text(path.read_text() + line + "\n" + json.dumps({}) + "\n")
    with pytest.raises(JournalError, match=r"warmup\.jsonl:3 is not readable"):
        journal(path)
