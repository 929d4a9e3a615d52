"""Adapters by the model of a request, loaded from the start or by a request."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest
from transformers import AutoModelForCausalLM

from compiled_attn.engine import SamplingParams
from compiled_attn.errors import AdapterError
from compiled_attn.serve.settings import ServerSettings
from compiled_attn.text import LLM
from tests.compiled_attn.models.adapters.lora import merged, saved, settings, tensors
from tests.compiled_attn.serve.conftest import CONFIG, running

PROMPT, NEW = "the moon", 8


@pytest.fixture(scope="module")
def folders(chat_dir: Path, tmp_path_factory) -> dict[str, Path]:
    model, base = AutoModelForCausalLM.from_pretrained(chat_dir), tmp_path_factory.mktemp("lora")
    return {
        name: saved(base / name, tensors(model, ("q_proj", "v_proj"), 4, seed), settings(4))
        for seed, name in enumerate(("sql", "poems"))
    }


def texts(chat_dir: Path, folders: dict[str, Path]) -> dict[str, str]:
    """What merged weights answer, by adapter; "tiny": the model itself."""
    from compiled_attn.models.adapters import read_adapter

    found = {}
    for name, folder in {"tiny": None, **folders}.items():
        model = AutoModelForCausalLM.from_pretrained(chat_dir)
        model = merged(model, folder and read_adapter(folder))
        with LLM(model, CONFIG, tokenizer=chat_dir) as llm:
            (answer,) = llm.generate([PROMPT], SamplingParams(max_new_tokens=NEW))
            found[name] = answer.text
    assert len(set(found.values())) == 3
    return found


def post(url: str, **body: object) -> tuple[int, dict]:
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_the_model_of_a_request_is_an_adapter(chat_dir, folders):
    wanted = texts(chat_dir, folders)
    with running(lambda p: LLM(chat_dir, CONFIG, adapters=folders, progress=p)) as server:
        server.wait()

        def ask(name: str) -> tuple[str, str]:
            answer = server.client.completions.create(
                model=name, prompt=PROMPT, max_tokens=NEW, temperature=0
            )
            return answer.model, answer.choices[0].text

        for name, text in [*wanted.items()] * 2:
            assert ask(name) == (name, text)
        assert [each.id for each in server.client.models.list()] == ["tiny", "sql", "poems"]
        text = server.get("/metrics")[1]
        assert 'adapter_slots{model_name="tiny"} 2.0' in text
        assert 'adapter_requests{adapter="sql",model_name="tiny"} 0.0' in text
        assert server.client.models.retrieve("sql").parent == "tiny"
        chat = server.client.chat.completions.create(
            model="sql", messages=[{"role": "user", "content": "a"}], max_tokens=2
        )
        response = server.client.responses.create(model="sql", input="a", max_output_tokens=2)
        assert chat.model == response.model == "sql"
        with pytest.raises(openai.NotFoundError, match="expected the model 'tiny', got 'other'"):
            ask("other")
        # Not served unless that was asked for.
        status, _ = post(f"{server.url}/v1/unload_lora_adapter", lora_name="sql")
        assert status == 404


def test_requests_load_and_unload_adapters_where_that_is_allowed(chat_dir, folders):
    from dataclasses import replace

    config, wanted = replace(CONFIG, max_adapters=1), texts(chat_dir, folders)
    allowed = ServerSettings(adapter_loading=True)
    with running(lambda p: LLM(chat_dir, config, progress=p), allowed) as server:
        server.wait()
        load, unload = (f"{server.url}/v1/{each}_lora_adapter" for each in ("load", "unload"))
        for name in ("sql", "poems"):
            given = {"lora_name": name, "lora_path": str(folders[name])}
            assert post(load, **given) == (200, {"loaded": name})
            answer = server.client.completions.create(
                model=name, prompt=PROMPT, max_tokens=NEW, temperature=0
            )
            assert answer.choices[0].text == wanted[name]
            for body, message in [
                (given, "expected a new name"),
                ({"lora_name": "b", "lora_path": str(folders["sql"])}, "at most 1 adapters"),
                ({"lora_name": "b", "lora_path": "/nowhere"}, "adapter /nowhere: expected"),
                ({"lora_name": "tiny", "lora_path": "/nowhere"}, "another name than the model's"),
                ({"lora_name": "b"}, "expected lora_path as text"),
            ]:
                status, found = post(load, **body)
                assert status == 400 and message in found["error"]["message"]
            assert post(unload, lora_name=name) == (200, {"unloaded": name})
            assert post(unload, lora_name=name)[0] == 404


def test_an_llm_has_room_for_the_adapters_that_it_is_given(chat_dir, folders):
    with LLM(chat_dir, CONFIG, adapters=folders) as llm:
        config = llm.engine.config
        assert (config.max_adapters, config.max_adapter_rank) == (2, 4)
        assert config.adapter_targets == ("q_proj", "v_proj")
        with pytest.raises(AdapterError, match="at most 2 adapters"):
            llm.engine.adapters.add("third", folders["sql"])
    with pytest.raises(AdapterError, match="expected a directory with adapter_config"):
        LLM(chat_dir, CONFIG, adapters={"sql": "/nowhere"})
