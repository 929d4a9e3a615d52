import sys

import pytest
import torch

from graphs.cli.errors import UserError
from graphs.cli.target import load_target

MODULE = """
import torch
from torch import nn
from neighbour import FACTOR

class Net(nn.Module):
    def forward(self, x):
        return x * FACTOR

class Needy(nn.Module):
    def __init__(self, size):
        super().__init__()

class Box:
    net = Net()

def double(x):
    return x * 2

def make():
    return Net()

def fail():
    return 1 / 0

NUMBER = 7
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "neighbour.py").write_text("FACTOR = 3\n")
    (tmp_path / "my_model.py").write_text(MODULE)
    (tmp_path / "exits.py").write_text("import sys\n\nsys.exit(0)\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("my_model", "neighbour")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "factor"), [("double", 2), ("Net", 3), ("make()", 3), ("Box.net", 3), ("Net()", 3)]
)
def test_a_callable_of_a_file_is_found_made_or_called(folder, name, factor):
    target = load_target(f"{folder}/my_model.py:{name}")
    assert target.callable(torch.ones(1)).item() == factor
    assert target.module.__name__ == "my_model"


def test_a_class_is_put_in_eval_mode_and_what_a_factory_returns_is_left_alone(folder):
    assert not load_target(f"{folder}/my_model.py:Net").callable.training
    assert load_target(f"{folder}/my_model.py:make()").callable.training


def test_a_module_of_the_current_folder_is_found_by_name(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert load_target("my_model:double").callable(2) == 4


def test_a_file_whose_name_is_taken_is_imported_under_another(folder):
    (folder / "json.py").write_text("def same(x):\n    return x\n")
    import json

    target = load_target(f"{folder}/json.py:same")
    assert target.module is not json and sys.modules["json"] is json
    assert sys.modules[target.module.__name__] is target.module
    del sys.modules[target.module.__name__]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("my_model.py", "expected MODULE:NAME"),
        (":double", "expected MODULE:NAME"),
        ("{}/missing.py:double", "no such file: .*missing.py"),
        ("no_such_module_here:double", "no module named no_such_module_here"),
        ("{}/my_model.py:triple", "has no triple; it has Net, Needy, Box, double, make, fail$"),
        ("{}/my_model.py:NUMBER", "expected .*NUMBER to be callable, got a int"),
        ("{}/my_model.py:fail()", r"fail\(\) failed: ZeroDivisionError.*my_model.py:24\)"),
        ("{}/exits.py:f", r"importing .* failed: SystemExit: 0 \(.*exits.py:3\)"),
        ("{}/my_model.py:Needy", r"Needy\(\) failed: TypeError: .*size"),
    ],
)
def test_what_cannot_be_found_is_an_error_of_one_line(folder, text, message):
    with pytest.raises(UserError, match=message) as caught:
        load_target(text.format(folder))
    assert "\n" not in str(caught.value)


def test_an_error_while_importing_names_the_line_and_leaves_nothing_behind(folder):
    (folder / "my_model_bad.py").write_text("x = 1\nimport nothing_of_that_name\n")
    with pytest.raises(UserError, match=r"ModuleNotFoundError.*my_model_bad.py:2\)"):
        load_target(f"{folder}/my_model_bad.py:x")
    assert "my_model_bad" not in sys.modules
