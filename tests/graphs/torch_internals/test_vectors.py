import pytest

from graphs.torch_internals.vectors import trust_vectors


@pytest.mark.parametrize(
    "program, expected", [("\nimport torch\nrun\n", ""), ("import sys\n", "import sys\n")]
)
def test_programs_that_import_torch_are_built_only(program, expected, monkeypatch):
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import VecISA

    monkeypatch.setattr(VecISA, "_avx_py_load", program)
    with trust_vectors():
        assert config.cpp.vec_isa_ok is True
        assert VecISA._avx_py_load == expected
    assert config.cpp.vec_isa_ok is None
    assert VecISA._avx_py_load == program


def test_the_choice_of_a_user_stays(monkeypatch):
    from torch._inductor import config

    with config.patch({"cpp.vec_isa_ok": False}), trust_vectors():
        assert config.cpp.vec_isa_ok is False
