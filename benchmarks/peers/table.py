"""What is printed: the surroundings, a table for each workload, and one of starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from graphs.report.surroundings import surroundings
from peers.contest import Contest
from peers.rounds import Cell
from peers.servers import Started
from peers.systems import OURS
from peers.workloads import Workload


def heading(what: str) -> str:
    """What is measured, date and machine."""
    found = surroundings()
    machine = found["machine"]
    units = [name for name in ("avx512", "amx") if machine[name]]
    return (
        f"# {what}, {found['date'][:10]}, {' '.join((machine['cpu'], *units))}, "
        f"{machine['usable_cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"
    )


def rows(
    workload: Workload, cells: Mapping[str, Cell], threads: Mapping[str, int]
) -> Iterator[str]:
    """Medians of each system, and the speed of ours over it."""
    yield f"\n{workload}"
    yield (
        f"{'':16}{'threads':>7}{'wall s':>9}{'CPU s':>9}"
        f"{'ours is':>10}{'by CPU s':>10}{'equal tokens':>14}"
    )
    for name, cell in cells.items():
        line = f"{name:16}{threads[name]:7}{cell.seconds:9.2f}{cell.cpu_seconds:9.2f}"
        if name != OURS.name:
            ours = cells[OURS.name]
            line += f"{cell.over(ours, 'seconds'):9.2f}x{cell.over(ours, 'cpu_seconds'):9.2f}x"
            line += f"{cell.equal(ours):14.1%}"
        yield line


def starts(contest: Contest) -> Iterator[str]:
    """What a start costs until a system is ready, and memory after it has served all."""
    yield "\nstart"
    times = f"{'cold: s':>8}{'CPU s':>8}{'second: s':>11}{'CPU s':>8}"
    yield f"{'':16}{times}{'peak GiB':>10}  versions"
    for name, server in contest.servers.items():
        cold, second = (_cost(each.get(name)) for each in (contest.cold, contest.second))
        installed = contest.second[name].versions.items()
        versions = ", ".join(f"{package} {version}" for package, version in installed)
        yield f"{name:16}{cold}   {second}{server.peak_bytes / 2**30:10.1f}  {versions}"
    for name, reason in contest.gone.items():
        yield f"{name} is left out: {reason}"


def _cost(start: Started | None) -> str:
    return f"{'-':>8}{'-':>8}" if start is None else f"{start.seconds:8.1f}{start.cpu_seconds:8.1f}"
