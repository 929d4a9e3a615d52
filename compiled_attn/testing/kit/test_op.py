"""The cases as tests: `pytest --paged-attention module:op`."""

from __future__ import annotations

import pytest

from compiled_attn.pytest_plugin import SUBJECT
from compiled_attn.testing.kit.cases import CASES, Case
from compiled_attn.testing.kit.run import run_case
from compiled_attn.testing.kit.script import script
from compiled_attn.testing.kit.subject import Subject


@pytest.fixture(scope="session")
def paged_attention_subject(request: pytest.FixtureRequest) -> Subject:
    """The op of ``--paged-attention``."""
    subject: Subject | None = request.config.stash.get(SUBJECT, None)
    if subject is None:
        pytest.fail("name the op: --paged-attention module:op", pytrace=False)
    return subject


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_paged_attention(paged_attention_subject: Subject, case: Case) -> None:
    """Runs one case."""
    result = run_case(paged_attention_subject, case)
    if result.status == "not claimed":
        pytest.skip(result.message)
    if result.status == "failed":
        text = script(paged_attention_subject, result)
        pytest.fail(f"{result.text}\n\nsmallest failing case:\n\n{text}", pytrace=False)
