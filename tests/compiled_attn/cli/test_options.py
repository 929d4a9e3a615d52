"""An option is declared once: commands, settings of the engine and their help agree."""

from __future__ import annotations

from dataclasses import fields

import pytest
import typer

from compiled_attn.cli.app import app
from compiled_attn.cli.options import ChatOptions, PlanOptions, RunOptions, settings_of, taking
from compiled_attn.engine.config import EngineConfig

SETTINGS = {each.name: each for each in fields(EngineConfig)}


@pytest.mark.parametrize(
    ("name", "kind", "own"),
    [
        ("run", RunOptions, {"max_graphs", "store"}),  # one for each bucket; default store
        ("plan", PlanOptions, {"max_graphs", "context"}),  # context: of the demand, too
        ("chat", ChatOptions, {"backend"}),  # one that starts at once
    ],
)
def test_an_option_of_the_engine_has_its_default_and_its_meaning(name, kind, own):
    command = typer.main.get_command(app).commands[name]
    shown = {parameter.name: parameter for parameter in command.params}
    common = shown.keys() & SETTINGS.keys()
    assert len(common) >= 7
    for each in common - own:
        assert shown[each].default == SETTINGS[each].default
        assert shown[each].help == SETTINGS[each].metadata["help"]
    assert {each.name for each in fields(kind)} == shown.keys() - {"help"}


def test_settings_of_the_engine_are_separated_from_other_options():
    given = settings_of(PlanOptions(max_seqs=7, out=None))
    assert given["max_seqs"] == 7 and given["backend"] == "inductor"
    assert given.keys() <= SETTINGS.keys() and "out" not in given
    assert EngineConfig(**given).max_seqs == 7


def test_a_command_gets_its_options_as_one_object():
    taken: list[PlanOptions] = []
    small = typer.Typer()

    @small.command()
    @taking(PlanOptions)
    def command(options: PlanOptions) -> int:
        taken.append(options)
        return 4

    assert small(["--max-seqs", "5", "--requests", "9"], standalone_mode=False) == 4
    assert taken == [PlanOptions(max_seqs=5, requests=9)]
