"""The metrics of a server in the format of Prometheus."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from compiled_attn.engine import StepRecord
from compiled_attn.serve.metrics import Metrics
from tests.compiled_attn.engine.small import small_engine
from tests.compiled_attn.serve.conftest import NAME, Running


def metrics(server: Running) -> dict[str, float]:
    """Sums over the labels."""
    found: dict[str, float] = {}
    _, text = server.get("/metrics")
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_what_is_served_is_counted(server):
    before = metrics(server)
    own = {"X-Cache-Salt": "metrics"}  # no other test has computed its prompt
    server.client.completions.create(model=NAME, prompt="the moon", max_tokens=5, extra_headers=own)
    after = metrics(server)

    def more(name: str) -> float:
        return after[f"compiled_attn_{name}"] - before[f"compiled_attn_{name}"]

    assert more("requests_total") == 1
    assert more("bucket_hits_total") == 5
    prompt = len(server.model.llm.tokenizer.encode("the moon"))
    assert more("tokens_total") == 5 + prompt + (prompt + 4)
    assert after["vllm:request_time_per_output_token_seconds_count"] >= 1
    assert after["compiled_attn_compiles_after_warmup_total"] == 0
    assert after["compiled_attn_ready"] == 1
    assert after["compiled_attn_blocks"] == 199


def test_the_gaps_of_a_stream_are_a_histogram_of_vllm(server):
    name = "vllm:inter_token_latency_seconds"
    before = metrics(server)
    settings = {"model": NAME, "prompt": "the moon", "max_tokens": 5, "stream": True}
    assert [*server.client.completions.create(**settings)]
    after = metrics(server)
    assert after[f"{name}_count"] - before[f"{name}_count"] == 4
    assert after[f"{name}_sum"] > before[f"{name}_sum"]
    bucket = f'{name}_bucket{{le="+Inf",model_name="{NAME}"}} {after[f"{name}_count"]}'
    assert bucket in server.get("/metrics")[1]


def test_tokens_of_drafts_are_counted_by_their_place():
    engine = small_engine(speculate="ngram:3")
    bucket = engine.sizing.buckets.largest
    for drafts in ([(3, 1), (1, 1)], [(2, 0)]):
        engine.tally.add(StepRecord(dict(bucket), bucket, 0.1, drafts=tuple(drafts)))
    owner = SimpleNamespace(call=lambda function: function(engine))
    text = Metrics(SimpleNamespace(name=NAME, stage="ready", engine=owner)).exposition().decode()
    found = {
        (sample.name, sample.labels["position"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "position" in sample.labels
    }
    drafted, accepted = (f"compiled_attn_{kind}_tokens_total" for kind in ("drafted", "accepted"))
    assert [found[drafted, place] for place in "123"] == [3, 2, 1]
    assert [found[accepted, place] for place in "123"] == [2, 0, 0]
