"""Registers, memory and instructions of a kernel, compiled for a device that is not at hand."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compiled_attn.ops.triton.arguments import MOST_WARPS_OF_AMD, Launch

__all__ = ["TARGETS", "Resources", "resources"]

TARGETS: Mapping[str, tuple[str, int | str, int]] = MappingProxyType(
    {
        "sm_80": ("cuda", 80, 32),
        "sm_89": ("cuda", 89, 32),
        "sm_90": ("cuda", 90, 32),
        "sm_100": ("cuda", 100, 32),
        "sm_120": ("cuda", 120, 32),
        "gfx942": ("hip", "gfx942", 64),
    }
)
"""Devices that kernels are compiled for."""

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
_INSTRUCTION = re.compile(r"\s([A-Z][A-Z0-9_.]+) (R\d+),\s*([^;]*);")
_REGISTER = re.compile(r"R\d+")
_TENSOR_CORES = re.compile(r"\b(HGMMA|UTC[A-Z]*MMA|HMMA|v_mfma)")


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of a device.

    Attributes:
        registers: of a thread.
        spilled: bytes of a thread that registers were spilled to.
        shared: bytes of a program.
        tensor_cores: the instruction that multiplies matrices; "": none does.
        fused_powers: powers of a product that was fused with a subtraction; NVIDIA only.
    """

    registers: int
    spilled: int
    shared: int
    tensor_cores: str
    fused_powers: int = 0


def resources(kernel: Any, launch: Launch, target: str) -> Resources:
    """Compiles a kernel for one of `TARGETS`; the arguments may be meta tensors.

    Raises:
        KeyError: there is no such target.
    """
    source = _source(kernel, launch.arguments)
    options = {**launch.options, "enable_fp_fusion": True}  # else Triton 3.9 warns of its default
    if target.startswith("gfx"):
        options["num_warps"] = min(options["num_warps"], MOST_WARPS_OF_AMD)
    made = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    if "cubin" in made.asm:
        return _of_cubin(made)
    return _of_amdgcn(made)


def _source(kernel: Any, arguments: Mapping[str, Any]) -> ASTSource:
    """As a launch of these arguments would compile it."""
    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        free = parameter.do_not_specialize
        is_one = _is_int(value) and value == 1 and not free
        if parameter.is_constexpr or value is None or is_one:
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = _type(value)
        if not free and (isinstance(value, Tensor) or (_is_int(value) and value % 16 == 0)):
            attributes[(number,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def _is_int(value: object) -> bool:
    return type(value) is int


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    return "i32" if _is_int(value) else "fp32"


def _of_cubin(made: Any) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, code = _dump("-res-usage", file.name), _dump("-sass", file.name)
    registers, stack = (int(n) for n in re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1])
    spilled = stack if re.search(r"\bSTL\b", code) else 0  # some stack is reserved and not used
    shared, fused = made.metadata.shared, _fused_powers(code)
    return Resources(registers, spilled, shared, _instruction(code), fused)


def _of_amdgcn(made: Any) -> Resources:
    text = made.asm["amdgcn"]
    registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[0])
    spilled = int(re.findall(r"\.private_segment_fixed_size:\s+(\d+)", text)[0])
    return Resources(registers, spilled, made.metadata.shared, _instruction(text))


def _instruction(code: str) -> str:
    found = _TENSOR_CORES.findall(code)
    return max(set(found), key=found.count) if found else ""


def _fused_powers(code: str) -> int:
    """How many arguments of MUFU.EX2 come from an FFMA that subtracts, of those found behind it."""
    written_by: dict[str, str] = {}
    found = 0
    for name, target, rest in _INSTRUCTION.findall(code):
        if name.startswith("MUFU.EX2"):
            source = _REGISTER.search(rest)
            made = written_by.get(source[0], "") if source else ""
            found += made.startswith("FFMA") and ", -R" in made
        scales = name.startswith("FMUL") and target in rest.split(",")[0]  # of small arguments
        if not scales:
            written_by[target] = f"{name} {rest}"
    return found


def _dump(option: str, file: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout
