from __future__ import annotations

import pytest

from graphs.torch_internals.triton_key import NO_TRITON_KEY, skip_triton_key

inductor = pytest.importorskip("torch._inductor.codecache")


def read_triton() -> str:
    raise AssertionError("read the Triton package")


def test_the_key_of_inductor_is_the_same_without_reading_triton(monkeypatch):
    from torch._inductor.runtime import triton_compat

    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    expected = inductor.CacheBase.get_system()
    monkeypatch.setattr(triton_compat, "triton_key", read_triton)
    with skip_triton_key():
        assert inductor.CacheBase.get_system.__wrapped__() == expected
    assert triton_compat.triton_key is read_triton


@pytest.mark.parametrize("why", ["device", "off"])
def test_it_is_read_where_it_counts_or_where_the_feature_is_off(monkeypatch, why):
    from torch._inductor.runtime import triton_compat

    monkeypatch.setattr("torch.accelerator.is_available", lambda: why == "device")
    monkeypatch.setattr(NO_TRITON_KEY, "_why_off", "a test" if why == "off" else "")
    monkeypatch.setattr(triton_compat, "triton_key", read_triton)
    with skip_triton_key(), pytest.raises(AssertionError, match="read the Triton package"):
        triton_compat.triton_key()
