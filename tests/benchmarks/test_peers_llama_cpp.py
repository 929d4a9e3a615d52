"""llama.cpp as a peer: its file holds the model, and its steps hold what each sequence needs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf")
gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("peers.gguf_model", reason="needs the benchmarks' folder")

from peers.gguf_model import gguf_file  # noqa: E402
from peers.servers import PeerGone  # noqa: E402
from peers.systems import PEERS, Task  # noqa: E402
from peers.workers import llama_cpp  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: E402

from compiled_attn.models import load_model  # noqa: E402
from tests.compiled_attn.tiny import tiny_model  # noqa: E402

VOCABULARY = 97


def test_a_file_holds_the_weights_of_the_model(tmp_path: Path):
    model = tiny_model().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "tiny")
    path = gguf_file(tmp_path / "tiny", "bfloat16", tmp_path)
    assert gguf_file(tmp_path / "tiny", "bfloat16", tmp_path) == path
    empty = AutoModelForCausalLM.from_config(model.config).to(torch.bfloat16)
    found = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)
    empty.load_state_dict({name: each.bfloat16() for name, each in found["tensors"].items()})
    ids = torch.arange(1, 12)[None]
    assert torch.equal(empty(ids).logits, model(ids).logits)
    kinds = {
        each.name: each.tensor_type.name
        for each in gguf.GGUFReader(gguf_file(tmp_path / "tiny", "q4_0", tmp_path)).tensors
    }
    assert kinds["blk.1.attn_q.weight"] == "Q4_0" and kinds["blk.1.attn_norm.weight"] == "F32"
    assert kinds["token_embd.weight"] == "Q8_0"


def test_this_engine_reads_the_file_though_its_tokens_have_no_text(tmp_path: Path, monkeypatch):
    # Not by the environment: kernels would be built there.
    monkeypatch.setattr("compiled_attn.models.folder.cache_folder", tmp_path.joinpath)
    model = tiny_model()
    model.save_pretrained(tmp_path / "tiny")
    read = load_model(gguf_file(tmp_path / "tiny", "float32", tmp_path))
    ids = torch.arange(1, 12)[None]
    torch.testing.assert_close(read(ids).logits, model(ids).logits)


def test_a_model_that_is_no_llama_and_a_peer_without_4_bits_are_gone(tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "other"}')
    task = Task(tmp_path / "other", "q4_0", 1, tmp_path)
    for name, reason in (("llama_cpp", "expected a Llama"), ("vllm", "no weights of q4_0")):
        with pytest.raises(PeerGone, match=reason):
            next(each for each in PEERS if each.name == name).start(task)
    assert not [*tmp_path.glob("*.gguf")]


def test_each_sequence_reads_its_own_tokens_and_prefixes_are_computed_once():
    lib = FakeLibrary()
    server = llama_cpp._Server(lib, None, None)
    draw = np.random.default_rng(0)
    for _ in range(2):
        shared = draw.integers(0, VOCABULARY, 700).tolist()
        prompts = [draw.integers(0, VOCABULARY, each).tolist() for each in (1, 30, 511, 513)]
        prompts += [shared + draw.integers(0, VOCABULARY, 3).tolist() for _ in range(20)]
        new = [1 + each % 7 for each in range(len(prompts))]
        lib.computed = 0
        assert server(prompts, new) == [continued(*each) for each in zip(prompts, new, strict=True)]
        most = sum(map(len, prompts[:4])) + len(shared) + 20 * 3 + sum(new)
        assert lib.computed <= most + 512, "prompts of one step cannot share what it computes"


def continued(prompt: list[int], count: int) -> list[int]:
    text = [*prompt]
    for _ in range(count):
        text.append(next_token(text))
    return text[len(prompt) :]


def next_token(text: list[int]) -> int:
    return sum((at + 1) * token for at, token in enumerate(text)) % VOCABULARY


class FakeLibrary:
    """Keeps the tokens of each sequence by position; the next token depends on all of them."""

    def __init__(self) -> None:
        self.tokens: dict[int, dict[int, int]] = defaultdict(dict)
        self.rows: dict[int, Any] = {}
        self.computed = 0

    def llama_model_get_vocab(self, model: object) -> None: ...
    def llama_get_memory(self, context: object) -> None: ...

    def llama_vocab_n_tokens(self, vocab: object) -> int:
        return VOCABULARY

    def llama_batch_init(self, tokens: int, embd: int, sequences: int) -> SimpleNamespace:
        zeros = {name: [0] * tokens for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(**zeros, seq_id=[[0] for _ in range(tokens)], n_tokens=0)

    def llama_memory_clear(self, memory: object, data: bool) -> None:
        self.tokens.clear()

    def llama_memory_seq_rm(self, memory: object, sequence: int, first: int, end: int) -> None:
        kept = self.tokens[sequence].items()
        self.tokens[sequence] = {at: token for at, token in kept if at < first}

    def llama_memory_seq_cp(self, memory: object, source: int, to: int, *whole: int) -> None:
        assert whole == (-1, -1) and not self.tokens[to]
        self.tokens[to] = dict(self.tokens[source])

    def llama_decode(self, context: object, batch: SimpleNamespace) -> int:
        self.rows.clear()
        for at in range(batch.n_tokens):
            assert batch.n_seq_id[at] == 1
            tokens = self.tokens[batch.seq_id[at][0]]
            assert batch.pos[at] == len(tokens), "a token is computed once, in order"
            tokens[batch.pos[at]] = batch.token[at]
            if batch.logits[at]:
                row = np.zeros(VOCABULARY, np.float32)
                row[next_token([*tokens.values()])] = 1
                self.rows[at] = np.ctypeslib.as_ctypes(row)
        self.computed += batch.n_tokens
        return 0

    def llama_get_logits_ith(self, context: object, row: int) -> Any:
        return self.rows[row]
