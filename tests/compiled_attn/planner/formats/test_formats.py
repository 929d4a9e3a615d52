"""Plans for other engines: their ladders, their picks, and their files read back."""

from __future__ import annotations

import ast
import itertools
import json
import math
import os
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
import yaml

from compiled_attn.planner import Demand, judge
from compiled_attn.planner.formats import (
    FORMATS,
    ascend,
    continuous,
    gaudi,
    needs_of,
    sizes,
    thinned,
    tpu,
)
from compiled_attn.planner.simulator import SimulatedEngine
from compiled_attn.planner.simulator.kinds import within
from compiled_attn.workloads import Arrival, fit, synthetic

ENGINE, CONTEXT = SimulatedEngine(1024, 16, 128, 512), 4096
VLLM = os.environ.get("VLLM_PYTHON", "")
GAUDI = os.environ.get("VLLM_GAUDI_SOURCES", "")


@pytest.fixture(scope="module", params=[*FORMATS])
def planned(request):
    """A format's plans and its text."""
    known = FORMATS[request.param]
    parts = known.parts(ENGINE, CONTEXT)
    needs = needs_of(parts, synthetic("chat", 60), ENGINE, speed=2.0)
    plans = known.plans(parts, needs, 16, 3.0)
    reports = {name: each.whole() for name, each in plans.items()}
    return request.param, plans, reports, known.write(reports, ENGINE)


def test_a_plan_of_each_format_is_within_its_graphs_and_misses_nothing(planned):
    format, plans, reports, _ = planned
    counts = [len(reports[name].space) for name in plans]
    if format == "transformers":  # its sizes of decodes are fixed
        counts = counts[:1]
    assert (math.prod(counts) if FORMATS[format].is_grid else sum(counts)) <= 16
    for name, each in plans.items():
        space, axes = reports[name].space, each.kind.axes
        assert each.early.judge(within(each.second, axes)[0]).missed == 0
        assert len(each.ladder) > len(space) or each.ours.waste <= each.theirs.waste + 1e-9
        assert {axis.name: axis.high for axis in axes} == dict(space.largest)


def test_the_text_holds_exactly_the_planned_buckets(planned):
    name, _, reports, text = planned
    if name in ("vllm", "vllm-ascend"):
        config = json.loads(text)
        sizes = config["cudagraph_capture_sizes"]
        assert sizes == sorted(bucket["tokens"] for bucket in reports["steps"].space)
        assert set(config.get("compile_sizes", [])) <= set(sizes)
    elif name == "sglang":
        assert re.fullmatch(r"--cuda-graph-bs( \d+)+", text)
        assert len(text.split()) == 1 + len(reports["decode"].space)
    elif name == "tensorrt-llm":
        config = yaml.safe_load(text)["cuda_graph_config"]
        sizes = sorted(bucket["sequences"] for bucket in reports["decode"].space)
        assert config == {"enable_padding": True, "max_batch_size": 16, "batch_sizes": sizes}
    elif name == "tpu-inference":
        shell = "set -a\n" + text + '\nenv -0; printf "%s" "$ADDITIONAL_CONFIG"'
        out = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout
        values = dict(line.split("=", 1) for line in out.split("\0") if "=" in line)
        tokens = json.loads(values["ADDITIONAL_CONFIG"])["compilation_sizes"]
        least = int(values["MIN_TOKEN_BUCKET"])
        assert least & (least - 1) == 0 and least >= ENGINE.max_tokens
        assert [*tokens, least] == sorted(bucket["tokens"] for bucket in reports["tokens"].space)
        requests = [int(size) for size in values["ATTN_CUSTOM_NUM_REQS_BUCKETS"].split(",")]
        assert requests == sorted(bucket["requests"] for bucket in reports["requests"].space)
        assert values["ATTN_BUCKETIZED_NUM_REQS"] == "1"
    elif name == "vllm-gaudi":
        rows = [ast.literal_eval(line) for line in text.splitlines() if not line.startswith("#")]
        prompts = [row for row in rows if row[1] != 1]
        assert all(batch == 1 and query % 128 == 0 for batch, query, _ in prompts)
        assert len(prompts) == len(reports["prompt"].space)
        assert len(rows) - len(prompts) == len(reports["decode"].space)
    else:
        assert name == "transformers"  # read back below


def test_transformers_takes_its_configuration_and_pads_to_the_planned_sizes(planned):
    name, plans, reports, text = planned
    if name != "transformers":
        pytest.skip("of another engine")
    from transformers import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.utils import pad_to_interval, pad_to_pow2

    config = ContinuousBatchingConfig(**json.loads(text))
    assert config.cuda_graph_booleans == (True, True)
    most_cached = config.page_size * config.num_blocks
    space = reports["prompt"].space
    for need in plans["prompt"].fitting.points[:200]:
        tokens, cached = need.tolist()
        padded = (
            pad_to_interval(tokens, config.q_padding_interval_size, config.max_batch_tokens),
            pad_to_interval(cached, config.kv_padding_interval_size, most_cached),
        )
        assert space.pick(tokens=tokens, cached=cached).sizes == padded
    for requests in range(1, config.max_requests_per_batch + 1):
        padded = pad_to_pow2(requests, config.max_requests_per_batch)
        assert reports["decode"].space.pick(sequences=requests)["sequences"] == padded


def test_intervals_of_transformers_are_the_best_of_those_within_the_graphs():
    engine = SimulatedEngine(96, 8, 16, 10)
    part = continuous.parts(engine, 160)[0]
    needs = Demand(("tokens", "cached"), [(30, 0), (33, 50), (64, 159), (90, 100)] * 2)

    def paid(tokens, cached):
        """By the definition of `pad_to_interval`, need by need."""
        total = 0.0
        for q, kv in needs.points.tolist():
            own_q = min(-(-q // tokens) * tokens, 96)
            own_kv = min(max(1, -(-kv // cached)) * cached, 160)
            total += part.kind.cost({"tokens": own_q, "cached": own_kv})
        return total

    def graphs(tokens, cached):
        return -(-96 // tokens) * -(-160 // cached)

    for most in (1, 4, 6, 12):
        space = part.plan(needs, most, None).whole().space
        assert len(space) <= most
        tokens, cached = (min(bucket[axis] for bucket in space) for axis in ("tokens", "cached"))
        steps = itertools.product(range(8, 97, 8), range(8, 161, 8))
        best = min(paid(*each) for each in steps if graphs(*each) <= most)
        assert paid(tokens, cached) == pytest.approx(best)


def test_tokens_and_requests_on_tpus_are_padded_axis_by_axis():
    engine = SimulatedEngine(1000, 24, 16, 512)
    assert tpu.token_ladder(engine) == [16, 32, 64, 128, 256, 512, 1024]
    tokens, requests = tpu.parts(engine, 4096)
    assert [bucket["requests"] for bucket in requests.default] == [24]
    few = tpu.parts(SimulatedEngine(64, 3, 16, 512), 128)[1]
    assert [bucket["requests"] for bucket in few.default] == [8]
    for need in (1, 16, 17, 500, 1000):
        padded = next(size for size in tpu.token_ladder(engine) if size >= need)
        assert tokens.default.pick(tokens=need)["tokens"] == padded


def test_captures_on_ascend_are_as_many_as_the_streams_allow():
    # floor((1920 - 1 * 40) / (48 + 1) / (1 + 1 * 2)) = 12 is the example in the plugin's source;
    # with the whole graphs of decodes, floor((1920 - 40) / (49 * 3 + 1)) is 12, too.
    assert ascend.ascend_captures(48, 1, 1920) == 12
    for layers, groups, streams in itertools.product((1, 28, 61, 94), (0, 1, 2), (1800, 1920)):
        found = ascend.ascend_captures(layers, groups, streams)

        def taken(count, layers=layers, groups=groups):
            piecewise = sum((1 + 2 * groups) * (layers + 1) for _ in range(count))
            return piecewise + count + 40 * groups

        assert taken(found) <= streams < taken(found + 1)
    with pytest.raises(ValueError, match="expected streams for a capture of 900 layers"):
        ascend.ascend_captures(900, 1, 1800)


def test_a_ladder_for_ascend_is_thinned_out_as_the_plugin_did():
    part = FORMATS["vllm-ascend"].parts(SimulatedEngine(8192, 256, 128, 512), 4096)[0]
    sizes = [bucket["tokens"] for bucket in part.default]
    assert sizes == [1, 2, 4, *range(8, 257, 8)]
    step = (len(sizes) - 1) / 11
    upstream = [sizes[index] for index in [0, *(round(i * step) for i in range(1, 11)), -1]]
    assert [bucket["tokens"] for bucket in thinned(part, 12).default] == upstream
    assert [bucket["tokens"] for bucket in thinned(part, 1).default] == [256]
    assert thinned(part, 40) is part


def test_the_ladder_of_tensorrt_is_the_one_its_source_says():
    engine = partial(SimulatedEngine, 8192)
    first = [1, 2, 4, *(8 * i for i in range(1, 17))]
    assert sizes.tensorrt_sizes(engine(128)) == first
    assert sizes.tensorrt_sizes(engine(300)) == [*first, 192, 256, 300]
    assert sizes.tensorrt_sizes(engine(256)) == [*first, 192, 256]
    assert sizes.tensorrt_sizes(engine(20)) == [1, 2, 4, 8, 16, 20]
    assert sizes.tensorrt_sizes(engine(3)) == [1, 2, 3]


def test_a_trace_without_steps_of_a_kind_is_refused_with_the_kind():
    parts = gaudi.parts(ENGINE, CONTEXT)
    with pytest.raises(ValueError, match="expected steps of the kind decode, got none"):
        needs_of(parts, [Arrival(0.0, 100, 1)], ENGINE)


# From upstream's own code for these limits.
GAUDI_COUNTS = {
    (8192, 128, 128, 4096, 16384): (96, 72),
    (8192, 128, 128, 4096, 131072): (144, 110),
    (2048, 64, 128, 1000, 4096): (63, 43),
    (4096, 256, 128, 3000, 2048): (48, 34),
    (512, 7, 16, 100, 1000): (72, 45),
}


@pytest.mark.parametrize("limits", [*GAUDI_COUNTS])
def test_the_ladder_for_gaudi_has_as_many_buckets_as_upstreams(limits):
    each = SimulatedEngine(*limits[:-1]), limits[-1]
    counts = len(gaudi.prompt_ladder(*each)), len(gaudi.decode_ladder(*each))
    assert counts == GAUDI_COUNTS[limits]


def test_contexts_of_the_ladder_for_gaudi_are_exponential_also_where_they_are_long():
    contexts = sorted(
        {c for _, c in gaudi.prompt_ladder(SimulatedEngine(8192, 128, 128, 4096), 131072)}
    )
    within = [c for c in contexts if 4 <= c < 960]
    ratios = [b / a for a, b in itertools.pairwise(within)]
    assert max(ratios) < 2.1 and min(ratios) > 1.5


def test_the_ladders_of_vllm_and_sglang_are_those_that_their_sources_say():
    engine = partial(SimulatedEngine, 8192)
    assert sizes.vllm_sizes(engine(16)) == [1, 2, 4, 8, 16, 24, 32]
    assert sizes.vllm_sizes(engine(256))[-3:] == [480, 496, 512]
    assert sizes.vllm_sizes(engine(3)) == [1, 2, 3, 4]
    few = sizes.vllm_sizes(SimulatedEngine(100, 100))
    assert len(few) == 16 and few[-1] == 100
    assert sizes.sglang_sizes(engine(30)) == [1, 2, 4, 8, 12, 16, 24, 30]
    assert sizes.sglang_sizes(engine(500))[-2:] == [248, 256]


def test_gaudi_takes_the_first_bucket_in_order_not_the_cheapest():
    part = gaudi.parts(ENGINE, CONTEXT)[1]
    space = type(part.default)(part.kind.names, [(4, 512), (5, 8)])
    judged = judge(space, Demand(part.kind.names, [(3, 6)]), part.kind.cost, part.order)
    assert [use.share for use in judged.uses] == [1.0, 0.0]


@pytest.mark.parametrize("kind", ["chat", "code"])
@pytest.mark.parametrize("requests", [3, 60])
def test_no_plan_pads_more_than_the_engines_ladder_of_as_many_graphs(kind, requests):
    for known in FORMATS.values():
        parts = known.parts(ENGINE, CONTEXT)
        needs = needs_of(parts, fit(synthetic(kind, requests), CONTEXT), ENGINE, speed=2.0)
        for part in parts:
            found = part.plan(needs[part.name], len(part.default) + 1, None)
            assert found.ours.waste <= found.theirs.waste + 1e-9, part.name


def test_a_decode_on_gaudi_counts_a_shared_block_once_for_each_that_reads_it():
    engine = SimulatedEngine(1024, 8, 128, 512)
    arrivals = [a for a in synthetic("rag", 200) if a.prompt_tokens < 1500][:20]
    needs = needs_of(gaudi.parts(engine, 2048), arrivals, engine)["decode"]
    assert (needs.points[:, 1] >= needs.points[:, 0]).all()


_READ_BACK = """
import json, sys
from vllm.config import CompilationConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
args = parser.parse_args(["--model", "x", "--compilation-config", sys.argv[1]])
config = args.compilation_config
config.max_cudagraph_capture_size = max(config.cudagraph_capture_sizes)
config.post_init_cudagraph_sizes()
assert isinstance(config, CompilationConfig)
print(json.dumps([config.cudagraph_capture_sizes, config.compile_sizes]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="VLLM_PYTHON names no Python that has vLLM")
def test_vllms_own_parser_reads_its_plan_back(planned, tmp_path):
    name, _, reports, text = planned
    if name != "vllm":
        pytest.skip("of another engine")
    run = [VLLM, "-c", _READ_BACK, text]
    out = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    sizes, alone = json.loads(out.splitlines()[-1])
    assert sizes == sorted(bucket["tokens"] for bucket in reports["steps"].space)
    assert sorted(alone) == json.loads(text)["compile_sizes"]


_GAUDI_READS = """
import importlib.util, json, sys, types
for name, values in {
    "vllm_gaudi": {}, "vllm_gaudi.extension": {},
    "vllm_gaudi.extension.logger": {"logger": lambda *a: None},
    "vllm_gaudi.extension.runtime": {"get_config": lambda: None},
}.items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(values)
spec = importlib.util.spec_from_file_location("read", sys.argv[1])
read = importlib.util.module_from_spec(spec)
spec.loader.exec_module(read)
strategy = read.FileBucketingStrategy()
print(json.dumps([strategy.get_buckets(sys.argv[2], is_prompt) for is_prompt in (True, False)]))
"""


@pytest.mark.skipif(not GAUDI, reason="VLLM_GAUDI_SOURCES names no checkout of vllm-gaudi")
def test_the_gaudi_plugins_own_parser_reads_its_plan_back(planned, tmp_path):
    import sys

    name, _, reports, text = planned
    if name != "vllm-gaudi":
        pytest.skip("of another engine")
    (tmp_path / "buckets.txt").write_text(text)
    source = Path(GAUDI) / "vllm_gaudi" / "extension" / "bucketing" / "file_strategy.py"
    run = [sys.executable, "-c", _GAUDI_READS, str(source), str(tmp_path / "buckets.txt")]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    prompts, decodes = json.loads(out)
    assert prompts == sorted([1, b["chunk"] * 128, b["context"]] for b in reports["prompt"].space)
    assert decodes == sorted([b["sequences"], 1, b["blocks"]] for b in reports["decode"].space)
