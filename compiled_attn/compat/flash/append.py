"""Writing new tokens to the cache in place, in compiled graphs too, without a copy of the cache.

`index_put_` is enough where the cache is a tensor of its own. Of a view the compiler makes a
functional update of its base, which copies what is written to and scatters it back, cache-sized:
for a view taken inside of the graph, and for two inputs whose elements interleave (halves of a
fused kv buffer). For these there is an op that declares what it mutates; the compiler then passes
the view on as it is. Both cases are shown in tests/graph_breaks/test_flash.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.ops.tracing import stands_alone

__all__ = ["append", "write"]

_LIBRARY = torch.library.Library("compiled_attn", "FRAGMENT")
_LIBRARY.define("write_tokens(Tensor(a!) cache, Tensor page, Tensor slot, Tensor tokens) -> ()")


def write(cache: Tensor, page: Tensor, slot: Tensor, tokens: Tensor) -> None:
    """Writes ``tokens [B, S, Hk, D]`` to ``cache [NP, P, Hk, D]`` at ``page, slot [B, S]``."""
    cache.index_put_((page, slot), tokens)


def _fake_write(cache: Tensor, page: Tensor, slot: Tensor, tokens: Tensor) -> None:
    return None


_LIBRARY.impl("write_tokens", write, "CompositeExplicitAutograd")
torch.library.register_fake("compiled_attn::write_tokens", _fake_write, lib=_LIBRARY)


def append(cache: Tensor, page: Tensor, slot: Tensor, tokens: Tensor) -> None:
    """`write`, in the form that the compiler does not turn into a copy of the cache."""
    if torch.compiler.is_compiling() and not stands_alone(cache):
        torch.ops.compiled_attn.write_tokens(cache, page, slot, tokens)
    else:
        write(cache, page, slot, tokens)
