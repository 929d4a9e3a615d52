"""One rank of a test, started by torchrun: ``worker.py CASE ARGUMENTS``; rank 0 prints JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from compiled_attn.cli.store import stored_backend
from compiled_attn.contrib.context_parallel import ContextExecutor
from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.errors import ConfigError, ModelRefused, RankLost, RanksDisagree
from compiled_attn.ranks import RankEngine, RankExecutor, Ranks, engine_on, join_ranks, shard
from compiled_attn.testing.fuzz.drafts import FreeRows
from tests.compiled_attn.engine.drafting import Known
from tests.compiled_attn.engine.words import Words, grammar_of
from tests.compiled_attn.models.hf.families import small_model
from tests.compiled_attn.ranks.layers import farthest
from tests.compiled_attn.tiny import FAMILIES, plain_generate, tiny_model

CONFIG = EngineConfig(
    16, 4, block_size=4, num_blocks=20, context=64, backend="eager", max_graphs=4, defrag_waste=0.0
)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 4], [9, 8, 7] * 5, [5] * 9, [1, 2, 3, 4, 5, 6, 9, 9]]
EXECUTORS = {"weights": RankExecutor, "context": ContextExecutor}
GREEDY = SamplingParams(max_new_tokens=8)


def tokens_of(engine: Engine) -> list[list[int]]:
    return [each.tokens for each in engine.generate(PROMPTS, GREEDY, in_order=True)]


def families(ranks: Ranks, backend: str, *names: str) -> None:
    _served(ranks, replace(CONFIG, backend=backend), RankExecutor, names)


def contexts(ranks: Ranks, backend: str, *names: str) -> None:
    """As `families`, but each rank has all weights and some blocks of each request."""
    _served(ranks, replace(CONFIG, backend=backend, num_blocks=12), ContextExecutor, names)


def _served(
    ranks: Ranks, config: EngineConfig, executor: type[RankExecutor], names: tuple[str, ...]
) -> None:
    for name in names:
        model_of = tiny_model if name in FAMILIES else small_model
        engine = engine_on(ranks, model_of(name), config, executor=executor)
        engine.warmup()
        if ranks.leads:
            tokens = tokens_of(engine)
            engine.dismiss()
        else:
            engine.follow()
        check_armed(engine)
        if ranks.leads:
            expected = [plain_generate(model_of(name), prompt, 8) for prompt in PROMPTS]
            report, heads = engine.report(), engine.executor.cache.shapes[0].num_kv_heads
            figures = heads, report.kernel, report.ranks, report.compiled_graphs
            emit(name, tokens == expected, *figures)


def long(ranks: Ranks) -> None:
    """A prompt for which the cache of one rank is too small, with log-probabilities."""
    config = replace(CONFIG, num_blocks=2 + 12 // ranks.count)  # 28 or 16 tokens, of 41
    sampling = SamplingParams(8, logprobs=3)
    prompt = [(7 * at) % 101 for at in range(33)]
    engine = engine_on(ranks, tiny_model(), config, executor=ContextExecutor)
    engine.warmup()
    if not ranks.leads:
        engine.follow()
        return
    (ours,) = engine.generate([prompt], sampling)
    engine.dismiss()
    alone = Engine(tiny_model(), replace(CONFIG, num_blocks=20))
    alone.warmup()
    (one,) = alone.generate([prompt], sampling)
    pairs = zip(ours.logprobs, one.logprobs, strict=True)
    apart = max(abs(a.logprob - b.logprob) for a, b in pairs)
    try:
        Engine(tiny_model(), config).submit(prompt, sampling)
    except ConfigError as error:
        emit(ours.tokens == one.tokens, apart, str(error))


def layers(ranks: Ranks) -> None:
    """How far a layer over keys of all ranks is from dense attention in float64."""
    emit(*(farthest(ranks, seed) for seed in range(12)))


def stored(ranks: Ranks, folder: str, divides: str) -> None:
    """Counts of graphs compiled, loaded from inductor's cache and from the store, per rank."""
    with stored_backend("inductor", Path(folder)) as backend:
        config = replace(CONFIG, backend=backend)
        engine = engine_on(ranks, tiny_model(), config, executor=EXECUTORS[divides])
        report = engine.warmup()
        hits = counters["aot_autograd"]["autograd_cache_hit"]
        facts: list = [None] * ranks.count
        own = [report.compiles, hits, len(report.loaded), len(report.results)]
        dist.all_gather_object(facts, own)
        emit(facts, len(backend.store.entries()))


def drafts(ranks: Ranks, divides: str, speculate: str, backend: str = "eager") -> None:
    """Random, greedy and constrained requests; steps and drafts take no time on rank 0 alone."""
    blocks = 16 if divides == "weights" else 8  # too few for all requests
    config = replace(
        CONFIG, num_blocks=blocks, context=48, max_graphs=12, speculate=speculate, backend=backend
    )
    texts = {"grammars": Words()}
    alone = Engine(tiny_model(), replace(CONFIG, num_blocks=40), **texts)
    alone.warmup()
    prompts = [*PROMPTS, [4, 5, 6] * 5]
    params = [SamplingParams(20, temperature=1.0, seed=1), SamplingParams(20, logprobs=1)]
    words = (tuple(range(40, 53)), (7, 8, 9, 7, 8, 9, 7, 8), (7, 8, 3))
    params += [SamplingParams(18), SamplingParams(20, repetition_penalty=1.3)]
    params += [SamplingParams(20, grammar=grammar_of(*words)), SamplingParams(20)]
    expected = [*alone.generate(prompts, params, in_order=True)]
    engine = engine_on(ranks, tiny_model(), config, executor=EXECUTORS[divides], **texts)
    engine.warmup()
    if ranks.leads:
        engine._drafter._costs = FreeRows(engine.sizing.buckets, {})
        engine._drafter._source.seconds_per_token = 0.0
        if speculate.startswith("ngram"):
            known = {each.index: [*each.prompt, *each.tokens] for each in expected}
            engine._drafter._source = Known(known, 0.3)
        given = [*engine.generate(prompts, params, in_order=True)]
        engine.dismiss()
    else:
        engine.follow()
    check_armed(engine)
    counts: list = [None] * ranks.count
    dist.all_gather_object(counts, engine.report().drafts)
    if ranks.leads:
        same = [each.tokens for each in given] == [each.tokens for each in expected]
        emit(same, counts, engine.pool.stats().used, engine.report().preemptions)


def windows(ranks: Ranks) -> None:
    try:
        engine_on(ranks, tiny_model("gemma2"), CONFIG, executor=ContextExecutor)
    except ModelRefused as error:
        emit(str(error))


def check_armed(engine: RankEngine) -> None:
    report = engine.report()
    assert report.steps and not (report.graph_breaks or report.compiles_after_warmup)


def chance(ranks: Ranks, seed: str, divides: str = "weights") -> None:
    """Random requests, seeds and aborts, in a pool with preemptions."""
    rng = random.Random(int(seed))
    is_context = divides == "context"
    config = replace(CONFIG, num_blocks=5 if is_context else 9, context=32)  # 8 in use
    engine = engine_on(ranks, tiny_model(), config, executor=EXECUTORS[divides])
    engine.warmup()
    if not ranks.leads:
        engine.follow()
        return
    alone = Engine(tiny_model(), replace(CONFIG, num_blocks=40))
    alone.warmup()
    given, dropped = {}, set()
    for step in range(60):
        if step < 40 and rng.random() < 0.5:
            prompt = PROMPTS[rng.randrange(len(PROMPTS))][: rng.randrange(1, 12)]
            sampling = SamplingParams(rng.randrange(4, 16), temperature=rng.choice([0.0, 0.9]))
            given[engine.submit(prompt, sampling)] = prompt
        if engine.open_requests and rng.random() < 0.1:
            dropped.add(victim := rng.choice(sorted(engine.open_requests)))
            engine.abort(victim)
        collect(engine)
    while engine.has_work:
        collect(engine)
    engine.dismiss()
    report = engine.report()
    same = all(
        result.tokens == next(alone.generate([given[name]], result.sampling)).tokens
        for name, result in RESULTS.items()
    )
    whole = engine.pool.stats().used == 0 and {*RESULTS} == {*given} - dropped
    defragmenter = engine.memory.defragmenter
    moved = defragmenter.totals.moves if defragmenter else 0
    emit(same, whole, report.preemptions, report.prefix_hit_ratio, len(RESULTS), moved)


RESULTS: dict = {}


def collect(engine: Engine) -> None:
    for event in engine.step():
        if event.result is not None:
            RESULTS[event.request_id] = event.result


def dies(ranks: Ranks, when: str) -> None:
    """Rank 1 is killed: before its warmup, in its third step, or while rank 0 is idle."""
    engine = engine_on(ranks, tiny_model(), CONFIG)
    compute, steps = engine._run_step, iter(range(99))

    def last() -> None:
        if next(steps) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        compute()

    if not ranks.leads:
        engine._run_step = last if when == "step" else compute
    if not ranks.leads and when == "warmup":
        os.kill(os.getpid(), signal.SIGKILL)
    engine.warmup()
    if ranks.leads and when != "idle":
        tokens_of(engine)
    elif ranks.leads:
        time.sleep(60)
    elif when == "idle":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        engine.follow()


def differs(ranks: Ranks, what: str) -> None:
    """Rank 1 has another model, other settings or versions; or a sharded model divides contexts."""
    seed, config, executor = 0, CONFIG, RankExecutor
    if not ranks.leads and what == "weights":
        seed = 1
    elif not ranks.leads and what == "setting":
        config = replace(CONFIG, block_size=8)
    elif not ranks.leads and what == "version":
        version = importlib.metadata.version
        importlib.metadata.version = lambda name: version(name) + "x" * (name == "torch")
    elif not ranks.leads and what == "buckets":
        config = replace(CONFIG, buckets=Engine(tiny_model(), CONFIG).sizing.buckets)
    elif not ranks.leads and what == "executor":
        executor = ContextExecutor
    model = tiny_model(seed=seed)
    if what == "cut":
        shard(model, ranks)
        executor = ContextExecutor
    try:
        engine_on(ranks, model, config, executor=executor)
    except ConfigError as error:
        emit(str(error))


def disagrees(ranks: Ranks) -> None:
    """Rank 1 is about to compute another token."""
    engine = engine_on(ranks, tiny_model(), CONFIG)
    engine.warmup()
    try:
        if ranks.leads:
            tokens_of(engine)
        else:
            compute = engine._run_step

            def wrong() -> None:
                for sequence in engine._requests.values():
                    sequence.tokens[0] = 5
                compute()

            engine._run_step = wrong
            engine.follow()
    except RanksDisagree as error:
        emit(str(error))


def emit(*values: object) -> None:
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(values), flush=True)


CASES: dict[str, Callable[..., None]] = {
    case.__name__: case
    for case in (
        *(families, contexts, layers, long, stored, windows, drafts),
        *(chance, dies, differs, disagrees),
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    FAMILIES["mixtral"] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    try:
        with join_ranks(100) as ranks:
            assert ranks is not None
            for case in " ".join(sys.argv[1:]).split(" + "):
                name, *arguments = case.split()
                CASES[name](ranks, *arguments)
    except RankLost as error:
        emit(str(error))
        os._exit(0)  # before torchrun kills it, so that its output is read
