"""`millrace measure`: what a step of an engine costs on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from millrace.cli.serve import (
    CacheTokens,
    Checkpoint,
    Device,
    Folder,
    Precision,
    find_model,
    load_weights,
    paged_engine,
    pool_sizes,
)
from millrace.errors import SetupError

if TYPE_CHECKING:
    from millrace.planner.engine_cost_file import CostMeasurement

What = Annotated[Literal["engine"], typer.Argument(metavar="engine", help="What is measured: its steps.")]
Output = Annotated[Path, typer.Option(metavar="FILE", help="Where the cost model is written.")]
Seconds = Annotated[
    float, typer.Option(min=1.0, help="At most; loads for which there is no time are skipped.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of the order of loads, of held-out loads and of tokens.")]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, help="CPU threads; a worker of serve --prefill has the cores over all workers. [default: all]"
    ),
]
MaxConcurrent = Annotated[int, typer.Option(min=1, help="Requests of a step at most.")]

WORDS = {
    "step_s": "for the step itself",
    "token_s": "for each token that it computes",
    "pair_s": "for each pair of such a token and a token before it (attention)",
    "row_s": "for each request",
    "context_s": "for each token of their contexts (reading the KV cache)",
}


def measure(
    what: What,
    model: Folder,
    checkpoint: Checkpoint = None,
    *,
    output: Output = Path("engine-cost.json"),
    seconds: Seconds = 60.0,
    seed: Seed = 0,
    max_concurrent: MaxConcurrent = 256,
    cache_tokens: CacheTokens = None,
    precision: Precision = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Measure steps of the engine of `millrace serve`, fit a cost model to them, and write it.

    Other work on the machine is measured too: leave it alone meanwhile.

    Exit code: 0, 1 if the model cannot be read, or 2 for a mistake in the words.
    """
    if output.is_dir() or not output.parent.is_dir():
        raise SetupError(f"--output {output} cannot be written; name a file in a folder that exists")
    import torch

    from millrace.inference.step_probes import engine_identity, measure_engine
    from millrace.planner.engine_cost_file import write_cost

    folder, of_run, _ = find_model(Path(model), checkpoint)
    weights = load_weights(folder, precision or of_run, device)
    if threads is not None:
        torch.set_num_threads(threads)
    num_slots, _ = pool_sizes(weights, cache_tokens, max_concurrent)
    # Probes have no stop strings, so no text is needed.
    engine = paged_engine(weights, lambda token_ids: "", num_slots, max_concurrent)
    identity = engine_identity(weights, engine)
    typer.echo(f"measuring for at most {seconds:g} s")
    measured = measure_engine(engine, identity, engine.sizes, seconds=seconds, seed=seed)
    write_cost(measured, output)
    for line in cost_lines(measured):
        typer.echo(line)
    typer.echo(f"written to {output}")


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def cost_lines(measured: CostMeasurement) -> Iterator[str]:
    """The table: coefficients in words, and errors."""
    engine = measured.engine
    yield (
        f"{engine.model_type}, {engine.num_parameters / 1e6:,.3g} M parameters, {engine.dtype}, on "
        f"{engine.machine}, {_number(engine.num_threads, 'thread')}"
    )
    yield "a step takes"
    for name, words in WORDS.items():
        yield f"  {duration(getattr(measured.cost, name)):>9}  {words}"
    yield f"{'error of a step':24}{'median':>8}{'p90':>8}{'loads':>7}"
    for name, error in (("fitted", measured.fit_error), ("held out", measured.held_out_error)):
        yield f"  {name:22}{error.median:8.1%}{error.p90:8.1%}{error.num_steps:7}"
    loads = [step.load for step in measured.steps]
    yield (
        f"measured in {measured.seconds:.0f} s: up to {max(load.tokens for load in loads):,.0f} tokens, "
        f"{max(load.rows for load in loads):,.0f} requests and {max(load.context for load in loads):,.0f} "
        f"tokens of context in a step; {measured.num_skipped} loads were skipped"
    )


def duration(seconds: float) -> str:
    """Format seconds with three digits, in the unit that suits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
