"""Questions to torch's dispatcher and its process groups that have no public form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["default_store", "has_kernel", "is_fake"]


def has_kernel(op: str, device: str) -> bool:
    """Whether an op, such as ``namespace::name``, has an implementation for a type of device."""
    key = torch._C._dispatch_key_for_device(device)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, key))


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no data, as while torch traces."""
    from torch._subclasses import FakeTensor

    return tensor.is_meta or isinstance(tensor, FakeTensor)


def default_store() -> Any:
    """The key-value store that the processes of the default group share."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
