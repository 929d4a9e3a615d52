"""The configuration of an engine: each setting with its default, help and least value."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from compiled_attn.engine.speculation.setting import Speculation
from compiled_attn.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from compiled_attn.ops import KernelChoice
    from graphs import BucketSpace
    from graphs.capture.contract import Backend

__all__ = ["ConfigError", "EngineConfig", "byte_size"]

_UNITS = {"": 1} | {
    f"{letter}{suffix}".lower(): base**power
    for power, letter in enumerate("KMG", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"(\d+(?:\.\d+(?= *[a-z]))?) *([a-z]*)", re.IGNORECASE)
_WEIGHTS = ("auto", "packed", "plain", "int8", "int4", "w8a16", "w4a16")


def byte_size(name: str, size: int | str) -> int:
    """Parses a size such as ``2147483648``, ``"2GiB"`` or ``"1.5 GB"``."""
    found = _SIZE.fullmatch(str(size).strip())
    unit = found and _UNITS.get(found[2].lower())
    if not found or not unit or not (amount := int(Decimal(found[1]) * unit)):
        raise ConfigError(
            f"expected {name} in bytes or with a unit of KiB, MiB, GiB, KB, MB, GB, got {size!r}: "
            "write it as 2GiB"
        )
    return amount


def setting(default: Any, meaning: str, *, least: int | None = None) -> Any:
    """A field whose meaning is also the help of the command line option of this name."""
    return field(default=default, metadata={"help": meaning, "least": least})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and policies of an engine.

    Raises:
        ConfigError: a size that cannot work.
    """

    max_tokens_per_step: int | None = setting(
        None,
        "Tokens of a step at most; by default 512 if one compile serves all buckets, 256 if each "
        "is compiled, but not less than max_seqs.",
        least=1,
    )
    max_seqs: int = setting(32, "Requests that run at the same time at most.", least=1)
    block_size: int = setting(32, "Tokens in a block of the KV cache.", least=1)
    num_blocks: int | None = setting(
        None,
        "Blocks of the KV cache, null block included; by default what kv_memory holds.",
        least=2,
    )
    kv_memory: int | str | None = setting(
        None,
        "Memory of the KV cache instead of num_blocks: bytes, or a size such as 2GiB; by default "
        "four times the weights, but at least 256 MiB, and at most half of the free memory (on a "
        "device four fifths of it, whatever the weights) or what max_seqs requests of full context "
        "fill.",
    )
    kv_dtype: str = setting(
        "auto",
        "Store keys and values in int8 or fp8 (e4m3), with a scale for each token and head, or "
        "auto: in the model's dtype.",
    )
    state_memory: int | str | None = setting(
        None,
        "Memory for snapshots of recurrent states, from which requests with a cached prefix "
        "continue: bytes, or a size such as 2GiB; 0: none; by default that of max_seqs requests, "
        "or less where memory is scarce. Only for models with such states.",
    )
    snapshot_every: int | None = setting(
        None,
        "Blocks of a prompt between snapshots, at which its steps end; by default those of a whole "
        "step.",
        least=1,
    )
    context: int | None = setting(
        None, "Longest prompt plus generation; by default the model's.", least=2
    )
    buckets: BucketSpace | None = setting(
        None,
        "Shapes to capture, over tokens, shared, unique, logits (portable kernel) or tokens, "
        "requests (native); by default a ladder of at most max_graphs.",
    )
    max_graphs: int = setting(24, "Graphs to capture at most.", least=1)
    learn_buckets: str | Path | None = setting(
        None,
        "File in which the sizes of steps are counted; the next start adds up to a third of "
        "max_graphs, at least one, where steps were padded most.",
    )
    defrag_waste: float | None = setting(
        None,
        "Move blocks between steps, a few at a time, when more than this share of their range is "
        "unused; 0: always, 1: never; by default 0.25 with the portable kernel, whose steps read "
        "the whole range, and never with the native one.",
    )
    prefix_key: bytes | None = setting(
        None,
        "Secret key of the hashes of block contents, so that no user can guess the "
        "prompt of another; by default random for each engine.",
    )
    backend: str | Backend = setting(
        "inductor",
        "inductor, aoti or onnxrt (compiled), eager or aot_eager; in Python also an object, such "
        "as graphs.store.StoredInductor.",
    )
    store: bool | str | Path | None = setting(
        None,
        "Folder of compiled graphs, from which the next start loads them, or True for the default "
        "one, False for none; by default LLM and the commands use the default one, a plain Engine "
        "none. A backend object has its own.",
    )
    kernel: KernelChoice = setting(
        "auto",
        "native (C++, buckets of tokens and requests), portable (torch alone), or auto: native if "
        "it can serve.",
    )
    weights: str = setting(
        "auto",
        "Linear layers of bfloat16 and float32 on the native kernel: packed (in place, in the "
        "order in which they are read), plain, int8 or int4 (rounded to the nearest of 8 or 4 "
        "bits, with a scale for an output or for 32 of its inputs; inputs are rounded to int8, "
        "with a scale for 32 of a row), w8a16 or w4a16 (the same weights, exact inputs), or auto: "
        "packed where that was measured to be faster, and float32 weights that bfloat16 holds "
        "exactly in 16 bits where that is faster still.",
    )
    same_bits: bool = setting(
        False,
        "A token's logits and log-probabilities have the same bits in any step, those of "
        "compiled_attn.score; on the CPU only, and slower.",
    )
    max_adapters: int = setting(
        0, "LoRA adapters at most, which may be added and removed while serving.", least=0
    )
    max_adapter_rank: int = setting(16, "Largest rank of an adapter, 1024 at most.", least=1)
    adapter_targets: tuple[str, ...] = setting(
        (),
        "Last parts of the names of the layers that adapters may change, such as q_proj,v_proj; by "
        "default all linear layers of the decoder. Each costs a little in every step.",
    )
    async_scheduling: bool = setting(
        True,
        "On a device that is not the CPU, plan and launch a step before the tokens of the previous "
        "one are read; the tokens are the same without.",
    )
    speculate: str | None = setting(
        None,
        "Draft the next tokens and check them in one step where that is faster; the tokens are the "
        "same without. ngram:K: what followed the request's last 4 to 2 tokens where it has them "
        "before, K tokens at most; model:DIR:K: the draft of a smaller model.",
    )
    strict: bool = setting(
        True,
        "Make a compile after warmup, a fallback, or a native kernel that cannot be built an error "
        "instead of a counted warning.",
    )
    watch_process: bool = setting(
        False,
        "Also count what other threads compile, build and capture during a step; by default other "
        "engines may warm up meanwhile.",
    )
    sanitize: bool = setting(
        False,
        "Check every read and write of the KV cache, poison freed blocks, and raise CorruptCache "
        "at the first wrong one; decode steps take up to 1.15 times as long, and none is "
        "scheduled ahead.",
    )
    warmup_journal: str | Path | None = setting(
        None, "File that records the result of each graph; a killed warmup continues from it."
    )

    @property
    def cache_dtype(self) -> torch.dtype | None:
        """Element type of keys and values; None: that of the model."""
        from compiled_attn.cache.quantisation import KV_DTYPES

        return KV_DTYPES.get(self.kv_dtype)

    @property
    def kv_bytes(self) -> int | None:
        """`kv_memory` in bytes."""
        return None if self.kv_memory is None else byte_size("kv_memory", self.kv_memory)

    @property
    def state_bytes(self) -> int | None:
        """`state_memory` in bytes."""
        given = self.state_memory
        if given is None or str(given).strip() == "0":
            return None if given is None else 0
        return byte_size("state_memory", given)

    @property
    def speculation(self) -> Speculation | None:
        """`speculate`, parsed."""
        return Speculation.of(self.speculate)

    @property
    def longest_draft(self) -> int:
        """Tokens of a draft at most; 0: there are none."""
        return 0 if (speculation := self.speculation) is None else speculation.most

    @property
    def backend_name(self) -> str:
        """Name of the backend, also of a backend object."""
        return self.backend if isinstance(self.backend, str) else self.backend.name

    def __post_init__(self) -> None:
        # Imported late: a command's help needs no torch.
        from compiled_attn.cache.quantisation import KV_DTYPES
        from compiled_attn.ops import CHOICES
        from compiled_attn.ops.lora import MAX_RANK

        for each in fields(self):
            size, least = getattr(self, each.name), each.metadata["least"]
            if least is not None and size is not None and size < least:
                raise ConfigError(
                    f"expected {each.name} >= {least}, got {size}: choose a larger {each.name}"
                )
        if self.defrag_waste is not None and not 0 <= self.defrag_waste <= 1:
            raise ConfigError(f"expected defrag_waste in 0..1 or None, got {self.defrag_waste}")
        if self.kernel not in CHOICES:
            raise ConfigError(f"expected a kernel of {CHOICES}, got {self.kernel!r}: choose one")
        if self.kv_dtype not in (kinds := ("auto", *KV_DTYPES)):
            raise ConfigError(f"expected a kv_dtype of {kinds}, got {self.kv_dtype!r}: choose one")
        if self.kv_dtype in KV_DTYPES and self.backend_name == "onnxrt":
            raise ConfigError(
                f"expected kv_dtype 'auto' with backend onnxrt, got {self.kv_dtype!r}, which it "
                "cannot capture: take another backend"
            )
        if self.kv_bytes is not None and self.num_blocks is not None:
            raise ConfigError(
                f"expected num_blocks or kv_memory, got both, {self.num_blocks} and "
                f"{self.kv_memory!r}: leave one of them out"
            )
        if self.max_adapter_rank > MAX_RANK:
            raise ConfigError(
                f"expected max_adapter_rank <= {MAX_RANK}, got {self.max_adapter_rank}: merge "
                "adapters of a larger rank into the model"
            )
        targets: object = self.adapter_targets
        if isinstance(targets, str):
            raise ConfigError(
                f"expected adapter_targets as a tuple of names, got {targets!r}: write "
                f"({targets!r},)"
            )
        _ = self.state_bytes  # raises if it is no size
        Speculation.of(self.speculate)
        if self.same_bits:
            _check_same_bits(self)
        if self.sanitize and self.backend_name == "onnxrt":
            raise ConfigError(
                "expected sanitize False with backend onnxrt, which cannot capture its checks, got "
                "True: take another backend"
            )
        if self.weights not in _WEIGHTS:
            raise ConfigError(f"expected weights of {_WEIGHTS}, got {self.weights!r}: choose one")
        if not (self.store is None or isinstance(self.store, (bool, str, os.PathLike))):
            raise ConfigError(
                f"expected store as True, False or a folder, got {self.store!r}: name a folder"
            )
        if self.max_tokens_per_step is not None and self.max_seqs > self.max_tokens_per_step:
            raise ConfigError(
                f"expected max_seqs <= max_tokens_per_step, got {self.max_seqs} > "
                f"{self.max_tokens_per_step}: every running request needs a token in a step"
            )


def _check_same_bits(config: EngineConfig) -> None:
    """Raises ConfigError if a setting needs graphs or kernels whose bits depend on the step."""
    is_inductor = config.backend == "inductor" or not isinstance(config.backend, str)
    rules: dict[str, tuple[bool, str]] = {
        "backend": (is_inductor, "'inductor'"),
        "kernel": (config.kernel != "portable", "'auto' or 'native'"),
        "weights": (config.weights != "plain", "that are packed"),
        "buckets": (config.buckets is None, "None"),
        "learn_buckets": (config.learn_buckets is None, "None"),
        "max_adapters": (not config.max_adapters, "0"),  # `score` has none
    }
    for name, (holds, expected) in rules.items():
        if not holds:
            got = getattr(config, name)
            raise ConfigError(
                f"expected {name} {expected} with same_bits, got {got!r}: leave {name} out"
            )


EngineConfig.__doc__ = "\n".join(
    [
        f"{EngineConfig.__doc__}",
        "    Args:",
        *(f"        {each.name}: {each.metadata['help']}" for each in fields(EngineConfig)),
    ]
)
