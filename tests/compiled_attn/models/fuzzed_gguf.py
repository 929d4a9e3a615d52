"""Reads a GGUF file with bits flipped, in a process with little memory; prints what came out."""

from __future__ import annotations

import collections
import json
import random
import resource
import signal
import sys
from pathlib import Path

from compiled_attn.models import ModelError, load_model
from compiled_attn.models.gguf_header import open_gguf
from tests.compiled_attn.text.gguf_file import write_gguf

_ROOM, _SECONDS = 2 << 30, 60


def damaged(whole: bytes, header: int, draw: random.Random) -> bytes:
    """Flips one to four bits, or overwrites eight bytes with a large number; most in the header."""
    changed = bytearray(whole)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        at = draw.randrange(header if draw.random() < 0.8 else len(whole) - 8)
        if draw.random() < 0.2:
            number = draw.choice([0, 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1])
            changed[at : at + 8] = number.to_bytes(8, "little")
        else:
            changed[at] ^= 1 << draw.randrange(8)
    return bytes(changed)


def fuzz(folder: Path, seed: int, opened: int, loaded: int) -> collections.Counter[str]:
    """Counts the results of `open_gguf` and `load_model`; anything but `ModelError` is raised."""
    draw, found, plain = random.Random(seed), collections.Counter[str](), folder / "plain.gguf"
    write_gguf(plain)
    load_model(plain)  # imports, before memory is limited
    whole = plain.read_bytes()
    header = whole.index(b"blk.1.ffn_norm.weight") + 64
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, used + _ROOM))
    for number in range(opened + loaded):
        file = folder / f"{number}.gguf"
        file.write_bytes(damaged(whole, header, draw))
        signal.alarm(_SECONDS)
        try:
            (open_gguf if number < opened else load_model)(file)
        except ModelError as error:
            assert "\n" not in str(error), error
            found["refused"] += 1
        else:
            found["read"] += 1
        finally:
            signal.alarm(0)
        file.unlink()
    return found


if __name__ == "__main__":
    folder, *numbers = sys.argv[1:]
    print(json.dumps(fuzz(Path(folder), *map(int, numbers))))
