"""Prometheus metrics of the server; metrics that vLLM has too have vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millrace.inference.served_engine import ServedEngine
from millrace.types import Completion

# Tokens older than this share one label, so that the number of labels is bounded.
MAX_LAG = 16
LENGTHS = [2.0**n for n in range(18)]
FAST_S = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10]
SLOW_S = [0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600]


class Meter:
    """The counters of one server, labelled with the model's name; the engine's are read at each scrape."""

    def __init__(self, name: str, engine: ServedEngine, more: Sequence[Collector] = ()) -> None:
        self._registry = CollectorRegistry()
        for collector in (_EngineCounts(name, engine), *more):
            self._registry.register(collector)
        self._name = name

        def histogram(title: str, text: str, buckets: list[float]) -> Histogram:
            family = Histogram(title, text, ["model_name"], buckets=buckets, registry=self._registry)
            return family.labels(name)

        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", LENGTHS)
        self._generation = histogram(
            "vllm:request_generation_tokens", "Generation tokens of a request.", LENGTHS
        )
        self._first_s = histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", SLOW_S
        )
        self._next_s = histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a request.", FAST_S
        )
        self._whole_s = histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", SLOW_S
        )
        self._ended = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._lag = Counter(
            "millrace:tokens_by_version_lag",
            "Generation tokens by the number of weight updates between sampling and the end of their "
            "request.",
            ["model_name", "lag"],
            registry=self._registry,
        )

    def first_token(self, seconds: float) -> None:
        """Record a request's first token, `seconds` after its arrival."""
        self._first_s.observe(seconds)

    def next_tokens(self, num_tokens: int, seconds: float) -> None:
        """Record more tokens of a request, `seconds` after the previous ones."""
        for _ in range(num_tokens):
            self._next_s.observe(seconds / num_tokens)

    def ended(self, num_prompt_tokens: int, completion: Completion, seconds: float, *, version: int) -> None:
        """Record the end of a request at policy version `version`, `seconds` after its arrival."""
        self._prompt.observe(num_prompt_tokens)
        self._generation.observe(len(completion.token_ids))
        self._whole_s.observe(seconds)
        self._ended.labels(self._name, completion.finish_reason).inc()
        for lag, count in zip(*np.unique(version - completion.versions, return_counts=True), strict=True):
            label = str(lag) if lag < MAX_LAG else f"{MAX_LAG}+"
            self._lag.labels(self._name, label).inc(int(count))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCounts(Collector):
    """The engine's own statistics, read at each scrape."""

    def __init__(self, name: str, engine: ServedEngine) -> None:
        self._name = name
        self._engine = engine

    def describe(self) -> Iterator[Metric]:
        """Return nothing, or the registry would call `collect` before the engine runs."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        gauges = {
            "vllm:num_requests_running": ("Requests in the batch.", stats.num_running),
            "vllm:num_requests_waiting": ("Requests that wait for a place in the batch.", stats.num_waiting),
            "vllm:kv_cache_usage_perc": ("Fraction of the KV cache in use, from 0 to 1.", stats.kv_usage),
            "millrace:policy_version": ("Version of the weights.", self._engine.version),
            "millrace:kv_leased_blocks": ("Blocks pinned for other engines.", stats.leased_blocks),
            "millrace:kv_imported_fraction": (
                "Imported over expected blocks of the last KV transfers.",
                stats.imported_fraction,
            ),
        }
        counters = {
            "vllm:prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_queries,
            ),
            "vllm:prefix_cache_hits": ("Prompt tokens found there.", stats.prefix_hits),
            "vllm:num_preemptions": ("Times a running request gave its place up.", stats.num_preemptions),
            "vllm:prompt_tokens": ("Prompt tokens of all requests.", stats.prompt_tokens),
            "vllm:generation_tokens": ("Generation tokens.", stats.generation_tokens),
            "millrace:prompt_tokens_computed": ("Prompt tokens computed here.", stats.prompt_tokens_computed),
            "millrace:prompt_tokens_imported": (
                "Prompt tokens whose keys and values came from another engine.",
                stats.prompt_tokens_imported,
            ),
            "millrace:kv_blocks_refused": ("Blocks of other engines not taken.", stats.blocks_refused),
        }
        for kind, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for title, (text, value) in table.items():
                family = kind(title, text, labels=["model_name"])
                family.add_metric([self._name], value)
                yield family
