"""Garbage is collected rarely inside the context, and as before after the last one left."""

from __future__ import annotations

import gc

import pytest

from compiled_attn.garbage import rare_collections


def test_the_last_one_to_leave_restores_the_thresholds():
    before = gc.get_threshold()
    with rare_collections:
        raised = gc.get_threshold()
        assert raised[0] > before[0]
        with rare_collections:
            pass
        assert gc.get_threshold() == raised
    assert gc.get_threshold() == before


def test_an_error_restores_them_too():
    before = gc.get_threshold()

    @rare_collections
    def fails() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        fails()
    assert gc.get_threshold() == before
