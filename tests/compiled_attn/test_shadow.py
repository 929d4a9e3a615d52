"""Projects of strangers: with another `graphs`, in an environment where this one is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYPI = {  # what PyPI's graphs 0.1.3 begins with
    "__init__.py": "from ._version import __version__\nfrom .base import Graph\n",
    "_version.py": "__version__ = '0.1.3'\n",
    "base/__init__.py": "class Graph:\n    pass\n",
}
TEST = "def test_theirs():\n    from graphs import Graph\n    assert Graph.__module__ != 'mine'\n"
CONFTEST = "import graphs\nassert graphs.Graph\n"
USES = """
import pytest

def test_fixture(compile_counter):
    with compile_counter.expect(graphs=0):
        pass

@pytest.mark.max_graphs(1)
def test_marker():
    pass
"""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed packages with this one, its entry points those of pyproject.toml."""
    folder = tmp_path / "site"
    metadata = folder / "compiled_attn-9.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: compiled-attn\nVersion: 9\n")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = (
        [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        for group, entries in groups.items()
    )
    (metadata / "entry_points.txt").write_text("\n".join(line for each in lines for line in each))
    for package in ("compiled_attn", "graphs"):
        (folder / package).symlink_to(ROOT / package)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    write(folder, {"tests/test_it.py": TEST})
    return folder


def ran(project: Path, *command: str, path: list[Path]) -> subprocess.CompletedProcess[str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "TORCH_", "PYTHON"))
    }
    # An older installation in this interpreter's environment may name the plugin by its old place.
    env["PYTEST_ADDOPTS"] = "-p no:graphs.watch.pytest_plugin -p no:cacheprovider"
    env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True)


def pytest_in(
    project: Path, path: list[Path], *options: str, console: bool = False
) -> subprocess.CompletedProcess[str]:
    # The console script `pytest` differs from `python -m pytest` in sys.path[0] only.
    start = ["-c", "import sys, pytest; del sys.path[0]; sys.exit(pytest.main(sys.argv[1:]))"]
    command = start if console else ["-m", "pytest"]
    return ran(project, sys.executable, *command, *options, path=path)


SHADOWS = {
    "folder": {f"graphs/{name}": text for name, text in PYPI.items()},
    "file": {"graphs.py": "class Graph:\n    pass\n"},
}


@pytest.mark.parametrize("mode", ["prepend", "append", "importlib"])
@pytest.mark.parametrize("shadow", SHADOWS)
def test_pytest_runs_as_without_us_and_warns_once(shadow, mode, project, site):
    write(project, {"conftest.py": CONFTEST} | SHADOWS[shadow])
    result = pytest_in(project, [site], f"--import-mode={mode}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed, 1 warning" in result.stdout
    assert result.stdout.count("the pytest plugin of compiled_attn is disabled") == 1
    assert str(project / "graphs") in result.stdout


def test_a_folder_graphs_that_holds_tests_only_is_theirs(project, site):
    write(project, {"graphs/test_more.py": "def test_more():\n    pass\n"})
    (project / "tests/test_it.py").unlink()
    for mode in ("prepend", "importlib"):
        result = pytest_in(project, [site], f"--import-mode={mode}")
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("shadow", SHADOWS)
def test_a_graphs_that_their_conftest_imports_after_our_plugin_is_theirs(shadow, project, site):
    write(project, {"conftest.py": CONFTEST} | SHADOWS[shadow])
    result = pytest_in(project, [site], console=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("console", [False, True])
def test_pypis_graphs_is_theirs(console, project, site, tmp_path):
    write(tmp_path / "pypi" / "graphs", PYPI)
    write(project, {"conftest.py": CONFTEST})
    result = pytest_in(project, [tmp_path / "pypi", site], console=console)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed, 1 warning" in result.stdout


def test_pypis_graphs_installed_over_ours_is_found_in_the_same_folder(project, site):
    (site / "graphs").unlink()
    write(site / "graphs", PYPI | {"lazy.py": (ROOT / "graphs/lazy.py").read_text()})
    result = pytest_in(project, [site])
    assert "1 passed, 1 warning" in result.stdout, result.stdout + result.stderr
    result = ran(project, sys.executable, "-c", "import compiled_attn", path=[site])
    assert "pip uninstall graphs" in result.stderr


def test_the_suite_for_backends_runs_where_it_is_installed(project, site):
    (site / "pyvenv.cfg").write_text("")
    (project / ".venv").symlink_to(site)  # a folder that pytest collects nothing in by itself
    select = ("-k", "structures or test_theirs", "--import-mode=importlib")
    options = ("--graphs-backend", "eager", *select)
    result = pytest_in(project, [project / ".venv"], *options, console=True)
    assert result.returncode == 0 and "1 passed" in result.stdout, result.stdout + result.stderr
    write(project, SHADOWS["file"])
    result = pytest_in(project, [site], *options)
    assert result.returncode == 4 and "compiled_attn needs its own package" in result.stderr


def test_where_warnings_are_errors_pytest_still_runs(project, site):
    write(project, SHADOWS["file"])
    result = pytest_in(project, [site], "-W", "error")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr.count("the pytest plugin of compiled_attn is disabled") == 1


def test_a_graph_test_beside_another_graphs_says_what_shadows_ours(project, site):
    write(project, {"tests/test_uses.py": USES} | SHADOWS["file"])
    for console in (False, True):
        write(project, {"conftest.py": "import graphs\n"})
        result = pytest_in(project, [site], console=console)
        assert "2 failed, 1 passed" in result.stdout
        assert f"'graphs' is {project / 'graphs.py'}: rename" in result.stdout


def test_without_another_graphs_a_graph_test_runs_and_others_import_nothing_of_ours(project, site):
    write(project, {"tests/test_it.py": "def test_it():\n"
                    "    import sys\n"
                    "    assert not {'graphs', 'torch'} & sys.modules.keys()\n"})  # fmt: skip
    options = ["-p", "no:hypothesispytest", "-W", "error", "--strict-markers"]
    for console in (False, True):
        result = pytest_in(project, [site], *options, console=console)
        assert result.returncode == 0, result.stdout + result.stderr
    write(project, {"tests/test_it.py": USES})
    result = pytest_in(project, [site], *options)
    assert "2 passed" in result.stdout, result.stdout + result.stderr


def test_importing_us_beside_another_graphs_is_an_error_that_names_it(project, site):
    write(project, SHADOWS["folder"])
    place = f"'graphs' is {project / 'graphs' / '__init__.py'}: rename that one"
    for code in ("import compiled_attn", "import compiled_attn.engine"):
        result = ran(project, sys.executable, "-c", code, path=[site])
        assert result.returncode == 1
        assert result.stderr.splitlines()[-1].startswith("ImportError: compiled_attn needs its own")
        assert place in result.stderr
    result = ran(project, sys.executable, "-m", "compiled_attn", "--version", path=[site])
    assert result.returncode != 0 and place in result.stderr
    late = "import graphs, compiled_attn"
    assert place in ran(project, sys.executable, "-c", late, path=[site]).stderr


def test_importing_us_in_a_test_beside_another_graphs_is_the_same_error(project, site):
    write(project, {"tests/test_it.py": "import pytest\n"
                    "@pytest.mark.parametrize('name', ['compiled_attn', 'compiled_attn.engine'])\n"
                    "def test_it(name):\n"
                    "    with pytest.raises(ImportError, match=r'graphs\\.py: rename'):\n"
                    "        __import__(name)\n"} | SHADOWS["file"])  # fmt: skip
    result = pytest_in(project, [site])
    assert "2 passed, 1 warning" in result.stdout, result.stdout + result.stderr


def test_another_graphs_breaks_no_list_of_dynamos_backends_and_no_compile(project, site):
    write(project, SHADOWS["file"])
    code = """if True:
        import torch, torch._dynamo
        assert "compiled_attn_ort" in torch._dynamo.list_backends()
        assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
        torch.compile(lambda x: x + 1, backend="compiled_attn_ort")(torch.ones(1))
    """
    result = ran(project, sys.executable, "-c", code, path=[site])
    assert result.stderr.splitlines()[-1].startswith("ImportError: compiled_attn needs its own")
