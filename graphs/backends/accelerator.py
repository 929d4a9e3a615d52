"""Graphs of any accelerator: `torch.accelerator.Graph`, see :mod:`graphs.backends.recorded`.

CUDA and XPU have them in torch 2.13; a device of its own (PrivateUse1) registers them with
`REGISTER_GRAPH_IMPL`. Tested on a fake device only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from graphs.backends.inductor import InductorBackend
from graphs.backends.recorded import Graph, RecordedBackend, Recorder

__all__ = ["AcceleratorBackend", "AcceleratorRecorder"]


class AcceleratorRecorder(Recorder):
    """Records with `torch.accelerator.Graph` on the accelerator of this process, in one pool."""

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None  # or the backend was not available
        self.device = accelerator.type
        self._pool: tuple[int, int] | None = None
        self._streams: dict[int, torch.Stream] = {}

    @contextmanager
    def recording(self) -> Iterator[Graph]:
        """See :meth:`Recorder.recording`."""
        graph = torch.accelerator.Graph(pool=self._pool)
        index = torch.accelerator.current_device_index()
        if index not in self._streams:  # graphs share the memory of a pool only on one stream
            self._streams[index] = torch.Stream(torch.device(self.device, index))
        torch.accelerator.synchronize()
        with self._streams[index]:
            # Not `with graph`, which also empties caches: a device need not have any.
            graph.capture_begin()
            try:
                yield graph
            finally:
                graph.capture_end()
        self._pool = self._pool or graph.pool()


class AcceleratorBackend(RecordedBackend):
    """Captures with graphs of the current accelerator; see :class:`RecordedBackend`."""

    name = "accelerator"

    def __init__(
        self,
        recorder: Callable[[], Recorder] = AcceleratorRecorder,
        inductor: InductorBackend | None = None,
    ) -> None:
        super().__init__(recorder, inductor)

    @property
    def device(self) -> str | None:  # type: ignore[override]
        """The kind of the current accelerator."""
        accelerator = torch.accelerator.current_accelerator()
        return None if accelerator is None else accelerator.type

    def available(self) -> str | None:
        """Needs torch 2.13 and an accelerator that has graphs, unless something else records."""
        if self._recorder is not AcceleratorRecorder:
            return None
        if not hasattr(torch.accelerator, "Graph"):
            return (
                f"torch {torch.__version__} has no torch.accelerator.Graph: install 2.13 or newer, "
                "or use backend 'cudagraph' on CUDA"
            )
        if not torch.accelerator.is_available():
            return f"torch {torch.__version__} sees no accelerator; use backend 'inductor'"
        try:
            torch.accelerator.Graph()
        except RuntimeError as error:
            return f"{str(error).splitlines()[0]}; use backend 'inductor' or 'eager'"
        return None
