"""A manager of continuous batching as transformers calls one, on our engine.

Private interface of transformers, see `compiled_attn.integrations.transformers.TESTED`: what its
context manager, ``generate_batch`` and its server call is here, under the same names.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.engine.request_state import TokenEvent
from compiled_attn.errors import EngineUnsupported
from compiled_attn.integrations.transformers_sampling import sampling_for
from compiled_attn.models.hf import ATTENTION_NAME

__all__ = ["EngineManager", "manager_for"]

_KEPT = "_compiled_attn_engine"
_IDLE_SECONDS = 0.05


def manager_for(
    model: Any,
    generation_config: Any,
    continuous_batching_config: Any,
    config: EngineConfig | None,
) -> EngineManager:
    """A manager over the engine that a model has, or gets now.

    Raises:
        ModelRefused, ConfigError, EngineUnsupported: the model or a setting cannot be served.
    """
    if getattr(continuous_batching_config, "return_logprobs", False):
        raise EngineUnsupported("expected return_logprobs=False, got True: uninstall for these")
    settings = generation_config or model.generation_config
    attention = model.config._attn_implementation
    kept: _Kept | None = getattr(model, _KEPT, None)
    if kept is None:
        try:
            kept = _Kept(Engine(model, config), threading.Lock())
        finally:
            model.set_attn_implementation(attention)
        setattr(model, _KEPT, kept)
    return EngineManager(model, kept.engine, settings, attention, kept.in_use)


class _Kept(NamedTuple):
    """What stays with a model: its engine, and the lock of the one manager that serves with it."""

    engine: Engine
    in_use: threading.Lock


@dataclass
class Status:
    """The state of the thread, of which transformers reads whether it has failed."""

    fatal_error: BaseException | None = None


@dataclass
class _Order:
    """A request on its way to the engine, and what came of it so far."""

    output: GenerationOutput
    sampling: SamplingParams
    streaming: bool
    begun_s: float = -1
    tokens: list[int] = field(default_factory=list)


class EngineManager:
    """Requests from any thread, served in a thread of its own, answered as transformers does.

    Args:
        model: whose attention is the engine's while the thread runs.
        engine: of the model.
        settings: ``GenerationConfig`` of all requests.
        attention: the model's own implementation.
        in_use: held by the manager that serves with the engine.

    Attributes:
        background_thread_status: whether the thread has failed.
        output_router: where results go.
        warmed_up: whether the engine is.
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
        sampling_for(model, settings, (), 1)  # refused now, and not request by request
        self.model, self.engine, self.generation_config = model, engine, settings
        self.background_thread_status, self.output_router = Status(), OutputRouter()
        self._attention, self._in_use = attention, in_use
        self._names = (f"req_{number}" for number in itertools.count())
        self._orders: queue.SimpleQueue[_Order | str] = queue.SimpleQueue()
        self._open: dict[int, _Order] = {}
        self._stopping = self._drains = False
        self._thread: threading.Thread | None = None

    @property
    def warmed_up(self) -> bool:
        """Whether the engine has captured its graphs."""
        return self.engine.warmup_report is not None

    def warmup(self) -> None:
        """Captures the graphs of the engine, once."""
        if not self.warmed_up:
            with self._engine_attention():
                self.engine.warmup()

    def is_running(self) -> bool:
        """Whether requests are served."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begins to serve; warms up first if nobody did.

        Raises:
            RuntimeError: another manager of the model serves.
        """
        if self.is_running():
            return
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                "expected a model whose other managers are stopped, got one that is served: stop "
                "that manager first"
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
        """Ends the thread, after what was asked (``hard_stop``: after the step that runs).

        The engine stays with the model, so ``keep_for_next_session`` changes nothing.
        """
        self._drains, self._stopping = not hard_stop, True
        if block and self._thread is not None:
            self._thread.join(timeout)

    def destroy(self) -> None:
        """Stops; a manager can be made again."""
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
        """Queues a request and returns its id.

        Raises:
            EngineUnsupported: time stamps or settings of processors of logits.
            RuntimeError: nobody serves.

        One that can never be served, being too long, has an error for its result.
        """
        if record_timestamps or processors:
            asked = sorted(processors) or ["record_timestamps"]
            raise EngineUnsupported(f"expected a plain request, got {asked}: leave them out")
        if self._stopping or self.background_thread_status.fatal_error is not None:
            raise RuntimeError("expected a manager that serves, got one that was stopped: start it")
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
            order = _Order(GenerationOutput(own, prompt), sampling.continuation(choice), streaming)
            self._orders.put(order)
        return name

    def add_requests(
        self, inputs: Iterable[Sequence[int]], max_new_tokens: int | None = None, **options: Any
    ) -> list[str]:
        """Queues requests, see `add_request`, and returns their ids in order."""
        end = self.generation_config.eos_token_id
        end = self.model.config.eos_token_id if end is None else end
        ends: dict[str, Any] = {"eos_token_id": -1 if end is None else end}
        return [
            self.add_request(each, max_new_tokens=max_new_tokens, **ends, **options)
            for each in inputs
        ]

    def cancel_request(self, request_id: str) -> None:
        """Drops a request; nothing more comes of it."""
        self._orders.put(request_id)

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """The next result, None where none comes in time (or the next one is another request's)."""
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
        """Has the results of a request told to a callback, in the event loop that calls this."""
        import asyncio

        handlers = self.output_router.result_handlers

        def tell(result: GenerationOutput) -> None:
            callback(result)
            if result.is_finished():
                handlers.pop(request_id, None)

        handlers[request_id] = tell, asyncio.get_running_loop()

    @contextlib.contextmanager
    def _engine_attention(self) -> Iterator[None]:
        """The model's attention is the engine's, and then its own again."""
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
                while self._take_orders():
                    if self.engine.has_work:
                        self._deliver(self.engine.step())
            error: BaseException = RuntimeError("the manager was stopped before it had ended")
        except BaseException as failure:
            self.background_thread_status.fatal_error = error = failure
        try:
            self._end(error)
        finally:
            self._in_use.release()

    def _take_orders(self) -> bool:
        """Enters what was asked; False when there is nothing more to do."""
        is_idle = not self.engine.has_work
        with contextlib.suppress(queue.Empty):
            while not self._stopping or self._drains:
                self._take(self._orders.get(is_idle, _IDLE_SECONDS))
                is_idle = False
        return not self._stopping or (self._drains and self.engine.has_work)

    def _take(self, asked: _Order | str) -> None:
        if isinstance(asked, str):
            for number, order in [*self._open.items()]:
                if order.output.request_id == asked:
                    del self._open[number]
                    self.engine.abort(number)
            return
        try:
            number = self.engine.submit(asked.output.prompt_ids, asked.sampling)
        except Exception as error:
            self._fail(asked, error)
        else:
            self._open[number] = asked

    def _deliver(self, events: Sequence[TokenEvent]) -> None:
        outputs = []
        for event in events:
            if (order := self._open.get(event.request_id)) is None:
                continue
            if order.begun_s < 0:
                order.begun_s = time.perf_counter()
            if event.token is not None:
                order.tokens.append(event.token)
            if event.result is not None:
                del self._open[event.request_id]
                outputs.append(_answer(order, RequestStatus.FINISHED, event.result.error or None))
            elif order.streaming:
                outputs.append(_answer(order, RequestStatus.DECODING, None))
        if outputs:
            self.output_router.deliver_batch(outputs)

    def _fail(self, order: _Order, error: BaseException) -> None:
        self.output_router.deliver(_answer(order, RequestStatus.FAILED, str(error)))

    def _end(self, error: BaseException) -> None:
        """Nobody waits for what does not come."""
        for number, order in [*self._open.items()]:
            del self._open[number]
            with contextlib.suppress(Exception):  # of an engine that cannot go on
                self.engine.abort(number)
            self._fail(order, error)
        while not self._orders.empty():
            asked = self._orders.get()
            if isinstance(asked, _Order):
                self._fail(asked, error)


def _answer(order: _Order, status: RequestStatus, error: str | None) -> GenerationOutput:
    """What transformers tells of a request: all of its tokens so far."""
    has_ended = status >= RequestStatus.FINISHED
    return GenerationOutput(
        order.output.request_id,
        prompt_ids=order.output.prompt_ids,
        generated_tokens=order.tokens[:],
        error=error,
        status=RequestStatus.FAILED if error else status,
        created_time=order.output.created_time,
        lifespan=(order.begun_s, time.perf_counter() if has_ended else -1),
    )
