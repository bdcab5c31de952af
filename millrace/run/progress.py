"""Where a run stands: everything that a resumed run needs besides weights, and its summary."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from millrace.observability.files import checked
from millrace.version import __version__

if TYPE_CHECKING:
    from millrace.run.components import Parts

Stage = Literal["warmup", "reinforcement"]


@dataclass(slots=True)
class Progress:
    """Counters of one run, saved in each checkpoint.

    Attributes:
        stage: what the run is at.
        step: steps done in this stage (optimizer steps of the warm-up, batches of reinforcement).
        order: counts checkpoints, so that the newest is known without clocks.
        version: optimizer steps done in all.
        attempts: optimizer steps tried in this stage, skipped ones included.
        critic_attempts: optimizer steps the critic tried.
        kl_coefficient: of the KL penalty, where it is steered.
        warmup_steps: optimizer steps of the warm-up.
        gate_open: the warm-up's held-out accuracy has reached its gate.
        wall_s: seconds of work, over all processes of the run.
        save_s: of the longest checkpoint, until it was whole.
        tokens_sampled: tokens drawn while training (evaluation aside).
        tokens_trained: chosen tokens a gradient was computed for.
        skipped_steps: optimizer steps left out because the gradient was not finite.
        nonfinite_in_row: the same, since the last good one.
        equal_in_row: batches in a row whose equal rewards taught nothing.
        eval_before: what `evaluation.measure` was before reinforcement (before training, if there is none).
        eval_last: what it was at the last evaluation.
        eval_after: what it is with the last weights.
        eval_best: the best seen.
        eval_best_reward: the mean reward beside it, which decides between checkpoints that are equal.
        best_checkpoint: name of the checkpoint it was seen with.
        metrics_bytes: length of metrics.jsonl.
        stream: of the warm-up's prompts; those of reinforcement are with its rollouts.
        warnings: what went wrong and was said.
    """

    stage: Stage = "warmup"
    step: int = 0
    order: int = 0
    version: int = 0
    attempts: int = 0
    critic_attempts: int = 0
    kl_coefficient: float | None = None
    warmup_steps: int = 0
    gate_open: bool = False
    wall_s: float = 0.0
    save_s: float = 0.0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    skipped_steps: int = 0
    nonfinite_in_row: int = 0
    equal_in_row: int = 0
    eval_before: float | None = None
    eval_last: float | None = None
    eval_after: float | None = None
    eval_best: float | None = None
    eval_best_reward: float | None = None
    best_checkpoint: str | None = None
    metrics_bytes: int = 0
    stream: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """A plain tree."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Progress:
        """What `to_json` gave; other keys are ignored.

        Raises:
            ValueError: a value has the wrong type, with a sentence on the first.
        """
        names = {f.name for f in fields(cls)}
        return checked(cls, {key: value for key, value in tree.items() if key in names})

    @property
    def checkpoint_name(self) -> str:
        """Name of a checkpoint taken now."""
        return f"{'warmup' if self.stage == 'warmup' else 'step'}-{self.step:06d}"


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run came to; written as `summary.json`.

    Attributes:
        run: the run folder.
        name: of the run.
        recipe: it was made from.
        status: `finished`, or `interrupted` (resume it), or `failed` (the reason is the last warning).
        out_of_time: whether it was interrupted because `limits.run_s` was nearly over.
        measure: metric of evaluations that the next four are about, as `evaluation.measure` names it.
        eval_before: before reinforcement (before training, if there is none).
        eval_after: with the last weights; null if the run did not end.
        eval_best: the best seen.
        best_checkpoint: name of its checkpoint.
        steps: batches of reinforcement done.
        warmup_steps: optimizer steps of the warm-up done.
        wall_s: seconds from start to end, over all processes of the run.
        tokens_sampled: tokens drawn while training.
        tokens_trained: chosen tokens a gradient was computed for.
        skipped_steps: optimizer steps left out because the gradient was not finite.
        num_parameters: weights of the policy.
        num_train_prompts: problems trained on.
        eval_size: problems held out.
        filtered_prompts: prompts left out because they are too long.
        filtered_demonstrations: demonstrations left out of the warm-up because they are too long.
        scored_demonstrations: held-out reference answers that the rewards were tried on before training.
        right_demonstrations: those of them that earned full marks.
        device: where it ran.
        versions: of millrace, python, torch and transformers.
        warnings: what went wrong and was said.
    """

    run: str
    name: str
    recipe: str
    status: Literal["finished", "interrupted", "failed"]
    out_of_time: bool
    measure: str
    eval_before: float | None
    eval_after: float | None
    eval_best: float | None
    best_checkpoint: str | None
    steps: int
    warmup_steps: int
    wall_s: float
    tokens_sampled: int
    tokens_trained: int
    skipped_steps: int
    num_parameters: int
    num_train_prompts: int
    eval_size: int
    filtered_prompts: int
    filtered_demonstrations: int
    scored_demonstrations: int
    right_demonstrations: int
    device: str
    versions: dict[str, str]
    warnings: list[str]


def run_report(
    progress: Progress,
    parts: Parts,
    *,
    run: Path,
    recipe: str,
    measure: str,
    status: Literal["finished", "interrupted", "failed"],
    demonstrations: tuple[int, int],
    out_of_time: bool,
) -> RunReport:
    """The summary of a run.

    Args:
        progress: where it stands.
        parts: what it is made of.
        run: its folder.
        recipe: it was made from.
        measure: metric that its evaluations are judged by.
        status: how it ended.
        demonstrations: held-out reference answers that the rewards were tried on, and those with full marks.
        out_of_time: whether it was interrupted because its time was nearly over.
    """
    warming = progress.stage == "warmup"
    return RunReport(
        run=str(run),
        name=run.name,
        recipe=recipe,
        status=status,
        out_of_time=out_of_time,
        measure=measure,
        eval_before=progress.eval_before,
        eval_after=progress.eval_after,
        eval_best=progress.eval_best,
        best_checkpoint=progress.best_checkpoint,
        steps=0 if warming else progress.step,
        warmup_steps=progress.step if warming else progress.warmup_steps,
        wall_s=round(progress.wall_s, 2),
        tokens_sampled=progress.tokens_sampled,
        tokens_trained=progress.tokens_trained,
        skipped_steps=progress.skipped_steps,
        num_parameters=parts.num_parameters,
        num_train_prompts=len(parts.train_prompts),
        eval_size=len(parts.eval_prompts),
        filtered_prompts=parts.num_filtered,
        filtered_demonstrations=parts.num_long_demonstrations,
        scored_demonstrations=demonstrations[0],
        right_demonstrations=demonstrations[1],
        device=parts.device,
        versions=versions(),
        warnings=progress.warnings,
    )


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    packages = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), "millrace": __version__, **packages}
