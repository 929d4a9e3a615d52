"""The benchmarks of `graphs.bucketed`, run small."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")
import bucketed
import bucketed_dispatch


@pytest.mark.slow
def test_all_ways_encode_and_ours_compiles_nothing_late(capsys):
    threads = torch.get_num_threads()
    small = f"--small --threads {threads} --batches 2 --rounds 1 --backend eager --parts tokens"
    bucketed.main(small.split())
    out = capsys.readouterr().out
    ways = re.findall(r"^(\S.*?)\s+\d+ tokens/s", out, re.MULTILINE)
    expected = ["bucketed", "dynamic=True", "mark_dynamic", "eager", "padded to the maximum"]
    assert ways == expected
    assert re.search(r"^bucketed .* 0 late compiles$", out, re.MULTILINE)


def test_the_dispatch_is_measured_at_all_sizes(capsys):
    with torch.no_grad():
        bucketed_dispatch.run("eager", rounds=1)
    out = capsys.readouterr().out
    assert len(re.findall("us over the bare graph$", out, re.MULTILINE)) == 8
