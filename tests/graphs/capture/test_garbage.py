import gc
import threading
from contextlib import contextmanager

import pytest
import torch

from graphs import CaptureError, capture
from graphs.capture.capture import collection_paused


@contextmanager
def collections(on):
    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("on", [True, False])
def test_it_is_as_before_afterwards(on):
    with collections(on):
        with collection_paused, collection_paused:
            assert not gc.isenabled()
        assert gc.isenabled() == on
        with pytest.raises(KeyError), collection_paused:
            raise KeyError
        assert gc.isenabled() == on


def test_the_last_thread_that_leaves_switches_it_on():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with collection_paused:
            entered.set()
            leave.wait()

    with collections(True):
        thread = threading.Thread(target=other)
        with collection_paused:
            thread.start()
            entered.wait()
        assert not gc.isenabled()
        leave.set()
        thread.join()
        assert gc.isenabled()


def test_nothing_is_collected_in_a_capture_and_a_failure_switches_it_on_again():
    enabled = []

    def fail(x):
        enabled.append(gc.isenabled())
        raise RuntimeError("no")

    with collections(True), torch.no_grad():
        with pytest.raises(CaptureError, match="no"):
            capture(fail, [torch.ones(2)], backend="eager")
        assert gc.isenabled() and enabled == [False]
