"""Compiled steps of an engine on a device: inputs are parts of one buffer, captured as they lie."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from graphs.backends.cudagraph import CudaGraphBackend
from tests.compiled_attn.engine.test_device_steps import (
    CONFIG,
    RANDOM,
    Recorded,
    each_step,
    served,
    tokens,
)
from tests.fake_device import open_device
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class RecordedCode(Recorded):
    """Records compiled code, on doubles of CUDA graphs."""

    options: ClassVar = {**CudaGraphBackend.options, "compiler": "aot_eager"}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kernel", slow_but(("native",), ("native", "portable")))
def test_compiled_steps_give_the_tokens_of_a_cpu_and_wait_for_nothing(kernel, recorded):
    open_device()
    config = replace(CONFIG, kernel=kernel)
    here, _, _ = served("cpu", RANDOM, config)
    backend = RecordedCode() if recorded else "aot_eager"
    there, spent, engine = served("fake_device", RANDOM, replace(config, backend=backend))
    assert tokens(there) == tokens(here)
    assert each_step(spent) == (1, 1, 0, 0)
    report = engine.executor.graphs.report
    assert len(report.captured) == len(report.results)
    assert kernel == "portable" or report.graphs < len(report.results)  # sizes are symbols
    if recorded:
        assert backend.doubles[0].replays == engine.report().steps
