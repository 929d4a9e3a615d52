"""Hooks of Triton: a mock of what each version calls, and the real compiler without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest

from graphs import GraphBudgetExceeded, no_compile
from graphs.torch_internals.triton_hooks import TritonHooks

TYPES = {"x": "*fp32", "n": "i32"}


def add_one(x, n):
    """Stands for the Python function of a kernel."""


class Knobs(ModuleType):
    """`triton.knobs`, as far as hooks go, and calls of them as Triton makes them."""

    def __init__(self, has_listener=True):
        super().__init__("triton.knobs")
        self.runtime = type("runtime_knobs", (), {"jit_post_compile_hook": None})()
        listener = {"listener": None} if has_listener else {}
        self.compilation = type("compilation_knobs", (), listener)()

    def compile(self, cache_hit=False, signature=None, jit=True, **more):
        kernel, signature = SimpleNamespace(fn=add_one, __name__="add_one"), signature or {**TYPES}
        if listener := getattr(self.compilation, "listener", None):
            source = SimpleNamespace(fn=kernel, name="add_one", signature=signature)
            listener(src=source, metadata={}, metadata_group={}, times=None, cache_hit=cache_hit)
        if jit and (hook := self.runtime.jit_post_compile_hook):
            info = SimpleNamespace(module=__name__, name="add_one", jit_function=kernel)
            compiled = {"key": "k", "signature": signature, "device": 0, "is_warmup": False, **more}
            return hook(
                key="k",
                repr="add_one[num_warps=4](x: *fp32)",
                fn=info,
                compile=compiled,
                is_manual_warmup=False,
                already_compiled=False,
            )
        return None

    def compile_as_inductor(self):
        self.compile(jit=False)
        kernel = SimpleNamespace(fn=add_one)
        given = {"key": "k", "repr": "source", "fn": kernel, "compile": SimpleNamespace(hash="h")}
        self.runtime.jit_post_compile_hook(is_manual_warmup=False, already_compiled=True, **given)


def imported(monkeypatch, **options):
    knobs = Knobs(**options)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    return knobs


@pytest.fixture
def knobs(monkeypatch):
    return imported(monkeypatch)


@pytest.mark.parametrize(
    "more", [{}, {"specialization_data": "{}"}, {"launch_cooperative_grid": False}]
)
@pytest.mark.parametrize("has_listener", [True, False])
def test_a_kernel_that_compiles_late_is_named_with_its_types(monkeypatch, more, has_listener):
    knobs = imported(monkeypatch, has_listener=has_listener)
    with no_compile(strict=False) as sentinel:
        knobs.compile(**more)
        knobs.compile(**more)
    knobs.compile(**more)
    event, second = sentinel.events
    assert (event.kind, event.function, event.file) == ("triton build", "add_one", __file__)
    assert event == second and event.line == add_one.__code__.co_firstlineno
    assert "x: *fp32, n: i32" in event.reason and event.remedy
    assert (sentinel.late_builds, sentinel.compiles) == (2, 0)


def test_a_kernel_from_tritons_cache_is_not_late(knobs):
    with no_compile() as sentinel:
        knobs.compile(cache_hit=True)
    assert sentinel.events == ()


def test_without_a_listener_each_load_counts_as_the_hook_cannot_say(monkeypatch):
    knobs = imported(monkeypatch, has_listener=False)
    with no_compile(strict=False) as sentinel:
        knobs.compile(cache_hit=True)
    assert sentinel.late_builds == 1


def test_a_strict_sentinel_raises_where_the_kernel_is_called(knobs):
    with no_compile() as sentinel, pytest.raises(GraphBudgetExceeded, match="build of add_one"):
        knobs.compile()
    assert len(sentinel.events) == 1


def test_a_kernel_that_inductor_compiles_at_run_time_counts_once(knobs):
    with no_compile(strict=False) as sentinel:
        knobs.compile_as_inductor()
    assert sentinel.late_builds == 1


def test_hooks_that_were_set_are_called_first_and_are_back_afterwards(knobs):
    calls = []

    def mine(*, key, compile, inductor_args=None, **more):
        calls.append(("hook", key, compile["signature"]))
        return "mine"

    def listener(*, src, cache_hit, **more):
        calls.append(("listener", src.name, cache_hit))

    knobs.runtime.jit_post_compile_hook, knobs.compilation.listener = mine, listener
    with no_compile() as sentinel, pytest.raises(GraphBudgetExceeded):
        knobs.compile()
    with no_compile(strict=False) as sentinel:
        assert knobs.compile(cache_hit=True) == "mine"
        assert knobs.runtime.jit_post_compile_hook.__wrapped__ is mine  # its parameters are seen
    assert sentinel.events == ()
    assert calls == [
        ("listener", "add_one", False),
        ("listener", "add_one", True),
        ("hook", "k", TYPES),
    ]
    assert knobs.runtime.jit_post_compile_hook is mine and knobs.compilation.listener is listener


def test_knobs_are_exactly_as_before_and_hooks_nest(knobs):
    outer, inner = no_compile(strict=False).arm(), no_compile(strict=False).arm()
    outer.disarm()
    knobs.compile()
    inner.disarm()
    assert (len(outer.events), len(inner.events)) == (0, 1)
    assert vars(knobs.runtime) == {} and vars(knobs.compilation) == {}


def test_a_hook_that_chains_ours_stays_and_reports_nothing_after_the_end(knobs):
    seen, calls = [], []
    hooks = TritonHooks(seen.append)
    hooks.add()
    ours = knobs.runtime.jit_post_compile_hook

    def chained(**given):
        calls.append("chained")
        ours(**given)

    knobs.runtime.jit_post_compile_hook = chained
    knobs.compile()
    assert not hooks.remove() and knobs.runtime.jit_post_compile_hook is chained
    knobs.compile()
    hooks.add()
    knobs.compile()
    hooks.remove()
    assert (len(seen), calls) == (2, ["chained"] * 3)


def test_hooks_that_are_replaced_are_logged_at_the_end(knobs, caplog):
    with caplog.at_level("WARNING", "graphs"), no_compile():
        knobs.runtime.jit_post_compile_hook = knobs.compilation.listener = None
    assert "hooks were replaced" in caplog.text


def test_triton_is_not_imported_but_hooked_when_it_is(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text("from . import knobs\nfrom . import runtime\n")
    (package / "runtime.py").write_text("")
    (package / "knobs.py").write_text(
        "import fractions\n"
        "from types import SimpleNamespace\n"
        "runtime = SimpleNamespace(jit_post_compile_hook=None)\n"
        "compilation = SimpleNamespace(listener=None)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with no_compile(strict=False):
        assert "triton" not in sys.modules
        import triton

        assert triton.knobs.runtime.jit_post_compile_hook is not None
    assert triton.knobs.runtime.jit_post_compile_hook is None
    for name in ("triton", "triton.knobs", "triton.runtime"):
        sys.modules.pop(name)


# In a process of its own, as the tests' Triton is an interpreter; without torch, to start quickly.
REAL = """
from types import SimpleNamespace
from graphs import no_compile
sentinel = no_compile(strict=False).arm()

import triton, triton.language as tl
from triton.backends.compiler import GPUTarget

@triton.jit
def zero(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, i * 0, mask=i < n)

def call(dtype):
    zero.warmup(triton.runtime.jit.MockTensor(dtype), 100, BLOCK=16, grid=(1,))

triton.runtime.driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
))
call("float32")
call("float32")
zero.device_caches.clear()
call("float32")  # from Triton's cache
(event,) = sentinel.events
assert (event.kind, event.function, event.file) == ("triton build", "zero", __file__), event
assert "x: *fp32" in event.reason, event
sentinel.disarm()
assert vars(triton.knobs.runtime).get("jit_post_compile_hook") is None
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_real_compiler_reports_what_it_compiles_but_not_what_it_caches(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(REAL)
    settings = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **settings, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
