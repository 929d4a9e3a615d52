"""A continuous batching manager with transformers' private interface, on our engine.

It has the methods that transformers' context manager, ``generate_batch`` and server call, see
`compiled_attn.contrib.transformers.TESTED`.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.engine.request_state import TokenEvent
from compiled_attn.errors import EngineUnsupported
from compiled_attn.models.hf import ATTENTION_NAME

__all__ = ["EngineManager", "manager_for", "sampling_for"]

_ATTRIBUTE = "_compiled_attn_engine"
_IDLE_SECONDS = 0.05
_SUPPORTED = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
}


def manager_for(
    model: Any,
    generation_config: Any,
    continuous_batching_config: Any,
    config: EngineConfig | None,
) -> EngineManager:
    """Create a manager over the engine of a model, which is created on first use.

    Raises:
        ModelRefused, ConfigError, EngineUnsupported: the model or a setting is not supported.
    """
    if getattr(continuous_batching_config, "return_logprobs", False):
        raise EngineUnsupported("expected return_logprobs=False, got True: uninstall")
    settings = generation_config or model.generation_config
    attention = model.config._attn_implementation
    if (cached := getattr(model, _ATTRIBUTE, None)) is None:
        try:
            cached = Engine(model, config), threading.Lock()
        finally:
            model.set_attn_implementation(attention)
        setattr(model, _ATTRIBUTE, cached)
    engine, in_use = cached
    return EngineManager(model, engine, settings, attention, in_use)


@dataclass
class _Queued:
    """A request; ``output`` has its tokens so far."""

    output: GenerationOutput
    sampling: SamplingParams
    streaming: bool
    started_s: float = -1


class EngineManager:
    """Serves requests from any thread in a background thread, with transformers' outputs.

    ``attention`` is the model's own implementation, restored when the thread stops; ``in_use`` is
    held by the manager that uses the engine.
    """

    batch_processor = None

    def __init__(
        self,
        model: Any,
        engine: Engine,
        settings: GenerationConfig,
        attention: str,
        in_use: threading.Lock,
    ) -> None:
        sampling_for(model, settings, (), 1)  # refuse unsupported settings early
        self.model, self.engine, self.generation_config = model, engine, settings
        self.background_thread_status = SimpleNamespace(fatal_error=None)
        self.output_router = OutputRouter()
        self._attention, self._in_use = attention, in_use
        self._names = (f"req_{number}" for number in itertools.count())
        self._queue: queue.SimpleQueue[_Queued | str] = queue.SimpleQueue()
        self._open: dict[int, _Queued] = {}
        self._stopping = self._drain = False
        self._thread: threading.Thread | None = None

    @property
    def warmed_up(self) -> bool:
        """Whether the engine has captured its graphs."""
        return self.engine.warmup_report is not None

    def warmup(self) -> None:
        """Capture the graphs of the engine, once."""
        if not self.warmed_up:
            with self._engine_attention():
                self.engine.warmup()

    def is_running(self) -> bool:
        """Whether the thread is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, which warms up the engine if necessary.

        Raises:
            RuntimeError: another manager of the model is running.
        """
        if self.is_running():
            return
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                "expected a model whose other managers are stopped, got one with a running "
                "manager: stop that first"
            )
        self._stopping = False
        self.background_thread_status.fatal_error = None
        self._thread = threading.Thread(target=self._run, name="compiled-attn manager", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._in_use.release()
            raise

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stop the thread after all requests, or with ``hard_stop`` after the current step.

        The engine stays on the model, so ``keep_for_next_session`` has no effect.
        """
        self._drain, self._stopping = not hard_stop, True
        if block and self._thread is not None:
            self._thread.join(timeout)

    def destroy(self) -> None:
        """Stop; a new manager can be created."""
        self.stop()

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        **processors: Any,
    ) -> str:
        """Queue a request; returns its id. The result of one that is too long is an error.

        Raises:
            EngineUnsupported: timestamps or settings of logits processors.
            RuntimeError: the manager is stopped.
        """
        if record_timestamps or processors:
            given = sorted(processors) or ["record_timestamps"]
            raise EngineUnsupported(f"expected a plain request, got {given}: omit them")
        if self._stopping or self.background_thread_status.fatal_error is not None:
            raise RuntimeError("expected a running manager, got one that was stopped: start it")
        settings, prompt = self.generation_config, [*map(int, input_ids)]
        name = next(self._names) if request_id is None else request_id
        limit = settings.max_new_tokens if max_new_tokens is None else max_new_tokens
        room = max(self.engine.sizing.context - len(prompt), 1)
        end = settings.eos_token_id if eos_token_id is None else eos_token_id
        ends = () if end is None else (end,) if isinstance(end, int) else tuple(end)
        number = settings.num_return_sequences or 1
        sampling = sampling_for(self.model, settings, ends, limit or room, number)
        for choice in range(number):
            # transformers names the first continuation last
            own = name if choice == number - 1 else f"{name}__child#{choice}"
            output = GenerationOutput(own, prompt)
            self._queue.put(_Queued(output, sampling.continuation(choice), streaming))
        return name

    def add_requests(
        self, inputs: Iterable[Sequence[int]], max_new_tokens: int | None = None, **options: Any
    ) -> list[str]:
        """Queue requests, see `add_request`; returns their ids in order."""
        end = self.generation_config.eos_token_id
        end = self.model.config.eos_token_id if end is None else end
        ends: dict[str, Any] = {"eos_token_id": -1 if end is None else end}
        return [
            self.add_request(each, max_new_tokens=max_new_tokens, **ends, **options)
            for each in inputs
        ]

    def cancel_request(self, request_id: str) -> None:
        """Abort a request; it has no further results."""
        self._queue.put(request_id)

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Return the next result; None after the timeout, or if it is another request's."""
        results = self.output_router.output_queue
        if results.empty() and not self.is_running():
            return None
        try:
            result: GenerationOutput = results.get(timeout=timeout)
        except queue.Empty:
            return None
        if request_id is not None and result.request_id != request_id:
            results.put(result)
            return None
        return result

    def __iter__(self) -> Iterator[GenerationOutput]:
        while self.is_running() or not self.output_router.output_queue.empty():
            if (result := self.get_result(timeout=0.1)) is not None:
                yield result

    def register_result_handler(self, request_id: str, callback: Callable[..., None]) -> None:
        """Pass the results of a request to a callback in the running event loop."""
        import asyncio

        handlers = self.output_router.result_handlers

        def handle(result: GenerationOutput) -> None:
            callback(result)
            if result.is_finished():
                handlers.pop(request_id, None)

        handlers[request_id] = handle, asyncio.get_running_loop()

    @contextlib.contextmanager
    def _engine_attention(self) -> Iterator[None]:
        self.model.set_attn_implementation(ATTENTION_NAME)
        try:
            yield
        finally:
            self.model.set_attn_implementation(self._attention)

    @torch.no_grad()
    def _run(self) -> None:
        try:
            self.warmup()
            with self._engine_attention():
                while self._submit_queued():
                    if self.engine.has_work:
                        self._deliver(self.engine.step())
            error: BaseException = RuntimeError(
                "the manager was stopped before the request finished"
            )
        except BaseException as failure:
            self.background_thread_status.fatal_error = error = failure
        try:
            self._fail_all(error)
        finally:
            self._in_use.release()

    def _submit_queued(self) -> bool:
        """Submit queued requests; False when there is nothing more to do."""
        is_idle = not self.engine.has_work
        with contextlib.suppress(queue.Empty):
            while not self._stopping or self._drain:
                self._submit(self._queue.get(is_idle, _IDLE_SECONDS))
                is_idle = False
        return not self._stopping or (self._drain and self.engine.has_work)

    def _submit(self, item: _Queued | str) -> None:
        if isinstance(item, str):
            for number, request in [*self._open.items()]:
                if request.output.request_id == item:
                    del self._open[number]
                    self.engine.abort(number)
            return
        try:
            number = self.engine.submit(item.output.prompt_ids, item.sampling)
        except Exception as error:
            self._fail(item, error)
        else:
            self._open[number] = item

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        outputs = []
        for event in events:
            if (request := self._open.get(event.request_id)) is None:
                continue
            if request.started_s < 0:
                request.started_s = time.perf_counter()
            if event.token is not None:
                request.output.generated_tokens.append(event.token)
            if event.result is not None:
                del self._open[event.request_id]
                outputs.append(_output(request, RequestStatus.FINISHED, event.result.error or None))
            elif request.streaming:
                outputs.append(_output(request, RequestStatus.DECODING, None))
        if outputs:
            self.output_router.deliver_batch(outputs)

    def _fail(self, request: _Queued, error: BaseException) -> None:
        self.output_router.deliver(_output(request, RequestStatus.FAILED, str(error)))

    def _fail_all(self, error: BaseException) -> None:
        for number, request in [*self._open.items()]:
            del self._open[number]
            with contextlib.suppress(Exception):  # the engine may have failed
                self.engine.abort(number)
            self._fail(request, error)
        while not self._queue.empty():
            item = self._queue.get()
            if isinstance(item, _Queued):
                self._fail(item, error)


def _output(request: _Queued, status: RequestStatus, error: str | None) -> GenerationOutput:
    """transformers' output of a request: all of its tokens so far."""
    is_finished = status >= RequestStatus.FINISHED
    return replace(
        request.output,
        generated_tokens=request.output.generated_tokens[:],
        error=error,
        status=RequestStatus.FAILED if error else status,
        lifespan=(request.started_s, time.perf_counter() if is_finished else -1),
    )


def sampling_for(
    model: Any, settings: Any, end: Iterable[int], limit: int, number: int = 1
) -> SamplingParams:
    """Convert a ``GenerationConfig``, with stop tokens ``end`` and at most ``limit`` tokens.

    Raises:
        EngineUnsupported: beams, or a logits processor that the engine does not support.
    """
    if (settings.num_beams or 1) > 1:
        raise EngineUnsupported(
            f"expected num_beams=1, got {settings.num_beams}: the engine has no beams"
        )
    names = {type(each).__name__ for each in model._get_logits_processor(settings)}
    if unknown := sorted(names - _SUPPORTED):
        raise EngineUnsupported(
            f"expected settings that the engine supports, got {', '.join(unknown)}: omit them, or "
            "uninstall"
        )
    given: dict[str, Any] = {"repetition_penalty": settings.repetition_penalty}
    if settings.do_sample:
        given["temperature"] = 1.0 if settings.temperature is None else settings.temperature
        given |= {name: getattr(settings, name, None) for name in ("top_k", "top_p", "min_p")}
    return SamplingParams(
        max_new_tokens=limit,
        stop_token_ids=tuple(token for token in end if token >= 0),
        ignore_eos=True,  # stop tokens are in `end`
        n=number,
        **{name: value for name, value in given.items() if value is not None},
    )
