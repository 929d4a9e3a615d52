"""Every public name can be imported from where the documentation says."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import compiled_attn
import graphs

NAMES = {
    "graphs.buckets": "Axis Bucket BucketSpace",
    "graphs.strategies": "linear exponential explicit from_file",
    "graphs": "capture CapturedGraph CaptureError available_backends no_compile explain",
    "graphs.capture": "CapturedGraph CaptureError available_backends",
    "graphs.warmup": "WarmupManager WarmupReport",
    "graphs.sentinel": "no_compile GraphBudgetExceeded",
    "graphs.explain": "BreakReport",
    "graphs.report": "write_report",
    "graphs.store": "ArtifactStore StoredInductor StoredAoti InductorCache",
    "compiled_attn.cache": "PagedKVCache",
    "compiled_attn.blocks": "BlockPool BlockTable PrefixIndex",
    "compiled_attn.defrag": "BlockSwap OnlineDefragmenter",
    "compiled_attn.partial": "PartialAttention merge merge_online lse partial_attn_causal "
    "partial_attn_shared partial_attn_unique",
    "compiled_attn.unified": "UnifiedMetadata unified_attention UnifiedAttention",
    "compiled_attn.batch": "AttentionMetadata BatchBuilder Request RequestTable StepBatch StepPlan "
    "TableBatch TablePlan",
    "compiled_attn.kernels.native": "load unavailable NativeKernel NativeOps NativeUnavailable",
    "compiled_attn.flash": "flash_attn_with_kvcache FlashKVCacheAttention FlashInputs",
    "compiled_attn.paged": "paged_attention_v1 paged_attention_v2 PagedAttention PagedInputs "
    "AttentionMetadata convert_key convert_value reshape_and_cache",
    "compiled_attn.rotary": "apply_rotary",
    "compiled_attn.engine": "Engine EngineConfig SamplingParams",
}
ATTENTION = [
    "compiled_attn.cache",
    "compiled_attn.partial",
    "compiled_attn.unified",
    "compiled_attn.batch",
    "compiled_attn.flash",
    "compiled_attn.rotary",
]


@pytest.mark.parametrize("module", NAMES)
def test_a_module_offers_the_names_that_are_documented_for_it(module):
    offered = importlib.import_module(module)
    for name in NAMES[module].split():
        assert getattr(offered, name, None) is not None, f"{module}.{name}"
        assert name in offered.__all__, f"{module}.__all__ lacks {name}"


def test_the_top_level_offers_every_attention_interface_as_the_same_object():
    pairs = [(module, name) for module in ATTENTION for name in NAMES[module].split()]
    interface = "paged_attention_v1 paged_attention_v2 PagedAttention PagedInputs AttentionMetadata"
    pairs += [("compiled_attn.paged", name) for name in interface.split()]
    for module, name in pairs:
        assert name in compiled_attn.__all__
        assert getattr(compiled_attn, name) is getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("package", [compiled_attn, graphs], ids=lambda package: package.__name__)
def test_everything_that_all_lists_exists(package):
    found = [f"{package.__name__}.{each.name}" for each in pkgutil.iter_modules(package.__path__)]
    for name in [package.__name__, *found]:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            assert error.name and error.name.split(".")[0] not in ("compiled_attn", "graphs")
            continue
        missing = [each for each in getattr(module, "__all__", ()) if not hasattr(module, each)]
        assert not missing, f"{name}.__all__ lists {missing}"
