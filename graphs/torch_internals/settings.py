"""Settings of Dynamo, inductor and functorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = [
    "custom_passes",
    "has_cudagraphs",
    "settings_digests",
    "settings_snapshot",
    "unlimited_recompiles",
]

_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
    "custom_partitioner_fn",
)


def settings_digests() -> tuple[bytes, ...]:
    """Digests of all settings that code depends on; fast, valid only in this process."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    return inductor.get_hash(), functorch.get_hash()


def settings_snapshot() -> Iterator[tuple[str, Any]]:
    """Yield name and value of all settings that code depends on."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    for config in (inductor, functorch):
        for name, value in config.save_config_portable().items():
            if name != "aot_inductor.metadata":  # written by a compile, not a setting of it
                yield f"{config.__name__}.{name}", value


def custom_passes() -> dict[str, Any]:
    """Custom passes of inductor that are set; torch itself leaves them out of its digests."""
    from torch._inductor import config as inductor

    found = {name: getattr(inductor, name, None) for name in _PASSES}
    return {name: value for name, value in found.items() if value is not None}


def has_cudagraphs() -> bool:
    """Whether inductor records CUDA graphs itself."""
    return bool(torch._inductor.config.triton.cudagraphs)


def unlimited_recompiles() -> AbstractContextManager[Any]:
    """Lift the limit of recompiles inside the context."""
    import torch._dynamo

    many = 1 << 20
    patched: AbstractContextManager[Any] = torch._dynamo.config.patch(
        recompile_limit=many, accumulated_recompile_limit=many
    )
    return patched
