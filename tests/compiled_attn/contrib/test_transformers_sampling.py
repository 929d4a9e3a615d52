"""Sampling settings of transformers become ours, or are refused."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs the extra hf")

from transformers import GenerationConfig

from compiled_attn.contrib.transformers.sampling import sampling_for
from compiled_attn.engine import SamplingParams
from tests.compiled_attn.tiny import tiny_model

DRAWN = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}


def test_all_settings_of_a_drawn_text_are_taken_over():
    sampling = sampling_for(tiny_model(), GenerationConfig(do_sample=True, **DRAWN), [7, -1], 9, 2)
    expected = SamplingParams(max_new_tokens=9, stop_token_ids=(7,), ignore_eos=True, n=2, **DRAWN)
    assert sampling == expected


def test_a_greedy_text_has_no_temperature_but_its_penalty():
    settings = GenerationConfig(do_sample=False, temperature=0.7, repetition_penalty=1.2)
    sampling = sampling_for(tiny_model(), settings, [], 3)
    assert (sampling.temperature, sampling.repetition_penalty) == (0.0, 1.2)


def test_what_is_not_said_is_as_transformers_has_it():
    sampling = sampling_for(tiny_model(), GenerationConfig(do_sample=True), [], 3)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (1.0, 1.0, 0.0)
