"""Amounts of memory as people write them: bytes, or a number with a unit."""

from __future__ import annotations

import re
from decimal import Decimal

from compiled_attn.errors import ConfigError

__all__ = ["byte_size"]

_UNITS = {"": 1} | {
    f"{letter}{suffix}".lower(): base**power
    for power, letter in enumerate("KMG", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"(\d+(?:\.\d+(?= *[a-z]))?) *([a-z]*)", re.IGNORECASE)


def byte_size(name: str, size: int | str) -> int:
    """Bytes of a setting such as ``2147483648``, ``"2GiB"`` or ``"1.5 GB"``.

    Raises:
        ConfigError: it is no such size, or less than a byte.
    """
    found = _SIZE.fullmatch(str(size).strip())
    unit = found and _UNITS.get(found[2].lower())
    if not found or not unit or not (amount := int(Decimal(found[1]) * unit)):
        raise ConfigError(
            f"expected {name} in bytes or with a unit of KiB, MiB, GiB, KB, MB, GB, got {size!r}: "
            "write it as 2GiB"
        )
    return amount
