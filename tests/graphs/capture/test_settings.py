import pytest
import torch

from graphs.capture import settings as module
from graphs.capture.settings import Settings


def test_modes_of_the_same_settings_are_equal_and_differ_in_nothing():
    mode = Settings.current()
    assert mode == Settings.current()
    assert mode.differences(Settings.current()) == ""


def test_each_changed_setting_is_named_with_both_values():
    captured = Settings.current()
    threads = torch.get_num_threads()
    with torch.no_grad():
        assert Settings.current().differences(captured) == "grad_enabled is False, captured True"
    with torch.inference_mode():
        assert "inference_mode is True, captured False" in Settings.current().differences(captured)
    try:
        torch.set_num_threads(threads + 1)
        expected = f"threads is {threads + 1}, captured {threads}"
        assert Settings.current().differences(captured) == expected
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        text = Settings.current().differences(captured)
        assert "default_dtype is torch.float64, captured torch.float32" in text
        assert "deterministic is on, captured off" in text
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert "deterministic is warn, captured off" in Settings.current().differences(captured)
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert Settings.current() == captured


def test_autocast_is_named_with_its_device_and_dtype():
    captured = Settings.current()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text = Settings.current().differences(captured)
    assert text == "autocast is cpu:bfloat16, captured off"


def test_the_precision_of_float32_products_is_part_of_the_mode():
    captured = Settings.current()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert "matmul_precision is medium" in Settings.current().differences(captured)
    finally:
        torch.set_float32_matmul_precision(before)


def set_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    return lambda: torch.set_num_threads(before)


def set_deterministic():
    torch.use_deterministic_algorithms(True)
    return lambda: torch.use_deterministic_algorithms(False)


def set_dtype():
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def entered(context):
    def enter():
        manager = context()
        manager.__enter__()
        return lambda: manager.__exit__(None, None, None)

    return enter


@pytest.mark.parametrize("has_native", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        set_threads,
        set_deterministic,
        set_dtype,
        entered(torch.no_grad),
        entered(torch.inference_mode),
        entered(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    ],
)
def test_a_watch_sees_each_change_until_it_is_undone(change, has_native, monkeypatch):
    if not has_native:
        monkeypatch.setattr(module, "native_settings_check", lambda: None)
    is_same = Settings.current().watch()
    assert is_same()
    undo = change()
    try:
        assert not is_same()
    finally:
        undo()
    assert is_same()


def test_a_watch_made_in_inference_mode_knows_when_it_is_left():
    with torch.inference_mode():
        is_same = Settings.current().watch()
        assert is_same()
    with torch.no_grad():
        assert not is_same()
