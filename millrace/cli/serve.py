"""`millrace serve`: a model behind HTTP."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from millrace.engines.prefill_decode_route import CostRoute, RouteKind, RoutePolicy
from millrace.planner.placement import Objective

if TYPE_CHECKING:
    from socket import socket

    import torch
    from prometheus_client.registry import Collector

    from millrace.config.engine_section import EngineConfig
    from millrace.data.tokenizers import Tokenizer
    from millrace.inference.engine import PagedEngine
    from millrace.inference.scheduler import Plan
    from millrace.inference.served_engine import ServedEngine
    from millrace.inference.server.limits import Limits
    from millrace.inference.server.service import ModelService
    from millrace.models.load import Model

# A request of this length is served however little memory is free.
SURE_TOKENS = 8192

Folder = Annotated[
    str, typer.Argument(metavar="MODEL", help="A run's folder, or a model's (config.json, .safetensors).")
]
Checkpoint = Annotated[
    str | None, typer.Option(metavar="best|last|NAME", help="Which of a run's; the best by default.")
]
Host = Annotated[str, typer.Option(help="Address to listen on; any but this machine's needs a token.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="MILLRACE_TOKEN",
        help="For requests that ask: Authorization: Bearer TOKEN. By default a new one is made and printed.",
    ),
]
AdminToken = Annotated[
    str | None,
    typer.Option(
        envvar="MILLRACE_ADMIN_TOKEN",
        help="For all requests, also those that steer (/update_weights, /pause, ...).",
    ),
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A further name by which clients reach this server; may be repeated."),
]
ServedName = Annotated[
    str | None, typer.Option(help="By which clients ask for the model; its folder's name by default.")
]
MaxConcurrent = Annotated[int, typer.Option(min=1, help="Completions generated at the same time.")]
MaxWaiting = Annotated[int, typer.Option(min=1, help="Samples that may wait; more get 429.")]
CacheTokens = Annotated[
    int | None,
    typer.Option(
        min=64,
        help="Tokens that the KV cache holds; by default a quarter of the free memory.",
    ),
]
Precision = Annotated[
    Literal["float32", "bfloat16"] | None,
    typer.Option(help="Of the weights; the run's, or bfloat16 on CUDA and float32 elsewhere."),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs.")]
Prefill = Annotated[
    int | None,
    typer.Option(min=1, help="Processes that compute prompts for those of --decode; see --route."),
]
Decode = Annotated[int | None, typer.Option(min=1, help="Processes that generate; needs --prefill.")]
Route = Annotated[
    RouteKind | None,
    typer.Option(
        help="With --prefill: compute prompts of more than --apart-above tokens apart, or with --cost where "
        "it is best (the default), or all, or none."
    ),
]
ApartAbove = Annotated[
    int | None,
    typer.Option(
        min=0, help="Prompts of so many tokens, 256, or fewer stay with the process that generates."
    ),
]
Worker = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOST:PORT",
        help="With --prefill: where millrace serve-worker listens, for each worker or more; may be repeated.",
    ),
]
WorkerToken = Annotated[
    str | None, typer.Option(envvar="MILLRACE_WORKER_TOKEN", help="That of each millrace serve-worker.")
]
WeightsRoot = Annotated[
    Path | None, typer.Option(help="Folder below which /update_weights may read; without it, nothing.")
]

Cost = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A cost model of this engine, from millrace measure engine; steps that leave it are reported. "
        "With --prefill it decides where a request is computed, for --ttft and --tpot.",
    ),
]
Ttft = Annotated[
    float | None, typer.Option(help="With --cost and --prefill: seconds to the first token at most.")
]
Tpot = Annotated[
    float | None, typer.Option(help="With --cost and --prefill: mean seconds of a further token at most.")
]


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers to serve a model with: their number by role, and which prompts are computed apart.

    Without `hosts` they are processes of this machine; else the workers at these addresses, with a token.
    """

    prefill: int
    decode: int
    route: RoutePolicy
    hosts: tuple[tuple[str, int], ...] = ()
    token: str = ""


def serve(
    model: Folder,
    checkpoint: Checkpoint = None,
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token: Token = None,
    admin_token: AdminToken = None,
    allowed_host: AllowedHost = None,
    served_name: ServedName = None,
    max_concurrent: MaxConcurrent = 256,
    max_waiting: MaxWaiting = 1024,
    cache_tokens: CacheTokens = None,
    precision: Precision = None,
    device: Device = "auto",
    weights_root: WeightsRoot = None,
    prefill: Prefill = None,
    decode: Decode = None,
    route: Route = None,
    apart_above: ApartAbove = None,
    cost: Cost = None,
    ttft: Ttft = None,
    tpot: Tpot = None,
    worker: Worker = None,
    worker_token: WorkerToken = None,
) -> None:
    """Answer OpenAI's requests, and those of a trainer, until SIGTERM or Ctrl-C."""
    # What is wrong here shows before the seconds it takes to load a model.
    workers = _workers(prefill, decode, route, apart_above)
    placed = _placed_by_cost(workers, route, apart_above, cost, {"--ttft": ttft, "--tpot": tpot})
    placed = _on_hosts(placed, worker, worker_token, cost)
    with _bound(host, port, token, admin_token, weights_root) as listening:
        from millrace.inference.server.limits import Limits

        served = open_served(
            model,
            checkpoint,
            name=served_name,
            max_concurrent=max_concurrent,
            max_waiting=max_waiting,
            cache_tokens=cache_tokens,
            precision=precision,
            device=device,
            weights_root=weights_root,
            workers=placed,
            cost=cost if workers is None else None,
        )
        made = token is None and admin_token is None
        limits = Limits(
            token=secrets.token_urlsafe(24) if made else token,
            admin_token=secrets.token_urlsafe(24) if made else admin_token,
            host=host,
            allowed_hosts=tuple(allowed_host or ()),
            max_concurrent=max_concurrent + max_waiting,
        )
        _listen(served, limits, max_waiting, listening, show_tokens=made)


def _bound(
    host: str, port: int, token: str | None, admin_token: str | None, weights_root: Path | None
) -> socket:
    """Return the socket to listen on; ConfigError if it cannot be had, or the root is no folder."""
    from millrace.config.recipe import ConfigError
    from millrace.inference.server.address import bind, check_address

    if weights_root is not None and not weights_root.is_dir():
        raise ConfigError(f"--weights-root {weights_root} is not a folder; make it first")
    try:
        check_address(host, token, admin_token)
        return bind(host, port)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _workers(
    prefill: int | None,
    decode: int | None,
    route: RouteKind | None,
    apart_above: int | None,
) -> Workers | None:
    """Return the processes of the options; ConfigError if one has no effect."""
    from millrace.config.recipe import ConfigError

    if prefill is not None and decode is not None:
        if apart_above is not None and route not in (None, "adaptive"):
            raise ConfigError(f"--apart-above has no effect with --route {route}; leave one out")
        policy = RoutePolicy(route or "adaptive", 256 if apart_above is None else apart_above)
        return Workers(prefill, decode, policy)
    if prefill is not None or decode is not None:
        raise ConfigError("--prefill and --decode need each other; give the number of processes of both")
    for option, value in (("--route", route), ("--apart-above", apart_above)):
        if value is not None:
            raise ConfigError(f"{option} has no effect without --prefill and --decode; leave it out")
    return None


def _placed_by_cost(
    workers: Workers | None,
    route: RouteKind | None,
    apart_above: int | None,
    cost: Path | None,
    targets: dict[str, float | None],
) -> Workers | None:
    """Return the processes with what places requests; ConfigError if an option has no effect."""
    from millrace.config.recipe import ConfigError

    given = {name: value for name, value in targets.items() if value is not None}
    if workers is None or cost is None:
        if given:
            needs = "--cost" if workers is not None else "--prefill, --decode and --cost"
            raise ConfigError(f"{min(given)} has no effect without {needs}; leave it out")
        return workers
    if route not in (None, "adaptive"):
        raise ConfigError(f"--cost has no effect with --route {route}; leave one out")
    if apart_above is not None:
        raise ConfigError(
            "--apart-above has no effect with --cost, which decides for each prompt; leave one out"
        )
    if len(given) < len(targets):
        raise ConfigError(
            "--cost with --prefill and --decode needs --ttft and --tpot: seconds to the first token, and of "
            "each further one, that requests may take"
        )
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value:g}; it must be above 0 and finite")
    by_cost = CostRoute(cost, Objective(ttft_s=given["--ttft"], tpot_s=given["--tpot"]))
    return replace(workers, route=replace(workers.route, cost=by_cost))


def _on_hosts(
    workers: Workers | None, addresses: list[str] | None, token: str | None, cost: Path | None
) -> Workers | None:
    """Return the workers with the machines that have them; ConfigError if an option has no effect."""
    from millrace.config.recipe import ConfigError

    if not addresses:
        return workers
    if workers is None:
        raise ConfigError("--worker has no effect without --prefill and --decode; leave it out")
    if cost is not None:
        raise ConfigError(
            "--cost has no effect with --worker, the model of a worker of this machine; leave one out"
        )
    if not token:
        raise ConfigError("--worker needs the token of each millrace serve-worker; set MILLRACE_WORKER_TOKEN")
    hosts = tuple(_address(one) for one in addresses)
    num = workers.prefill + workers.decode
    if len(set(hosts)) < num:
        raise ConfigError(
            f"{num} workers need {num} addresses, and --worker gives {len(set(hosts))}; start as many "
            "of millrace serve-worker"
        )
    return replace(workers, hosts=hosts, token=token)


def _address(text: str) -> tuple[str, int]:
    from millrace.config.recipe import ConfigError

    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError(f"--worker {text} is no address; write HOST:PORT")
    return host, int(port)


def _listen(
    served: ModelService, limits: Limits, max_samples: int, listening: socket, *, show_tokens: bool
) -> None:
    from millrace.config.recipe import ConfigError
    from millrace.engines.prefill_decode_engine import PrefillDecodeEngine
    from millrace.inference.server.serve import Server
    from millrace.inference.server.service import GenerationService

    def ready(url: str) -> None:
        typer.echo(
            f"{served.name} answers at {url}/v1 (a prompt and its answer have at most {served.max_length:,} "
            "tokens); Ctrl-C ends it"
        )
        if show_tokens:
            typer.echo(f"token for requests: {limits.token} (new at each start; --token sets one)")
            typer.echo(f"admin token, to steer it: {limits.admin_token} (--admin-token sets one)")

    before = served.engine.start if isinstance(served.engine, PrefillDecodeEngine) else None
    try:
        service = GenerationService(served, max_samples=max_samples)
        server = Server(service, limits, ready=ready, before=before)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    server.run([listening])


def _note_kernels(where: torch.device) -> None:
    from millrace.kernels.device_record import unchecked_note

    if note := unchecked_note(where):
        typer.echo(note, err=True)


def open_served(
    model: str,
    checkpoint: str | None,
    *,
    name: str | None,
    max_concurrent: int,
    max_waiting: int,
    cache_tokens: int | None,
    precision: str | None,
    device: str,
    weights_root: Path | None,
    workers: Workers | None = None,
    cost: Path | None = None,
) -> ModelService:
    """Load a model and build an engine for it, in this process without `workers`; see the options of `serve`.

    A ValueError or RuntimeError if the run or the model cannot be read; the message names the cause.
    """
    from millrace.config.engine_section import EngineConfig
    from millrace.data.tokenizers import check_vocabulary, load_tokenizer, stop_token_ids
    from millrace.inference.server.service import ModelService

    folder, of_run, template = find_model(Path(model), checkpoint)
    weights = load_weights(folder, precision or of_run, device)
    tokenizer = load_tokenizer(folder)
    vocab_size = weights.config.get_text_config().vocab_size
    check_vocabulary(tokenizer, vocab_size)
    num_engines = 1 if workers is None else workers.prefill + workers.decode
    num_slots, max_length = pool_sizes(weights, cache_tokens, max_concurrent, num_engines)
    name = name or Path(model).resolve().name
    if workers is not None:
        sizes = EngineConfig(cache_tokens=num_slots, max_num_seqs=max_concurrent)
        engine, metrics = _worker_engine(
            weights, tokenizer, sizes, workers, name, max_length, max_waiting=max_waiting
        )
    else:
        # One tokenizer for the engine's thread and one for the server's: it is not made for two.
        own = load_tokenizer(folder)
        engine, metrics = _own_engine(weights, own, num_slots, max_concurrent, max_waiting, cost=cost)
    return ModelService(
        engine=engine,
        tokenizer=tokenizer,
        name=name,
        max_length=max_length,
        vocab_size=vocab_size,
        dtype=weights.dtype,
        stop_token_ids=stop_token_ids(tokenizer, getattr(weights.generation_config, "eos_token_id", None)),
        template=template,
        weights_root=weights_root,
        tokenizer_folder=folder,
        more_metrics=metrics,
    )


def _own_engine(
    weights: Model,
    tokenizer: Tokenizer,
    num_slots: int,
    max_concurrent: int,
    max_waiting: int,
    *,
    cost: Path | None,
) -> tuple[ServedEngine, tuple[Collector, ...]]:
    """Build an engine in this process; it has no further metrics."""
    from millrace.inference.async_engine import AsyncEngine

    _note_kernels(weights.device)

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    engine = paged_engine(weights, decode, num_slots, max_concurrent)
    if cost is not None:
        report_drift(engine, weights, cost)
    return AsyncEngine(engine, max_waiting=max_waiting), ()


def report_drift(engine: PagedEngine, weights: Model, cost: Path) -> None:
    """Warn once the engine's steps leave a cost model; PlanError if it is not that of this engine."""
    import warnings

    from millrace.inference.step_probes import engine_identity
    from millrace.planner.engine_cost_file import read_cost
    from millrace.planner.step_drift import StepDrift
    from millrace.simulation.step_engines import step_seconds

    drift = StepDrift()
    predict = step_seconds(read_cost(cost, engine_identity(weights, engine)).cost)

    def watch(plan: Plan, seconds: float) -> None:
        if warning := drift.add(seconds, predict(plan)):
            warnings.warn(warning, stacklevel=1)

    engine.watch_steps(watch)


def load_weights(folder: Path, precision: str | None, device: str) -> Model:
    """Load a model for sampling on all cores; without a precision, bfloat16 on CUDA and float32 elsewhere."""
    import os

    import torch

    from millrace.models.load import load_model
    from millrace.run.build import choose_device

    where = choose_device(device)
    dtype = getattr(torch, precision or ("bfloat16" if where.type == "cuda" else "float32"))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return load_model(folder, dtype=dtype).to(where).requires_grad_(False)


def paged_engine(
    weights: Model, decode: Callable[[Sequence[int]], str], num_slots: int, max_concurrent: int
) -> PagedEngine:
    """Build the engine of a server that has one in its own process."""
    from millrace.inference.engine import PagedEngine
    from millrace.inference.engine_trial import check_engine
    from millrace.models.decoding import prepare

    check_engine(weights)
    prepare(weights)
    return PagedEngine(weights, decode, max_cache_tokens=num_slots, max_requests=max_concurrent)


def _worker_engine(
    weights: Model,
    tokenizer: Tokenizer,
    sizes: EngineConfig,
    workers: Workers,
    name: str,
    max_length: int,
    *,
    max_waiting: int,
) -> tuple[ServedEngine, tuple[Collector, ...]]:
    """Build an engine in worker processes, and its metrics."""
    from millrace.engines.build_prefill_decode import build_prefill_decode
    from millrace.engines.prefill_decode_metrics import RoleMetrics

    engine = build_prefill_decode(
        weights,
        tokenizer,
        sizes,
        max_length=max_length,
        num_workers={"prefill": workers.prefill, "decode": workers.decode},
        route=workers.route,
        max_waiting=max_waiting,
        hosts=workers.hosts,
        token=workers.token,
    )
    return engine, (RoleMetrics(name, engine),)


def find_model(path: Path, checkpoint: str | None) -> tuple[Path, str | None, str]:
    """Return the folder, the precision (None of a model) and the chat template of a run or a model."""
    from millrace.config.recipe import ConfigError, from_yaml
    from millrace.data.chat import CHAT
    from millrace.run.folder import RunFolder, find_checkpoint, model_folder

    if (path / "recipe.yaml").is_file():
        run = RunFolder.open(path)
        config = from_yaml(run.recipe.read_text(encoding="utf-8"), str(run.recipe))
        folder = find_checkpoint(run, checkpoint or "best") / "model"
        return folder, config.precision, config.data.template
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint has no effect because {path} is a model and not a run; leave it out")
    return model_folder(path), None, CHAT


def pool_sizes(
    weights: Model, cache_tokens: int | None, max_concurrent: int, num_engines: int = 1
) -> tuple[int, int]:
    """Return the tokens in the KV cache of each engine, and those of a prompt and its answer at most."""
    from millrace.config.engine_section import EngineConfig
    from millrace.engines.build_engine import cache_tokens as tokens_that_fit

    most = getattr(weights.config.get_text_config(), "max_position_embeddings", None) or SURE_TOKENS
    sizes = EngineConfig(cache_tokens=cache_tokens, max_num_seqs=max_concurrent)
    sure = min(most, SURE_TOKENS)
    num_slots = tokens_that_fit(sizes, weights, sure)
    if cache_tokens is None:
        # Engines share the memory that one would take.
        num_slots = max(num_slots // num_engines, sure + sizes.block_size)
    num_slots -= num_slots % sizes.block_size
    return num_slots, min(most, num_slots)
