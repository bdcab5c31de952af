"""Prometheus metrics of workers with roles, beside those that every engine has."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millrace.engines.prefill_decode_engine import PrefillDecodeEngine
from millrace.engines.prefill_decode_handle import ROLES


class RoleMetrics(Collector):
    """Counters of one engine with roles, read at each scrape and labelled with the model's name."""

    def __init__(self, name: str, engine: PrefillDecodeEngine) -> None:
        self._name, self._engine = name, engine

    def describe(self) -> Iterator[Metric]:
        """Return nothing, or the registry would call `collect` before the engine runs."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Return the metrics."""
        counts = self._engine.counts
        workers = GaugeMetricFamily(
            "millrace:workers", "Workers that take requests.", labels=["model_name", "role"]
        )
        lost = CounterMetricFamily(
            "millrace:workers_lost", "Workers that were lost.", labels=["model_name", "role"]
        )
        for role in ROLES:
            workers.add_metric([self._name, role], self._engine.num_ready(role))
            lost.add_metric([self._name, role], counts.lost[role])
        routed = CounterMetricFamily(
            "millrace:prompts_routed",
            "Prompts by where they were computed.",
            labels=["model_name", "route"],
        )
        routed.add_metric([self._name, "apart"], counts.apart)
        routed.add_metric([self._name, "collocated"], counts.collocated)
        transfers = CounterMetricFamily(
            "millrace:kv_transfers",
            "KV transfers by the part of the expected blocks that was imported.",
            labels=["model_name", "imported"],
        )
        for part, count in (("all", counts.complete), ("some", counts.partial), ("none", counts.failed)):
            transfers.add_metric([self._name, part], count)
        drift = GaugeMetricFamily(
            "millrace:step_drift",
            "Actual over predicted seconds of a worker's steps.",
            labels=["model_name", "worker"],
        )
        for worker, factor in self._engine.drifts().items():
            drift.add_metric([self._name, worker], factor)
        yield from (workers, lost, routed, transfers, drift)
