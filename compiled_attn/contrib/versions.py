"""Checks the version of another engine against the tested ones."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from compiled_attn.errors import EngineUnsupported

__all__ = ["check_tested", "installed", "is_tested", "listed"]


def installed(*packages: str) -> str | None:
    """Return the version of the first installed package, or None."""
    for each in packages:
        try:
            return version(each)
        except PackageNotFoundError:
            continue
    return None


def is_tested(found: str, tested: tuple[str, ...]) -> bool:
    """Whether a version starts with a tested one, such as ``5.23``."""
    return f"{found.split('+')[0]}.".startswith(tuple(f"{each}." for each in tested))


def listed(tested: tuple[str, ...]) -> str:
    """Return the tested versions in words."""
    return " or ".join(f"{each}.*" for each in tested)


def check_tested(engine: str, found: str | None, tested: tuple[str, ...], remedy: str) -> None:
    """Raise EngineUnsupported unless ``found`` (None: not installed) is a tested version."""
    if found is not None and is_tested(found, tested):
        return
    got = "none" if found is None else found
    raise EngineUnsupported(
        f"expected {engine} {listed(tested)}, which this version of compiled-attn is tested with, "
        f"got {got}: {remedy}"
    )
