"""`millrace evaluate`: the held-out accuracy of a checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.cli.resume import Run

if TYPE_CHECKING:
    from millrace.orchestration.evaluate import Evaluation

Checkpoint = Annotated[
    str, typer.Option(metavar="best|last|NAME", help="Which checkpoint, such as best or step-000050.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NUM_EXAMPLES = 3
MAX_SHOWN = 200


def evaluate(run: Run, checkpoint: Checkpoint = "best", as_json: AsJson = False) -> None:
    """Answer the run's held-out prompts greedily and score the answers."""
    from millrace.orchestration.checkpoints import evaluate_checkpoint

    result = evaluate_checkpoint(run, checkpoint)
    if as_json:
        typer.echo(json.dumps(as_tree(run, checkpoint, result), indent=1, ensure_ascii=False))
        return
    typer.echo("\n".join(as_lines(checkpoint, result)))


def as_tree(run: str, checkpoint: str, result: Evaluation) -> dict[str, Any]:
    """An evaluation for programs: numbers, and a few wrong answers."""
    return {
        "run": run,
        "checkpoint": checkpoint,
        "accuracy": result.accuracy,
        "mean_reward": result.reward,
        "mean_length_tokens": result.length,
        "truncated_share": result.truncated,
        "failed_share": result.failed,
        "num_prompts": len(result.rows),
        "wrong": [{key: row[key] for key in ("prompt", "completion", "answer")} for row in _wrong(result)],
    }


def as_lines(checkpoint: str, result: Evaluation) -> list[str]:
    """An evaluation for people."""
    right = sum(row["right"] for row in result.rows)
    lines = [
        f"accuracy     {result.accuracy:.3f}, {right} of {len(result.rows)} held-out prompts, "
        f"checkpoint {checkpoint}",
        f"mean reward  {result.reward:.3f}",
        f"mean length  {result.length:.1f} tokens, {result.truncated:.0%} ran out of tokens",
    ]
    if result.failed:
        lines.append(
            f"failed       {result.failed:.0%} of the rewards failed; accuracy and reward leave them out"
        )
    examples = _wrong(result)
    if examples:
        lines.append("wrong answers, for example:")
    for row in examples:
        lines += [f"  {_short(row['prompt'])}", f"    answered {_short(row['completion'])}"]
        lines += [f"    expected {_short(row['answer'])}"] * bool(row["answer"])
    return lines


def _wrong(result: Evaluation) -> list[dict[str, Any]]:
    return [row for row in result.rows if not row["right"] and row["outcome"] != "failed"][:NUM_EXAMPLES]


def _short(text: str) -> str:
    """Quoted, so that white space and control characters show."""
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
