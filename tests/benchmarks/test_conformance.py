"""The page of other kernels is what the recorded reports say."""

from __future__ import annotations

import json

import conformance

REPORT = {
    "kernel": "K", "command": "python -m compiled_attn.testing m:k", "version": "p 1",
    "passed": "2 of 3 cases", "features": {"plain": "1/1", "window": "1/2"},
    "failing": {"window": "window"}, "failed": {"window": "nan [step]"},
}  # fmt: skip


def test_the_page_has_a_column_for_each_report_and_the_other_a_line_for_each_script(
    tmp_path, monkeypatch
):
    kernels = tuple(conformance.Kernel(name, name, "m:k", "p") for name in ("ran", "absent"))
    monkeypatch.setattr(conformance, "KERNELS", kernels)
    (tmp_path / "conformance").mkdir()
    monkeypatch.setattr(conformance, "SCRIPTS", tmp_path / "conformance")
    kernels[0].report.write_text(json.dumps(REPORT))
    absent = {"kernel": "L", "version": "q not installed", "not_measured": "no GPU"}
    kernels[1].report.write_text(json.dumps(absent))
    (tmp_path / "conformance" / "k_nan.py").write_text('"""K returns NaN.\n\nMore."""\n')
    lines = [*conformance.page()]
    assert "| plain | 1/1 |" in lines
    assert "| window | **1/2** window |" in lines
    assert "- L (q not installed): no GPU" in lines
    assert "- K returns NaN. [k_nan.py](k_nan.py)" in [*conformance.failures()]


def test_a_kernel_without_its_package_is_not_measured(tmp_path):
    kernel = conformance.Kernel("none", "None", "m:k", "compiled-attn-absent")
    measured = conformance.measure(kernel, tmp_path)
    assert measured["version"] == "compiled-attn-absent not installed"
    assert "not installed" in measured["not_measured"]
