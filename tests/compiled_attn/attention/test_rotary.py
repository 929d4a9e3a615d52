from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiled_attn.attention.rotary import apply_rotary


def tables(rows: int, rotated: int) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** -(torch.arange(0, rotated, 2).double() / rotated)
    angles = torch.arange(rows).double().unsqueeze(1) * frequencies
    return angles.cos(), angles.sin()


def by_complex_numbers(x: Tensor, positions: Tensor, rotated: int, interleaved: bool) -> Tensor:
    frequencies = 10000.0 ** -(torch.arange(0, rotated, 2).double() / rotated)
    turn = torch.polar(torch.ones(1).double(), positions.double().unsqueeze(-1) * frequencies)
    out = x.double().clone()
    half = rotated // 2
    one = slice(0, rotated, 2) if interleaved else slice(0, half)
    two = slice(1, rotated, 2) if interleaved else slice(half, rotated)
    turned = torch.complex(out[..., one], out[..., two]) * turn.unsqueeze(-2)
    out[..., one], out[..., two] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotated", [0, 16, 32])
def test_pairs_turn_as_complex_numbers_and_the_rest_passes(interleaved: bool, rotated: int) -> None:
    x = torch.randn(2, 5, 3, 32, dtype=torch.float64)
    positions = torch.randint(0, 40, (2, 5))
    cos, sin = tables(40, rotated) if rotated else (torch.ones(40, 0), torch.ones(40, 0))
    out = apply_rotary(x, cos.double(), sin.double(), positions, interleaved=interleaved)
    want = by_complex_numbers(x, positions, rotated, interleaved) if rotated else x
    assert torch.allclose(out, want, atol=1e-13)
    assert torch.equal(out[..., rotated:], x[..., rotated:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_half_precision_is_rounded_once(dtype: torch.dtype, interleaved: bool) -> None:
    x = torch.randn(1, 64, 2, 16).to(dtype)
    cos, sin = (table.to(dtype) for table in tables(64, 16))
    out = apply_rotary(x, cos, sin, interleaved=interleaved)
    exact = apply_rotary(x.float(), cos.float(), sin.float(), interleaved=interleaved)
    assert out.dtype == dtype and torch.equal(out, exact.to(dtype))


def test_positions_count_from_zero_by_default_and_x_stays() -> None:
    x = torch.randn(2, 5, 3, 16)
    before = x.clone()
    cos, sin = (table.float() for table in tables(8, 16))
    positions = torch.arange(5).expand(2, 5)
    assert torch.equal(apply_rotary(x, cos, sin), apply_rotary(x, cos, sin, positions))
    assert torch.equal(x, before)
    assert torch.equal(apply_rotary(x, cos, sin)[:, 0], x[:, 0])


def test_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(1, 1, 1, 16).double(), torch.randn(1, 1, 1, 16).double()
    cos, sin = tables(64, 16)

    def score(at: int, other: int) -> Tensor:
        turned = (apply_rotary(x, cos, sin, torch.tensor([[p]])) for x, p in ((q, at), (k, other)))
        return torch.sum(next(turned) * next(turned))

    assert torch.allclose(score(40, 37), score(13, 10))
    assert not torch.allclose(score(40, 37), score(40, 36))


@pytest.mark.parametrize(
    ("cos", "sin"), [((8, 9), (8, 9)), ((8, 4), (8, 5)), ((8, 4), (7, 4)), ((4,), (4,))]
)
def test_tables_that_do_not_fit_are_refused(cos: tuple[int, ...], sin: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rd <= D"):
        apply_rotary(torch.zeros(1, 2, 1, 16), torch.ones(cos), torch.ones(sin))
