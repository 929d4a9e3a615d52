"""Demand from vLLM's metrics and its log."""

from __future__ import annotations

import pytest

from compiled_attn.errors import TraceError
from compiled_attn.planner.formats.metrics import sample_requests, step_tokens
from compiled_attn.planner.formats.request_log import read_request_log

STEPS = (3, 5, 7, 20, 30, 100, 1000)
BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, float("inf"))


def exposed(name, values, bounds=BOUNDS):
    """A histogram as Prometheus shows it."""
    labels = 'engine="0",model_name="m"'
    lines = [f"# TYPE {name} histogram"]
    for bound in bounds:
        at = "+Inf" if bound == float("inf") else f"{bound:.1f}"
        count = sum(value <= bound for value in values)
        lines.append(f'{name}_bucket{{{labels},le="{at}"}} {count:.1f}')
    lines.append(f"{name}_count{{{labels}}} {len(values):.1f}")
    lines.append(f"{name}_sum{{{labels}}} {sum(values):.1f}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.txt"
    path.write_text(
        exposed("vllm:iteration_tokens_total", STEPS)
        + exposed("vllm:request_prompt_tokens", [10, 20, 600, 40])
        + exposed("vllm:request_generation_tokens", [100, 7, 9])
    )
    return path


def test_a_histogram_of_steps_keeps_each_count_between_its_bounds_and_the_mean(metrics):
    demand = step_tokens(metrics, 2048)
    sizes, weights = demand.points[:, 0], demand.weights
    assert weights.sum() == pytest.approx(len(STEPS))
    assert sizes @ weights == pytest.approx(sum(STEPS), rel=1e-3)
    for low, high in ((2, 8), (17, 32), (65, 128), (513, 1024)):
        inside = weights[(sizes >= low) & (sizes <= high)].sum()
        assert inside == pytest.approx(sum(low <= step <= high for step in STEPS))


def test_engines_of_one_server_add_up(tmp_path):
    path = tmp_path / "metrics.txt"
    two = exposed("vllm:iteration_tokens_total", STEPS)
    path.write_text(two + two.replace('engine="0"', 'engine="1"'))
    assert step_tokens(path, 2048).total == pytest.approx(2 * len(STEPS))


def test_requests_are_sampled_with_the_counted_lengths(metrics):
    sampled = sample_requests(metrics, 500, 2048, seed=1)
    assert sampled == sample_requests(metrics, 500, 2048, seed=1)
    assert all(a.prompt_tokens + a.output_tokens <= 2048 for a in sampled)
    assert sum(a.prompt_tokens > 512 for a in sampled) == pytest.approx(125, abs=45)


def test_metrics_without_the_histogram_say_where_it_comes_from(tmp_path):
    path = tmp_path / "metrics.txt"
    path.write_text("python_info 1.0\n")
    with pytest.raises(TraceError, match=r"vllm:iteration_tokens_total.*got none: save what"):
        step_tokens(path, 128)
    with pytest.raises(TraceError, match="cannot be read as metrics"):
        step_tokens(tmp_path / "missing", 128)


def request(number, tokens, at):
    return (
        f"DEBUG 12-31 23:59:{at:02d} [request_logger.py:55] Request r-{number} details: prompt: "
        f"'a, [b]', prompt_token_ids: {tokens}, prompt_embeds shape: None.\n"
        f"INFO 12-31 23:59:{at:02d} [request_logger.py:65] Received request r-{number}: params: "
        "SamplingParams(max_tokens=5), lora_request: None.\n"
    )


def response(number, tokens, kind=""):
    return (
        f"DEBUG 01-01 00:00:30 [request_logger.py:99] Generated response r-{number}{kind} details: "
        f"output_token_ids: {tokens}\n"
    )


def test_a_log_gives_lengths_times_and_what_prompts_share(tmp_path):
    path = tmp_path / "log"
    first, second = [*range(300)], [*range(200), 7, 8]
    path.write_text(
        "something else\n" + request(1, first, 10) + request(2, second, 13)
        + response(1, [1, 2, 3]) + response(2, [4], " (streaming delta)")
        + response(2, [5, 6], " (streaming delta)") + request(3, [1], 14)
    )  # fmt: skip
    one, two = read_request_log(path)
    assert (one.prompt_tokens, one.output_tokens, one.arrival_s) == (300, 3, 0.0)
    assert (two.prompt_tokens, two.output_tokens, two.arrival_s) == (202, 3, 3.0)
    assert one.prefix_ids[0] == two.prefix_ids[0] and one.prefix_ids[1] != two.prefix_ids[1]


def test_a_log_at_info_says_how_to_log(tmp_path):
    path = tmp_path / "log"
    path.write_text("INFO 03-07 10:00:00 [x.py:1] Received request a: params: P, lora: None.\n")
    with pytest.raises(TraceError, match=r"got 1 without: log with VLLM_LOGGING_LEVEL=DEBUG"):
        read_request_log(path)
