"""Fixtures of the tests of `compiled_attn`."""

from __future__ import annotations

import pytest

from compiled_attn.ops import NativeOps, NativeUnavailable, load
from compiled_attn.ops.cpu.build import find_compiler
from compiled_attn.ops.cpu.replayer import NativeReplayer


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skips where the native kernel cannot be built, with the reason."""
    try:
        find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def ops(compiler: None) -> NativeOps:
    """The ops of this processor's best build, which must not fail where there is a compiler."""
    return load(strict=True)


@pytest.fixture(scope="session")
def replayer(ops: NativeOps) -> NativeReplayer:
    """Replays graphs with the library of these ops."""
    replayer = ops.replayer()
    assert replayer is not None
    return replayer
