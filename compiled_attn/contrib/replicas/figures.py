"""Figures of a fleet in the format of Prometheus: those of each replica, with its number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from compiled_attn.contrib.replicas.fleet import Fleet

__all__ = ["fleet_exposition", "labelled"]


async def fleet_exposition(fleet: Fleet) -> bytes:
    """What ``/metrics`` answers."""
    told = {str(number): text for number, text in await fleet.ask("metrics")}
    registry = CollectorRegistry()
    registry.register(_Figures([*_of_fleet(fleet), *labelled(told)]))
    return generate_latest(registry)


def labelled(texts: Mapping[str, str]) -> list[Metric]:
    """The figures of all replicas, each with the label ``replica``.

    Args:
        texts: of each, by its label.
    """
    merged: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            known = Metric(family.name, family.documentation, family.type)
            whole = merged.setdefault(family.name, known)
            for each in family.samples:
                whole.add_sample(each.name, {**each.labels, "replica": replica}, each.value)
    return [*merged.values()]


class _Figures(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _of_fleet(fleet: Fleet) -> Iterable[Metric]:
    prefix = "compiled_attn_replicas"
    yield GaugeMetricFamily(prefix, "Replicas there shall be.", value=len(fleet.members))
    yield GaugeMetricFamily(f"{prefix}_ready", "Replicas that answer.", value=len(fleet.ready))
    retried = "Requests sent to another replica, as theirs ended."
    yield CounterMetricFamily(f"{prefix}_retried_requests", retried, value=fleet.retried)
    restarts = CounterMetricFamily(f"{prefix}_restarts", "New processes.", labels=["replica"])
    for each in fleet.members:
        restarts.add_metric([str(each.number)], each.restarts)
    yield restarts
