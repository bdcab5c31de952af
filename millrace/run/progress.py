"""The progress of a run: everything that a resumed run needs besides weights, and the run's summary."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from millrace.observability.files import checked
from millrace.observability.sinks import RENAMED_STAGES
from millrace.version import __version__

if TYPE_CHECKING:
    from millrace.run.components import Components

Stage = Literal["sft", "reinforcement"]
# Names of fields in checkpoints of older versions.
RENAMED_FIELDS = {"warmup_steps": "sft_steps", "gate_open": "sft_done"}


@dataclass(slots=True)
class Progress:
    """Counters of one run, saved in each checkpoint.

    Attributes:
        stage: current stage.
        step: steps done in this stage (optimizer steps of SFT, batches of reinforcement).
        order: number of checkpoints so far; finds the newest without clocks.
        version: policy version, the number of optimizer steps done in all.
        attempts: optimizer steps tried in this stage, skipped ones included.
        critic_attempts: optimizer steps the critic tried.
        kl_coefficient: of the KL penalty, where it is adaptive.
        sft_steps: optimizer steps of SFT.
        sft_done: whether the held-out accuracy has reached sft.stop_accuracy.
        wall_s: seconds of work, over all processes of the run.
        save_s: duration of the longest checkpoint, until it was complete.
        tokens_sampled: tokens generated for training (without evaluations).
        tokens_trained: number of chosen tokens with a gradient.
        skipped_steps: optimizer steps skipped because the gradient was not finite.
        nonfinite_in_row: the same, since the last finite one.
        equal_in_row: batches in a row without gradient because their rewards were equal.
        eval_before: `evaluation.measure` before reinforcement (before training, without reinforcement).
        eval_last: `evaluation.measure` at the last evaluation.
        eval_after: `evaluation.measure` with the last weights.
        eval_best: best value so far.
        eval_best_reward: mean reward of the same evaluation; breaks ties.
        best_checkpoint: name of the checkpoint with the best value.
        metrics_bytes: length of metrics.jsonl.
        stream: position in SFT's prompts; that of reinforcement is saved with its rollouts.
        warnings: printed so far.
    """

    stage: Stage = "sft"
    step: int = 0
    order: int = 0
    version: int = 0
    attempts: int = 0
    critic_attempts: int = 0
    kl_coefficient: float | None = None
    sft_steps: int = 0
    sft_done: bool = False
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
        """Return a dict of plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Progress:
        """Rebuild the progress from `to_json`, also of an older version; unknown keys are ignored.

        Raises:
            ValueError: a value has the wrong type; the message names the first.
        """
        names = {f.name for f in fields(cls)}
        tree = {RENAMED_FIELDS.get(key, key): value for key, value in tree.items()}
        if isinstance(stage := tree.get("stage"), str):
            tree["stage"] = RENAMED_STAGES.get(stage, stage)
        return checked(cls, {key: value for key, value in tree.items() if key in names})

    @property
    def checkpoint_name(self) -> str:
        """Name of a checkpoint saved now."""
        return f"{'sft' if self.stage == 'sft' else 'step'}-{self.step:06d}"


@dataclass(frozen=True, slots=True)
class RunReport:
    """The summary of a run; written as `summary.json`.

    Attributes:
        run: the run folder.
        name: of the run.
        recipe: name of the recipe.
        status: `finished`, or `interrupted` (can be resumed), or `failed` (the reason is the last warning).
        out_of_time: whether it was interrupted because `timeouts.walltime_s` was nearly over.
        measure: metric of the next four, as `evaluation.measure` names it.
        eval_before: before reinforcement (before training, without reinforcement).
        eval_after: with the last weights; null if the run did not finish.
        eval_best: best value of the run.
        best_checkpoint: name of its checkpoint.
        steps: batches of reinforcement done.
        sft_steps: optimizer steps of SFT done.
        wall_s: seconds from start to end, over all processes of the run.
        tokens_sampled: tokens generated for training.
        tokens_trained: number of chosen tokens with a gradient.
        skipped_steps: optimizer steps skipped because the gradient was not finite.
        num_parameters: number of policy weights.
        num_train_prompts: number of training prompts.
        eval_size: number of held-out prompts.
        filtered_prompts: prompts dropped because they are too long.
        filtered_demonstrations: demonstrations dropped from SFT because they are too long.
        scored_demonstrations: held-out reference answers scored before training to test the rewards.
        right_demonstrations: number of them that earned full marks.
        device: name of the device.
        versions: of millrace, python, torch and transformers.
        warnings: printed during the run.
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
    sft_steps: int
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
    components: Components,
    *,
    run: Path,
    recipe: str,
    measure: str,
    status: Literal["finished", "interrupted", "failed"],
    demonstrations: tuple[int, int],
    out_of_time: bool,
) -> RunReport:
    """Build the summary of a run.

    Args:
        progress: of the run.
        components: components of the run.
        run: the run folder.
        recipe: name of the recipe.
        measure: metric of its evaluations.
        status: how it ended.
        demonstrations: number of reference answers that tested the rewards, and of those with full marks.
        out_of_time: whether it was interrupted because its time was nearly over.
    """
    warming = progress.stage == "sft"
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
        sft_steps=progress.step if warming else progress.sft_steps,
        wall_s=round(progress.wall_s, 2),
        tokens_sampled=progress.tokens_sampled,
        tokens_trained=progress.tokens_trained,
        skipped_steps=progress.skipped_steps,
        num_parameters=components.num_parameters,
        num_train_prompts=len(components.train_prompts),
        eval_size=len(components.eval_prompts),
        filtered_prompts=components.num_filtered,
        filtered_demonstrations=components.num_long_demonstrations,
        scored_demonstrations=demonstrations[0],
        right_demonstrations=demonstrations[1],
        device=components.device,
        versions=versions(),
        warnings=progress.warnings,
    )


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide a run's numbers."""
    packages = {name: _installed(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), "millrace": __version__, **packages}


@cache
def _installed(package: str) -> str:
    # Reads the package's whole description, and a live report asks again and again.
    return metadata.version(package)
