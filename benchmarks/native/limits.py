"""What the machine can do at best, measured in C++: see limits.cpp."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from compiled_attn.ops.cpu.build import find_compiler

STEPS = 4_000_000
_PRODUCTS = {torch.bfloat16: "multiply_add_pairs", torch.int8: "multiply_add_codes"}
LEVELS = (1, 2)
"""Of the caches that reading may prefetch into: which is faster depends on the processor."""


class Limits:
    """Memory and arithmetic at full speed, on some threads."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        folder = Path(tempfile.mkdtemp(prefix="limits-"))
        library = folder / "limits.so"
        source = Path(__file__).with_name("limits.cpp")
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run([find_compiler(), *flags, str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))
        pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self._reads = [self._library.read_blocks_1, self._library.read_blocks_2]
        for read in self._reads:
            read.argtypes = [pointer, pointer, pointer, long, long, integer]

    def read(self, keys: Tensor, values: Tensor, table: Tensor, level: int) -> None:
        """Reads the blocks of a table ``[R, W]`` int32 out of ``[num_blocks, ...]`` buffers.

        They are prefetched into that level of the caches, 1 or 2.
        """
        bytes_of_block = keys[0].numel() * keys.element_size()
        self._reads[level - 1](
            keys.data_ptr(), values.data_ptr(), table.data_ptr(), table.numel(), bytes_of_block,
            self.threads,
        )  # fmt: skip

    def flops(self, dtype: torch.dtype) -> float:
        """Operations a second of multiply-adds as the kernel takes a cache of this type.

        Of floats, of pairs of bfloat16, or of integers of 16 bits with int8, where there are any.
        """
        name = _PRODUCTS.get(dtype, "multiply_add")
        run = getattr(self._library, name, self._library.multiply_add)
        run.argtypes, run.restype = [ctypes.c_int64, ctypes.c_int32], ctypes.c_int32
        best = 0.0
        for _ in range(5):
            started = time.perf_counter()
            each = run(STEPS, self.threads)
            seconds = time.perf_counter() - started
            best = max(best, 2 * STEPS * 12 * each * self.threads / seconds)
        return best
