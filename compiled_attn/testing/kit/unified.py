"""The interface of `compiled_attn.unified_attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor

from compiled_attn.testing import reference
from compiled_attn.testing.capabilities import FEATURES
from compiled_attn.testing.kit.interface import Arguments, Interface
from compiled_attn.testing.kit.step import Step

__all__ = ["Unified"]


class Unified(Interface):
    """``compiled_attn.unified_attention``, its metadata both in parts and in tables."""

    name = "unified"
    features = frozenset(FEATURES) - {"rotary", "noncausal", "empty_rows"}
    parameters = ("query", "key", "value", "key_cache", "value_cache", "scale", "metadata")
    keywords: ClassVar[Mapping[str, str]] = MappingProxyType({
        "window": "sliding_window", "softcap": "softcap", "sinks": "sinks",
        "alibi": "alibi_slopes", "int8": "key_scale", "fp8_e4m3": "key_scale",
        "fp8_e5m2": "key_scale", "lse": "return_lse",
    })  # fmt: skip
    appends = "always"
    reference: ClassVar[Callable[..., Any]] = staticmethod(reference.unified_attention)

    @staticmethod
    def arguments(s: SimpleNamespace) -> Arguments:
        """See `Interface.arguments`."""
        import torch

        from compiled_attn import UnifiedMetadata

        tokens, size, tables = len(s.query), s.block_size, s.block_table.tolist()
        index, hidden = s.block_table.dtype, float("-inf")
        positions = torch.zeros(tokens, dtype=torch.int64)
        causal = torch.full((tokens, tokens), hidden)
        # Keys of earlier steps, and their blocks.
        olds = (s.seq_lens.cpu() - torch.tensor(s.counts)).clamp_min(0).tolist()
        used = [table[: -(-old // size)] for table, old in zip(tables, olds, strict=True)]
        listed = sorted({block for blocks in used for block in blocks})
        listed += [0] * (s.block_table.numel() - len(listed))
        starts = torch.zeros(len(listed), dtype=torch.int64)
        shared, row = torch.full((tokens, len(listed), size), hidden), 0
        for blocks, old, count in zip(used, olds, s.counts, strict=True):
            for column, block in enumerate(blocks):
                at = listed.index(block)
                starts[at] = column * size
                shared[row : row + count, at, : old - column * size] = 0
            causal[row : row + count, row : row + count].masked_fill_(
                torch.ones(count, count).tril().bool(), 0
            )
            positions[row : row + count] = torch.arange(old, old + count)
            row += count
        parts: dict[str, Any] = {
            "causal_bias": causal, "shared_blocks": torch.tensor(listed), "shared_bias": shared,
            "positions": positions, "shared_starts": starts,
        }  # fmt: skip
        metadata = UnifiedMetadata(
            size, s.slots, block_tables=s.block_table, seq_lens=s.seq_lens,
            query_start_loc=s.starts.to(index),
            **{name: value.to(s.query.device) for name, value in parts.items()},
        )  # fmt: skip

        def flat(cache: Tensor | None) -> Tensor | None:
            return None if cache is None else cache.flatten(0, 1)

        options = {
            "sliding_window": s.window, "softcap": s.softcap, "alibi_slopes": s.slopes,
            "sinks": s.sinks, "key_scale": flat(s.key_scale), "value_projection": s.projection,
            "value_scale": None if s.latent else flat(s.value_scale),
            "return_lse": True if s.lse else None,
        }  # fmt: skip
        caches = flat(s.key_cache), flat(s.value_cache)
        args = s.query, s.key, s.value, *caches, s.scale, metadata
        return args, {name: value for name, value in options.items() if value is not None}

    @classmethod
    def why_not(cls, step: Step) -> str | None:
        """See `Interface.why_not`."""
        return "slots have one stride" if step.gaps else None

    @staticmethod
    def results(returned: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
        """See `Interface.results`."""
        return returned if isinstance(returned, (tuple, list)) else (returned, None)  # type: ignore[return-value]
