"""Finds the op that a command line names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiled_attn.testing.capabilities import CapabilityError
from compiled_attn.testing.kit.interface import Interface
from compiled_attn.testing.kit.subject import Subject
from graphs.installation import install_command

__all__ = ["find"]


def find(
    op: str, interface: str | None = None, changes: Mapping[str, Any] | None = None
) -> Subject:
    """Returns the subject of ``module:name`` or ``file.py:name``.

    Args:
        op: a callable; with ``name()`` it is called, and its result is tested.
        interface: name of its interface, or ``module:Class`` or ``file.py:Class`` of one; None: by
            its parameters.
        changes: fields of `Capabilities` that replace the declared ones.

    Raises:
        CapabilityError: the class is no `Interface`, an extra is missing, or as `Subject.of`.
        UserError: the module raises on import, or lacks the name.
    """
    try:
        from graphs.cli.target import load_target
    except ImportError as error:
        raise CapabilityError(f"this needs {error.name}: {install_command('cli')}") from error
    target = load_target(op)
    kind: str | type[Interface] | None = interface
    if interface is not None and ":" in interface:
        own: Any = load_target(interface).callable
        if not (isinstance(own, type) and issubclass(own, Interface)):
            raise CapabilityError(
                f"interface: expected a subclass of compiled_attn.testing.Interface, got "
                f"{interface}: name the class itself"
            )
        kind = own
    source, _, name = op.rpartition(":")
    if source.endswith(".py"):
        source = str(Path(source).resolve())
    return Subject.of(target.callable, None, kind, f"{source}:{name}", changes, target.module)
