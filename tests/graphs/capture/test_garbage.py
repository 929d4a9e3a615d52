import gc
import os
import threading
from contextlib import contextmanager

import pytest
import torch

from graphs import capture
from graphs.backends.eager import EagerBackend
from graphs.capture.garbage import collected_later


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
        with collected_later, collected_later:
            assert not gc.isenabled()
        assert gc.isenabled() == on
        with pytest.raises(KeyError), collected_later:
            raise KeyError
        assert gc.isenabled() == on


def test_the_last_thread_that_leaves_switches_it_on():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with collected_later:
            entered.set()
            leave.wait()

    with collections(True):
        thread = threading.Thread(target=other)
        with collected_later:
            thread.start()
            entered.wait()
        assert not gc.isenabled()
        leave.set()
        thread.join()
        assert gc.isenabled()


def test_nothing_is_collected_in_a_capture_and_what_fails_leaves_it_on():
    seen = []

    class Looking(EagerBackend):
        def capture(self, *args, **settings):
            seen.append(gc.isenabled())
            return super().capture(*args, **settings)

    def fail(x):
        raise RuntimeError("no")

    with collections(True), torch.no_grad():
        graph = capture(torch.neg, [torch.ones(2)], backend=Looking())
        assert gc.isenabled()
        graph.run(torch.ones(2))
        with pytest.raises(Exception, match="no"):
            capture(fail, [torch.ones(2)], backend=Looking())
        assert gc.isenabled()
    assert seen == [False, False]


def test_an_interrupt_on_the_way_in_leaves_it_as_it_was(monkeypatch):
    def interrupted():
        real()
        raise KeyboardInterrupt

    real = gc.disable
    with collections(True):
        monkeypatch.setattr(gc, "disable", interrupted)
        with pytest.raises(KeyboardInterrupt), collected_later:
            pass
        monkeypatch.undo()
        assert gc.isenabled()
        with collected_later:
            assert not gc.isenabled()
        assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_process_that_is_forked_meanwhile_collects():
    with collections(True), collected_later:
        if not (pid := os.fork()):
            with collected_later:
                is_off = not gc.isenabled()
            os._exit(0 if gc.isenabled() and is_off else 1)
        assert os.waitpid(pid, 0)[1] == 0
