"""Every family of causal language models is served as `generate` does, or refused with a reason."""

from __future__ import annotations

import logging
import warnings

import pytest
import transformers
from transformers.utils import logging as hf_logging

from compiled_attn.models.hf import PagedCausalLM, cache_for
from graphs.store.values import describe
from tests.compiled_attn.models.hf.families import FAMILIES, small_model
from tests.compiled_attn.models.hf.survey import (
    PAGE,
    page,
    quiet,
    survey_family,
    surveys,
)

# Plain, windows, latents, layers of several shapes, shared keys, experts, sinks, no keywords handed
# on, positions that are learned; several calls a step, a mask of its own, recurrence, padding.
QUICK = [
    *("llama", "mistral", "deepseek_v3", "gemma4_text", "mixtral", "gpt_oss", "nemotron", "gpt2"),
    *("diffllama", "doge", "mamba", "roberta"),
]
_OTHERS = [family for family in FAMILIES if family not in QUICK]


@pytest.fixture(autouse=True)
def quiet_logs():
    before = hf_logging.get_verbosity(), logging.getLogger("compiled_attn").level
    with warnings.catch_warnings():
        quiet()
        yield
    hf_logging.set_verbosity(before[0])
    logging.getLogger("compiled_attn").setLevel(before[1])


def _check(family: str) -> None:
    found = survey_family(family)
    assert found.result != "wrong", found.note
    stored = surveys().get(transformers.__version__)
    if stored is not None:
        assert [*found[1:]] == stored.families[family], "make families writes the page"
    if found.result == "equal":
        # Two models in memory have addresses as different as those of two processes.
        models = [small_model(family) for _ in range(2)]
        digests = [
            describe(PagedCausalLM(model, cache_for(model, 5, 4))).digest for model in models
        ]
        assert digests[0] == digests[1], "another process does not find its graphs in the store"


@pytest.mark.parametrize("family", QUICK)
def test_a_family_is_served_or_refused_as_the_page_says(family, ops):
    _check(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", _OTHERS)
def test_every_other_family_is_served_or_refused_as_the_page_says(family, ops):
    _check(family)


def test_the_page_shows_the_stored_results_and_none_is_wrong():
    stored = surveys()
    assert PAGE.read_text() == page(stored)
    assert [survey.counts()["wrong"] for survey in stored.values()] == [0] * len(stored)
    installed = stored.get(transformers.__version__)
    assert installed is None or [*installed.families] == [*FAMILIES]


@pytest.mark.parametrize("text", ["README.md", "docs/reference/models.md"])
def test_texts_have_the_number_of_the_page(text):
    newest = next(iter(surveys().values()))
    path = PAGE.parents[2] / text
    assert f"{newest.counts()['equal']} architectures" in " ".join(path.read_text().split())
