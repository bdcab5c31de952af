"""Measurement of an engine's steps: probes of known load, run by the engine itself.

A probe runs some requests that decode behind contexts of given lengths, and adds chunks of prompts to a
step. The contexts are imported as blocks of zeros (`PagedEngine.import_prefix`), whose attention takes as
long as that of computed ones. What is recorded is the plan that the engine made and the seconds of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import numpy as np
import torch

from millrace.errors import PlanError
from millrace.inference.engine import PagedEngine
from millrace.inference.engine_sizes import EngineSizes
from millrace.inference.kv_blocks import KvBlock, KvPrefix, checksum
from millrace.inference.prefix_cache import chain
from millrace.models.load import Model, num_parameters
from millrace.planner.engine_cost import (
    LEAST_STEPS,
    StepLoad,
    error_summary,
    fit_engine_cost,
    relative_errors,
    step_load,
)
from millrace.planner.engine_cost_file import (
    CostMeasurement,
    MeasuredEngine,
    MeasuredStep,
    processor_name,
)
from millrace.types import SamplingParams

NUM_REPEATS = 5
# Of the grid: tokens of a chunk, requests that decode, and blocks of their contexts.
CHUNKS = (0, 16, 64, 256, 1_024, 4_096, 16_384)
ROWS = (0, 1, 4, 16, 64, 256)
CONTEXT_BLOCKS = (1, 4, 16, 64, 256)
MAX_CHUNKS = 4
# Of the attention, from one of the first probes to the next.
GROWTH = 4.0
# For so many probes of the grid there is one with random lengths that is held out of the fit; so many are
# needed.
HELD_OUT_EVERY = 3
LEAST_HELD_OUT = 3
# A probe counts after so many of its repeats. The first round takes this part of all seconds.
LEAST_REPEATS = 3
FIRST_ROUND = 0.9 / NUM_REPEATS
# One probe may take this part of a round.
MAX_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class StepProbe:
    """Load of a step: (tokens, context) of each chunk, the context of each request that decodes.

    Contexts are whole blocks. `held_out` probes are not fitted to.
    """

    chunks: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    held_out: bool = False

    @property
    def load(self) -> StepLoad:
        """The expected load; the engine's own plan is what counts."""
        counts = [count for count, _ in self.chunks] + [1] * len(self.rows)
        starts = [context for _, context in self.chunks] + [*self.rows]
        return step_load(np.array(counts, np.int64), np.array(starts, np.int64))

    def num_blocks(self, block_size: int) -> int:
        """Blocks that the probe needs at once."""
        ends = [context + count for count, context in self.chunks] + [*self.rows]
        return sum(end // block_size + 2 for end in ends)

    def fits(self, sizes: EngineSizes) -> bool:
        """Whether an engine can run the probe as one step."""
        num_tokens = sum(count for count, _ in self.chunks) + len(self.rows)
        longest = max([context + count + 1 for count, context in self.chunks] + [*self.rows, 0])
        return (
            0 < num_tokens <= sizes.max_batch_tokens
            and len(self.chunks) + len(self.rows) <= sizes.max_requests
            and longest + 4 <= sizes.max_length
            # The engine reserves a block for each request, and old blocks are evicted meanwhile.
            and 2 * (self.num_blocks(sizes.block_size) + len(self.rows)) <= sizes.num_blocks
        )


def probes(sizes: EngineSizes, seed: int) -> list[StepProbe]:
    """Return the probes in the order of measurement.

    They are a grid of chunk size, requests and contexts, and random loads that are held out. The smallest
    come first, for which no model predicts the seconds. Then each has GROWTH times the attention of the one
    before, or little more, so that no prediction goes far beyond what was measured. The others are shuffled.
    """
    numbers = np.random.default_rng(seed)
    grid = []
    for count, num_rows, blocks in product(CHUNKS, ROWS, CONTEXT_BLOCKS):
        context = blocks * sizes.block_size
        count = min(count, sizes.max_batch_tokens - num_rows)
        chunks = ((count, context * int(numbers.integers(2))),) if count > 0 else ()
        grid.append(StepProbe(chunks, (context,) * num_rows))
    grid = [probe for probe in dict.fromkeys(grid) if probe.fits(sizes)]
    if not grid:
        raise PlanError("the engine is too small for a probe; give it a larger cache or a longer context")
    ordered = sorted(grid, key=lambda probe: probe.load.attention)
    first = ordered[:LEAST_STEPS]
    for probe in ordered[LEAST_STEPS:]:
        if probe.load.attention >= GROWTH * first[-1].load.attention:
            first.append(probe)
    rest = [probe for probe in ordered if probe not in first]
    rest += [_random_probe(sizes, grid, numbers) for _ in range(len(grid) // HELD_OUT_EVERY)]
    return list(dict.fromkeys(first + [rest[place] for place in numbers.permutation(len(rest))]))


def _random_probe(sizes: EngineSizes, grid: Sequence[StepProbe], numbers: np.random.Generator) -> StepProbe:
    """A load of unequal chunks and contexts within the bounds of the grid."""
    most_tokens = max((count for probe in grid for count, _ in probe.chunks), default=0)
    most_rows = max(len(probe.rows) for probe in grid)
    most_blocks = max(max(probe.rows, default=0) for probe in grid) // sizes.block_size

    def up_to(most: int) -> int:
        return int(np.exp(numbers.uniform(0, np.log(most + 1))))

    while True:
        num_chunks = int(numbers.integers(0, MAX_CHUNKS + 1)) if most_tokens else 0
        chunks = [
            (up_to(most_tokens), sizes.block_size * int(numbers.integers(2)) * up_to(most_blocks))
            for _ in range(num_chunks)
        ]
        rows = [sizes.block_size * up_to(most_blocks) for _ in range(up_to(most_rows) - 1)]
        probe = StepProbe(tuple(chunks), tuple(rows), held_out=True)
        if probe.fits(sizes):
            return probe


def engine_identity(model: Model, engine: PagedEngine) -> MeasuredEngine:
    """Return what a measurement of an engine over this model holds for; torch's threads are the current."""
    device, layout = model.device, engine.kv_layout
    return MeasuredEngine(
        machine=torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        device=device.type,
        num_threads=torch.get_num_threads(),
        dtype=layout.dtype,
        model_type=layout.model_type,
        num_parameters=num_parameters(model),
        pools=layout.pools,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        max_batch_tokens=engine.sizes.max_batch_tokens,
        deterministic=layout.deterministic,
    )


class ProbeRunner:
    """Runs probes on an idle engine, which has no other requests meanwhile."""

    def __init__(self, engine: PagedEngine, seed: int) -> None:
        self._engine = engine
        self._numbers = np.random.default_rng(seed)

    def run(self, probe: StepProbe) -> tuple[StepLoad, float]:
        """Run a probe once; return the load of its step and its seconds.

        RuntimeError if the engine made another plan than one step of these requests.
        """
        engine, steps = self._engine, []
        ids = [self._request(context, 1, max_tokens=4) for context in probe.rows]
        try:
            if ids:
                engine.step()  # admits them
            ids += [self._request(context, count, max_tokens=1) for count, context in probe.chunks]
            engine.watch_steps(lambda plan, seconds: steps.append((plan, seconds)))
            engine.step()
        finally:
            engine.watch_steps(None)
            for id in ids:
                engine.abort(id)
        ((plan, seconds),) = steps
        load, expected = step_load(plan.count_B, plan.start_B), probe.load
        if (load.tokens, load.rows) != (expected.tokens, expected.rows):
            raise RuntimeError(
                f"the engine computed {load.tokens:g} tokens of {load.rows:g} requests in a step where a "
                f"probe has {expected.tokens:g} of {expected.rows:g}; it must be idle meanwhile"
            )
        return load, seconds

    def _request(self, context: int, count: int, *, max_tokens: int) -> str:
        """Add a request with so many cached tokens and `count` others; return its id."""
        prompt = np.append(self._prefix(context), self._tokens(count))
        params = SamplingParams(max_tokens=max_tokens, seed=int(self._numbers.integers(1 << 40)))
        (request,) = self._engine.add(prompt.tolist(), [params])
        return request.id

    def _tokens(self, count: int) -> np.ndarray:
        return self._numbers.integers(0, self._engine.vocab_size, count).astype(np.int32)

    def _prefix(self, context: int) -> np.ndarray:
        """Random tokens whose keys and values the engine has from now on, all zeros."""
        token_ids, layout = self._tokens(context), self._engine.kv_layout
        if context:
            version, size = self._engine.version, layout.block_size
            prefix = KvPrefix(version, token_ids, layout, chain(version, token_ids, size))
            done = self._engine.import_prefix(prefix, _zeros(prefix))
            if done.num_imported < prefix.num_blocks:
                raise RuntimeError(f"a context of {context} tokens was not imported: {done.reason}")
        return token_ids


def _zeros(prefix: KvPrefix) -> Iterator[KvBlock]:
    data = np.zeros(prefix.layout.block_bytes, np.uint8)
    for index, digest in enumerate(prefix.digests):
        yield KvBlock(index, data, checksum(digest, data))


def measure_engine(
    engine: PagedEngine,
    identity: MeasuredEngine,
    sizes: EngineSizes,
    *,
    seconds: float,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> CostMeasurement:
    """Measure steps of an idle engine for at most about so many seconds, and fit the cost model.

    No probe exceeds `sizes`, which are those of the engine or smaller.

    Each probe runs once in each of NUM_REPEATS rounds, so that a while in which the machine is busy with
    something else does not decide what a probe takes. Probes for which there is no time are skipped.

    Raises:
        PlanError: too few probes ended in time, or the engine is too small for one.
    """
    runner, begin_s = ProbeRunner(engine, seed), clock()
    planned = probes(sizes, seed)
    runner.run(planned[0])  # one-time costs
    visits: dict[StepProbe, list[tuple[StepLoad, float]]] = {}
    import_s, num_blocks = 0.0, 1
    for probe in planned:
        started_s, blocks = clock(), _import_blocks(probe, sizes.block_size)
        expected_s = blocks * import_s / num_blocks
        if len(visits) >= LEAST_STEPS:
            found = [one for visit in visits.values() for one in visit]
            cost = fit_engine_cost([load for load, _ in found], [step_s for _, step_s in found])
            expected_s += cost.seconds(probe.load)
        late = started_s + expected_s > begin_s + FIRST_ROUND * seconds
        if late or expected_s > MAX_FRACTION * FIRST_ROUND * seconds:
            continue
        visits[probe] = [runner.run(probe)]
        import_s += clock() - started_s - visits[probe][0][1]
        num_blocks += blocks
    for _ in range(NUM_REPEATS - 1):
        for probe, visit in visits.items():
            if clock() < begin_s + seconds:
                visit.append(runner.run(probe))
    steps = [_median(probe, visit) for probe, visit in visits.items() if len(visit) >= LEAST_REPEATS]
    return _fitted(steps, identity, seed=seed, seconds=clock() - begin_s, num_planned=len(planned))


def _fitted(
    steps: Sequence[MeasuredStep], identity: MeasuredEngine, *, seed: int, seconds: float, num_planned: int
) -> CostMeasurement:
    fitted = [step for step in steps if not step.held_out]
    held_out = [step for step in steps if step.held_out]
    if len(fitted) < LEAST_STEPS or len(held_out) < LEAST_HELD_OUT:
        raise PlanError(
            f"only {len(fitted)} probes ended in {seconds:.3g} s, and {len(held_out)} to test the model; "
            f"{LEAST_STEPS} and {LEAST_HELD_OUT} are needed: allow more seconds"
        )
    cost = fit_engine_cost([step.load for step in fitted], [step.seconds for step in fitted])
    errors = [
        relative_errors(cost, [step.load for step in part], [step.seconds for step in part])
        for part in (fitted, held_out)
    ]
    return CostMeasurement(
        engine=identity,
        cost=cost,
        fit_error=error_summary(errors[0]),
        held_out_error=error_summary(errors[1]),
        steps=tuple(steps),
        seed=seed,
        seconds=seconds,
        num_skipped=num_planned - len(steps),
    )


def _median(probe: StepProbe, visit: Sequence[tuple[StepLoad, float]]) -> MeasuredStep:
    load = StepLoad(*(median(column) for column in zip(*(load for load, _ in visit), strict=True)))
    return MeasuredStep(load, median(step_s for _, step_s in visit), probe.held_out)


def _import_blocks(probe: StepProbe, block_size: int) -> int:
    return (sum(probe.rows) + sum(context for _, context in probe.chunks)) // block_size
