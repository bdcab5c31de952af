"""`millrace evaluate`: what a checkpoint's answers, or those of any model, are worth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.cli.train import Overrides

if TYPE_CHECKING:
    from millrace.config.settings import RunConfig
    from millrace.run.evaluation import Evaluation

Target = Annotated[
    str,
    typer.Argument(
        metavar="RUN|MODEL", help="A run's folder, such as runs/quickstart-1, or any model folder."
    ),
]
Checkpoint = Annotated[
    str, typer.Option(metavar="best|last|NAME", help="Which checkpoint, such as best or step-000050.")
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Questions: JSONL, Parquet, a dataset folder (every row), or reasoning-gym:NAME."
    ),
]
Rewards = Annotated[
    list[str] | None,
    typer.Option(
        "--reward", metavar="KIND", help="exact, gsm8k, number, task, or module:function; several add up."
    ),
]
RecipeName = Annotated[
    str | None, typer.Option(metavar="RECIPE", help="Recipe that a model folder is evaluated as.")
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the most likely tokens.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
# The rewards that need no settings.
PLAIN_REWARDS = ("exact", "gsm8k", "number", "task")
NUM_EXAMPLES = 3
MAX_SHOWN = 200


def evaluate(
    target: Target,
    overrides: Overrides = None,
    *,
    checkpoint: Checkpoint = "best",
    data: Data = None,
    reward: Rewards = None,
    recipe: RecipeName = None,
    temperature: Temperature = 0.0,
    as_json: AsJson = False,
) -> None:
    """Let a model answer questions, without training, and score the answers.

    A run's checkpoint answers the run's held-out questions, and is judged as in the run. Any model folder
    answers the questions of --data or --recipe. KEY=VALUE changes settings, such as data.template=chat,
    data.prompt_column=problem or rollout.max_tokens=512.
    """
    from millrace.config.recipe import ConfigError
    from millrace.run.folder import RunFolder, find_checkpoint, model_folder

    is_run = (Path(target) / "recipe.yaml").is_file()
    if is_run and recipe is not None:
        raise ConfigError(f"{target} is a run, which has a recipe of its own; remove --recipe")
    if not is_run and checkpoint != "best":
        raise ConfigError(f"{target} is not a run, so --checkpoint has no effect; remove it")
    config = settings_of(
        str(Path(target) / "recipe.yaml") if is_run else recipe, data, reward or [], overrides or []
    )
    from millrace.config.inputs import TASK_PREFIX
    from millrace.run.offline import evaluate_model

    if is_run:
        folder = find_checkpoint(RunFolder.open(target), checkpoint) / "model"
    else:
        folder = model_folder(Path(target))
    whole = data is not None and not data.startswith(TASK_PREFIX)
    result = evaluate_model(folder, config, whole=whole, temperature=temperature)
    measure, of = config.evaluation.measure, f"checkpoint {checkpoint}" if is_run else target
    if as_json:
        tree = {"run" if is_run else "model": target} | ({"checkpoint": checkpoint} if is_run else {})
        typer.echo(json.dumps(tree | as_tree(measure, result), indent=1, ensure_ascii=False))
        return
    typer.echo("\n".join(as_lines(of, measure, result)))


def settings_of(
    recipe: str | None, data: str | None, rewards: Sequence[str], words: Sequence[str]
) -> RunConfig:
    """Settings of an evaluation: the command line's over any recipe's; ConfigError if one is missing."""
    from millrace.config.inputs import DataConfig
    from millrace.config.recipe import ConfigError, from_settings, load_recipe, parse_overrides

    given: dict[str, Any] = parse_overrides(words)
    if data is not None:
        given |= {"data.train": data, "data.eval": None}
        if not data.startswith("reasoning-gym:"):
            # Of another source, which the recipe may have had.
            given |= {"data.task": {}, "data.task_size": DataConfig.model_fields["task_size"].default}
    if rewards:
        given["rewards"] = [_reward(word) for word in rewards]
    if recipe is not None:
        return load_recipe(recipe, given)
    if "data.train" not in given:
        raise ConfigError("there are no questions; give --data FILE, or --recipe for those that it holds out")
    if not any(key.partition(".")[0] == "rewards" for key in given):
        raise ConfigError(
            f"there is no reward; give --reward {', '.join(PLAIN_REWARDS)} or module:function, or --recipe"
        )
    return from_settings({"steps": 1} | given, "of the command")


def _reward(word: str) -> dict[str, Any]:
    from millrace.config.recipe import ConfigError

    if ":" in word:
        return {"kind": "function", "function": word}
    if word not in PLAIN_REWARDS:
        raise ConfigError(
            f"--reward {word} is none of {', '.join(PLAIN_REWARDS)} and module:function; give one of these, "
            "or rewards='[{kind: ...}]'"
        )
    return {"kind": word}


def as_tree(measure: str, result: Evaluation) -> dict[str, Any]:
    """An evaluation for programs: numbers, and a few answers without full marks."""
    return {
        "measure": measure,
        "value": result.metrics[measure],
        "accuracy": result.accuracy,
        "mean_reward": result.reward,
        "rewards": dict(result.parts),
        "mean_length_tokens": result.length,
        "truncated_fraction": result.truncated,
        "failed_fraction": result.failed,
        "num_prompts": len(result.rows),
        "num_left_out": result.left_out,
        "wrong": [{key: row[key] for key in ("prompt", "completion", "answer")} for row in _wrong(result)],
    }


def as_lines(of: str, measure: str, result: Evaluation) -> list[str]:
    """An evaluation for people."""
    from millrace.observability.measure import measure_words
    from millrace.observability.plain import plain_text

    metrics, size = result.metrics, len(result.rows)
    left_out = f" ({result.left_out} too long)" if result.left_out else ""
    told = [(measure_words(measure), f"{metrics[measure]:.3f} on {size} questions{left_out}, {of}")]
    others = [name for name in metrics if name.endswith("/mean") and name.startswith("reward/")]
    others = [name for name in ("accuracy", *others) if name != measure]
    told += [(measure_words(name), f"{metrics[name]:.3f}") for name in others]
    full = sum(row["right"] for row in result.rows)
    failed = [row for row in result.rows if row["outcome"] == "failed"]
    invalid = sum(row["outcome"] == "invalid" for row in result.rows)
    unread = f" ({invalid} of them could not be read)" if invalid else ""
    told.append(("answers", f"{full} with full marks, {size - full - len(failed)} with less{unread}"))
    if failed:
        reason = plain_text(failed[0]["reason"], 300)
        told.append(("failed", f"{len(failed)} have no score, and no mean counts them; the first: {reason}"))
    told.append(("mean length", f"{result.length:.1f} tokens, {result.truncated:.0%} ran out of tokens"))
    width = max(len(name) for name, _ in told)
    lines = [f"{name:{width}}  {value}" for name, value in told]
    examples = _wrong(result)
    if examples:
        lines.append("answers without full marks, for example:")
    for row in examples:
        lines += [
            f"  {_short(row['prompt'])}",
            f"    answered {_short(row.get('transcript', row['completion']))}",
        ]
        lines += [f"    expected {_short(row['answer'])}"] * bool(row["answer"])
        lines += [f"    reward   {row['reward']:.3f}"] * (measure != "accuracy")
    return lines


def _wrong(result: Evaluation) -> list[dict[str, Any]]:
    return [row for row in result.rows if not row["right"] and row["outcome"] != "failed"][:NUM_EXAMPLES]


def _short(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
