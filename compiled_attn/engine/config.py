"""What an engine is made with, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compiled_attn.ops import CHOICES, KernelChoice
from graphs import BucketSpace
from graphs.capture.contract import Backend

__all__ = ["ConfigError", "EngineConfig"]


class ConfigError(ValueError):
    """A setting or a request that cannot work: the message says expected, got, remedy."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and policies of an engine.

    Args:
        max_tokens_per_step: tokens that a step computes at most.
        max_seqs: requests that run at the same time at most (<= max_tokens_per_step).
        block_size: slots in a KV block.
        num_blocks: blocks of the KV cache with the null block. None: 256 MiB of KV, but room for
            one request of full context at least and for ``max_seqs`` of them at most.
        context: longest prompt plus generation. None: the model's ``max_position_embeddings``.
        buckets: shapes to capture, over the axes tokens, shared, unique, logits for the portable
            kernel, or tokens, requests for the native one. None: a ladder of at most
            ``max_graphs``, see `compiled_attn.engine.ladder`.
        max_graphs: upper limit of captured graphs.
        defrag_waste: share of unused places in the range of used blocks above which blocks are
            moved between steps, a few at a time; 0 moves whenever one can, None never.
        defrag_min_gap: and not before so many places of the range are unused.
        partial_hits: whether a prompt also shares the beginning of a cached block, by a copy of it.
        prefix_key: secret under which the contents of blocks are hashed, so that nobody can guess
            what another's prompt would be found by; None: drawn for each engine.
        backend: a backend of `graphs.capture`, by its name or as an object, such as one with a
            store in its back (`graphs.store.StoredInductor`).
        kernel: "native": attention by the C++ kernel, "portable": by torch alone; "auto": native
            where it supports model, backend and buckets, see `compiled_attn.engine.kernel`.
        strict: a compile after warmup or a fallback is an error instead of a counted warning; so is
            a native kernel that supports the model but cannot be built here.
        watch_process: whether what other threads compile, build and capture during a step counts as
            well, as an error if ``strict``. By default other engines may warm up meanwhile.
        warmup_workers: how many processes compile steps, this one included; see
            `graphs.WarmupManager`.
        warmup_journal: a file that a warmup which was killed goes on from; see there.

    Raises:
        ConfigError: a size that cannot work.
    """

    max_tokens_per_step: int = 256
    max_seqs: int = 32
    block_size: int = 32
    num_blocks: int | None = None
    context: int | None = None
    buckets: BucketSpace | None = None
    max_graphs: int = 24
    defrag_waste: float | None = 0.25
    defrag_min_gap: int = 8
    partial_hits: bool = True
    prefix_key: bytes | None = None
    backend: str | Backend = "inductor"
    kernel: KernelChoice = "auto"
    strict: bool = True
    watch_process: bool = False
    warmup_workers: int = 1
    warmup_journal: str | Path | None = None

    @property
    def backend_name(self) -> str:
        """Name of the backend, also of one that is an object."""
        return self.backend if isinstance(self.backend, str) else self.backend.name

    def __post_init__(self) -> None:
        sizes = (
            ("max_tokens_per_step", self.max_tokens_per_step, 1),
            ("max_seqs", self.max_seqs, 1),
            ("block_size", self.block_size, 1),
            ("num_blocks", self.num_blocks, 2),
            ("context", self.context, 2),
            ("max_graphs", self.max_graphs, 1),
            ("defrag_min_gap", self.defrag_min_gap, 1),
            ("warmup_workers", self.warmup_workers, 1),
        )
        for name, size, least in sizes:
            if size is not None and size < least:
                raise ConfigError(f"expected {name} >= {least}, got {size}: choose a larger {name}")
        if self.defrag_waste is not None and not 0 <= self.defrag_waste <= 1:
            raise ConfigError(f"expected defrag_waste in 0..1 or None, got {self.defrag_waste}")
        if self.kernel not in CHOICES:
            raise ConfigError(f"expected a kernel of {CHOICES}, got {self.kernel!r}: choose one")
        if self.max_seqs > self.max_tokens_per_step:
            raise ConfigError(
                f"expected max_seqs <= max_tokens_per_step, got {self.max_seqs} > "
                f"{self.max_tokens_per_step}: every running request needs a token in a step"
            )
