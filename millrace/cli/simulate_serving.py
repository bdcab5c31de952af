"""`millrace simulate-serving`: prompts and tokens on the same engines or on different ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.errors import PlanError

if TYPE_CHECKING:
    from millrace.planner.durations import Quantile
    from millrace.planner.engine_cost_file import MeasuredEngine
    from millrace.simulation.arrivals import ServingRequest
    from millrace.simulation.serving import Objective, ServedTimes, Serving
    from millrace.simulation.step_engines import EngineSizes

Cost = Annotated[Path, typer.Argument(metavar="COST", help="A cost model, from millrace measure engine.")]
Engines = Annotated[int, typer.Option(min=1, help="How many engines.")]
Policy = Annotated[
    list[str] | None,
    typer.Option(
        metavar="collocated|P:D",
        help="Every engine serves whole requests, or P compute prompts and D tokens; may be repeated. "
        "[default: all there are]",
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(help="Requests a second; of a trace its own by default, else it must be given."),
]
Burstiness = Annotated[
    float, typer.Option(help="Variation of the times between arrivals: 1 is Poisson, more is Gamma.")
]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Arrivals and lengths of Mooncake's or Azure's traces.")
]
Requests = Annotated[int, typer.Option(min=10, help="How many requests, of a trace at most.")]
PromptTokens = Annotated[
    str, typer.Option(metavar="MEDIAN,SPREAD", help="Tokens of prompts: lognormal; spread of the logarithm.")
]
OutputTokens = Annotated[str, typer.Option(metavar="MEDIAN,SPREAD", help="Tokens of answers: lognormal.")]
Ttft = Annotated[float, typer.Option(help="Objective: seconds to the first token at most.")]
Tpot = Annotated[float, typer.Option(help="Objective: mean seconds of each further token at most.")]
BatchTokens = Annotated[
    int | None, typer.Option(min=16, help="Tokens of a step at most (the chunk). [default: as measured]")
]
MaxConcurrent = Annotated[int, typer.Option(min=1, help="Requests that an engine runs at the same time.")]
CacheTokens = Annotated[int, typer.Option(min=64, help="Tokens that an engine's KV cache holds.")]
Bandwidth = Annotated[float, typer.Option(help="GB/s between engines.")]
Latency = Annotated[float, typer.Option(min=0.0, help="Milliseconds of a transfer without its bytes.")]
Seed = Annotated[int, typer.Option(min=0, help="Of arrivals and lengths.")]

NUMBER_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """A line of the table."""

    policy: str
    times: Sequence[ServedTimes]
    attained: float
    goodput: float | None


def simulate_serving(
    cost: Cost,
    *,
    engines: Engines = 2,
    policy: Policy = None,
    rate: Rate = None,
    burstiness: Burstiness = 1.0,
    trace: Trace = None,
    requests: Requests = 200,
    prompt: PromptTokens = "500,0.8",
    output: OutputTokens = "100,0.8",
    ttft: Ttft = 1.0,
    tpot: Tpot = 0.1,
    batch_tokens: BatchTokens = None,
    max_concurrent: MaxConcurrent = 256,
    cache_tokens: CacheTokens = 262_144,
    bandwidth: Bandwidth = 10.0,
    latency: Latency = 1.0,
    seed: Seed = 0,
) -> None:
    """Compare collocated engines with prefill and decode on different ones, before any is started.

    Each engine runs the real scheduler on a virtual clock; a step takes what the cost model predicts.

    Exit code: 0, or 2 for a mistake in the words.
    """
    from millrace.planner.engine_cost import step_load
    from millrace.planner.engine_cost_file import read_cost
    from millrace.simulation.serving import Link, Objective, Serving

    for name, value in (("--ttft", ttft), ("--tpot", tpot), ("--bandwidth", bandwidth)):
        if not value > 0:
            raise PlanError(f"{name} is {value:g}; it must be above 0")
    measured = read_cost(cost)
    served = _arrivals(trace, requests, rate, burstiness, (prompt, output), seed)
    sizes = engine_sizes(measured.engine, batch_tokens, max_concurrent, cache_tokens)
    serving = Serving(
        engines,
        sizes,
        lambda plan: measured.cost.seconds(step_load(plan.count_B, plan.start_B)),
        Link(latency / 1e3, bandwidth * 1e9),
    )
    objective = Objective(ttft, tpot)
    for line in heading_lines(measured.engine, served, ttft, tpot):
        typer.echo(line)
    for name in policy or all_policies(engines):
        typer.echo(result_line(_result(serving, name, served, objective)))


def _arrivals(
    trace: Path | None,
    num: int,
    rate: float | None,
    burstiness: float,
    lengths: tuple[str, str],
    seed: int,
) -> list[ServingRequest]:
    from millrace.simulation.arrivals import at_rate, random_requests, read_arrivals

    if rate is not None and not rate > 0:
        raise PlanError(f"--rate is {rate:g}; it must be above 0")
    if trace is not None:
        found = read_arrivals(trace, most=num)
        return found if rate is None else at_rate(found, rate)
    if rate is None:
        raise PlanError("--rate is missing; give requests a second, or a --trace")
    prompt, output = (given_tokens(*pair) for pair in zip(("--prompt", "--output"), lengths, strict=True))
    return random_requests(num, rate=rate, burstiness=burstiness, prompt=prompt, output=output, seed=seed)


def given_tokens(option: str, text: str) -> Quantile:
    """Parse the length distribution of an option; PlanError if it is malformed."""
    from millrace.planner.durations import lognormal

    try:
        median, spread = (float(word) for word in text.split(","))
        return lognormal(median, spread)
    except ValueError:
        raise PlanError(
            f"{option} is {text!r}; write the median and the deviation of the logarithm, such as 500,0.8"
        ) from None


def engine_sizes(
    engine: MeasuredEngine, batch_tokens: int | None, max_concurrent: int, cache_tokens: int
) -> EngineSizes:
    """Sizes of the simulated engines: those of the measured one, with its bytes of keys and values."""
    from millrace.simulation.step_engines import EngineSizes

    if engine.dtype not in NUMBER_BYTES:
        raise PlanError(f"the cost model has the dtype {engine.dtype}; there are: {', '.join(NUMBER_BYTES)}")
    numbers = sum(heads * (key + value) for heads, key, value in engine.pools)
    num_blocks = max(1, cache_tokens // engine.block_size)
    return EngineSizes(
        num_blocks=num_blocks,
        block_size=engine.block_size,
        max_batch_tokens=batch_tokens or engine.max_batch_tokens,
        max_requests=max_concurrent,
        max_length=num_blocks * engine.block_size,
        block_bytes=numbers * engine.block_size * NUMBER_BYTES[engine.dtype],
    )


def all_policies(num_engines: int) -> list[str]:
    """Collocated, and every division of the engines."""
    return ["collocated", *(f"{one}:{num_engines - one}" for one in range(1, num_engines))]


def _result(
    serving: Serving, policy: str, requests: Sequence[ServingRequest], objective: Objective
) -> PolicyResult:
    from millrace.simulation.serving import attainment, counted

    times = serving.run(policy, requests)
    return PolicyResult(
        policy,
        counted(times),
        attainment(times, objective),
        serving.goodput(policy, requests, objective),
    )


def heading_lines(
    engine: MeasuredEngine, requests: Sequence[ServingRequest], ttft_s: float, tpot_s: float
) -> Iterator[str]:
    """What is simulated, and the head of the table."""
    from millrace.simulation.arrivals import mean_rate

    prompt = sum(len(request.prompt) for request in requests) / len(requests)
    output = sum(request.num_output for request in requests) / len(requests)
    yield (
        f"steps: {engine.model_type}, {engine.num_parameters / 1e6:,.3g} M parameters, {engine.dtype}, on "
        f"{engine.machine}"
    )
    yield (
        f"{len(requests)} requests, {mean_rate(requests):.3g} a second; on average {prompt:,.0f} tokens of "
        f"prompt and {output:,.0f} of answer"
    )
    yield f"objective: first token within {ttft_s:g} s, then {tpot_s:g} s a token; goodput: met by 90%"
    yield ""
    yield (f"{'policy':12}{'TTFT p50':>10}{'p90':>9}{'TPOT p50':>11}{'p90':>9}{'met':>7}{'goodput, 1/s':>15}")


def result_line(result: PolicyResult) -> str:
    """A policy: times in seconds, without the first tenth of the requests."""
    import numpy as np

    ttft = np.quantile([one.ttft_s for one in result.times], [0.5, 0.9])
    tpot = np.quantile([one.tpot_s for one in result.times], [0.5, 0.9])
    goodput = "none" if result.goodput is None else f"{result.goodput:.3g}"
    return (
        f"{result.policy:12}{ttft[0]:10.3g}{ttft[1]:9.3g}{tpot[0]:11.3g}{tpot[1]:9.3g}"
        f"{result.attained:7.0%}{goodput:>15}"
    )
