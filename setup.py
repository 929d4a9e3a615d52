"""Puts prebuilt kernels into a wheel: those in the folder COMPILED_ATTN_PREBUILT, see `make wheel`.

Without it a wheel is pure Python, and builds its kernels where it is used.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PREBUILT = os.environ.get("COMPILED_ATTN_PREBUILT", "")


class WithKernels(build_py):
    """Copies the libraries and their manifest into the package."""

    def run(self) -> None:
        """Builds the package."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "compiled_attn/ops/cpu/prebuilt")
            shutil.rmtree(target, ignore_errors=True)
            if PREBUILT:
                shutil.copytree(PREBUILT, target)


class ForPlatform(Distribution):
    """A distribution that is for a platform if it has libraries."""

    def has_ext_modules(self) -> bool:
        """Whether it is."""
        return bool(PREBUILT)


class PlatformWheel(bdist_wheel):
    """A wheel for any Python 3, and for the platform that its libraries were built for."""

    def get_tag(self) -> tuple[str, str, str]:
        """Tags of Python, its ABI and the platform."""
        if not PREBUILT:
            return super().get_tag()
        manifest = json.loads(Path(PREBUILT, "manifest.json").read_text())
        return "py3", "none", manifest["platform"]


setup(distclass=ForPlatform, cmdclass={"build_py": WithKernels, "bdist_wheel": PlatformWheel})
