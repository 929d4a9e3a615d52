"""``same_bits``: a token's logits do not depend on the step that computes them.

Attention merges fixed segments of keys, linear layers are packed, and everything between them is
one graph of symbolic sizes. `check_model` refuses what has other kernels; `prove` compares steps at
warmup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compiled_attn.errors import ConfigError
from compiled_attn.models.packed import packable
from compiled_attn.models.packed_layers import PackedLayer
from compiled_attn.step import BatchBuilder, Request
from compiled_attn.step.tables import SHARED
from graphs import Bucket, BucketSpace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compiled_attn.engine.kernel import ChosenKernel
    from compiled_attn.models.hf import PagedCausalLM

__all__ = ["check_model", "order", "prove", "same_bits"]

_TOKENS = 24  # of the prompt that is compared
_CHUNKS = ((24,), (1, 3, 17, 3), (7, 16, 1))


def check_model(model: PreTrainedModel, kernel: ChosenKernel) -> None:
    """Raises ConfigError unless the model is on the CPU and all its weights can be packed.

    Kernels of torch for other weights (linear layers of odd sizes, experts, convolutions) choose
    their order of sums by the number of rows.
    """
    if model.device.type != "cpu" or kernel.name != "native":
        where = f"{kernel.name} on {model.device.type}"
        raise ConfigError(
            f"expected the native kernel on the CPU with same_bits, got {where}: leave it out"
        )
    packed = {id(weight) for weight in packable(model)}
    for path, module in model.named_modules():
        if isinstance(module, PackedLayer | nn.Embedding):
            continue
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() > 1 and id(weight) not in packed:
                raise _refused(
                    module, path, f"its {name} {[*weight.shape]} in {weight.dtype} cannot be packed"
                )


def order(buckets: BucketSpace) -> Callable[[Bucket], Any]:
    """The order of captures: the bucket that all engines have is first, as inductor reads sizes of
    the first one; then the largest."""
    return lambda bucket: (bucket.sizes != SHARED[0], -buckets.cost(bucket), bucket.sizes)


def prove(executor: Any) -> None:
    """Compares the logits of drawn tokens in different steps, bit for bit, before any is served.

    Args:
        executor: a `LocalExecutor` after its captures.

    Raises:
        ConfigError: they differ; it names a module that depends on the rows of a step, if one by
            itself does.
    """
    report = executor.graphs.report
    if report and (alone := next((each for each in report.captured if each.why_alone), None)):
        raise _refused(
            executor.module.model, "", f"{alone.bucket} has its own graph: {alone.why_alone}"
        )
    trial = _Trial(executor)
    expected = trial.logits([1] * len(trial.tokens))
    for chunks in _CHUNKS:
        trial.compare(expected, chunks, f"chunks of {chunks}")
    for bucket in executor.sizing.buckets:
        trial.compare(expected, (len(trial.tokens) - 1, 1), f"{bucket} with other requests", bucket)


class _Trial:
    """A prompt of drawn tokens, computed in an unused cache in different steps."""

    def __init__(self, executor: Any) -> None:
        sizing = executor.sizing
        self._executor, self._size = executor, sizing.block_size
        self._blocks = min(sizing.num_blocks, sizing.near_blocks or sizing.num_blocks) - 1
        count = min(_TOKENS, sizing.context, self._blocks * sizing.block_size)
        chance = torch.Generator().manual_seed(0)
        self.tokens: list[int] = torch.randint(sizing.vocab, (count,), generator=chance).tolist()
        self._own = -(-count // sizing.block_size)

    def compare(
        self, expected: Tensor, chunks: Sequence[int], what: str, bucket: Bucket | None = None
    ) -> None:
        """Raises ConfigError unless the logits of the prompt in these chunks are as expected."""
        got = self.logits(chunks, bucket)
        known = ~got.isnan().all(1)
        if same_bits(got[known], expected[: len(got)][known]):
            return
        module = self._executor.module
        path, dependent = _dependent(module, partial(self._eagerly, len(self.tokens)))
        raise _refused(dependent, path, f"{what} gives other logits than single tokens")

    def logits(self, chunks: Sequence[int], bucket: Bucket | None = None) -> Tensor:
        """Logits ``[tokens, vocab]``, NaN where a step does not return them.

        ``bucket``: of the last chunk, which it fills with other requests.
        """
        executor, start, found = self._executor, 0, list[Tensor]()
        for chunk in chunks:
            end = min(start + chunk, len(self.tokens))
            last = bucket if end == len(self.tokens) else None
            others = self._others(last, end - start) if last else []
            plan = self._plan([*others, self._request(start, end, executor.sizing.buckets)])
            chosen = last or executor.graphs.bucket(**plan.need)
            with torch.no_grad(), self._near_blocks():
                out: Tensor = executor.graphs.run(chosen, *plan.fill(chosen))
            count = int(plan.rows.logits[-1])
            found.append(out.new_full((end - start - count, out.shape[1]), torch.nan))
            found.append(out[len(others) : len(others) + count].clone())
            start = end
        return torch.cat(found)

    def _plan(self, requests: Sequence[Request]) -> Any:
        sizing = self._executor.sizing
        builder = BatchBuilder(sizing.num_blocks, self._size, sizing.window)
        return sizing.layout.plan(builder.rows_of(requests))

    def _request(self, start: int, end: int, buckets: BucketSpace) -> Request:
        most = min(bucket["requests"] for bucket in buckets if bucket["tokens"] >= end - start)
        table = range(1, self._own + 1)
        return Request(self.tokens[start:end], start, table, min(end - start, most))

    def _others(self, bucket: Bucket, own: int) -> list[Request]:
        """Requests that fill a bucket, each with a block."""
        count = min(bucket["requests"] - 1, self._blocks - self._own, bucket["tokens"] - own)
        if count <= 0:
            return []
        each = min((bucket["tokens"] - own) // count, self._size, len(self.tokens))
        tokens = self.tokens[:each]
        return [Request(tokens, 0, [self._own + 1 + number]) for number in range(count)]

    def _eagerly(self, count: int) -> None:
        plan = self._plan([Request(self.tokens[:count], 0, range(1, self._own + 1))])
        with torch.no_grad(), self._near_blocks():
            self._executor.module(*plan.fill())

    @contextmanager
    def _near_blocks(self) -> Iterator[None]:
        """Lends each block the near block of its number."""
        if self._executor.sizing.near_blocks is None:
            yield
            return
        near_of = self._executor.near_of
        before = near_of.copy()
        near_of[: self._blocks + 1] = range(self._blocks + 1)
        try:
            yield
        finally:
            near_of[:] = before


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one dtype have the same bits."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def _dependent(model: PagedCausalLM, run: Callable[[], None]) -> tuple[str, nn.Module]:
    """The first module whose output for a token depends on the others: its path, and itself.

    Modules are called again, with two rows of their inputs; the innermost come first. The model
    itself if there is none.
    """
    found: list[tuple[str, nn.Module]] = []

    def check(path: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        rows = args[0] if len(args) == 1 and not kwargs else None
        if found or not (isinstance(rows, Tensor) and isinstance(out, Tensor)):
            return
        if rows.shape[:2] == out.shape[:2] and not same_bits(
            type(module).forward(module, rows[:, :2]), out[:, :2]
        ):
            found.append((path, module))

    with ExitStack() as hooks:
        for path, module in model.model.named_modules():
            hook = module.register_forward_hook(partial(check, path), with_kwargs=True)
            hooks.callback(hook.remove)
        run()
    return found[0] if found else ("", model.model)


def _refused(module: nn.Module, path: str, why: str) -> ConfigError:
    name = f"{type(module).__name__} ({path})" if path else type(module).__name__
    return ConfigError(
        f"expected layers that compute each row alone with same_bits, got {name}: {why}: leave "
        "same_bits out"
    )
