from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from compiled_attn.errors import NativeUnavailable
from compiled_attn.ops.cpu.isa import (
    ISAS,
    available_isas,
    flags_of,
    isas_of_machine,
    request_permission,
)

AVX2 = "fpu avx avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"
BF16 = "avx512_bf16 avx512vbmi avx512_vnni"


@pytest.mark.parametrize(
    ("flags", "machine", "expected"),
    [
        (f"{AVX512} {BF16} amx_bf16 amx_int8 amx_tile", "x86_64", [*list(ISAS)[:4], "portable"]),
        (f"{AVX512} {BF16} amx_tile", "x86_64", [*list(ISAS)[1:4], "portable"]),
        (AVX512, "x86_64", ["avx512", "avx2", "portable"]),
        (f"{AVX2} avx512f avx512_bf16", "x86_64", ["avx2", "portable"]),
        (AVX2.replace("fma", ""), "x86_64", ["portable"]),
        ("", "aarch64", ["neon", "portable"]),
        ("", "riscv64", ["portable"]),
    ],
)
def test_instruction_sets_follow_from_what_the_processor_says(tmp_path, flags, machine, expected):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags\t\t: {flags}\n\nprocessor : 1\nflags\t\t: {flags}\n")
    assert available_isas(cpuinfo, machine) == expected


def test_a_machine_can_build_all_of_its_kind_and_the_portable_one():
    assert isas_of_machine("x86_64") == [isa for isa in ISAS if isa != "neon"]
    assert isas_of_machine("aarch64") == ["neon", "portable"]
    assert isas_of_machine("riscv64") == ["portable"]


def test_without_cpuinfo_torch_is_asked(monkeypatch):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    assert available_isas(Path("/nowhere"), "x86_64") == ["avx2", "portable"]


def test_flags_are_those_of_the_features():
    assert flags_of("portable") == flags_of("neon") == []  # what every compiler takes
    assert flags_of("avx2") == ["-mavx2", "-mfma", "-mf16c"]
    assert "-mavx512bf16" in flags_of("avx512_bf16") and "-mavx512bf16" not in flags_of("avx512")
    with pytest.raises(ValueError, match=r"expected an instruction set of .*got 'sse9'"):
        flags_of("sse9")
    assert flags_of("amx_bf16")[-3:] == ["-mamx-tile", "-mamx-bf16", "-mamx-int8"]


def test_a_system_that_refuses_tile_registers_is_reported_before_a_kernel_runs(monkeypatch):
    library = SimpleNamespace(syscall=lambda *_: -1)
    monkeypatch.setattr("compiled_attn.ops.cpu.isa.ctypes.CDLL", lambda *_, **__: library)
    request_permission("avx512_bf16")  # needs none
    with pytest.raises(NativeUnavailable, match=r"expected Linux to permit the tile registers"):
        request_permission("amx_bf16")
