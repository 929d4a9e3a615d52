from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")

from compiled_attn.models.hf.rounding import computed_in, last_logits, rounding_of
from tests.compiled_attn.tiny import FAMILIES, tiny_model

TEXT = [(7 * i + 3) % 128 for i in range(40)]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict(keep_vars=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computed_in_float32_is_its_copy_in_float32(family):
    model = tiny_model(family).to(torch.bfloat16)
    wide = copy.deepcopy(model).float()
    with torch.no_grad():
        with computed_in(model, torch.float32):
            found = last_logits(model, TEXT)
        expected, own = last_logits(wide, TEXT), last_logits(model, TEXT)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # two orders of float32
    assert (found - own).abs().max() > 1e-3


@pytest.mark.parametrize("at", [0, 3, 9])
def test_an_error_anywhere_gives_every_weight_back(at):
    model = tiny_model("gemma2").to(torch.bfloat16)
    before = weights(model)
    modules = [module for module in model.modules() if not list(module.children())]

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    hook = modules[at].register_forward_pre_hook(stop)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt), computed_in(model, torch.float32):
        last_logits(model, TEXT)
    hook.remove()
    assert all(weights(model)[name] is weight for name, weight in before.items())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in modules)


def test_no_more_than_one_module_is_there_twice():
    model = tiny_model().to(torch.bfloat16)
    most = 0

    def count(*_: object) -> None:
        nonlocal most
        wide = [p for p in model.parameters() if p.dtype is torch.float32]
        most = max(most, len(wide))

    with torch.no_grad(), computed_in(model, torch.float32):
        hooks = [module.register_forward_hook(count) for module in model.modules()]
        last_logits(model, TEXT)
    for hook in hooks:
        hook.remove()
    assert most == 0  # after each module its weights are back


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_deviation_is_proportional_to_the_unit_roundoff(dtype):
    model = tiny_model().to(dtype)
    with torch.no_grad():
        found = rounding_of(model, TEXT, last_logits(model, TEXT))
    assert found is not None
    share = found.deviation / found.exact.abs().max().item()
    eps = torch.finfo(dtype).eps
    # A rounding is off by half an eps at most, and dozens of them make a logit.
    assert eps / 20 < share < 20 * eps


def test_what_cannot_be_computed_with_wider_numbers_is_not_measured(
    caplog,
):
    model = tiny_model()

    def narrow(*_: object) -> None:
        if model.model.norm.weight.dtype is torch.float64:
            raise RuntimeError("no kernel for Double")

    model.model.norm.register_forward_hook(narrow)
    with torch.no_grad():
        logits = last_logits(model, TEXT)
        assert rounding_of(model, TEXT, logits) is None
        assert "LlamaForCausalLM is not measured: no kernel for Double" in caplog.text
        assert rounding_of(model.double(), TEXT, logits) is None
