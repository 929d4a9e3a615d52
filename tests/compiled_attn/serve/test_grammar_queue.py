"""Grammars that are compiled for clients that wait, and for none that has gone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from compiled_attn.engine import Grammar
from compiled_attn.errors import QueueFull
from compiled_attn.serve.grammar_queue import GrammarQueue


class Slow:
    """Compiles each grammar as soon as it is allowed to."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.allowed: dict[str, threading.Event] = {}

    def __call__(self, grammar: Grammar) -> str:
        self.begun.append(grammar.text)
        assert self.allowed.setdefault(grammar.text, threading.Event()).wait(60)
        return grammar.text.upper()

    def allow(self, name: str) -> None:
        self.allowed.setdefault(name, threading.Event()).set()


def queued(queue: GrammarQueue, name: str, client: str = "a") -> asyncio.Task[str]:
    return asyncio.ensure_future(queue.compiled(Grammar.regex(name), client))


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_client_that_goes_leaves_the_queue_and_the_next_begins():
    async def main():
        slow = Slow()
        queue = GrammarQueue(slow)
        tasks = [queued(queue, name) for name in "xyz"]
        await until(lambda: slow.begun == ["x"])
        tasks[1].cancel()  # it waits
        tasks[0].cancel()  # it runs, and cannot be interrupted
        await until(lambda: slow.begun == ["x", "z"])
        slow.allow("z")
        assert await tasks[2] == "Z"
        assert not queue.is_idle
        slow.allow("x")
        await until(lambda: queue.is_idle)
        assert slow.begun == ["x", "z"]

    asyncio.run(main())


def test_two_clients_of_one_grammar_share_its_compilation():
    async def main():
        slow = Slow()
        queue = GrammarQueue(slow)
        first, second = queued(queue, "x"), queued(queue, "x", "b")
        await until(lambda: slow.begun == ["x"])
        first.cancel()
        slow.allow("x")
        assert await second == "X"
        assert slow.begun == ["x"]

    asyncio.run(main())


def test_a_client_has_a_limit_that_others_do_not_feel():
    async def main():
        slow = Slow()
        queue = GrammarQueue(slow)
        tasks = [queued(queue, name) for name in "abcd"]
        await until(lambda: slow.begun == ["a"])
        with pytest.raises(QueueFull, match="at most 4 grammars of a client"):
            await queue.compiled(Grammar.regex("e"), "a")
        other = queued(queue, "e", "b")
        for name in "abcde":
            slow.allow(name)
        assert await asyncio.gather(*tasks, other) == [*"ABCDE"]

    asyncio.run(main())


def test_an_error_reaches_those_who_wait_and_the_next_goes_on():
    async def main():
        def refuse(grammar):
            if grammar.text == "x":
                raise ValueError("no")
            return 1

        queue = GrammarQueue(refuse)
        bad, good = queued(queue, "x"), queued(queue, "y")
        with pytest.raises(ValueError, match="no"):
            await bad
        assert await good == 1

    asyncio.run(main())
