"""Text in, text out: a model with its tokenizer on a warm engine."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine import Engine, EngineConfig, SamplingParams, Stream
from compiled_attn.engine.adapters import with_adapters
from compiled_attn.engine.local import LocalExecutor
from compiled_attn.errors import ConfigError, RequestFailed
from compiled_attn.garbage import rare_collections
from compiled_attn.models import load_model, served_model
from compiled_attn.models.adapters import PeftAdapters
from compiled_attn.models.folder import will_convert
from compiled_attn.ops.paged_attention import build_ahead
from compiled_attn.text.answer import Answer, AnswerPieces
from compiled_attn.text.grammars import Grammars
from compiled_attn.text.plain_tokenizer import PlainTokenizer
from compiled_attn.text.tokenizer import Message, Prompt, Tokenizer
from compiled_attn.waiting import why_slow
from graphs import BucketEvent, progress_for
from graphs.errors import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from compiled_attn.bundle import Bundle
    from compiled_attn.models.adapters import Adapter

__all__ = ["LLM"]

_log = logging.getLogger(__name__)


class LLM:
    """A model with its tokenizer, on an engine that is warmed up.

    A context manager; leaving it, or `close`, frees graphs and cache.

    Args:
        model: as for `compiled_attn.models.load_model`: a directory, a GGUF file, ``"smollm2"``,
            the id of a model in the local hub cache; or a causal LM of transformers, also wrapped
            by peft, whose own attention `close` restores.
        config: sizes and policies of the engine. Compiled graphs are stored for the next start,
            unless it has ``store=False``.
        tokenizer: of transformers, or a path as for `model`; None: that of the model. Required with
            a model object.
        dtype: of the weights; None: float32, or that of the model object.
        device: of the model; None: the CPU, or that of the model object.
        bundle: a folder of `compiled_attn.bundle.write_bundle`, or its `Bundle`, which has model,
            tokenizer and configuration; give no others, except a model and its arguments to compile
            if the bundle was made for another machine. Sets torch's number of threads to that of
            the bundle.
        adapters: LoRA adapters by name, folders as peft saves them: requests name one in
            `SamplingParams.adapter`, and ``llm.engine.adapters`` adds and removes more. Without
            ``max_adapters`` the engine has room for just these.
        progress: called with the events of the warmup, see `graphs.progress_for`; None: shows them
            if stderr is a terminal, False: does not.

    Attributes:
        tokenizer: of the model.
        grammars: compiles grammars over its tokens.
        model: that the engine runs.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded; a `BundleError` of a bundle.
        AdapterError: an adapter cannot be read, or does not fit.
        ConfigError, graphs.CaptureError, ValueError: see `compiled_attn.engine.Engine`.
        TypeError: a model object without a tokenizer, or with a dtype or device; neither a model
            nor a bundle; or another kind of `config` or `progress`.

    Example::

        with LLM("path/to/model") as llm:
            (answer,) = llm.chat({"role": "user", "content": "What is the capital of France?"})
            print(answer.text)
    """

    @rare_collections
    def __init__(
        self,
        model: str | Path | PreTrainedModel | None = None,
        config: EngineConfig | None = None,
        *,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        bundle: str | Path | Bundle | None = None,
        adapters: Mapping[str, str | Path | Adapter] | None = None,
        progress: Callable[[BucketEvent], None] | Literal[False] | None = None,
    ) -> None:
        if not isinstance(config, EngineConfig | None):
            raise TypeError(
                f"config: expected an EngineConfig or None, got {quoted(config)}: make "
                "EngineConfig(name=value, ...)"
            )
        if not (progress is None or progress is False or callable(progress)):
            raise TypeError(
                f"progress: expected a function of events, False or None, got {quoted(progress)}: "
                "leave it out, or pass graphs.progress_for(sys.stderr)"
            )
        is_shown = progress is None and sys.stderr.isatty()
        self._attention: str | None = None  # to be restored in a model object
        if bundle is not None and model is None:
            _refuse_with_bundle(
                config=config, tokenizer=tokenizer, dtype=dtype, device=device, adapters=adapters
            )
        executor = None if bundle is None else self._opened(bundle, model)
        if executor is None:
            config = config or EngineConfig()
            self._load(model, tokenizer, dtype, device, config.cache_dtype, is_shown=is_shown)
            if config.store is None:
                config = replace(config, store=True)
            inside = given.adapters if (given := PeftAdapters.of(model)) else {}
            config, read = with_adapters(config, {**inside, **(adapters or {})})
            adapters = {name: read[name] for name in adapters or {}}
        else:
            config = executor.config
        self.grammars = Grammars(self.tokenizer)
        if executor is not None:  # measuring takes time, in which this process goes on
            threading.Thread(target=_warn_if_slow, args=(lambda: None,), daemon=True).start()
        elif self.model.device.type == "cpu":
            _warn_if_slow()
        text: Any = {"has_stop": self.tokenizer.has_stop, "grammars": self.grammars}
        self._engine: Engine | None = Engine(
            executor or (self.model if isinstance(model, (str, Path)) else model), config, **text
        )
        try:
            for name, adapter in (adapters or {}).items():
                self._engine.adapters.add(name, adapter)
            self._engine.warmup((progress_for(sys.stderr) if is_shown else progress) or None)
        except BaseException:
            self.close()
            raise

    def _load(
        self,
        model: str | Path | PreTrainedModel | None,
        tokenizer: Any,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        cache_dtype: torch.dtype | None,
        *,
        is_shown: bool,
    ) -> None:
        if model is None:
            raise TypeError("expected a model or a bundle, got neither: give one of them")
        if not isinstance(model, (str, Path)):
            _check_object(model, tokenizer, dtype, device)
            self.tokenizer = Tokenizer(tokenizer)
            self.model = served_model(model)
            self._attention = self.model.config._attn_implementation
            return
        if device is None or torch.device(device).type == "cpu":
            build_ahead(cache_dtype or dtype)
        if is_shown:
            line = f"loading {model}"
            if will_convert(model):
                line = f"reading the tokenizer of the GGUF file of {model}, once"
            print(line, file=sys.stderr, flush=True)
        self.tokenizer = Tokenizer(model if tokenizer is None else tokenizer)
        self.model = load_model(model, dtype, "cpu" if device is None else device)

    def _opened(self, bundle: str | Path | Bundle, model: object) -> LocalExecutor | None:
        """The executor of a bundle; None: it does not fit here, and there is a model to compile."""
        from compiled_attn.bundle import Bundle, BundleExecutor, BundleMisfit

        try:
            opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
            plain = PlainTokenizer.read(opened.folder)
            executor = BundleExecutor(opened)
        except BundleMisfit as error:
            if model is None:
                raise
            _log.warning("compiling the model instead: %s", error)
            return None
        self.tokenizer, self.model = Tokenizer(plain), executor.module.model
        return executor

    @property
    def engine(self) -> Engine:
        """The engine, for prompts and results in tokens.

        Raises:
            RuntimeError: the LLM was closed.
        """
        if self._engine is None:
            raise RuntimeError("expected an open LLM, got one that was closed: make a new one")
        return self._engine

    def close(self) -> None:
        """Aborts open requests, and frees graphs, cache and model; a second call does nothing.

        Restores the attention of a model object; its layers stay packed, which may round otherwise.
        """
        engine, self._engine = self._engine, None
        if engine is None:
            return
        for request_id in engine.open_requests:
            engine.abort(request_id)
        if isinstance(engine.executor, LocalExecutor):
            engine.executor.close()
        if self._attention is not None:
            self.model.set_attn_implementation(self._attention)
        del self.model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: Salt | Sequence[Salt] = None,
    ) -> list[Answer]:
        """Answers all prompts in one batch; returns answers in the order of the prompts.

        A prompt with ``n`` continuations has as many answers, one after the other.

        Args:
            prompts: texts to continue, or chats.
            sampling: one for all, or one each.
            salt: one for all, or one each: only prompts of equal salt share blocks.

        Raises:
            ConfigError: a prompt can never be served, see `Tokenizer.encode` and
                `compiled_attn.engine.Engine.submit`; then none is.
        """
        if isinstance(prompts, (str, Mapping)):
            raise ConfigError(f"expected a list of prompts, got {quoted(prompts)}: put it in one")
        tokens = [self.tokenizer.encode(prompt) for prompt in prompts]
        results = self.engine.generate(tokens, sampling, salt=salt, in_order=True)
        return [
            Answer.of(result, self.tokenizer, self.engine.end_tokens(result.sampling))
            for result in results
        ]

    def chat(
        self,
        chats: Message | Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: Salt | Sequence[Salt] = None,
    ) -> list[Answer]:
        """Answers one chat, or several in their order, with the model's chat template.

        Args:
            chats: the messages of one chat, which may be a single message, or a list of chats.
            sampling, salt: see `generate`.

        Raises:
            ConfigError: see `generate`, or the model has no template.
        """
        given: object = chats
        if isinstance(given, str):
            raise ConfigError(
                f'expected messages, got {quoted(given)}: give {{"role": "user", "content": text}}'
            )
        if isinstance(chats, Mapping):
            chats = [chats]
        is_one = bool(chats) and isinstance(chats[0], Mapping)
        return self.generate([chats] if is_one else chats, sampling, salt=salt)  # type: ignore[list-item, arg-type]

    def stream(
        self, prompt: Prompt | Message, sampling: SamplingParams | None = None, *, salt: Salt = None
    ) -> Generator[str, None, None]:
        """Yields the answer to a text, a chat or a message in pieces of whole characters.

        Closing or dropping the generator aborts the request, which frees its blocks.

        Raises:
            ConfigError: see `generate`, or the sampling has several continuations.
            RuntimeError: at the first piece, while another stream of this model is open.
            RequestFailed: the request ended with an error.
        """
        sampling = SamplingParams() if sampling is None else sampling
        if sampling.n != 1:
            raise ConfigError(
                f"expected n = 1 for a stream of text, got {sampling.n}: use generate"
            )
        tokens = self.tokenizer.encode(prompt)
        return self._pieces(self.engine.stream([tokens], sampling, salt=salt), sampling)

    def _pieces(self, events: Stream, sampling: SamplingParams) -> Generator[str, None, None]:
        pieces = AnswerPieces(self.tokenizer, sampling, self.engine.end_tokens(sampling))
        with contextlib.closing(events):
            for event in events:
                if event.result is not None and event.result.error:
                    raise RequestFailed(event.result.error)
                if event.token is not None and (piece := pieces.put(event.token)):
                    yield piece
        if piece := pieces.rest():
            yield piece


def _warn_if_slow(work: Callable[[], object] | None = None) -> None:
    if advice := why_slow(torch.get_num_threads(), work):
        _log.warning("%s", advice)


def _refuse_with_bundle(**given: object) -> None:
    if names := [name for name, value in given.items() if value is not None]:
        raise TypeError(
            f"expected no {', '.join(names)} with a bundle, which has its own: leave them out"
        )


def _check_object(model: Any, tokenizer: Any, dtype: Any, device: Any) -> None:
    kind = type(model).__name__
    if tokenizer is None:
        raise TypeError(
            f"expected a tokenizer with a model object, got a {kind} alone: pass "
            "tokenizer=AutoTokenizer.from_pretrained(...), or the path of its files"
        )
    if dtype is not None or device is not None:
        raise TypeError(
            f"expected no dtype or device with a model object, got a {kind} with dtype {dtype} and "
            f"device {device}: convert it with model.to() first"
        )
