"""Damaged headers of GGUF files are refused in one line, without much memory."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="needs the extra gguf")

import gguf

from compiled_attn.errors import ModelError
from compiled_attn.models.gguf_header import open_gguf
from tests.compiled_attn.models import fuzzed_gguf
from tests.compiled_attn.text.gguf_file import write_gguf

FAMILY = "general.architecture", 8, struct.pack("<Q", 5) + b"llama"
F32, Q8_0 = 0, 8


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def header(
    *tensors: tuple[str, list[int], int, int],
    values: list[tuple[str, int, bytes]] | None = None,
    counts: tuple[int, int] | None = None,
    start: bytes = b"GGUF" + struct.pack("<I", 3),
    data: int = 4096,
) -> bytes:
    """A file of settings (name, type, bytes) and tensors (name, sizes, type, offset)."""
    values = [FAMILY] if values is None else values
    parts = [start, struct.pack("<QQ", *(counts or (len(tensors), len(values))))]
    parts += [text(name) + struct.pack("<I", kind) + value for name, kind, value in values]
    for name, sizes, kind, offset in tensors:
        parts.append(text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
        parts.append(struct.pack("<IQ", kind, offset))
    whole = b"".join(parts)
    return whole + bytes(-len(whole) % 32 + data)


def _array(kind: int, count: int, values: bytes = b"") -> tuple[str, int, bytes]:
    return "array", 9, struct.pack("<IQ", kind, count) + values


ONE = "one", [32], F32, 0
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "expected 4 bytes from byte 0, got 0 bytes"),
    "magic": (header(start=b"GGML" + bytes(4)), "does not begin with GGUF"),
    "version": (header(start=b"GGUF" + struct.pack("<I", 1)), "expected version 2 or 3, got 1"),
    "big-endian": (header(start=b"GGUF" + struct.pack(">I", 3)), "version 2 or 3, got 50331648"),
    "tensors": (header(counts=(1 << 40, 1)), "expected 1,099,511,627,776 entries"),
    "settings": (header(counts=(0, 1 << 63)), "expected 9,223,372,036,854,775,808 entries"),
    "text": (header(values=[("a", 8, struct.pack("<Q", 1 << 60))]), "setting 'a' cannot be read"),
    "not a text": (header(values=[("a", 8, text("x")[:-1] + b"\xff")]), "utf-8"),
    "name": (header(("x" * 9, [32], F32, 0)).replace(b"\t" + bytes(7), b"\xff" * 8), "bytes"),
    "kind of a setting": (header(values=[("a", 77, b"")]), "expected a known type, got 77"),
    "long array": (header(values=[_array(0, 1 << 60)]), "at most 4,194,304 numbers or texts"),
    "texts": (header(values=[_array(8, 1 << 60)]), "entries"),
    "nested": (header(values=[_array(9, 1, struct.pack("<IQ", 9, 1) * 5000)]), "1 of type 9"),
    "twice a setting": (header(values=[FAMILY, FAMILY]), "there are two of this name"),
    "no family": (header(values=[]), r"expected the text general\.architecture, got none"),
    "family": (header(values=[("general.architecture", 4, bytes(4))]), "architecture, got none"),
    "alignment 0": (header(values=[FAMILY, ("general.alignment", 4, bytes(4))]), "got 0"),
    "alignment": (
        header(values=[FAMILY, ("general.alignment", 4, b"\x18" + bytes(3))]), "power of two"
    ),
    "alignment as text": (header(values=[FAMILY, ("general.alignment", 8, text("8"))]), "got 8"),
    "twice a tensor": (header(ONE, ("one", [32], F32, 128)), "'one' .*two of this name"),
    "dimensions": (header(("one", [1] * 5, F32, 0)), "expected 1 to 4 dimensions, got 5"),
    "no dimension": (header(("one", [], F32, 0)), "expected 1 to 4 dimensions, got 0"),
    "no row": (header(("one", [32, 0], F32, 0)), r"a positive number of rows .* got \[0, 32\]"),
    "part of a block": (header(("one", [40, 2], Q8_0, 0)), r"whole blocks of 32, got \[2, 40\]"),
    "huge": (header(("one", [1 << 63, 2], F32, 0)), "tensor one cannot be read"),
    "wraps around": (header(("one", [1 << 62, 4], F32, 0)), "73,786,976,294,838,206,464 bytes"),
    "offset": (header(("one", [32], F32, 1 << 63)), "expected it at 0, after"),
    "overlap": (header(ONE, ("two", [32], F32, 64)), "'two' .*expected it at 128"),
    "type": (header(("one", [32], 20, 0)), "one is of type IQ4_NL, expected one of Q4_0"),
    "unknown type": (header(("one", [32], 1 << 31, 0)), "one is of type 2147483648"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_header_is_refused(tmp_path, name):
    whole, message = DAMAGED[name]
    file = tmp_path / "a.gguf"
    file.write_bytes(whole)
    with pytest.raises(ModelError, match=message) as refused:
        open_gguf(file)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600


def test_a_file_that_ends_anywhere_is_refused(tmp_path):
    file = tmp_path / "a.gguf"
    whole = header(ONE, ("two", [32, 2], Q8_0, 128), values=[FAMILY, _array(8, 1, text("x"))])
    used = len(whole) - 4096 + 128 + 68
    for length in range(0, used, 3):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="truncated"):
            open_gguf(file)
    file.write_bytes(whole[:used])
    assert [each.data.shape for each in open_gguf(file).tensors] == [(32,), (2, 34)]


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"none\.gguf: cannot be read: No such file"):
        open_gguf(tmp_path / "none.gguf")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16"])
def test_a_file_is_read_as_gguf_reads_it(tmp_path, kind):
    write_gguf(tmp_path / "a.gguf", kind=kind)
    found, expected = open_gguf(tmp_path / "a.gguf"), gguf.GGUFReader(tmp_path / "a.gguf")
    assert found.family == "llama" and len(found.tensors) == len(expected.tensors)
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        assert (one.name, one.kind) == (other.name, other.tensor_type.name)
        assert np.array_equal(one.data, other.data)


def test_flipped_bits_are_refused_or_read_in_little_memory(tmp_path):
    root = Path(fuzzed_gguf.__file__).parents[3]
    arguments: list[Any] = [sys.executable, fuzzed_gguf.__file__, tmp_path, 0, 400, 20]
    environment = os.environ | {"PYTHONPATH": str(root), "XDG_CACHE_HOME": str(tmp_path)}
    environment["PATH"] = ""  # else kernels are built, which takes minutes
    done = subprocess.run(
        [*map(str, arguments)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["refused"] > 100 and found["read"] > 30
