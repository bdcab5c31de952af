"""`millrace reward-model`: a reward model from preference pairs."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

Pairs = Annotated[
    str, typer.Argument(metavar="PAIRS.jsonl", help="One {prompt, chosen, rejected} a line, each a text.")
]
Model = Annotated[
    str, typer.Option(metavar="FOLDER", help="A language model's folder, or a reward model's to go on with.")
]
Output = Annotated[str, typer.Option(metavar="FOLDER", help="Where the reward model goes; a new folder.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Optimizer steps; without it the pairs once.")]
LearningRate = Annotated[float, typer.Option(help="Of the first step; it falls to a tenth.")]
PairsPerStep = Annotated[int, typer.Option(min=1, help="Pairs in one optimizer step.")]
Seed = Annotated[int, typer.Option(min=0, help="Of what is held out, and of the order.")]


def reward_model(
    pairs: Pairs,
    model: Model,
    output: Output,
    *,
    steps: Steps = None,
    learning_rate: LearningRate = 1e-5,
    pairs_per_step: PairsPerStep = 32,
    seed: Seed = 0,
) -> None:
    """Train a reward model on preference pairs, a tenth of whose prompts are held out."""
    from millrace.run.build import choose_device
    from millrace.training.preferences import train_reward_model

    report = train_reward_model(
        pairs,
        model,
        output,
        steps=steps,
        learning_rate=learning_rate,
        pairs_per_step=pairs_per_step,
        seed=seed,
        device=choose_device("auto"),
        say=typer.echo,
    )
    typer.echo(
        f"held-out accuracy {report.accuracy_before:.3f} -> {report.accuracy_after:.3f} on "
        f"{report.num_held_out} pairs, after {report.steps} steps"
    )
    typer.echo(f"reward model: {shlex.quote(output)}")
