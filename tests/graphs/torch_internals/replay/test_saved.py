"""Recordings that were written and read again, against eager."""

from __future__ import annotations

import ctypes

import pytest
import torch

from graphs import capture
from graphs.torch_internals.replay.recorder import NotReplayable
from graphs.torch_internals.replay.replay import Replay, Replays
from graphs.torch_internals.replay.saved import read_recordings, write_recordings
from tests.graphs.torch_internals.replay.replayer_double import ReplayerDouble
from tests.graphs.torch_internals.replay.steps import Step, inputs_of

pytestmark = pytest.mark.usefixtures("no_grad")


class WithEntry(ReplayerDouble):
    """Its entry is a function, as that of a library is."""

    entry = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value


@pytest.fixture
def recorded(replayer):
    """Recordings of two sizes, with the inputs of each and what it returned."""
    module, replays, seen = Step(), Replays(WithEntry()), []
    for tokens in (5, 2):
        inputs = inputs_of(tokens)
        graph = capture(module, inputs, replays=replays)
        replays.on_run = lambda replay, args: seen.append((replay.recording(), [*args]))
        result = graph.run(*inputs)
        replays.on_run = None
        seen[-1] += (result,)
    return replays, seen


def test_what_is_read_computes_what_was_written(recorded, tmp_path):
    replays, seen = recorded
    libraries = write_recordings([each[0] for each in seen], replays.replayer.entry, tmp_path)
    assert not any(name in path.read_bytes() for path in tmp_path.iterdir() for name in [b"pickle"])
    read = read_recordings(tmp_path, libraries)
    assert len(read) == len(seen) == 2
    for recording, (_, args, expected) in zip(read, seen, strict=True):
        made = Replay(recording, replays).run(args, replays)
        assert [*map(torch.equal, made, expected)] == [True] * len(expected)


def test_files_that_do_not_fit_are_refused(recorded, tmp_path):
    replays, seen = recorded
    libraries = write_recordings([seen[0][0]], replays.replayer.entry, tmp_path)
    with pytest.raises(ValueError, match="has no function"):
        read_recordings(tmp_path, libraries[:1] * len(libraries))
    numbers = tmp_path / "graphs.bin"
    numbers.write_bytes(numbers.read_bytes()[:-8])
    with pytest.raises(ValueError, match="does not have the numbers"):
        read_recordings(tmp_path, libraries)


def test_a_function_of_no_library_is_refused(recorded, tmp_path):
    _, seen = recorded
    nowhere = ctypes.CFUNCTYPE(None)(lambda: None)
    recording = seen[0][0]._replace(
        words=[3, 0, ctypes.cast(nowhere, ctypes.c_void_p).value], at=[], base=[], offset=[]
    )
    with pytest.raises(NotReplayable, match="a function of no library"):
        write_recordings([recording], 0, tmp_path)
