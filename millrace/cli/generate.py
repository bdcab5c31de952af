"""`millrace generate`: let a trained policy answer."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from millrace.cli.evaluate import AsJson, Checkpoint
from millrace.cli.resume import Run

Prompts = Annotated[
    list[str], typer.Argument(metavar="PROMPT", help="What to answer, each prompt in quotes.")
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the most likely tokens.")]
Samples = Annotated[
    int, typer.Option(min=1, help="Answers to each prompt; several need a temperature above 0.")
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Seed of the first completion at a temperature above 0.")
]


def generate(
    run: Run,
    prompts: Prompts,
    checkpoint: Checkpoint = "best",
    *,
    temperature: Temperature = 0.0,
    samples: Samples = 1,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Answer prompts of your own, put into the run's template."""
    from millrace.config.recipe import ConfigError

    if temperature == 0 and (samples > 1 or seed is not None):
        option = "--samples" if samples > 1 else "--seed"
        raise ConfigError(f"{option} has no effect at temperature 0; add --temperature 1")
    from millrace.run.offline import answer

    drawn = answer(
        run, prompts, checkpoint=checkpoint, temperature=temperature, num_samples=samples, seed=seed or 0
    )
    if as_json:
        tree = [
            {
                "prompt": prompt,
                "completions": [
                    {"text": c.text, "num_tokens": len(c.token_ids), "finish_reason": c.finish_reason}
                    for c in completions
                ],
            }
            for prompt, completions in zip(prompts, drawn, strict=True)
        ]
        typer.echo(json.dumps(tree, indent=1, ensure_ascii=False))
        return
    for prompt, completions in zip(prompts, drawn, strict=True):
        if len(prompts) > 1:
            typer.echo(f"> {visible(prompt)}")
        for completion in completions:
            typer.echo(visible(completion.text))


def visible(text: str) -> str:
    """The text with control characters written out, since they could take over a terminal."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text
    )
