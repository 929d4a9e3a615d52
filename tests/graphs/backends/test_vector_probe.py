"""Inductor's probes of vector instructions: the best that works, and no others."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config, cpu_vec_isa

from graphs.backends.vector_probe import one_probe, probed, without_probes


class Isa:
    def __init__(self, name: str, works: bool = True) -> None:
        self.name, self.works, self.probes = name, works, 0

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        self.probes += 1
        return self.works


@pytest.fixture
def isas(monkeypatch):
    """Four, of which the processor has not the first, and the compiler not the second."""
    if (
        not hasattr(cpu_vec_isa, "x86_isa_checker")
        or torch.backends.cpu.get_cpu_capability() != "AVX512"
    ):
        pytest.skip("the best instructions of this processor are not among several")
    made = [Isa("future"), Isa("broken", works=False), Isa("good"), Isa("old")]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", made)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["broken", "good", "old"])
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    yield made
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


def test_what_is_worse_than_the_best_that_works_is_not_probed(isas):
    with one_probe():
        assert cpu_vec_isa.valid_vec_isa_list() == [isas[2]]
    assert [bool(isa.probes) for isa in isas] == [False, True, True, False]
    assert probed() == ["good"]


def test_where_it_is_known_what_works_nothing_is_probed(isas):
    with without_probes(["old"]):
        assert cpu_vec_isa.valid_vec_isa_list() == [isas[3]]
    assert not any(isa.probes for isa in isas)
    assert [str(isa) for isa in cpu_vec_isa.valid_vec_isa_list()] == ["good", "old"]
    assert probed() == ["good", "old"]


@pytest.mark.parametrize("known", [None, ["removed"]])
def test_where_it_is_not_known_it_is_probed(isas, known):
    with without_probes(known):
        assert "good" in map(str, cpu_vec_isa.valid_vec_isa_list())


def test_afterwards_inductor_is_as_it_was(isas):
    program, found = cpu_vec_isa.VecISA._avx_code, cpu_vec_isa.valid_vec_isa_list
    with one_probe():
        assert [str(isa) for isa in cpu_vec_isa.valid_vec_isa_list()] == ["good"]
    assert cpu_vec_isa.VecISA._avx_code == program and cpu_vec_isa.valid_vec_isa_list is found
    assert [str(isa) for isa in cpu_vec_isa.valid_vec_isa_list()] == ["good", "old"]
    with one_probe():
        assert cpu_vec_isa.valid_vec_isa_list is found  # it has its answers


def test_who_asks_for_a_width_of_vectors_finds_all_of_them(isas):
    with one_probe(), config.patch({"cpp.simdlen": 256}):
        assert [str(isa) for isa in cpu_vec_isa.valid_vec_isa_list()] == ["good", "old"]


def test_the_last_of_several_at_once_puts_it_back(isas):
    found = cpu_vec_isa.valid_vec_isa_list
    first, second = one_probe(), one_probe()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert [str(isa) for isa in cpu_vec_isa.valid_vec_isa_list()] == ["good"]
    second.__exit__(None, None, None)
    assert cpu_vec_isa.valid_vec_isa_list is found
    assert sum(isa.probes for isa in isas) == 2


@pytest.mark.parametrize(
    ("has", "taken", "is_one"),
    [(["avx2"], "AVX2", True), (["avx2", "avx512"], "AVX2", False), (["avx2"], "DEFAULT", False)],
)
def test_where_a_lesser_set_is_asked_for_all_are_probed(monkeypatch, has, taken, is_one):
    if not hasattr(cpu_vec_isa, "x86_isa_checker"):
        pytest.skip("this torch has no such list")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: taken)
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [Isa("avx512"), Isa("avx2")])
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: has)
    own = cpu_vec_isa.valid_vec_isa_list
    own.cache_clear()
    try:
        with one_probe():
            assert [*map(str, cpu_vec_isa.valid_vec_isa_list())] == sorted(has, reverse=True)
        assert bool(own.cache_info().currsize) is not is_one
    finally:
        own.cache_clear()
