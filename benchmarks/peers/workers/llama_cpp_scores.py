"""Sum of llama.cpp's log-probabilities of windows of token ids, read from stdin as JSON."""

from __future__ import annotations

import json
import sys

import llama_cpp
import numpy as np

from peers.workers.llama_cpp import model_settings


def main(path: str) -> None:
    """Prints the sum; the first token of a window is not counted."""
    windows = json.load(sys.stdin)
    most = max(map(len, windows))
    settings = model_settings(llama_cpp.llama_cpp)
    llama_cpp.llama_cpp.llama_model_default_params = lambda: settings
    llm = llama_cpp.Llama(path, n_ctx=most, n_batch=most, logits_all=True, verbose=False)
    total = 0.0
    for window in windows:
        llm.reset()
        llm.eval(window)
        rows = llm.scores[: len(window) - 1].astype(np.float64)
        norm = np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1)) + rows.max(-1)
        total += float((rows[np.arange(len(rows)), window[1:]] - norm).sum())
    print(total)


if __name__ == "__main__":
    main(sys.argv[1])
