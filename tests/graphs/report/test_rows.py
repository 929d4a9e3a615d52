import json

import torch

from graphs import WarmupManager, explicit
from graphs.report import describe, write_report


def picky(x):
    if x.shape[0] == 3:
        raise ZeroDivisionError("three")
    return x + 1


def test_a_manager_is_described_with_hits_and_failures(tmp_path):
    space = explicit(["rows"], [2, 3, 4])
    manager = WarmupManager(picky, space, lambda b: (torch.zeros(b.rows),), backend="eager")
    assert describe(manager)["buckets"] == []
    manager.warmup()
    manager.bucket(rows=1)
    found = describe(manager)
    assert (found["graphs"], found["failed"]) == (2, 1)
    rows = {row["bucket"]: row for row in found["buckets"]}
    assert [rows[f"rows={n}"]["hits"] for n in (2, 3, 4)] == [1, 0, 0]
    assert "three" in rows["rows=3"]["error"]
    page = write_report(tmp_path, found).read_text()
    assert "rows=3: failed, " in page and "rows=4: never hit" in page
    assert json.loads((tmp_path / "report.json").read_text()) == found
