"""The cases of the kit: what each guarantees, the features that it needs, and its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from compiled_attn.testing.capabilities import Capabilities
from compiled_attn.testing.kit import checks
from compiled_attn.testing.kit.checks import Check
from compiled_attn.testing.kit.interface import Interface
from compiled_attn.testing.kit.step import QUANTISED, Step

__all__ = ["CASES", "Case", "Plan"]


@dataclass(frozen=True)
class Plan:
    """Builds the steps of a case from claims, an interface, and one set of sizes."""

    claims: Capabilities
    interface: type[Interface]
    base: Step

    def has(self, *features: str) -> bool:
        """Whether all are claimed."""
        return {*features} <= self.claims.features

    @property
    def size(self) -> int:
        """Tokens in a block."""
        return self.base.block_size

    def rows(self, *requests: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """Adapts query rows to the interface: one row per request, equally many, or any number."""
        if self.interface.rows == "one" or not self.has("chunked"):
            is_any = self.interface.rows == "any" and self.has("mixed")
            return tuple((rows if is_any and rows == n else 1, n) for rows, n in requests)
        if self.interface.rows == "equal":
            most = min(max(rows for rows, _ in requests), 4)
            return tuple((most, max(n, most)) for _, n in requests)
        return requests

    def decodes(self, **fields: object) -> Step:
        """Three decodes of different lengths."""
        size = self.size
        return self.base.replace(
            requests=((1, 2 * size + 3), (1, size // 2 + 1), (1, size + 2)), **fields
        )

    def chunks(self, **fields: object) -> Step:
        """Several queries of a request after tokens in the cache, if that is claimed."""
        size = self.size
        rows = self.rows((3, 2 * size + 2), (2, size + 1), (4, 4 + size // 2))
        return self.base.replace(requests=rows, **fields)

    def mixed(self, **fields: object) -> Step:
        """A decode, a prompt, a first token, a chunk and draft tokens, as far as claimed."""
        size = self.size
        rows = self.rows((1, size + 2), (5, 5), (1, 1), (4, 2 * size + 1), (2, max(2, size)))
        return self.base.replace(requests=rows, **fields)

    def equal_weights(self, **fields: object) -> Step:
        """Decodes whose outputs are weights, powers of two that are exact in each dtype."""
        length = max(16, 1 << (2 * self.size - 1).bit_length())
        requests = (1, length), (1, length // 2), (1, length)
        return self.base.replace(requests=requests, spread=0.0, units=True, **fields)

    def general(self, **fields: object) -> Step:
        """The step with the most kinds of requests that are claimed."""
        return self.mixed(**fields) if self.has("mixed") else self.chunks(**fields)


_LARGE_CACHE = 2**26
"""Bytes of a cache with large block ids."""

Steps = Callable[[Plan], Iterator[Step]]
Sizes = Literal["every", "each", "first"]


@dataclass(frozen=True)
class Case:
    """One guarantee.

    Attributes:
        name: name of the case, mostly the feature that it tests.
        guarantee: completes "a kernel must guarantee that ...".
        needs: features that must be claimed.
        steps: yields its steps for one set of sizes.
        check: checks a step.
        sizes: "every" combination of the claimed sizes, "each" size once, or only the "first".
    """

    name: str
    guarantee: str
    needs: frozenset[str]
    steps: Steps
    check: Check = field(repr=False)
    sizes: Sizes = "each"


CASES: list[Case] = []
"""All cases, the simplest first."""


def _case(
    guarantee: str, needs: str = "", check: Check = checks.values, sizes: Sizes = "each"
) -> Callable[[Steps], Steps]:
    def add(steps: Steps) -> Steps:
        name = getattr(steps, "__name__", "").strip("_")
        CASES.append(Case(name, guarantee, frozenset(needs.split()), steps, check, sizes))
        return steps

    return add


# The first, as an op may change something in its first call only.
@_case("a call leaves torch's global settings and default generators as they are",
       check=checks.state)  # fmt: skip
def global_state(plan: Plan) -> Iterator[Step]:
    yield plan.decodes()
    yield plan.general()


@_case("a decode attends to all keys of its request", sizes="every")
def decode(plan: Plan) -> Iterator[Step]:
    lengths = (max(1, plan.size - 1), max(1, plan.size // 2), max(1, plan.size - 2))
    heads = plan.base.heads // plan.base.kv_heads
    yield plan.base.replace(
        requests=tuple((1, length) for length in lengths), heads=heads, kv_heads=1
    )


@_case("blocks may be in any order, with any ids up to the largest")
def blocks(plan: Plan) -> Iterator[Step]:
    heads = plan.base.heads // plan.base.kv_heads
    yield plan.decodes(heads=heads, kv_heads=1)


@_case("query head h reads KV head h // (H // Hk)")
def heads(plan: Plan) -> Iterator[Step]:
    for kv_heads in (1, 3):
        group = plan.base.heads // plan.base.kv_heads
        yield plan.decodes(heads=kv_heads * group, kv_heads=kv_heads)


@_case("lengths just below, at and above a multiple of the block size are exact")
def block_borders(plan: Plan) -> Iterator[Step]:
    size = plan.size
    lengths = {1, 2, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1} - {0}
    yield plan.base.replace(requests=tuple((1, length) for length in sorted(lengths)))


@_case("a softmax over equal scores gives each key the same weight")
def weights(plan: Plan) -> Iterator[Step]:
    yield plan.equal_weights()


@_case("scores are multiplied by the scale that is passed")
def scale(plan: Plan) -> Iterator[Step]:
    yield plan.decodes(scale=0.11)


@_case("a softmax over scores that differ by hundreds does not overflow")
def large_scores(plan: Plan) -> Iterator[Step]:
    yield plan.decodes(spread=100.0)


@_case("a request of more than a thousand keys is exact")
def long_context(plan: Plan) -> Iterator[Step]:
    # Apart from short ones, whose larger numbers would allow larger errors.
    yield plan.base.replace(requests=((1, 1100), (1, 1037)))
    yield plan.base.replace(requests=((1, 513), (1, 5)))


@_case("large block ids are exact: above 32,767, or as many as 64 MiB hold", sizes="first")
def large_ids(plan: Plan) -> Iterator[Step]:
    claims = plan.claims
    small = plan.base.replace(
        dtype=min(claims.dtypes, key=lambda dtype: dtype.itemsize), kv_heads=1,
        heads=plan.base.heads // plan.base.kv_heads, head_dim=min(claims.head_dims),
        block_size=min(claims.block_sizes),
    )  # fmt: skip
    block = small.block_size * small.head_dim * small.dtype.itemsize
    size, first = small.block_size, min(2**15, _LARGE_CACHE // block)
    yield small.replace(requests=((1, 2 * size + 1), (1, size)), first_block=first)


@_case("each query of a chunk sees the keys up to its own position", "chunked")
def chunked(plan: Plan) -> Iterator[Step]:
    yield plan.chunks()
    yield plan.base.replace(requests=plan.rows((plan.size + 2, 3 * plan.size)))


@_case("prompts and decodes may be in one call", "mixed")
def mixed(plan: Plan) -> Iterator[Step]:
    yield plan.mixed()
    yield plan.base.replace(requests=plan.rows((9, 9), (1, 12)))
    yield plan.base.replace(requests=plan.rows((1, 12), (9, 9), (1, plan.size)))


@_case("requests may read the same blocks", "shared_prefix")
def shared_prefix(plan: Plan) -> Iterator[Step]:
    size = plan.size
    rows = plan.rows((1, 2 * size + 1), (3, 2 * size + 7), (1, 4), (2, 3 * size))
    yield plan.base.replace(requests=rows, shared=2)


@_case("NaN in slots that belong to no request never reaches the output")
def poison_nan(plan: Plan) -> Iterator[Step]:
    yield plan.decodes(unowned=math.nan)
    yield plan.general(unowned=math.nan)


@_case("inf in slots that belong to no request never reaches the output")
def poison_inf(plan: Plan) -> Iterator[Step]:
    yield plan.general(unowned=math.inf)


@_case("a request's output has the same bits whatever other requests hold, even NaN",
       check=checks.neighbours)  # fmt: skip
def neighbours(plan: Plan) -> Iterator[Step]:
    yield plan.decodes()
    yield plan.general()


@_case("a second call is right when other metadata is in the same buffers", check=checks.again,
       sizes="first")  # fmt: skip
def same_buffers(plan: Plan) -> Iterator[Step]:
    yield plan.decodes()
    yield plan.general()


@_case("the call writes to its outputs only", check=checks.inputs)
def inputs(plan: Plan) -> Iterator[Step]:
    if plan.interface.appends != "always":
        yield plan.general()


@_case("a window of w keys hides all earlier ones", "window")
def window(plan: Plan) -> Iterator[Step]:
    for width in (1, 3, plan.size, plan.size + 1, 1000):
        yield plan.general(window=width)
    yield plan.general(window=5, unowned=math.nan)
    yield plan.equal_weights(window=8)


@_case("scores are capped", "softcap")
def softcap(plan: Plan) -> Iterator[Step]:
    yield plan.general(softcap=0.7)
    yield plan.general(softcap=30.0)


@_case("ALiBi adds slope * (key position - query position)", "alibi")
def alibi(plan: Plan) -> Iterator[Step]:
    yield plan.general(alibi=True)


@_case("scores are capped before ALiBi is added", "softcap alibi")
def softcap_alibi(plan: Plan) -> Iterator[Step]:
    yield plan.general(softcap=0.7, alibi=True)


@_case("a sink is an extra logit in the softmax, without a value", "sinks")
def sinks(plan: Plan) -> Iterator[Step]:
    yield plan.general(sinks=True)


@_case("the claimed ones of softcap, window, ALiBi and sinks work in one call")
def all_scores(plan: Plan) -> Iterator[Step]:
    scores = {"softcap": 2.0, "window": plan.size // 2 + 1, "alibi": True, "sinks": True}
    claimed = {name: value for name, value in scores.items() if plan.has(name)}
    if len(claimed) > 1:
        yield plan.general(**claimed)


@_case("values may have another head size than keys", "mla")
def mla(plan: Plan) -> Iterator[Step]:
    dim = plan.base.head_dim
    yield plan.general(value_dim=max(1, dim // 2))
    yield plan.general(value_dim=max(1, dim // 2), latent=True, kv_heads=1)


def _quantised(name: str) -> Steps:
    def steps(plan: Plan) -> Iterator[Step]:
        yield plan.general(cache=name)

    steps.__name__ = name
    return steps


for _name in QUANTISED:
    _case("keys and values are dequantized, each with its own scales", _name)(_quantised(_name))


@_case("with causal=False a query sees all keys of its request", "noncausal")
def noncausal(plan: Plan) -> Iterator[Step]:
    yield plan.general(causal=False)


@_case("the log-sum-exp covers all visible scores", "lse")
def lse(plan: Plan) -> Iterator[Step]:
    yield plan.decodes(lse=True)
    yield plan.general(lse=True)
    if plan.has("window"):
        yield plan.general(lse=True, window=3)
    if plan.has("softcap"):
        yield plan.general(lse=True, softcap=0.7)


@_case("the log-sum-exp includes the sink", "lse sinks")
def lse_sinks(plan: Plan) -> Iterator[Step]:
    yield plan.general(lse=True, sinks=True)


@_case("new keys and values are stored bit for bit, attended to, and nothing else is written",
       "append", check=checks.written)  # fmt: skip
def append(plan: Plan) -> Iterator[Step]:
    size = plan.size
    yield plan.decodes(append=True)
    borders = plan.rows((1, 1), (1, size), (1, size + 1), (3, size + 2), (2, 2 * size))
    yield plan.base.replace(requests=borders, append=True, unowned=math.nan)
    if plan.has("mixed"):
        yield plan.mixed(append=True)
    for name in QUANTISED:
        if plan.has(name):
            yield plan.general(append=True, cache=name)


@_case("new keys and queries are rotated by their positions", "append rotary",
       check=checks.written)  # fmt: skip
def rotary(plan: Plan) -> Iterator[Step]:
    dim = plan.base.head_dim
    for rotated in {dim // 16 * 16, 16} - {0}:
        if rotated <= dim:
            yield plan.chunks(append=True, rotary=rotated)


@_case("padding rows return finite numbers and change no other row", "padding_rows")
def padding_rows(plan: Plan) -> Iterator[Step]:
    padding = 3 if plan.interface.rows == "any" else 0
    yield plan.general(padding=padding, padded_requests=2)
    yield plan.decodes(padding=padding, padded_requests=2, unowned=math.nan)


@_case("padding rows write to null block 0 only", "padding_rows append", check=checks.written)
def padding_append(plan: Plan) -> Iterator[Step]:
    if plan.interface.rows == "any":
        yield plan.general(padding=3, padded_requests=2, append=True)


@_case("the output of a row without keys is zero, its log-sum-exp -inf or the sink", "empty_rows")
def empty_rows(plan: Plan) -> Iterator[Step]:
    rows = ((1, 0), (1, plan.size + 1), (1, 0))
    if plan.interface.appends != "always":
        yield plan.base.replace(requests=rows, lse=plan.has("lse"))
        yield plan.base.replace(requests=rows[::-1], unowned=math.nan, lse=plan.has("lse"))


@_case("queries, caches and tables may be views of larger tensors", "strided")
def strided(plan: Plan) -> Iterator[Step]:
    yield plan.general(strided=True)
    yield plan.general(gaps=True)


@_case("writes to a view leave the rest of its memory unchanged", "strided append",
       check=checks.written)  # fmt: skip
def strided_append(plan: Plan) -> Iterator[Step]:
    yield plan.general(strided=True, append=True)
    yield plan.general(gaps=True, append=True)


@_case("block tables and lengths may be int64", "int64_tables")
def int64_tables(plan: Plan) -> Iterator[Step]:
    yield plan.general(index=torch.int64)


@_case("a replayed call uses the metadata that is in its buffers at that time", "replay",
       check=checks.replay, sizes="first")  # fmt: skip
def replay(plan: Plan) -> Iterator[Step]:
    yield plan.decodes()
    yield plan.general()
