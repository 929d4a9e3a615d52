"""The helper that interrupts the library at a chosen line interrupts there, and nowhere else."""

from __future__ import annotations

import sys
import threading

import pytest

from compiled_attn.cache.blocks import BlockPool
from graphs import no_compile
from tests.interrupts import count_lines, interrupted_at


def _work() -> BlockPool:
    pool = BlockPool(8, 4)
    pool.add("a")
    pool.reserve("a", 9)
    return pool


def test_every_place_is_reached_once_and_none_after_the_last() -> None:
    places = []
    for n in range(count_lines(_work)):
        expected = pytest.raises(KeyboardInterrupt, match="injected at compiled_attn/")
        with expected, interrupted_at(n) as cut:
            _work()
        assert cut.was_raised and cut.lines == n
        places.append(cut.where)
    assert len(places) > 100
    assert places[0].startswith("compiled_attn/cache/blocks/pool.py:")
    assert any(place.startswith("compiled_attn/cache/blocks/states.py:") for place in places)
    with interrupted_at(len(places)) as cut:
        _work()
    assert not cut.was_raised and cut.where == "" and cut.lines == len(places)


def test_any_exception_can_be_raised() -> None:
    given = OSError("no space")
    with pytest.raises(OSError) as raised, interrupted_at(3, given):
        _work()
    assert raised.value is given
    with pytest.raises(MemoryError, match="injected"), interrupted_at(3, MemoryError):
        _work()


def test_what_traced_before_traces_again() -> None:
    def tracer(*_: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with pytest.raises(KeyboardInterrupt), interrupted_at(0):
            _work()
        assert sys.gettrace() is tracer
        count_lines(_work)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)


def test_a_sentinel_interrupted_at_any_line_keeps_no_lock_that_another_thread_needs():
    place, was_raised = 0, True
    while was_raised:
        sentinel = no_compile()
        try:
            with interrupted_at(place) as cut, sentinel:
                pass
        except KeyboardInterrupt:
            sentinel.disarm()
        other = threading.Thread(target=lambda: no_compile().__enter__().disarm(), daemon=True)
        other.start()
        other.join(60)
        assert not other.is_alive(), cut.where
        place, was_raised = place + 1, cut.was_raised
    assert place > 50
