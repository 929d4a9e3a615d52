"""Every public name can be imported from where the documentation says."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import compiled_attn
import graphs

NAMES = {
    "graphs.buckets.axes": "Axis Bucket",
    "graphs.buckets.space": "BucketSpace",
    "graphs.buckets.ladders": "linear exponential explicit",
    "graphs.buckets.file": "from_file to_file",
    "graphs.errors": "CaptureError GraphBudgetExceeded",
    "graphs": "capture CapturedGraph CaptureError available_backends no_compile explain",
    "graphs.capture.capture": "CapturedGraph available_backends",
    "graphs.warmup.manager": "WarmupManager",
    "graphs.warmup.report": "WarmupReport",
    "graphs.watch.sentinel": "no_compile",
    "graphs.watch.explain": "BreakReport",
    "graphs.report": "write_report",
    "graphs.store": "ArtifactStore StoredInductor StoredAoti InductorCache",
    "compiled_attn.cache.kv_cache": "PagedKVCache",
    "compiled_attn.cache.blocks": "BlockPool BlockTable PrefixIndex",
    "compiled_attn.cache.defrag": "BlockSwap OnlineDefragmenter",
    "compiled_attn.attention.state": "PartialAttention",
    "compiled_attn.attention.merge": "merge merge_online lse",
    "compiled_attn.attention.parts": "partial_attn_causal partial_attn_shared partial_attn_unique",
    "compiled_attn.attention.metadata": "UnifiedMetadata",
    "compiled_attn.attention.unified": "unified_attention",
    "compiled_attn.attention.module": "UnifiedAttention",
    "compiled_attn.step": "AttentionMetadata BatchBuilder Request RequestTable StepBatch StepPlan "
    "TableBatch TablePlan",
    "compiled_attn.ops": "load unavailable NativeKernel NativeOps NativeUnavailable",
    "compiled_attn.compat.flash": "flash_attn_with_kvcache FlashKVCacheAttention FlashInputs",
    "compiled_attn.compat.paged": "paged_attention_v1 paged_attention_v2 PagedAttention "
    "PagedInputs AttentionMetadata convert_key convert_value reshape_and_cache",
    "compiled_attn.attention.rotary": "apply_rotary",
    "compiled_attn.engine": "Engine EngineConfig SamplingParams AsyncEngine RequestHandle",
    "compiled_attn.engine.asynchronous": "AsyncEngine",
    "compiled_attn.integrations.transformers": "install uninstall",
    "compiled_attn.integrations.vllm": "register",
    "compiled_attn.ranks": "RankEngine Ranks engine_on joined_ranks shard",
    "compiled_attn": "LLM",
    "compiled_attn.text": "LLM Answer AnswerPieces Tokenizer TextPieces StopFilter",
}
ATTENTION = [
    "compiled_attn.cache.kv_cache",
    "compiled_attn.attention.state",
    "compiled_attn.attention.merge",
    "compiled_attn.attention.parts",
    "compiled_attn.attention.metadata",
    "compiled_attn.attention.unified",
    "compiled_attn.attention.module",
    "compiled_attn.step",
    "compiled_attn.compat.flash",
    "compiled_attn.attention.rotary",
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
    pairs += [("compiled_attn.compat.paged", name) for name in interface.split()]
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
