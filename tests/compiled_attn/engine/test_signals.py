"""Real signals at any moment of a step, as Ctrl-C sends them."""

from __future__ import annotations

import multiprocessing
import signal

import numpy as np

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from tests.compiled_attn.tiny import plain_generate, tiny_model

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
PARAMS = SamplingParams(max_new_tokens=5)


class Alarm(BaseException):
    """No `except Exception` catches it, like KeyboardInterrupt."""


def _ring(*_: object) -> None:
    raise Alarm


def _serve_while_it_rings() -> None:
    sizes = {"max_tokens_per_step": 24, "max_seqs": 4, "block_size": 4, "num_blocks": 20}
    engine = Engine(tiny_model(), EngineConfig(**sizes, backend="eager"))
    engine.warmup()
    signal.signal(signal.SIGALRM, _ring)
    rng, told, of, rang = np.random.default_rng(2), {}, {}, 0
    for _ in range(150):
        while len(engine.open_requests) < 4:
            which = len(of) % 3
            of[engine.submit(PROMPTS[which], PARAMS)] = which
        events = []
        try:
            signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-4, 8e-3)))
            events = engine.step()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Alarm:
            rang += 1
        for event in events:
            told.setdefault(event.request_id, []).append(event.token)
    while engine.has_work:
        for event in engine.step():
            told.setdefault(event.request_id, []).append(event.token)
    wanted = [plain_generate(engine.executor.module.model, prompt, 5) for prompt in PROMPTS]
    assert rang > 5 and set(told) == set(of)
    # A signal after the last line of step() may take its events from the caller, never others.
    assert sum(told[request] != wanted[which] for request, which in of.items()) <= rang // 10
    assert engine.pool.stats().used == 0


def test_real_signals_at_any_moment_lose_no_token():
    # A process of its own: a signal inside of `logging` or `torch.no_grad` leaves their lock held
    # or gradients off, which no code of ours can undo, for all tests after this one.
    child = multiprocessing.get_context("spawn").Process(target=_serve_while_it_rings)
    child.start()
    child.join(240)
    exitcode = child.exitcode
    child.kill()
    assert exitcode == 0, "the traceback is on stderr; None: it hangs"
