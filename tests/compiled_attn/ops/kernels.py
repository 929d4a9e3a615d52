"""The kernels that this machine can run, the best one first."""

from __future__ import annotations

import pytest

from compiled_attn.ops import NativeOps, NativeUnavailable, available_isas, load
from compiled_attn.ops.cpu.build import find_compiler

BEST, *OTHERS = available_isas()
SLOW = [pytest.param(isa, marks=pytest.mark.slow) for isa in OTHERS]


def loaded(isa: str) -> NativeOps:
    try:
        find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error)) if isa != "reference" else None
    return load(isa)
