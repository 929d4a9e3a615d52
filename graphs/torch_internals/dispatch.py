"""Queries of torch's dispatcher and process groups that have no public API."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["default_store", "has_kernel", "is_fake"]


def has_kernel(op: str, device: str) -> bool:
    """Whether an op, such as ``namespace::name``, is implemented for a type of device."""
    key = torch._C._dispatch_key_for_device(device)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, key))


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no data, as during a trace."""
    from torch._subclasses import FakeTensor

    return tensor.is_meta or isinstance(tensor, FakeTensor)


def default_store() -> Any:
    """The key-value store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
