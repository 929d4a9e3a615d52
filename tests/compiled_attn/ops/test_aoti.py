"""A packaged graph with the ops runs without this package: from Python, and from C++ alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compiled_attn.ops.cpu.build import find_compiler
from tests.compiled_attn.ops.native_cases import MIXED
from tests.compiled_attn.ops.native_scene import assert_right, scene

pytestmark = pytest.mark.slow

PYTHON = """
import sys, torch
folder, library = sys.argv[1:]
torch.ops.load_library(library)
inputs = torch.load(folder + "/inputs.pt")
out = torch._inductor.aoti_load_package(folder + "/layer.pt2").loader.run(inputs)
torch.save([out[0], out[1], *inputs[3:5]], folder + "/out.pt")
assert not [name for name in sys.modules if name.startswith("compiled_attn")]
"""
CPP = """
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>
#include <iostream>

int main(int, char** argv) {
  if (!dlopen(argv[2], RTLD_NOW)) { std::cerr << dlerror(); return 3; }
  std::string folder = argv[1];
  torch::inductor::AOTIModelPackageLoader loader(folder + "/layer.pt2");
  auto module = torch::jit::load(folder + "/inputs.jit");
  std::vector<at::Tensor> inputs;
  for (auto value : module.run_method("forward").toTensorVector()) inputs.push_back(value);
  auto out = loader.run(inputs);
  auto want = torch::jit::load(folder + "/expected.jit").run_method("forward").toTensorVector();
  bool same = at::equal(out[0], want[0]) && at::equal(inputs[3], want[2]);
  std::cout << (same ? "same" : "different") << std::endl;
  return same ? 0 : 1;
}
"""


class Layer(nn.Module):
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, *step: Tensor
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.compiled_attn.paged_attention_(
            query, key, value, keys, values, *step, 0.25, window=40
        )


class Tensors(nn.Module):
    """A list of tensors that C++ can read."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def forward(self) -> list[Tensor]:
        return self.tensors


@pytest.fixture(scope="module")
def package(ops, tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("package")
    step = scene(MIXED, poison=0.5, window=40)
    tokens = step.query.shape[0]
    new = torch.randn(2, tokens, 2, 16)
    slots = torch.arange(4, 4 + tokens)
    inputs = [step.query, *new, step.key_cache, step.value_cache, slots, *step.step[:-1]]
    torch.save(inputs, folder / "inputs.pt")
    torch.jit.script(Tensors(inputs)).save(str(folder / "inputs.jit"))
    with torch.no_grad():
        program = torch.export.export(Layer(), tuple(inputs), strict=False)
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "layer.pt2"))
    out, lse = ops.paged_attention_(*inputs, step.scale, window=40)
    assert_right((out, lse), step)
    torch.jit.script(Tensors([out, lse, *inputs[3:5]])).save(str(folder / "expected.jit"))
    torch.save([out, lse, *inputs[3:5]], folder / "expected.pt")
    return folder, ops.build.library


def test_a_package_runs_where_only_torch_and_the_library_are(package):
    folder, library = package
    subprocess.run([sys.executable, "-c", PYTHON, str(folder), str(library)], check=True)
    for out, expected in zip(
        torch.load(folder / "out.pt"), torch.load(folder / "expected.pt"), strict=True
    ):
        assert torch.equal(out, expected)


def test_a_package_runs_from_cpp_without_python(package, tmp_path):
    folder, library = package
    home = Path(torch.__file__).parent
    (tmp_path / "main.cpp").write_text(CPP)
    include = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"]
    link = [f"-L{home}/lib", f"-Wl,-rpath,{home}/lib", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    program = str(tmp_path / "main")
    command = [find_compiler(), "-std=c++20", "-O0", str(tmp_path / "main.cpp"), *include, *link]
    subprocess.run([*command, "-o", program], check=True)
    done = subprocess.run([program, str(folder), str(library)], capture_output=True, text=True)
    assert done.stdout.strip() == "same", done.stderr
