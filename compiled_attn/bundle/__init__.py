"""Bundles: a model, compiled, in one folder that another process serves within seconds.

`write_bundle` writes the graphs of a warm engine, their kernels, packed weights and the tokenizer.
`Bundle` checks such a folder, and `BundleExecutor` computes the steps of an engine from it, without
transformers, inductor and a C++ compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphs.lazy import lazy_names

if TYPE_CHECKING:
    from compiled_attn.bundle.executor import BundleExecutor as BundleExecutor
    from compiled_attn.bundle.folder import Bundle as Bundle
    from compiled_attn.bundle.folder import BundleError as BundleError
    from compiled_attn.bundle.folder import BundleMisfit as BundleMisfit
    from compiled_attn.bundle.write import write_bundle as write_bundle
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "executor": "BundleExecutor",
            "folder": "Bundle BundleError BundleMisfit",
            "write": "write_bundle",
        },
    )

__all__ = ["Bundle", "BundleError", "BundleExecutor", "BundleMisfit", "write_bundle"]
