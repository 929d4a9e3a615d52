import json

import pytest

from graphs import CompileEvent, LateFileError, no_compile
from graphs.watch.late_file import LateFile, LateWork, read_late

HEAD = {"form": "graphs late work", "version": 1}
BUILD = CompileEvent("build", "kernel.cu", "", 0, "", 1, "build it")
CALL = {"function": "m:f", "args": [{"value": 3}], "kwargs": {}, "grad": True}
CALL |= {"inference": False, "autocast": {}}
COMPILE = CompileEvent("compile", "f", "m.py", 3, "", 1, "call it", "", CALL)
RECOMPILE = CompileEvent("recompile", "f", "m.py", 3, "x is no longer 'secret' (guarded at m.py:4)",
                         2, "leave it", "", {**CALL, "args": [{"value": 4}]})  # fmt: skip
CAPTURE = CompileEvent("capture", "decode[tokens=7 shared=0]", "", 0, "", 1, "capture it")


def test_late_work_is_written_once_and_read_back(tmp_path):
    path = tmp_path / "late.jsonl"
    late = LateFile(path)
    assert not path.exists()
    for event in (BUILD, COMPILE, BUILD, RECOMPILE, CAPTURE, COMPILE):
        late.append(event)
    LateFile(path).append(BUILD)  # of a later run
    build, compiled, recompiled, capture = read_late(path)
    assert len(path.read_text().splitlines()) == 5
    assert (build.kind, build.function, build.remedy) == ("build", "kernel.cu", "build it")
    assert (compiled.call, compiled.line) == (CALL, 3)
    assert recompiled.reason == "x changed" and "secret" not in path.read_text()
    assert (capture.name, capture.need) == ("decode", {"tokens": 7, "shared": 0})


@pytest.mark.parametrize(
    ("reason", "written"),
    [
        ("tensor 'x' size mismatch at index 0. expected 4, actual 5", None),
        ("grad mode changed (no_grad, inference_mode)", None),
        ("for x: *fp32, n: i32", None),
        ("L['x'] == 'secret'", ""),
        ("whether 'secret' is in global NAMES has changed", ""),
        ("self.offset is no longer 1", "self.offset changed"),
    ],
)
def test_reasons_are_written_without_the_values_of_guards(reason, written):
    event = CompileEvent("recompile", "f", "m.py", 3, reason, 1)
    assert LateWork.of(event).reason == (reason if written is None else written)


def test_a_compile_and_a_recompile_of_the_same_call_are_one():
    again = CompileEvent("recompile", "f", "m.py", 3, "the thread count changed", 1, "", "", CALL)
    assert LateWork.of(COMPILE).key == LateWork.of(again).key
    assert LateWork.of(COMPILE).key != LateWork.of(RECOMPILE).key


def test_two_processes_may_append_and_a_line_without_an_end_is_ignored(tmp_path):
    path = tmp_path / "late.jsonl"
    one, two = LateFile(path), LateFile(path)
    one.append(BUILD)
    two.append(BUILD)
    two.append(CAPTURE)
    with path.open("a") as file:
        file.write(json.dumps(HEAD) + '\n{"kind": "bui')
    assert [work.function for work in read_late(path)] == ["kernel.cu", CAPTURE.function]


ENTRY = {"kind": "build", "function": "a.cu"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{}"], r":1: expected a file of late work"),
        (["rows: 3"], r":1: not valid JSON"),
        (["[]"], r":1: expected an object, got \[\]"),
        ([json.dumps(HEAD | {"version": 2})], r":1: version 2 is not known"),
        ([json.dumps(HEAD), json.dumps({"form": "other"})], r":2: expected a file of late work"),
        *(
            ([json.dumps(HEAD), json.dumps(ENTRY), json.dumps(ENTRY | change)], message)
            for change, message in (
                ({"kind": "guess"}, r":3: expected kind to be one of .*, got 'guess'"),
                ({"function": 3}, r":3: expected text as function, got 3"),
                ({"function": ""}, r":3: expected the name of a function"),
                ({"line": "3"}, r":3: expected a number as line"),
                ({"need": {"rows": -1}}, r":3: expected sizes by axis"),
                ({"call": {"function": 1}}, r":3: expected function to be a str"),
                ({"more": 1}, r":3: unknown key 'more'"),
            )
        ),
    ],
)
def test_a_malformed_file_is_one_line_with_its_place_and_is_not_changed(tmp_path, lines, message):
    path = tmp_path / "late.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    before = path.read_bytes()
    for open_it in (read_late, lambda path: no_compile(record=path)):
        with pytest.raises(LateFileError, match=message) as caught:
            open_it(path)
        assert "\n" not in str(caught.value) and str(caught.value).startswith(str(path))
    assert path.read_bytes() == before


def test_another_file_without_a_whole_line_is_refused(tmp_path):
    path = tmp_path / "late.jsonl"
    path.write_text("important")
    with pytest.raises(LateFileError, match=":1: expected a file of late work"):
        LateFile(path)
    with pytest.raises(FileNotFoundError, match="is no folder"):
        LateFile(tmp_path / "none" / "late.jsonl")
    path.write_text("")
    LateFile(path).append(BUILD)
    assert len(read_late(path)) == 1


def test_a_full_disk_is_logged_once_and_stops_nothing(tmp_path, caplog):
    late = LateFile(tmp_path / "late.jsonl")
    tmp_path.rmdir()
    with caplog.at_level("WARNING", "graphs"):
        late.append(BUILD)
        late.append(CAPTURE)
    assert len(caplog.messages) == 1 and "not recorded any more" in caplog.text
