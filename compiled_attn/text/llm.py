"""A model that is asked in text and answers in text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

import torch

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine import Engine, EngineConfig, SamplingParams, Stream
from compiled_attn.errors import ConfigError, RequestFailed
from compiled_attn.models import load_model
from compiled_attn.text.answer import Answer, AnswerPieces
from compiled_attn.text.grammars import Grammars
from compiled_attn.text.tokenizer import Message, Prompt, Tokenizer
from graphs import BucketEvent
from graphs.errors import quoted

__all__ = ["LLM"]


class LLM:
    """A model with its tokenizer, on an engine that is warmed up.

    Args:
        model: as for `compiled_attn.models.load_model`: a directory, a GGUF file, ``"smollm2"``.
        config: sizes and policies of the engine.
        dtype: of the weights.
        device: that the model is put on.
        progress: of the warmup, see `graphs.progress_for`.

    Attributes:
        tokenizer: that of the model.
        grammars: over its tokens.
        model: what the engine runs.
        engine: what serves it; tokens go in and out there.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded.
        ConfigError, graphs.CaptureError, ValueError: see `compiled_attn.engine.Engine`.

    Example::

        llm = LLM("path/to/model")
        for answer in llm.generate(["The capital of France is"], SamplingParams(stop=("\\n",))):
            print(answer.text)
    """

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        progress: Callable[[BucketEvent], None] | None = None,
    ) -> None:
        self.tokenizer = Tokenizer(model)
        self.grammars = Grammars(self.tokenizer)
        self.model = load_model(model, dtype, device)
        self.engine = Engine(
            self.model,
            config,
            has_stop=self.tokenizer.has_stop,
            grammars=self.grammars,
        )
        self.engine.warmup(progress)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: Salt | Sequence[Salt] = None,
    ) -> list[Answer]:
        """The answers to all prompts, served together, in the order of the prompts.

        With ``n`` continuations of a prompt there are as many answers, one after the other.

        Args:
            prompts: texts to go on with, or chats.
            sampling: one for all, or one each.
            salt: one for all, or one each: only prompts of equal salt share blocks.

        Raises:
            ConfigError: a prompt that can never be served, see `Tokenizer.encode` and
                `compiled_attn.engine.Engine.submit`; then none is.
        """
        if isinstance(prompts, str):
            raise ConfigError(f"expected a list of prompts, got {quoted(prompts)}: put it in one")
        tokens = [self.tokenizer.encode(prompt) for prompt in prompts]
        results = self.engine.generate(tokens, sampling, salt=salt, in_order=True)
        return [
            Answer.of(result, self.tokenizer, self.engine.end_tokens(result.sampling))
            for result in results
        ]

    def chat(
        self,
        chats: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: Salt | Sequence[Salt] = None,
    ) -> list[Answer]:
        """The next turn of a chat, or of several in their order, by the model's chat template.

        Args:
            chats: the messages of one chat, or a list of chats.
            sampling, salt: see `generate`.

        Raises:
            ConfigError: see `generate`; or the model has no template.
        """
        is_one = bool(chats) and isinstance(chats[0], Mapping)
        return self.generate([chats] if is_one else chats, sampling, salt=salt)  # type: ignore[list-item, arg-type]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, salt: Salt = None
    ) -> Generator[str, None, None]:
        """The answer to a text or a chat, in pieces of whole characters, as it is generated.

        Closing the generator, or dropping it, aborts the request: its blocks are free at once.

        Raises:
            ConfigError: see `generate`; or several continuations are wanted.
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
