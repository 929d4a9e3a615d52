"""The report of the kit: a table of features as text, JSON and HTML."""

from __future__ import annotations

import html
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_attn import __version__
from compiled_attn.testing.capabilities import FEATURES
from compiled_attn.testing.kit.result import Result, Status
from compiled_attn.testing.kit.script import script
from compiled_attn.testing.kit.subject import Subject
from compiled_attn.testing.kit.trial import MULTIPLE, ROUNDINGS, Measured
from graphs.errors import clipped

__all__ = ["PLAIN", "Report", "Row"]

PLAIN = "plain"
"""Name of the row of cases that every kernel must pass."""


@dataclass(frozen=True)
class Row:
    """One feature in the table.

    Attributes:
        feature: a name in `compiled_attn.testing.FEATURES`, or "plain".
        status: "failed" if a case failed.
        passed, cases: number of cases that passed, and that ran.
        error, allowed: maximum error and tolerance of the case closest to its tolerance.
        note: names of failed cases, else the first message of a case.
    """

    feature: str
    status: Status
    passed: int
    cases: int
    error: float
    allowed: float
    note: str


@dataclass(frozen=True)
class Report:
    """Results of all cases; prints as a table.

    Attributes:
        subject: the op under test.
        seed: seed of all inputs.
        results: result of each case.
    """

    subject: Subject
    seed: int
    results: tuple[Result, ...]

    @property
    def failed(self) -> tuple[Result, ...]:
        """Failed cases; the first one is shrunk."""
        return tuple(each for each in self.results if each.status == "failed")

    @property
    def ok(self) -> bool:
        """Whether no case failed."""
        return not self.failed

    @property
    def script(self) -> str | None:
        """A script of the smallest failing case that needs only torch and the op, or None.

        It imports the op relative to the current folder, where it is to be saved.
        """
        return None if self.ok else self.script_in(Path.cwd())

    def script_in(self, folder: Path) -> str:
        """Returns `script` for another folder; raises IndexError if no case failed."""
        return script(self.subject, self.failed[0], folder)

    @property
    def rows(self) -> list[Row]:
        """The table. A case that needs several features counts for the last one in `FEATURES`."""
        found = []
        for feature in (PLAIN, *FEATURES):
            mine = [each for each in self.results if _feature(each) == feature]
            if row := _row(feature, mine, self.subject.claims.features):
                found.append(row)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        claims = self.subject.claims
        return {
            "op": self.subject.name, "source": self.subject.source,
            "interface": self.subject.interface.name, "seed": self.seed, "ok": self.ok,
            "versions": versions(claims.device),
            "tolerance": {"multiple": MULTIPLE, "roundings": ROUNDINGS},
            "claims": {
                "features": sorted(claims.features), "dtypes": [*map(_short, claims.dtypes)],
                "head_dims": [*claims.head_dims], "block_sizes": [*claims.block_sizes],
                "groups": [*claims.groups], "device": claims.device,
            },
            "features": [vars(row) for row in self.rows],
            "cases": [
                {"name": each.case.name, "status": each.status, "message": each.message,
                 "guarantee": each.case.guarantee, "needs": sorted(each.case.needs),
                 "error": each.measured.error, "allowed": each.measured.allowed,
                 "steps": each.steps, "seconds": each.seconds,
                 "step": None if each.step is None else str(each.step)}
                for each in self.results
            ],
        }  # fmt: skip

    def to_html(self) -> str:
        """Returns the report as one HTML page."""
        cells = [_cells(row) for row in self.rows]
        head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
        body = "\n".join(
            f"<tr class='{row[1].split()[0].lower()}'>"
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
            + "</tr>"
            for row in cells
        )
        failures = "".join(f"<pre>{html.escape(each.text)}</pre>" for each in self.failed)
        title = html.escape(f"{self.subject.name} as {self.subject.interface.name}")
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in self._head()[1:])
        source = f"<h2>Smallest failing case</h2><pre>{html.escape(self.script or '')}</pre>"
        return (
            f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
            f"<h1>{title}</h1>{lines}<table><tr>{head}</tr>\n{body}</table>{failures}"
            f"{'' if self.ok else source}\n"
        )

    def __str__(self) -> str:
        table = [_COLUMNS, *(_cells(row) for row in self.rows)]
        widths = [max(len(row[column]) for row in table) for column in range(len(_COLUMNS) - 1)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]).rstrip()
            for row in table
        ]
        failures = [f"\n{each.text}" for each in self.failed]
        ran = [each for each in self.results if each.status != "not claimed"]
        passed = sum(each.status == "passed" for each in ran)
        last = f"\n{passed} of {len(ran)} cases passed, {sum(each.steps for each in ran)} calls"
        return "\n".join([*self._head(), "", *lines, *failures, last])

    def _head(self) -> list[str]:
        claims = self.subject.claims
        sizes = ", ".join(
            f"{name} {' '.join(map(str, values))}"
            for name, values in (
                ("dtypes", [*map(_short, claims.dtypes)]), ("head dims", claims.head_dims),
                ("block sizes", claims.block_sizes), ("groups", claims.groups),
            )
        )  # fmt: skip
        used = versions(claims.device)
        return [
            f"{self.subject.name}: interface {self.subject.interface.name}, seed {self.seed}",
            f"claims: {sizes}, on {claims.device}",
            f"tolerance: {MULTIPLE:g} times the error of plain torch in the op's dtype, plus one "
            f"rounding of the output and {ROUNDINGS} of the accumulator",
            ", ".join(f"{name} {value}" for name, value in used.items()),
        ]


_COLUMNS = ["feature", "result", "cases", "error", "allowed", "note"]
_STYLE = (
    "body{font:14px sans-serif;margin:2em}td,th{text-align:left;padding:2px 12px}"
    "pre{background:#f4f4f4;padding:1em;overflow:auto}.failed{background:#fdd}"
    ".passed{background:#dfd}.not{color:#777}"
)


def versions(device: str) -> Mapping[str, str]:
    """Returns the versions of torch, Python and this package, and the machine."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    return {
        "torch": torch.__version__, "python": platform.python_version(),
        "compiled-attn": __version__, "machine": f"{platform.system()} {name}",
    }  # fmt: skip


def _feature(result: Result) -> str:
    order = [*FEATURES]
    return max(result.case.needs, key=order.index, default=PLAIN)


def _row(feature: str, results: Iterable[Result], claimed: Iterable[str]) -> Row | None:
    results = [*results]
    ran = [each for each in results if each.status != "not claimed"]
    if not ran:
        note = "nothing to test" if feature in claimed else ""
        return Row(feature, "not claimed", 0, 0, 0.0, 0.0, note) if results else None
    passed = sum(each.status == "passed" for each in ran)
    worst = Measured()
    for each in ran:
        worst = worst.or_worse(each.measured)
    status: Status = "passed" if passed == len(ran) else "failed"
    failed = [each.case.name for each in ran if each.status == "failed"]
    note = ", ".join(failed) or next((each.message for each in ran if each.message), "")
    return Row(feature, status, passed, len(ran), worst.error, worst.allowed, note)


def _cells(row: Row) -> list[str]:
    ran = f"{row.passed}/{row.cases}" if row.cases else ""
    numbers = [f"{row.error:.2g}", f"{row.allowed:.2g}"] if row.allowed else ["", ""]
    status = "FAILED" if row.status == "failed" else row.status
    return [row.feature, status, ran, *numbers, clipped(row.note, 80)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
