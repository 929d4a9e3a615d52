"""The global settings of torch that a captured graph was made under, and may only run under."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Mode"]


class Mode(NamedTuple):
    """Settings outside the inputs that change what a callable computes or how it was compiled."""

    grad_enabled: bool
    inference_mode: bool
    threads: int
    default_dtype: torch.dtype
    deterministic: bool

    @classmethod
    def current(cls) -> Mode:
        """Read the settings of the calling thread."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def differences(self, captured: Mode) -> str:
        """Say where this mode is not the captured one: `grad_enabled is True, captured False`."""
        return ", ".join(
            f"{name} is {now}, captured {then}"
            for name, now, then in zip(self._fields, self, captured, strict=True)
            if now != then
        )
