"""Global settings of torch that a captured graph depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from graphs.torch_internals.checks import native_settings_check

__all__ = ["Settings"]


class Settings(NamedTuple):
    """Settings that change what a callable computes or how it is compiled.

    Attributes:
        grad_enabled, inference_mode: of the calling thread.
        threads: `torch.get_num_threads()`.
        default_dtype: `torch.get_default_dtype()`.
        deterministic: `off`, `on`, or `warn`, as `torch.use_deterministic_algorithms` sets it.
        autocast: the devices for which it is enabled, each with its dtype, as `cpu:bfloat16`; else
            `off`.
        matmul_precision: of float32, as `torch.set_float32_matmul_precision` sets it.
    """

    grad_enabled: bool
    inference_mode: bool
    threads: int
    default_dtype: torch.dtype
    deterministic: str
    autocast: str
    matmul_precision: str

    @classmethod
    def current(cls) -> Settings:
        """Read the settings of the calling thread."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_num_threads(),
            torch.get_default_dtype(),
            ("off", "warn", "on")[torch.get_deterministic_debug_mode()],
            _autocast(),
            torch.get_float32_matmul_precision(),
        )

    def watch(self) -> Callable[[], bool]:
        """Return a check that the settings are still these; it takes a fraction of a microsecond.

        Call it while they are. The check may also fail where another setting changed that torch's
        own guard knows of.
        """
        check = native_settings_check()
        if check is None:
            return lambda: Settings.current() == self
        is_inference, inference = torch.is_inference_mode_enabled, self.inference_mode
        return lambda: check() and is_inference() is inference

    def differences(self, captured: Settings) -> str:
        """Describe what differs from the captured settings: `threads is 2, captured 1`."""
        return ", ".join(
            f"{name} is {now}, captured {then}"
            for name, now, then in zip(self._fields, self, captured, strict=True)
            if now != then
        )


def _autocast() -> str:
    devices = ["cpu"]
    if (accelerator := torch.accelerator.current_accelerator()) is not None:
        devices.append(accelerator.type)
    enabled = [device for device in devices if torch.is_autocast_enabled(device)]
    dtypes = [str(torch.get_autocast_dtype(device)).removeprefix("torch.") for device in enabled]
    return " ".join(map(":".join, zip(enabled, dtypes, strict=True))) or "off"
