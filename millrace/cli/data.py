"""`millrace data check`: what a data set holds, how a recipe reads it, and what its answers earn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millrace.observability.plain import plain_text

if TYPE_CHECKING:
    from millrace.config.settings import RunConfig
    from millrace.data.tokenizers import Tokenizer
    from millrace.run.data_check import DataCheck, ReferenceScores
    from millrace.types import Prompt

Action = Annotated[Literal["check"], typer.Argument(metavar="check", help="What to do.")]
File = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A file, pattern or folder, as data.train; reasoning-gym:NAME; or a recipe.yaml, to check what "
        "it reads.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings, such as data.prompt_column=problem."),
]
RecipeName = Annotated[
    str | None, typer.Option("--recipe", metavar="RECIPE", help="Read it as this recipe would.")
]
Model = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Model folder with the tokenizer; by default tokenizer.path or model.path of the recipe.",
    ),
]
Rewards = Annotated[
    list[str] | None,
    typer.Option(
        "--reward", metavar="KIND", help="Score the answers: exact, gsm8k, number, task, or module:function."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NUM_PROBLEMS = 5
MAX_SHOWN = 600


def data(
    action: Action,
    file: File,
    overrides: Overrides = None,
    *,
    recipe: RecipeName = None,
    model: Model = None,
    reward: Rewards = None,
    as_json: AsJson = False,
) -> None:
    """Show what a data set holds, how it is read, and what the rewards give its reference answers.

    Exit code: 1 if a row cannot be used.
    """
    from millrace.config.inputs import TASK_PREFIX
    from millrace.config.recipe import ConfigError
    from millrace.data.prompts import read_files
    from millrace.data.rows import read_rows
    from millrace.data.tasks import task_rows
    from millrace.run.data_check import NUM_SHOWN, check_data

    if file.endswith((".yaml", ".yml")):
        if recipe is not None:
            raise ConfigError(f"{file} is a recipe itself; leave out --recipe {recipe}")
        config = _settings(file, None, reward or [], overrides or [])
    else:
        config = _settings(recipe, file, reward or [], overrides or [])
    settings = config.data
    if settings.train.startswith(TASK_PREFIX):
        rows = task_rows(settings.train, settings.task, size=settings.task_size, seed=config.seed)
    else:
        rows = read_files(settings)
    held_out = read_rows(settings.eval) if settings.eval is not None else ()
    tokenizer = _tokenizer(config, model)
    found = check_data(rows, config, tokenizer, held_out=held_out)
    if as_json:
        typer.echo(json.dumps(as_tree(found), indent=1, ensure_ascii=False))
    else:
        for line in as_lines(found, config, is_tokenized=tokenizer is not None):
            typer.echo(line)
        for number, (row, prompt) in enumerate(found.prompts[:NUM_SHOWN], start=1):
            trained = found.trained[number - 1] if found.trained else ()
            _show(f"prompt {number}, {row.where}", prompt, tokenizer, trained)
    if found.problems:
        raise typer.Exit(1)


def _settings(recipe: str | None, file: str | None, rewards: list[str], words: list[str]) -> RunConfig:
    """The settings of the recipe for this file; without one the defaults, with the given rewards alone."""
    from millrace.cli.evaluate import settings_of

    chosen = bool(rewards or recipe) or any(word.startswith("rewards") for word in words)
    config = settings_of(recipe, file, rewards if chosen else ["exact"], words)
    return config if chosen else config.model_copy(update={"rewards": ()})


def _tokenizer(config: RunConfig, model: Path | None) -> Tokenizer | None:
    from millrace.data.chat_template import set_chat_template
    from millrace.data.tokenizers import load_tokenizer

    folder = model or config.tokenizer.path or config.model.path
    if folder is None:
        return None
    tokenizer = load_tokenizer(folder)
    set_chat_template(tokenizer, config.tokenizer.chat_template)
    return tokenizer


def as_tree(found: DataCheck) -> dict[str, Any]:
    """The check for programs."""
    from millrace.run.data_check import NUM_SHOWN, quantiles

    trained = found.trained or [()] * NUM_SHOWN
    return {
        "num_rows": found.num_rows,
        "columns": {name: dict(kinds) for name, kinds in found.columns.items()},
        "formats": [name for name, _ in found.formats],
        "num_prompts": len(found.prompts),
        "num_answers": found.num_answers,
        "num_duplicates": found.num_duplicates,
        "num_held_out": found.num_held_out,
        "sources": dict(found.sources),
        "tokens": quantiles(found.lengths) if found.lengths else None,
        "num_too_long": found.num_too_long,
        "problems": list(found.problems),
        "template": list(found.template),
        "functions": dict(found.functions),
        "scores": None if found.scores is None else asdict(found.scores),
        "examples": [
            {
                "prompt": prompt.text,
                "answer": prompt.answer,
                "tokens": len(prompt.token_ids) or None,
                "trained": [text for is_trained, text in pieces if is_trained],
            }
            for (_, prompt), pieces in zip(found.prompts[:NUM_SHOWN], trained, strict=False)
        ],
    }


def as_lines(found: DataCheck, config: RunConfig, *, is_tokenized: bool) -> list[str]:
    """The check for people, without the examples."""
    from millrace.run.data_check import quantiles

    lines = [f"rows        {found.num_rows:,}, of which {len(found.prompts):,} can be used"]
    lines += [f"format      {name}: {advice}" for name, advice in found.formats]
    for number, (name, kinds) in enumerate(found.columns.items()):
        values = ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())
        lines.append(f"{'' if number else 'columns':11} {plain_text(name, 80)}: {values}")
    lines.append(f"answers     {found.num_answers:,}")
    lines.append(f"duplicates  {found.num_duplicates:,} rows have the problem of an earlier row")
    if found.num_held_out is not None:
        lines.append(f"held out    {found.num_held_out:,} rows, whose problem is in {config.data.eval}")
    if found.sources:
        shown = ", ".join(f"{plain_text(name, 80)} {count:,}" for name, count in found.sources.most_common())
        lines.append(f"sources     {plain_text(shown, MAX_SHOWN)}")
    if found.lengths:
        sizes = ", ".join(f"{name} {size:,}" for name, size in quantiles(found.lengths).items())
        over = f"{found.num_too_long:,} over data.max_prompt_tokens {config.data.max_prompt_tokens:,}"
        lines.append(f"tokens      {sizes}; {over}")
    elif not is_tokenized:
        lines.append("tokens      not counted; --model FOLDER names a tokenizer")
    lines += [f"template    {plain_text(problem, MAX_SHOWN)}" for problem in found.template]
    lines += [f"function    {name} is called as {trainer} calls its own" for name, trainer in found.functions]
    lines.append(f"rewards     {_scored(found.scores)}")
    if found.scores is not None and found.scores.first_wrong:
        lines.append(f"            the first without: {plain_text(found.scores.first_wrong, MAX_SHOWN)}")
    lines += [f"problem     {plain_text(problem, MAX_SHOWN)}" for problem in found.problems[:NUM_PROBLEMS]]
    if len(found.problems) > NUM_PROBLEMS:
        lines.append(f"            and {len(found.problems) - NUM_PROBLEMS:,} rows more")
    return lines


def _scored(scores: ReferenceScores | None) -> str:
    if scores is None:
        return "not tried; --reward KIND or --recipe names some that compare with answers"
    mean = "" if scores.num_failed == scores.num_scored else f", mean {scores.mean:.3f}"
    failed = f", {scores.num_failed} failed" if scores.num_failed else ""
    return f"{scores.num_right} of {scores.num_scored} reference answers earn full marks{mean}{failed}"


def _show(
    heading: str, prompt: Prompt, tokenizer: Tokenizer | None, trained: Sequence[tuple[bool, str]]
) -> None:
    """Print a prompt as the model sees it, special tokens included, what SFT trains on, and its answer."""
    size = f", {len(prompt.token_ids)} tokens" if tokenizer is not None else ""
    typer.secho(f"{heading}{size}", bold=True)
    text = prompt.text if tokenizer is None else str(tokenizer.decode(list(prompt.token_ids)))
    for line in text[:MAX_SHOWN].split("\n"):
        typer.echo(f"  {plain_text(line, MAX_SHOWN)}")
    if len(text) > MAX_SHOWN:
        typer.echo(f"  … ({len(text) - MAX_SHOWN:,} more characters)")
    for is_trained, piece in trained:
        shown = plain_text(piece, MAX_SHOWN)
        typer.echo(f"  {'SFT trains on' if is_trained else 'SFT does not train on'}: {shown}")
    typer.echo(f"  answer: {plain_text(prompt.answer, MAX_SHOWN)}" if prompt.answer else "  no answer")
