"""Compiles kernels for absent devices; reports registers, memory, instructions and occupancy."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from compiled_attn.ops.triton.arguments import MAX_AMD_WARPS, Launch

__all__ = ["TARGETS", "Resources", "machine_code", "programs_per_processor", "resources"]

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
"""Devices to compile for."""


class _Processor(NamedTuple):
    """What programs share on a multiprocessor (CUDA programming guide, compute capabilities)."""

    warps: int
    programs: int
    shared: int


_PROCESSORS: Mapping[str, _Processor] = MappingProxyType(
    {
        "sm_80": _Processor(64, 32, 164 * 1024),
        "sm_89": _Processor(48, 24, 100 * 1024),
        "sm_90": _Processor(64, 32, 228 * 1024),
        "sm_100": _Processor(64, 32, 228 * 1024),
        "sm_120": _Processor(48, 24, 100 * 1024),
    }
)
_REGISTERS = 65536
_RESERVED = 1024  # bytes of shared memory of each program
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
_STEPS = {
    "S": r"STG|global_store",
    "B": r"BAR\.SYNC|s_barrier",
    "R": r"MEMBAR\.\w+\.GPU|buffer_wbl2 sc1",  # release
    "A": r"ATOMG\.E\.ADD\.STRONG\.GPU|global_atomic_add",
    "Q": r"CCTL\.IVALL|buffer_inv sc1",  # acquire
    "L": r"LDG\.[.\w]*STRONG\.GPU|global_load",
}
_STEP = re.compile("|".join(rf"(?P<{name}>\b(?:{code}))" for name, code in _STEPS.items()))
_PUBLISHES = re.compile("SB+RAQB+L")
_TENSOR_CORES = re.compile(r"\b(HGMMA|UTC[A-Z]*MMA|HMMA|v_mfma)")
_MEMORY = re.compile(r"\s(LDGSTS|LDG|STG|LDL|STL|UTMALDG|ATOMG|RED)\b([A-Z0-9_.]*)")


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel.

    Attributes:
        registers: per thread.
        spilled: bytes of spilled registers per thread.
        shared: bytes of shared memory per program.
        tensor_cores: the matrix instruction; "": none.
        fused_powers: exponentials of a product fused with a subtraction; NVIDIA only.
        publishes: stores, a barrier, an atomic addition that releases and acquires for the whole
            device, a barrier and loads from its L2 cache follow each other.
        memory: instructions on global and local memory by name and bits of a thread, such as
            "LDGSTS.128" (a copy to shared memory that runs on); NVIDIA only.
        programs: resident on a multiprocessor at once; NVIDIA only, else 0.
    """

    registers: int
    spilled: int
    shared: int
    tensor_cores: str
    fused_powers: int = 0
    publishes: bool = False
    memory: dict[str, int] = field(default_factory=dict)
    programs: int = 0


def resources(kernel: Any, launch: Launch, target: str) -> Resources:
    """Compiles a kernel for one of `TARGETS`; the arguments may be meta tensors.

    Raises:
        KeyError: unknown target.
    """
    source = _source(kernel, launch.arguments)
    options = {**launch.options, "enable_fp_fusion": True}  # else Triton 3.9 warns of its default
    if target.startswith("gfx"):
        options["num_warps"] = min(options["num_warps"], MAX_AMD_WARPS)
    made = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    if "cubin" in made.asm:
        return _of_cubin(made, target)
    return _of_amdgcn(made)


def programs_per_processor(target: str, registers: int, shared: int, warps: int) -> int:
    """Returns how many programs a multiprocessor of a `TARGETS` of NVIDIA holds at once.

    Args:
        registers: of a thread; a warp's are allocated in units of 256.
        shared: bytes of shared memory of a program.
        warps: of a program.
    """
    processor = _PROCESSORS[target]
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = _REGISTERS // of_warp // 4 * 4 // warps
    by_shared = processor.shared // (-(-(shared + _RESERVED) // 128) * 128)
    return min(processor.programs, processor.warps // warps, by_registers, by_shared)


def machine_code(kernel: Any, launch: Launch, target: str) -> str:
    """Returns the machine code of a kernel for one of `TARGETS` of NVIDIA, as `cuobjdump` has it.

    Raises:
        KeyError: unknown target.
    """
    options = {**launch.options, "enable_fp_fusion": True}
    source = _source(kernel, launch.arguments)
    made = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        return _dump("-sass", file.name)


def _source(kernel: Any, arguments: Mapping[str, Any]) -> ASTSource:
    """The source as specialised by a launch with these arguments."""
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
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}{value.block_shape}>"
    return "i32" if _is_int(value) else "fp32"


def _of_cubin(made: Any, target: str) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, code = _dump("-res-usage", file.name), _dump("-sass", file.name)
    registers, stack = (int(n) for n in re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1])
    spilled = stack if re.search(r"\bSTL\b", code) else 0  # some stack is reserved but unused
    return Resources(
        registers, spilled, made.metadata.shared, _instruction(code), _fused_powers(code),
        _publishes(code), _memory(code),
        programs_per_processor(target, registers, made.metadata.shared, made.metadata.num_warps),
    )  # fmt: skip


def _of_amdgcn(made: Any) -> Resources:
    text = made.asm["amdgcn"]
    registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[0])
    spilled = int(re.findall(r"\.private_segment_fixed_size:\s+(\d+)", text)[0])
    shared, publishes = made.metadata.shared, _publishes(text)
    return Resources(registers, spilled, shared, _instruction(text), publishes=publishes)


def _instruction(code: str) -> str:
    found = _TENSOR_CORES.findall(code)
    return max(set(found), key=found.count) if found else ""


def _memory(code: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for name, suffix in _MEMORY.findall(code):
        bits = next((each for each in ("128", "64", "16", "8") if each in _widths(suffix)), "32")
        found[f"{name}.{bits}"] += 1
    return dict(sorted(found.items()))


def _widths(suffix: str) -> set[str]:
    """The bits in a suffix such as ``.E.BYPASS.LTC128B.128`` or ``.E.U16.CONSTANT``."""
    return {part.lstrip("US") for part in suffix.split(".")}


def _publishes(code: str) -> bool:
    steps = "".join(step.lastgroup or "" for step in _STEP.finditer(code))
    return len(_PUBLISHES.findall(steps)) == steps.count("A") == 1


def _fused_powers(code: str) -> int:
    """Counts arguments of MUFU.EX2 that come from a subtracting FFMA."""
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
