"""llama.cpp: its library, with a batch of all sequences in each step, as its server forms them."""

from __future__ import annotations

import argparse
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from peers.workers.protocol import Serve, answer

_SEQUENCES, _CONTEXT, _BATCH = 16, 8192, 512


def start(options: argparse.Namespace) -> Serve:
    """A context of 16 sequences; keys and values are float32 with float32 weights, else 16 bits."""
    import llama_cpp as lib

    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(options.model).encode(), model_settings(lib))
    if not model:
        raise RuntimeError(f"llama.cpp cannot read {options.model}")
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max = _SEQUENCES * _CONTEXT, _SEQUENCES
    params.n_batch = params.n_ubatch = _BATCH
    params.n_threads = params.n_threads_batch = options.threads
    if options.dtype == "float32":
        params.type_k = params.type_v = lib.GGML_TYPE_F32
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to 16 bits
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp has no memory for its context")
    return _Server(lib, model, context)


def model_settings(lib: Any) -> Any:
    """Its defaults, but for AMX tiles: those of 0.3.36 end by SIGSEGV at the second row."""
    settings = lib.llama_model_default_params()
    settings.use_extra_bufts = "amx_int8" not in Path("/proc/cpuinfo").read_text().split()
    return settings


class _Server:
    """Decodes of all running sequences and a part of a prompt in each step."""

    def __init__(self, lib: Any, model: Any, context: Any) -> None:
        self._lib, self._model, self._context = lib, model, context
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._memory = lib.llama_get_memory(context)
        self._batch = lib.llama_batch_init(_BATCH, 0, 1)

    def __call__(self, prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        self._lib.llama_memory_clear(self._memory, False)
        texts: list[list[int]] = [[*prompt] for prompt in prompts]
        lengths = [len(prompt) for prompt in prompts]
        computed = [0] * len(prompts)
        waiting, running = deque(range(len(prompts))), deque[int]()
        place: dict[int, int] = {}
        free = deque(range(_SEQUENCES))
        while waiting or running:
            step: list[tuple[int, int]] = [(each, 1) for each in running]
            room = _BATCH - len(step)
            while waiting and room and (waiting[0] in place or free):
                each = waiting[0]
                if each not in place:
                    place[each] = free.popleft()
                    computed[each] = self._share(each, texts, computed, place)
                count = min(room, lengths[each] - computed[each])
                step.append((each, count))
                room -= count
                if computed[each] + count < lengths[each]:
                    break
                waiting.popleft()
            for each, token in self._compute(step, texts, computed, place):
                texts[each].append(token)
                if each not in running:
                    running.append(each)
                if len(texts[each]) - lengths[each] == new[each]:
                    running.remove(each)
                    free.append(place[each])  # its keys stay until another sequence starts there
        return [text[length:] for text, length in zip(texts, lengths, strict=True)]

    def _share(
        self, each: int, texts: list[list[int]], computed: list[int], place: dict[int, int]
    ) -> int:
        """Copies the longest common prefix of an earlier sequence; returns its length."""
        lib, memory, at = self._lib, self._memory, place[each]
        best, source = 0, -1
        for other, where in [*place.items()]:
            if other != each and where == at:
                del place[other]
            elif other != each:
                common = _common(texts[other][: computed[other]], texts[each][:-1])
                if common > best:
                    best, source = common, where
        lib.llama_memory_seq_rm(memory, at, -1, -1)
        if best:
            lib.llama_memory_seq_cp(memory, source, at, -1, -1)
            lib.llama_memory_seq_rm(memory, at, best, -1)
        return best

    def _compute(
        self,
        step: list[tuple[int, int]],
        texts: list[list[int]],
        computed: list[int],
        place: dict[int, int],
    ) -> list[tuple[int, int]]:
        """Computes the next tokens; returns those that follow, of texts that reached their end."""
        batch, at, ends = self._batch, 0, []
        for each, count in step:
            for position in range(computed[each], computed[each] + count):
                is_last = position + 1 == len(texts[each])
                batch.token[at] = texts[each][position]
                batch.pos[at], batch.n_seq_id[at] = position, 1
                batch.seq_id[at][0] = place[each]
                batch.logits[at] = is_last
                if is_last:
                    ends.append((each, at))
                at += 1
            computed[each] += count
        batch.n_tokens = at
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        return [(each, self._most_likely(row)) for each, row in ends]

    def _most_likely(self, row: int) -> int:
        logits = self._lib.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


def _common(ours: list[int], theirs: list[int]) -> int:
    different = (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
    return next(different, min(len(ours), len(theirs)))


if __name__ == "__main__":
    answer(start, "llama-cpp-python")
