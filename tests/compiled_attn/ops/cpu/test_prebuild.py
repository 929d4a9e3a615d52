"""A wheel with prebuilt kernels serves where there is no compiler."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

from compiled_attn.ops import available_isas
from compiled_attn.ops.cpu.build import build, digests_of
from compiled_attn.ops.cpu.prebuilt import Manifest
from compiled_attn.ops.paged_attention import NAMESPACE
from compiled_attn.ops.schema import SOURCES

ROOT = Path(__file__).parents[4]
SERVE = """
import shutil, sys
import compiled_attn
from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.ops import load
from transformers import LlamaConfig, LlamaForCausalLM

assert compiled_attn.__file__.startswith(sys.prefix), compiled_attn.__file__
assert not any(map(shutil.which, ("g++", "clang++", "c++", "gcc", "cc")))
sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval().requires_grad_(False)
config = EngineConfig(max_tokens_per_step=24, max_seqs=4, block_size=4, num_blocks=128,
                      backend="eager", kernel="auto", strict=True)
engine = Engine(model, config)
engine.warmup()
(result,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))
report, build = engine.report(), load().build
print(len(result.tokens), report.kernel, report.fallbacks, report.kernel_notes["native"])
print(build.library)
"""


@pytest.fixture
def library_only_built(ops, tmp_path) -> Path:
    """A folder of libraries that has one for this processor, with all parts."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    shutil.copyfile(build(ops.isa, NAMESPACE).library, folder / f"{ops.isa}.so")
    release = torch.__version__.partition("+")[0]
    tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    Manifest(release, platform.machine(), tag, digests_of(SOURCES)).write(folder)
    return folder


def _wheel(libraries: Path | None, to: Path) -> Path:
    """Builds a wheel of a copy of the sources, without the network."""
    copy = to / "checkout"
    for name in ("compiled_attn", "graphs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    variables = {"COMPILED_ATTN_PREBUILT": str(libraries)} if libraries else {}
    command = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(to), str(copy)]
    _run([sys.executable, "-m", *command], {**os.environ, **variables})
    (wheel,) = to.glob("*.whl")
    return wheel


def _serve(wheel: Path, to: Path) -> list[str]:
    """Serves a model by a wheel in an environment of its own, which borrows this one's packages."""
    venv = to / "venv"
    _run([sys.executable, "-m", "venv", "--without-pip", str(venv)], dict(os.environ))
    python = str(venv / "bin" / "python")
    own = _run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], {}).strip()
    install = ["pip", "--python", python, "install", "-q", "--no-deps", str(wheel)]
    _run([sys.executable, "-m", *install], dict(os.environ))
    Path(own, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (empty := to / "bin").mkdir()
    return _run([python, "-c", SERVE], {"PATH": str(empty), "HOME": str(to)}).splitlines()


def _run(command: list[str], environment: dict[str, str]) -> str:
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_has_its_native_kernel_where_there_is_no_compiler(
    library_only_built, ops, tmp_path
):
    wheel = _wheel(library_only_built, tmp_path)
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "installed")
    (empty := tmp_path / "bin").mkdir()
    environment = {"PATH": str(empty), "HOME": str(tmp_path)}
    path = f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r}); "
    found = "from compiled_attn.ops import load; build = load(strict=True).build; print(build)"
    script = f"{path}{found}; print(build.library)"
    build, library = _run([sys.executable, "-c", script], environment).splitlines()
    assert build == f"{ops.isa}, prebuilt"
    assert library.startswith(str(tmp_path / ".cache"))  # next to which tunings are saved


@pytest.mark.slow  # 20 s of installing and measuring kernels
def test_a_wheel_serves_with_its_native_kernel_where_there_is_no_compiler(
    library_only_built, ops, tmp_path
):
    wheel = _wheel(library_only_built, tmp_path)
    assert "-py3-none-linux_" in wheel.name
    report, library = _serve(wheel, tmp_path)
    assert report == f"4 native 0 {ops.isa}, prebuilt"
    assert library.startswith(str(tmp_path / ".cache"))  # next to which tunings are saved


def test_a_wheel_without_libraries_is_pure_and_has_the_sources(tmp_path):
    wheel = _wheel(None, tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    for source in SOURCES.rglob("*.[hc]*"):
        assert f"compiled_attn/ops/cpu/csrc/{source.relative_to(SOURCES).as_posix()}" in names
    assert not [name for name in names if "/prebuilt/" in name]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_libraries_as_make_wheel_builds_them_bring_no_openmp_and_no_paths(compiler, tmp_path):
    best = available_isas()[0]
    libraries = tmp_path / "libraries"
    command = ["compiled_attn.ops.cpu.prebuild", str(libraries), "--isa", best, "--any-torch"]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    needs = _run(["readelf", "-d", str(libraries / f"{best}.so")], dict(os.environ))
    assert "libtorch_cpu.so" in needs
    assert not [word for word in ("gomp", "RPATH", "RUNPATH") if word in needs]
    report, _ = _serve(_wheel(libraries, tmp_path), tmp_path)
    assert report == f"4 native 0 {best}, prebuilt"
