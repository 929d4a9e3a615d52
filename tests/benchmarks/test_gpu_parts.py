"""Parts of the GPU benchmark on a CPU: replays, engines, weights, the sanitizer, the goals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")
import docs_page
import gpu
import gpu_goals
import gpu_sanitizer
from accelerator import engines, replays, shares, weights
from accelerator.scene import Sizes, steps

from compiled_attn.ops import load
from compiled_attn.ops.providers import PROVIDERS, flash
from compiled_attn.testing.kit.command import run_command
from tests.compiled_attn.ops.kernels import interpreted

CPU = torch.device("cpu")


def test_replays_equal_fresh_calls_and_a_stale_buffer_is_found(monkeypatch):
    load()
    bucket = replays.SMALL["mixed 8"]
    found = replays.compare("mixed 8", bucket, 5, CPU, torch.float32, 16)
    assert found == ("mixed 8", 5, 0, False)
    recorded = replays._recorded

    def stale(call, device):
        _, outputs, _ = recorded(call, device)
        return lambda: None, outputs, False

    monkeypatch.setattr(replays, "_recorded", stale)
    assert replays.compare("mixed 8", bucket, 5, CPU, torch.float32, 16).different == 5


class Served:
    """A provider: Triton's results times a factor, or none."""

    def __init__(self, name, factor=1.0, why=None):
        self.name, self.factor, self.why = name, factor, why
        self.calls = []

    def why_not(self, call):
        return self.why

    def attend(self, call, paged):
        self.calls.append(call)
        out, lse = paged(call)
        return out * self.factor, lse


@pytest.mark.parametrize("case", gpu.SMALL)
def test_each_provider_has_a_column_or_a_reason(case, monkeypatch, capsys):
    interpreted()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    right, wrong = Served("varlen"), Served("fa3", 1.5)
    for each in (right, wrong, Served("dense+paged", why="has no window\nof any size")):
        monkeypatch.setitem(PROVIDERS, each.name, each)
    sizes = Sizes(4, 2, 16, 16, torch.float32)
    made = steps(sizes, *gpu.SMALL[case], CPU, 2)
    names = "triton", "varlen", "dense+paged", "fa3", "flashinfer", "specialized", "copy", "sdpa"
    found = gpu.row(names, case, made, SimpleNamespace(rounds=1, calls=2))
    assert [*found["seconds"]] == ["triton", "varlen", "copy", "sdpa"]
    assert found["skipped"]["dense+paged"] == "NotImplementedError: it has no window"
    assert found["skipped"]["flashinfer"].startswith("NotImplementedError: it ")
    assert found["skipped"]["fa3"].startswith("ArithmeticError: differs by ")
    assert found["differences"]["triton"] < 1e-5 and found["differences"]["fa3"] > 0.02
    assert len(wrong.calls) == 1, "what is wrong is not timed"
    printed = capsys.readouterr().out
    assert re.search(r"# differences from gather: triton \S+, varlen \S+, fa3", printed)
    assert printed.index("# differences") < printed.index("TFLOP/s")
    call = right.calls[0]
    new = torch.cat([call.key_cache[b, o][None] for b, o in cells_of_new(made[0])])
    assert torch.equal(call.new.key, new)


@pytest.mark.parametrize(("case", "page"), [("chunk 5 of 30", 16), ("prefill 2 x 20", 64)])
def test_kernels_of_descriptors_have_columns(case, page, monkeypatch, capsys):
    interpreted()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(flash, "capability", lambda _: (9, 0))
    monkeypatch.setattr(flash, "lacks_device", lambda _: None)
    made = steps(Sizes(4, 2, 16, page, torch.bfloat16), *gpu.SMALL[case], CPU, 1)
    names = "descriptors", "specialized"
    found = gpu.row(names, case, made, SimpleNamespace(rounds=1, calls=1))
    assert [*found["seconds"]] == [*found["differences"]] == [*names], found["skipped"]
    assert max(found["differences"].values()) < 0.02


def cells_of_new(step):
    """Block and offset of each new token: the last ones of each request."""
    size = step.sizes.block_size
    for request in range(step.requests):
        for at in range(step.length - step.queries, step.length):
            yield int(step.block_table[request, at // size]), at % size


def test_kinds_of_kernels():
    kinds = {
        "attend_kernel": "attention", "write_kernel": "attention",
        "void cudnn_generated_fort_native_sdpa_sm90_flash_fprop": "attention",
        "nvjet_tst_128x64_64x8_2x1_v_bz_TNN": "linear",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n": "linear", "aten::mm": "linear",
        "void at::native::reduce_kernel<512, ArgMaxOps<float>>": "sampling",
        "void cub::DeviceRadixSortOnesweepKernel": "sampling",
        "void at::native::vectorized_elementwise_kernel<4, SiluFunctor>": "other",
        "aten::rsqrt": "other",
    }  # fmt: skip
    assert {name: shares.kind_of(name) for name in kinds} == kinds


def test_shares_are_of_the_wall_time():
    events = [
        SimpleNamespace(key=name, self_device_time_total=micros)
        for name, micros in (("attend_kernel", 20), ("nvjet", 50), ("rsqrt", 10))
    ]
    found = shares._divided(events, 100, on_device=True)
    assert found == {"attention": 0.2, "linear": 0.5, "sampling": 0, "other": 0.1, "host": 0.2}
    assert sum(shares._divided(events, 40, on_device=True).values()) == pytest.approx(1)


def test_this_engine_is_compared_with_transformers_and_absent_ones_are_named():
    setup = engines.Setup(
        engines.MODELS["tiny"], engines.Load(3, 9, 4), "eager", torch.float32, CPU
    )
    found = engines.compare("tiny", setup, rounds=1)
    assert found["speeds"].keys() >= {"ours", "generate_batch"}, found["skipped"]
    assert found["skipped"].keys() == {"vllm", "sglang"} - found["speeds"].keys()
    assert found["shares"]["attention"] > 0 and found["shares"]["linear"] > 0


def test_a_layer_has_a_row_for_each_number_of_rows(monkeypatch):
    load()
    monkeypatch.setattr(weights, "ROWS", (1, 3))
    assert weights.why_not(CPU) is None
    assert "has no kernel for cuda" in (
        weights.why_not(torch.device("cuda")) or "has no kernel for cuda"
    )
    (shape,) = weights.SMALL_LAYERS.values()
    found = [*weights.layer_rows("tiny", shape, CPU, 2, 2)]
    assert [row["rows"] for row in found] == [1, 3]
    assert {*found[0]["seconds"]} == {"bfloat16", "4 bits", "8 bits"}


SANITIZER = """#!{python}
import sys
tool = sys.argv[sys.argv.index("--tool") + 1]
print("2 passed in 1.0s")
print("========= ERROR SUMMARY:", 3 if tool == "racecheck" else 0, "errors")
sys.exit(86 if tool == "racecheck" else 0)
"""


def test_each_tool_of_the_sanitizer_has_a_result(tmp_path, monkeypatch, capsys):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER.format(python=sys.executable))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "argv", ["gpu_sanitizer.py", "--json", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit, match="1"):
        gpu_sanitizer.main()
    found = json.loads((tmp_path / "x.json").read_text())["sanitizer"]
    assert [each["state"] for each in found] == ["passed", "failed (86)", "passed"]
    assert found[1]["errors"] == 3


def test_without_the_sanitizer_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_sanitizer, "find_tool", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu_sanitizer.py", "--json", str(tmp_path / "x.json")])
    gpu_sanitizer.main()
    assert "# not measured: no compute-sanitizer" in capsys.readouterr().out
    found = json.loads((tmp_path / "x.json").read_text())["sanitizer"]
    assert {each["state"] for each in found} == {"not measured"}


def test_tests_that_do_not_run_do_not_pass():
    assert gpu_sanitizer.parsed(0, "no tests ran")["state"] == "failed (0)"


def test_the_kit_runs_the_op_of_the_dispatcher(tmp_path):
    op = docs_page.ROOT / "benchmarks" / "accelerator" / "dispatched.py"
    report = tmp_path / "gpu_kit.json"
    command = [f"{op}:paged_attention_", "-k", "heads", "--json", str(report)]
    assert run_command(command) == 0
    assert gpu_goals.table(tmp_path)["kit"][1] == "1 of 1 cases"


def test_a_goal_is_measured_or_says_that_it_is_not(tmp_path):
    assert {cells[1] for cells in gpu_goals.table(tmp_path).values()} == {"not measured"}
    attention = [
        {"case": "prefill 1 x 2k", "seconds": {"op": 2.0, "sdpa": 1.9, "sdpa cudnn": 1.8}},
        {"case": "decode 1 x 8k", "seconds": {"op": 20e-6, "copy": 15e-6}},
    ]
    written = {
        "attention": attention,
        "codes": [{"case": "decode 64 x 1k", "seconds": {"plain": 3.0, "e4m3": 2.0}}],
        "weights": [[{"layer": "QKV", "rows": 1,
                      "seconds": {"bfloat16": 4.0, "4 bits": 1.6, "8 bits": 2.0}}]],
        "replays": [{"replays": 1000, "different": 0, "recorded": True}],
        "engines": [{"model": "1b", "speeds": {"ours": 3.0, "generate_batch": 2.0},
                     "shares": {"attention": 0.1, "linear": 0.6, "sampling": 0.1, "host": 0.2}}],
    }  # fmt: skip
    for name, rows in written.items():
        text = json.dumps({"device": "NVIDIA H100", name: rows})
        (tmp_path / f"gpu_{name}.json").write_text(text)
    (tmp_path / "gpu_tests.txt").write_text("1 failed, 340 passed, 7 deselected in 9 s")
    (tmp_path / "gpu_kit.json").write_text(
        json.dumps({"cases": [{"status": "passed", "steps": 3}] * 9})
    )
    measured = [cells[1] for cells in gpu_goals.table(tmp_path).values()]
    no = "not measured"
    assert measured == [
        f"0.90, {no}, {no}, {no}", f"0.75, {no}, {no}, {no}", "20.0 us", f"{no}, {no}, 1.50, {no}",
        "QKV 2.50, 2.00", "1 failed, 340 passed", "9 of 9 cases", no, "0 of 1,000",
        f"1.50, {no}, {no}, {no}",
        f"0.10, 0.60, 0.10, 0.20, {no}",
    ]  # fmt: skip
    assert gpu_goals.question(tmp_path)["columns"][0]["shows"] == "NVIDIA H100"


def test_a_provider_nearer_to_sdpa_than_the_op_is_named(tmp_path):
    own = [{"case": case, "seconds": {"op": 2.0, "sdpa": 1.0}} for case in gpu_goals.PREFILLS[:2]]
    (tmp_path / "gpu_attention.json").write_text(json.dumps({"attention": own}))
    for file, case, name, speed in (
        ("providers", 0, "fa3", 1.1),
        ("specialized", 0, "specialized", 1.25),
        ("providers", 1, "varlen", 4.0),
    ):
        path = tmp_path / f"gpu_{file}.json"
        rows = json.loads(path.read_text())["providers"] if path.exists() else []
        seconds = {"triton": 0.1, "copy": 0.1, "sdpa": 1.2, "sdpa cudnn": 1.0, name: speed}
        rows.append({"case": gpu_goals.PREFILLS[case], "seconds": seconds})
        path.write_text(json.dumps({"providers": rows}))
    (cells, *_) = gpu_goals.table(tmp_path).values()
    assert cells[1] == "0.50 (fa3 0.91), 0.50, not measured, not measured"


def test_the_docs_have_the_goals():
    assert docs_page.page().count(gpu_goals.NOTHING) >= 1
    assert re.search(r"## Goals on a GPU", docs_page.page())


def test_the_cells_of_the_traffic_model_run():
    made = subprocess.run(
        [sys.executable, docs_page.ROOT / "benchmarks" / "gpu_traffic.py"],
        capture_output=True, text=True, check=True, cwd=docs_page.ROOT,
        env={**os.environ, "PYTHONPATH": str(docs_page.ROOT)},
    )  # fmt: skip
    assert len(made.stdout.splitlines()) == 17
