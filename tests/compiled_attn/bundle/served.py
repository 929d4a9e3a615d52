"""Serves a bundle in a process of its own, and prints what it answered and what it loaded."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import torch

from compiled_attn import LLM
from compiled_attn.engine import SamplingParams


def refuse(*_args, **_kwargs):
    raise AssertionError("something was unpickled")


def copied_bytes(name: str) -> int:
    """Bytes of a mapped file that this process does not share with others."""
    copied, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            is_file = line.endswith(name)
        elif is_file and head == "Anonymous:":
            copied += int(rest.split()[0]) * 1024
    return copied


if __name__ == "__main__":
    folder, prompts, count = json.loads(sys.argv[1])
    pickle.load = pickle.loads = pickle.Unpickler = torch.load = refuse
    with LLM(bundle=folder) as llm:
        short = SamplingParams(max_new_tokens=count)
        texts = [answer.text for answer in llm.generate(prompts, short)]
        (chat,) = llm.chat({"role": "user", "content": "Hello"}, short)
        report = llm.engine.report()
    print(
        json.dumps(
            {
                "texts": texts,
                "chat": chat.text,
                "modules": sorted(sys.modules),
                "copied": copied_bytes("weights.bin"),
                "compiles": report.compiles_after_warmup,
            }
        )
    )
