"""Explicit CUDA graphs, see :mod:`graphs.backends.recorded`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from graphs.backends.inductor import InductorBackend
from graphs.backends.recorded import RecordedBackend, Recorder

__all__ = ["CudaGraphBackend", "CudaRecorder"]


class CudaRecorder(Recorder):
    """Records with `torch.cuda.CUDAGraph`, in one memory pool."""

    device = "cuda"

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._streams: dict[int, torch.cuda.Stream] = {}

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """See :meth:`Recorder.on`."""
        return torch.cuda.device(device)

    @contextmanager
    def recording(self) -> Iterator[torch.cuda.CUDAGraph]:
        """See :meth:`Recorder.recording`."""
        graph = torch.cuda.CUDAGraph()
        # Torch's default capture stream is on the device recorded first, and graphs share the
        # memory of their pool only on the same stream.
        device = torch.cuda.current_device()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._streams[device]):
            yield graph


class CudaGraphBackend(RecordedBackend):
    """Captures with CUDA graphs, over compiled or eager code; see :class:`RecordedBackend`."""

    name = "cudagraph"
    device = "cuda"

    def __init__(
        self,
        recorder: Callable[[], Recorder] = CudaRecorder,
        inductor: InductorBackend | None = None,
    ) -> None:
        super().__init__(recorder, inductor)

    def available(self) -> str | None:
        """Needs a CUDA device, unless something else records."""
        if self._recorder is not CudaRecorder or torch.cuda.is_available():
            return None
        built = "sees no CUDA device" if torch.version.cuda else "is built without CUDA"
        return f"torch {torch.__version__} {built}; use backend 'inductor'"
