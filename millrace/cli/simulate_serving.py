"""`millrace simulate-serving`: prompts and tokens on the same engines or on different ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.errors import PlanError

if TYPE_CHECKING:
    from millrace.inference.engine_sizes import EngineSizes
    from millrace.planner.engine_cost_file import MeasuredEngine
    from millrace.simulation.arrivals import ServingRequest
    from millrace.simulation.serving import ServedTimes, Serving

Cost = Annotated[Path, typer.Argument(metavar="COST", help="A cost model, from millrace measure engine.")]
Engines = Annotated[int, typer.Option(min=1, help="How many engines.")]
Policy = Annotated[
    list[str] | None,
    typer.Option(
        metavar="collocated|adaptive|makespan|P:D",
        help="Every engine serves whole requests, or each is placed by the cost model, for --ttft and "
        "--tpot or for the earliest end of all, or P compute prompts and D tokens; may be repeated. "
        "[default: all there are]",
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(help="Requests a second; of a trace its own by default, else it must be given."),
]
Burstiness = Annotated[
    float | None,
    typer.Option(help="Variation of the times between arrivals: 1 is Poisson, more is Gamma. [default: 1]"),
]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Arrivals and lengths of Mooncake's or Azure's traces.")
]
Requests = Annotated[int, typer.Option(min=10, help="How many requests, of a trace at most.")]
PromptTokens = Annotated[
    str | None,
    typer.Option(
        metavar="MEDIAN,SPREAD",
        help="Tokens of prompts: lognormal; spread of the logarithm. [default: 500,0.8]",
    ),
]
OutputTokens = Annotated[
    str | None,
    typer.Option(metavar="MEDIAN,SPREAD", help="Tokens of answers: lognormal. [default: 100,0.8]"),
]
Ttft = Annotated[float, typer.Option(help="Objective: seconds to the first token at most.")]
Tpot = Annotated[float, typer.Option(help="Objective: mean seconds of each further token at most.")]
BatchTokens = Annotated[
    int | None, typer.Option(min=16, help="Tokens of a step at most (the chunk). [default: as measured]")
]
MaxConcurrent = Annotated[int, typer.Option(min=1, help="Requests that an engine runs at the same time.")]
CacheTokens = Annotated[int, typer.Option(min=64, help="Tokens that an engine's KV cache holds.")]
Bandwidth = Annotated[float, typer.Option(help="GB/s between engines.")]
Latency = Annotated[float, typer.Option(help="Milliseconds of a transfer without its bytes.")]
Seed = Annotated[int, typer.Option(min=0, help="Of arrivals and lengths.")]


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
    burstiness: Burstiness = None,
    trace: Trace = None,
    requests: Requests = 200,
    prompt: PromptTokens = None,
    output: OutputTokens = None,
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
    from millrace.planner.engine_cost_file import read_cost
    from millrace.planner.placement import Link, Objective
    from millrace.simulation.serving import Serving, roles_of

    for name, value in (("--ttft", ttft), ("--tpot", tpot), ("--bandwidth", bandwidth)):
        if not value > 0:
            raise PlanError(f"{name} is {value:g}; it must be above 0")
    if not 0 <= latency < math.inf:
        raise PlanError(f"--latency is {latency:g}; it must be 0 or more and finite")
    measured = read_cost(cost)
    policies = policy or all_policies(engines)
    for name in policies:
        roles_of(name, engines)
    if trace is None:
        served = made_requests(requests, rate, burstiness, prompt, output, seed=seed)
    else:
        given = {"--burstiness": burstiness, "--prompt": prompt, "--output": output}
        served = traced_requests(trace, requests, rate, given)
    sizes = engine_sizes(measured.engine, batch_tokens, max_concurrent, cache_tokens)
    serving = Serving(
        engines,
        sizes,
        measured.cost,
        Link(latency / 1e3, bandwidth * 1e9),
        Objective(ttft, tpot),
    )
    for line in heading_lines(measured.engine, served, ttft, tpot):
        typer.echo(line)
    for name in policies:
        typer.echo(result_line(_result(serving, name, served)))


def made_requests(
    num: int,
    rate: float | None,
    burstiness: float | None,
    prompt: str | None,
    output: str | None,
    *,
    seed: int,
) -> list[ServingRequest]:
    """Return requests with the given distributions; PlanError if the rate is missing or one is invalid."""
    from millrace.planner.durations import given_lognormal
    from millrace.simulation.arrivals import random_requests

    if rate is None:
        raise PlanError("--rate is missing; give requests a second, or a --trace")
    return random_requests(
        num,
        rate=_checked(rate),
        burstiness=1.0 if burstiness is None else burstiness,
        prompt=given_lognormal("--prompt", prompt or "500,0.8"),
        output=given_lognormal("--output", output or "100,0.8"),
        seed=seed,
    )


def traced_requests(
    trace: Path, num: int, rate: float | None, without_effect: Mapping[str, object]
) -> list[ServingRequest]:
    """Return those of a trace; PlanError if it cannot be read, or an option is given that has no effect."""
    from millrace.simulation.arrivals import at_rate, read_arrivals

    for option, value in without_effect.items():
        if value is not None:
            raise PlanError(f"{option} has no effect with --trace; leave one of them out")
    found = read_arrivals(trace, most=num)
    return found if rate is None else at_rate(found, _checked(rate))


def _checked(rate: float) -> float:
    if not 0 < rate < math.inf:
        raise PlanError(f"--rate is {rate:g}; it must be above 0 and finite")
    return rate


def engine_sizes(
    engine: MeasuredEngine, batch_tokens: int | None, max_concurrent: int, cache_tokens: int
) -> EngineSizes:
    """Sizes of the simulated engines: those of the measured one, with the given ones."""
    from millrace.inference.engine_sizes import EngineSizes

    num_blocks = max(1, cache_tokens // engine.block_size)
    return EngineSizes(
        num_blocks=num_blocks,
        block_size=engine.block_size,
        max_batch_tokens=batch_tokens or engine.max_batch_tokens,
        max_requests=max_concurrent,
        max_length=num_blocks * engine.block_size,
        block_bytes=engine.block_bytes,
    )


def all_policies(num_engines: int) -> list[str]:
    """Collocated, adaptive, and every division of the engines; adaptive alone needs two of them at least."""
    return [
        "collocated",
        *(["adaptive"] if num_engines > 1 else []),
        *(f"{one}:{num_engines - one}" for one in range(1, num_engines)),
    ]


def _result(serving: Serving, policy: str, requests: Sequence[ServingRequest]) -> PolicyResult:
    from millrace.simulation.serving import attainment, counted

    times = serving.run(policy, requests)
    return PolicyResult(
        policy,
        counted(times),
        attainment(times, serving.objective),
        serving.goodput(policy, requests),
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
