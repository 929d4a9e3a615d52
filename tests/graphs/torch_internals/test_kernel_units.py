"""The kernels of a graph in few translation units: the same bits, and nothing hangs or is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.utils import fresh_cache

from graphs import available_backends, capture
from graphs.torch_internals import kernel_units as units

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_gradients")

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"


class Step(nn.Module):
    """Has a kernel before, between and behind its products: vectors, reductions, integers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x, rows):
        x = torch.sin(x)
        for layer in self.layers:
            x = torch.softmax(layer(x), -1) * x.amax(0, keepdim=True)
        return x[(rows * 3) % 5].exp(), rows.cumsum(0)


@pytest.fixture(autouse=True)
def cache(tmp_path):
    if reason := available_backends()["inductor"]:
        pytest.skip(reason)
    if not units.SHARED_UNITS.is_on:
        pytest.skip("this torch binds its kernels otherwise")
    with fresh_cache(dir=tmp_path):
        yield tmp_path


@pytest.fixture(scope="module")
def step():
    return Step(), (torch.randn(6, 24), torch.arange(6))


def libraries(cache: Path) -> list[str]:
    """The sources that were compiled with several kernels in them, and those with one."""
    sources = [file.read_text() for file in cache.rglob("*.main.cpp")]
    return [source for source in sources if "extern" in source and "void  kernel" in source]


def run(step):
    module, inputs = step
    return capture(module, inputs).run(*inputs)


def one_by_one(monkeypatch, step):
    """What inductor makes by itself."""
    with monkeypatch.context() as patched:
        patched.setattr(units, "_body_of", lambda source: None)
        return run(step)


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_share_a_library_and_give_the_same_bits(cache, step, monkeypatch, threads):
    with config.patch(compile_threads=threads):
        made = run(step)
        assert [source.count("namespace of_") > 1 for source in libraries(cache)] == [True]
        torch._dynamo.reset()
        with fresh_cache():
            alone = one_by_one(monkeypatch, step)
    for one, other in zip(made, alone, strict=True):
        assert torch.equal(one, other)
    module, inputs = step
    torch.testing.assert_close(made, module(*inputs))


def test_a_graph_that_is_compiled_again_finds_its_libraries(cache, step, monkeypatch):
    run(step)
    files = sorted(cache.rglob("*.so"))
    torch._dynamo.reset()
    CppPythonBindingsCodeCache.cache_clear()  # as a later process has none of them in memory
    monkeypatch.setattr("torch._inductor.cpp_builder.CppBuilder.build", None)
    run(step)
    assert sorted(cache.rglob("*.so")) == files


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "broken", [lambda unit: "no C++\n", lambda unit: 1 / 0], ids=["source", "error"]
)
def test_kernels_that_do_not_compile_together_are_compiled_one_by_one(
    cache, step, monkeypatch, threads, broken
):
    monkeypatch.setattr(units, "_source_of", broken)
    with config.patch(compile_threads=threads):
        made = run(step)
    assert len([source for source in libraries(cache) if "namespace of_" not in source]) > 1
    module, inputs = step
    torch.testing.assert_close(made, module(*inputs))


def test_a_compile_that_is_no_capture_is_left_alone(cache):
    torch.compile(torch.cos)(torch.ones(9))
    with units.share_units():
        pass
    compiled = torch.compile(lambda x: (x.sin() @ x).cos())(torch.ones(9, 9))
    assert compiled.shape == (9, 9)
    assert not any("namespace of_" in source for source in libraries(cache))


@pytest.mark.parametrize(
    "source",
    [
        "#include <vector>\n" + HEADER + "void kernel() {}",
        HEADER + "#include <vector>\nvoid kernel() {}",
        HEADER + "void helper() {}\nvoid kernel() { kernel(); }",
        HEADER + "void other() {}",
        "void kernel() {}",
    ],
)
def test_what_is_not_one_function_after_the_header_is_left_to_inductor(source):
    assert units._body_of(source) is None


def test_pragmas_are_no_matter():
    body = "#pragma omp parallel\n  #pragma GCC ivdep\nvoid kernel() {}"
    assert units._body_of("\n" + HEADER + body) == body


def test_units_have_about_the_same_size(monkeypatch):
    monkeypatch.setattr(units, "_UNIT_CHARACTERS", 100)
    sizes = [10, 60, 20, 30, 120, 40, 1]
    kernels = {str(size): units._Kernel([], "x" * size, object) for size in sizes}
    shared = units._split(kernels)
    assert sorted(name for unit in shared for name in unit) == sorted(kernels)
    assert [sum(map(int, unit)) for unit in shared] == [120, 81, 80]
    assert units._split({}) == []


def test_each_module_gets_its_own_kernels(cache):
    def source(factor):
        body = f"{{ for (int i = 0; i < 4; ++i) out[i] = in[i] * {factor}; }}"
        return HEADER + 'extern "C" void kernel(const float* in, float* out) ' + body

    pool = AsyncCompile()
    with units.share_units():
        scopes = [
            {name: pool.cpp_pybinding(["const float*", "float*"], source(n)) for name in "abc"}
            for n in (2, 3)
        ]
        for scope in reversed(scopes):
            pool.wait(scope)
    for n, scope in zip((2, 3), scopes, strict=True):
        for kernel in scope.values():
            out = torch.zeros(4)
            kernel(torch.ones(4), out)
            assert out.tolist() == [n] * 4
    assert not [name for name in sys.modules if name.endswith(".kernel_1")]
