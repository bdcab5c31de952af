"""What a run came to, from where it stands."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Literal

from millrace import __version__
from millrace.orchestration.parts import Parts
from millrace.orchestration.progress import Progress, RunReport


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
