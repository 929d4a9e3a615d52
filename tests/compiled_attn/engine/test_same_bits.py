"""``same_bits``: random traffic gives the log-probabilities of `score`; others are refused."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compiled_attn import Scorer
from compiled_attn.engine import Engine, EngineConfig, GenerationResult, SamplingParams
from compiled_attn.engine.logprobs import log_sum_exp, logprobs_of, token_logprobs
from compiled_attn.engine.same_bits import _dependent, _Trial, order, prove, same_bits
from compiled_attn.errors import ConfigError
from compiled_attn.models.packed import pack_linears
from compiled_attn.step import TableLayout
from compiled_attn.step.layout import StepLimits
from tests.compiled_attn.engine.drafting import draft_known
from tests.compiled_attn.tiny import tiny_model

CONFIG: dict[str, Any] = {
    "same_bits": True, "max_tokens_per_step": 48, "max_seqs": 6, "block_size": 8, "context": 200,
    "num_blocks": 40, "max_graphs": 6,
}  # fmt: skip
UNTIED = {"tie_word_embeddings": False}
LATENTS = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "a window and softcaps": ("gemma2", UNTIED, {}),
    "int4 weights": ("llama", {}, {"weights": "int4"}),
    "int8": ("llama", {}, {"kv_dtype": "int8"}),
    "fp8": ("llama", {}, {"kv_dtype": "fp8"}),
    "latents": ("deepseek_v3", LATENTS, {}),
}
KINDS = [
    pytest.param(
        name, dtype, marks=() if (name, dtype) == ("llama", "float32") else pytest.mark.slow
    )
    for name in MODELS
    for dtype in ("float32", "bfloat16")
]


def traffic() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts longer than a step, of which half share a prefix, and more tokens than the cache."""
    rng = np.random.default_rng(0)
    shared = rng.integers(1, 128, 20).tolist()
    own = [rng.integers(1, 128, length).tolist() for length in rng.integers(1, 90, 20)]
    prompts = [shared * (index % 2) + each for index, each in enumerate(own)]
    params = [
        SamplingParams(max_new_tokens=30, temperature=1.0, seed=seed, logprobs=0)
        for seed in range(len(prompts))
    ]
    return prompts, params


def check_bits(scorer: Scorer, results: list[GenerationResult]) -> None:
    for result in results:
        expected = scorer.score([*result.prompt, *result.tokens])[len(result.prompt) - 1 :]
        got = torch.tensor([each.logprob for each in result.logprobs], dtype=torch.float64)
        assert same_bits(got, expected)


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_tokens_of_random_traffic_have_the_bits_of_score(name, dtype):
    family, sizes, settings = MODELS[name]
    model = tiny_model(family, **sizes).to(getattr(torch, dtype))
    config = EngineConfig(**CONFIG, **settings)
    scorer = Scorer(copy.deepcopy(model), config)
    engine = Engine(model, config)
    engine.warmup()
    prompts, params = traffic()
    results = [*engine.generate(prompts, params, in_order=True)]
    assert engine.report().preemptions > 0
    check_bits(scorer, results)
    given = prompts[0]
    assert same_bits(scorer.score(torch.tensor(given)), scorer.score(given))
    assert scorer.score([1]).shape == (0,)
    with pytest.raises(ValueError, match=r"expected 1..200 tokens"):
        scorer.score([])
    with pytest.raises(ValueError, match=r"token ids in 0..127, got 1..128"):
        scorer.score([1, 128])


@pytest.mark.slow
def test_accepted_drafts_have_the_same_bits():
    model, config = tiny_model(), EngineConfig(**CONFIG, speculate="ngram:4")
    scorer = Scorer(copy.deepcopy(model), config)
    engine = Engine(model, config)
    engine.warmup()
    prompts, params = traffic()
    draft_known(engine, [*engine.generate(prompts, params, in_order=True)], wrong=0.2)
    results = [*engine.generate(prompts, params, in_order=True)]
    assert sum(each.accepted_tokens for each in results) > 100
    check_bits(scorer, results)


@pytest.mark.parametrize(
    ("name", "value"),
    [("kernel", "portable"), ("backend", "eager"), ("weights", "plain"), ("max_adapters", 2)],
)
def test_a_setting_with_other_kernels_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"expected {name} .* with same_bits, got {value!r}"):
        EngineConfig(same_bits=True, **{name: value})


@pytest.mark.parametrize(
    ("family", "sizes", "expected"),
    [
        ("gpt_oss", {}, r"GptOssTopKRouter \(model.layers.0.mlp.router\): its weight"),
        ("gemma2", {}, r"Linear \(lm_head\): its weight"),
        ("llama", {"vocab_size": 130}, r"Linear \(lm_head\): its weight \[130, 64\]"),
    ],
)
def test_a_layer_that_cannot_be_packed_is_refused_by_name(family, sizes, expected):
    with pytest.raises(ConfigError, match=expected):
        Engine(tiny_model(family, **sizes), EngineConfig(**CONFIG))


@pytest.mark.slow
def test_a_bucket_with_a_graph_of_its_own_is_refused():
    # The rotary embedding multiplies complex numbers, which inductor cannot do for all sizes.
    engine = Engine(tiny_model("deepseek_v2", **LATENTS), EngineConfig(**CONFIG))
    with pytest.raises(ConfigError, match=r"got DeepseekV2ForCausalLM: .* has its own graph"):
        engine.warmup()


class MixesRows(nn.Module):
    """Adds to each row what depends on the number of rows."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + 1e-3 * rows.shape[1]


def test_a_module_that_depends_on_other_rows_is_found_by_name():
    model = tiny_model().requires_grad_(False)
    model.model.layers[1].mlp.act_fn = MixesRows()
    wrapped = nn.Module()
    wrapped.model = model
    with ExitStack() as undo:
        pack_linears(model, undo)
        path, module = _dependent(wrapped, lambda: model(torch.arange(9)[None]))
    assert path == "model.layers.1.mlp.act_fn" and isinstance(module, MixesRows)


def test_a_difference_at_warmup_is_an_error(monkeypatch):
    logits = torch.zeros(4, 8)

    class Executor:
        class graphs:
            report = None

        class sizing:
            buckets = ()

        class module:
            model = nn.Linear(2, 2)

    def changed(self: _Trial, chunks: Any, bucket: Any = None) -> torch.Tensor:
        return logits + 1e-7 * (len(chunks) == 3)

    monkeypatch.setattr(_Trial, "__init__", lambda self, executor: vars(self).update(
        tokens=[1] * 4, _executor=executor))  # fmt: skip
    monkeypatch.setattr(_Trial, "logits", changed)
    monkeypatch.setattr(_Trial, "_eagerly", lambda *_: None)
    with pytest.raises(ConfigError, match=r"got Linear: chunks of \(7, 16, 1\) gives other logits"):
        prove(Executor)


@pytest.mark.parametrize("seqs", [1, 2, 9])
@pytest.mark.parametrize("tokens", [9, 512])
def test_all_buckets_share_a_graph(tokens, seqs):
    limits = StepLimits(tokens, seqs, 16, 64)
    space = TableLayout(64, 16, 16, segment=256).ladder(limits, 9, one_compile=True)
    sizes = [bucket.sizes for bucket in space]
    assert {(64, 8), (2, 2)} < {*sizes} and len(sizes) <= 9
    assert all(min(each) > 1 for each in sizes)
    assert space.pick(tokens=tokens, requests=seqs)
    first = min(space.with_cost(lambda bucket: bucket["tokens"]), key=order(space))
    assert first.sizes == (64, 8)


def test_log_sum_exp_of_a_row_does_not_depend_on_others():
    logits = torch.randn(40, 50_000, generator=torch.Generator().manual_seed(0)) * 9
    whole = log_sum_exp(logits)
    assert np.array_equal(whole[7:8], log_sum_exp(logits[7:8]))
    np.testing.assert_allclose(whole, logits.double().logsumexp(1).numpy(), rtol=1e-6)
    tokens = [*range(40)]
    found = [each.logprob for each in logprobs_of(logits, tokens, [0] * 40)]
    assert np.array_equal(found, token_logprobs(logits, tokens))
    odd = torch.tensor([[0.0, torch.nan], [-torch.inf, 0.0], [torch.inf, 0.0]])
    assert np.array_equal(np.isnan(log_sum_exp(odd)), [True, False, True])
