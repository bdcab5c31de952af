"""millrace's paged engine, through `generate`."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from serve import serve
from workloads import Workload

from millrace.inference.engine import PagedEngine
from millrace.inference.sampler import SamplingTable
from millrace.models.decoding import prepare
from millrace.models.load import load_model
from millrace.types import SamplingParams

# A run of the smallest workload takes 14 ms, which any other process may double.
RUNS = 5


class Ours:
    """`PagedEngine` as recipes use it; its log-probabilities cannot be switched off."""

    def __init__(self, folder: str, dtype: str, threads: int, device: str) -> None:
        torch.set_num_threads(threads)
        model = load_model(folder, dtype=getattr(torch, dtype)).to(device).requires_grad_(False)
        # As many tokens as the peers' caches hold; a GPU's is large enough for nano at once.
        tokens = 131_072 if device == "cpu" else 327_680
        prepare(model)  # as every recipe does
        self._engine = PagedEngine(model, lambda tokens: "", max_cache_tokens=tokens)

    def generate(self, one: Workload, *, logprobs: bool) -> list[list[int]]:
        """One call; the log-probabilities come along."""
        params = [
            SamplingParams(max_tokens=length, temperature=one.temperature, seed=seed)
            for seed, length in enumerate(one.lengths)
        ]
        return [list(done.token_ids) for done in self._engine.generate(one.prompts, params)]

    def device_bytes(self) -> int:
        """The most memory that tensors have held on the GPU."""
        return torch.cuda.max_memory_allocated()

    def time_fractions(self, one: Workload) -> dict[str, float]:
        """Where the time of a workload goes.

        Returns:
            `draw`, the sampler's part; `logprob`, an upper limit of what log-probabilities cost: the time to
            reduce the logits of every draw once more to one normaliser a row. Both are fractions of the time
            without that second reduction, and medians of `RUNS` runs.
        """
        runs = [self._time_fractions(one) for _ in range(RUNS)]
        return {name: statistics.median(run[name] for run in runs) for name in runs[0]}

    def _time_fractions(self, one: Workload) -> dict[str, float]:
        """Of one run."""
        spent = {"draw": 0.0, "logprob": 0.0}
        draw = SamplingTable.sample

        def timed(table: SamplingTable, logit_NV: torch.Tensor, *rest: Any) -> Any:
            start = time.perf_counter()
            drawn = draw(table, logit_NV, *rest)
            middle = time.perf_counter()
            logit_NV.logsumexp(-1)
            spent["draw"] += middle - start
            spent["logprob"] += time.perf_counter() - middle
            return drawn

        SamplingTable.sample = timed
        try:
            start = time.perf_counter()
            self.generate(one, logprobs=True)
            total = time.perf_counter() - start - spent["logprob"]
        finally:
            SamplingTable.sample = draw
        return {name: seconds / total for name, seconds in spent.items()}


if __name__ == "__main__":
    serve(Ours, ("millrace-rl", "torch", "transformers"))
