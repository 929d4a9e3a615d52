"""Sampling parameters of a command's options."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from compiled_attn.cli.errors import UserError
from compiled_attn.cli.options import SamplingOptions
from compiled_attn.engine import Grammar, SamplingParams

__all__ = ["sampling_of"]

_SAME = {each.name for each in fields(SamplingParams)} - {"stop", "grammar"}


def sampling_of(options: SamplingOptions) -> SamplingParams:
    """Builds the sampling parameters of the options.

    Raises:
        UserError: there are several grammars, or a file cannot be read.
        ValueError: `SamplingParams` refuses a value, or the schema is invalid.
    """
    names = (each.name for each in fields(options) if each.name in _SAME)
    settings = {name: getattr(options, name) for name in names}
    return SamplingParams(**settings, stop=tuple(options.stop or ()), grammar=_grammar_of(options))


def _grammar_of(options: SamplingOptions) -> Grammar | None:
    names = ("json_schema", "regex", "grammar")
    given = [name for name in names if getattr(options, name) is not None]
    if len(given) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"{flags} were given: choose one")
    if options.json_schema is not None:
        return Grammar.json_schema(_read(options.json_schema))
    if options.grammar is not None:
        return Grammar.ebnf(_read(options.grammar))
    return None if options.regex is None else Grammar.regex(options.regex)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start + 1}: save it as UTF-8") from error
