"""Wrappers of peft, by the attributes that they are known by."""

from __future__ import annotations

import pytest
from torch import nn

from compiled_attn.errors import ModelRefused
from compiled_attn.models.load import unwrap


class Wrapper(nn.Module):
    """What peft's ``PeftModel`` has."""

    def __init__(self, inside: nn.Module, *, prompts: bool = False) -> None:
        super().__init__()
        self.inside = inside
        config = type("Config", (), {"is_prompt_learning": prompts, "peft_type": "PREFIX_TUNING"})
        self.peft_config, self.active_adapter = {"default": config()}, "default"

    def get_base_model(self) -> nn.Module:
        return self.inside


def test_a_wrapper_is_taken_off_and_anything_else_stays():
    inside = nn.Linear(2, 2)
    assert unwrap(Wrapper(inside)) is inside
    assert unwrap(inside) is inside and unwrap(None) is None


def test_an_adapter_of_the_wrapper_itself_is_refused():
    with pytest.raises(ModelRefused, match="got one of type PREFIX_TUNING, which adds tokens"):
        unwrap(Wrapper(nn.Linear(2, 2), prompts=True))
