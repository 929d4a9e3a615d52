import pytest
import torch

from graphs.mode import Mode


def test_modes_of_the_same_settings_are_equal_and_differ_in_nothing():
    mode = Mode.current()
    assert mode == Mode.current()
    assert mode.differences(Mode.current()) == ""


def test_each_changed_setting_is_named_with_both_values():
    captured = Mode.current()
    threads = torch.get_num_threads()
    with torch.no_grad():
        assert Mode.current().differences(captured) == "grad_enabled is False, captured True"
    with torch.inference_mode():
        assert "inference_mode is True, captured False" in Mode.current().differences(captured)
    try:
        torch.set_num_threads(threads + 1)
        expected = f"threads is {threads + 1}, captured {threads}"
        assert Mode.current().differences(captured) == expected
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        text = Mode.current().differences(captured)
        assert "default_dtype is torch.float64, captured torch.float32" in text
        assert "deterministic is True, captured False" in text
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert Mode.current() == captured


@pytest.mark.parametrize("field", Mode._fields)
def test_the_order_of_the_fields_is_the_order_they_are_read_in(field):
    expected = {
        "grad_enabled": torch.is_grad_enabled(),
        "inference_mode": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
        "default_dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    assert getattr(Mode.current(), field) == expected[field]
