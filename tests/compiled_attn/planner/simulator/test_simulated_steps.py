"""Simulated steps of engines that compute prompts and decodes separately."""

from __future__ import annotations

from compiled_attn.planner.simulator import SimulatedEngine, simulate
from compiled_attn.planner.simulator.simulated_steps import SeparateSteps
from compiled_attn.workloads import Arrival

ENGINE = SimulatedEngine(max_tokens=64, max_seqs=4, block_size=16, blocks=64)


def test_a_prompt_goes_in_chunks_of_its_own_and_decodes_go_together():
    arrivals = [Arrival(0.0, 100, 3), Arrival(0.0, 20, 3)]
    needs = simulate(arrivals, ENGINE, speed=None, steps=SeparateSteps).needs
    assert needs["prefill"].points.tolist() == [[64, 0], [36, 4], [20, 0]]
    assert needs["decode"].points[:, 0].tolist() == [2, 2]
    assert needs["decode"].points[:, 1].tolist() == [9, 9]


def test_each_token_is_computed_once():
    arrivals = [Arrival(0.1 * n, 30 + 7 * n, 1 + n) for n in range(9)]
    needs = simulate(arrivals, ENGINE, speed=1.0, steps=SeparateSteps).needs
    computed = sum(int(needs[kind].points[:, 0].sum()) for kind in ("prefill", "decode"))
    assert computed == sum(a.prompt_tokens + a.output_tokens - 1 for a in arrivals)
