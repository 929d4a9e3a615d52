"""Plans for other engines: their ladders, their picks, and their files read back."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest

from compiled_attn.planner import Demand, judge
from compiled_attn.planner.formats import FORMATS, gaudi, needs_of, sizes
from compiled_attn.planner.simulator import SimulatedEngine
from compiled_attn.planner.simulator.kinds import within
from compiled_attn.workloads import fit, synthetic

ENGINE, CONTEXT = SimulatedEngine(1024, 16, 128, 512), 4096
VLLM = os.environ.get("VLLM_PYTHON", "")
GAUDI = os.environ.get("VLLM_GAUDI_SOURCES", "")


@pytest.fixture(scope="module", params=[*FORMATS])
def planned(request):
    """A format's plans and its text."""
    known = FORMATS[request.param]
    parts = known.parts(ENGINE, CONTEXT)
    needs = needs_of(parts, synthetic("chat", 60), ENGINE, speed=2.0)
    plans = {part.name: part.plan(needs[part.name], 8, 3.0) for part in parts}
    reports = {name: each.whole() for name, each in plans.items()}
    return request.param, plans, reports, known.write(reports, ENGINE)


def test_a_plan_of_each_format_is_within_its_graphs_and_misses_nothing(planned):
    _, plans, reports, _ = planned
    for name, each in plans.items():
        space, axes = reports[name].space, each.kind.axes
        assert len(space) <= 8
        assert each.early.judge(within(each.second, axes)[0]).missed == 0
        assert len(each.ladder) > 8 or each.ours.waste <= each.theirs.waste + 1e-9
        assert {axis.name: axis.high for axis in axes} == dict(space.largest)


def test_the_text_holds_exactly_the_planned_buckets(planned):
    name, _, reports, text = planned
    if name == "vllm":
        config = json.loads(text)
        sizes = config["cudagraph_capture_sizes"]
        assert sizes == sorted(bucket["tokens"] for bucket in reports["steps"].space)
        assert set(config["compile_sizes"]) <= set(sizes)
    elif name == "sglang":
        assert re.fullmatch(r"--cuda-graph-bs( \d+)+", text)
        assert len(text.split()) == 1 + len(reports["decode"].space)
    else:
        rows = [ast.literal_eval(line) for line in text.splitlines() if not line.startswith("#")]
        prompts = [row for row in rows if row[1] != 1]
        assert all(batch == 1 and query % 128 == 0 for batch, query, _ in prompts)
        assert len(prompts) == len(reports["prompt"].space)
        assert len(rows) - len(prompts) == len(reports["decode"].space)


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
