"""The models that the command serves: a Hugging Face directory, or a small Llama built on the spot.

Nothing here opens a network connection. Needs the extra ``hf``.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compiled_attn.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ModelError", "default_model", "load_model"]


def default_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a Llama of 4 layers, 256 wide, with random weights that depend on ``seed`` alone.

    4 query heads on 2 KV heads of 64, 4096 tokens, a context of 8192, no end-of-sequence token; the
    global random state is left as it was. The weights are drawn four times wider than usual: so
    greedy texts do not fall into a loop, and depend on the whole context.

    Returns:
        ``LlamaForCausalLM`` of ``dtype`` on the CPU, in evaluation mode, without gradients.
    """
    with _quiet_transformers():
        from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return _for_serving(model, dtype)


def load_model(path: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load any causal language model that transformers can read from a local directory.

    Weights must be safetensors, as pickled weights are code; no code of the directory is run.

    Returns:
        the model in ``dtype`` on the CPU, in evaluation mode, without gradients.

    Raises:
        ModelError: no such directory, no causal language model, unreadable or incomplete weights.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"model {path}: no such directory; expected one with a config.json")
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model {path}: holds no config.json; expected what save_pretrained writes"
        )
    with _quiet_transformers():
        model, info = _from_pretrained(folder, dtype)
    unset = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if unset:
        raise ModelError(
            f"model {path}: {len(unset)} weights are missing or have a shape that config.json does "
            f"not give, {unset[0]} first; save it again with save_pretrained"
        )
    return _for_serving(model, dtype)


def _from_pretrained(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # a damaged directory fails anywhere in the loading code
        reason = textwrap.shorten(str(error) or type(error).__name__, 200, placeholder=" ...")
        raise ModelError(
            f"model {folder}: transformers cannot load it as a causal language model: {reason}"
        ) from error
    model, info = loaded
    return model, info


def _for_serving(model: Any, dtype: torch.dtype) -> PreTrainedModel:
    served: PreTrainedModel = model.to(dtype=dtype).eval().requires_grad_(False)
    return served


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep reports and progress bars of transformers off the terminal: errors are raised anyway."""
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise ModelError(
            "models need transformers, which is not installed: pip install 'compiled-attn[hf]'"
        ) from error
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
