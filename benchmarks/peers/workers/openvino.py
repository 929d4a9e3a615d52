"""OpenVINO GenAI: its pipeline of continuous batches, over a model that optimum-intel exports."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

from peers.workers.protocol import Serve, answer

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
_BITS = {"q4": ("int4", "--group-size", "32", "--ratio", "1.0"), "q8": ("int8",)}


def start(options: argparse.Namespace) -> Serve:
    """A pipeline that computes, and keeps keys and values, in the dtype; it exports once.

    With rounded weights it chooses both.
    """
    import openvino
    import openvino_genai as genai

    folder = options.state / "exported"
    if not (folder / "openvino_model.xml").is_file():
        _export(options.model, folder, _BITS.get(options.dtype[:2], ()))
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = options.kv_bytes // 2**30
    properties = {"INFERENCE_NUM_THREADS": options.threads}
    if (precision := _PRECISIONS.get(options.dtype)) is not None:
        properties |= {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)

    def serve(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        asked = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        configs = [
            genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
            for count in new
        ]
        results = pipeline.generate(asked, configs)
        return [list(result.m_generation_ids[0]) for result in results]

    return serve


def _export(model: Path, folder: Path, bits: tuple[str, ...]) -> None:
    program = Path(sys.executable).with_name("optimum-cli")
    task = ["--task", "text-generation-with-past"]
    weights = ["--weight-format", *bits] if bits else []
    command = [program, "export", "openvino", "--model", model, *task, *weights, folder]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    answer(start, "openvino-genai", "optimum-intel")
