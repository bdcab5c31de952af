"""Memory of a run: the models that hold weights, and the peak of each phase."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from millrace.distributed.ranks import Ranks
from millrace.run.train_step import TrainStep
from millrace.training.offload import Owner
from millrace.training.policy import PolicyTrainer
from millrace.training.scorer import ModelScorer

# Phases of a step whose peaks are metrics.
PHASES = ("sample", "score", "train", "weight_sync")


def total_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def owners(
    trainer: PolicyTrainer | None, train_step: TrainStep | None, teacher: ModelScorer | None
) -> list[Owner]:
    """Return everything of the trainer side that holds weights, with its optimizers."""
    found: list[Owner] = []
    if trainer is not None:
        found.append(("the policy", trainer.model, trainer.optimizer))
    if train_step is not None and train_step.critic is not None:
        found.append(("the critic", train_step.critic.model, train_step.critic.optimizer))
    if train_step is not None and train_step.reference is not None:
        found.append(("the reference", train_step.reference.model, None))
    if teacher is not None:
        found.append(("the teacher", teacher.model, None))
    return found


def fullest(ranks: Ranks, peaks: Mapping[str, int]) -> dict[str, int]:
    """Return the peak bytes by phase, at most over the ranks; a collective call.

    Args:
        ranks: of the run.
        peaks: bytes of this rank, by phase; other phases, and phases that a rank lacks, are dropped.
    """
    gathered = [json.loads(each) for each in ranks.all_gather(json.dumps(dict(peaks)).encode())]
    return {
        f"memory/{phase}_peak_bytes": max(each[phase] for each in gathered)
        for phase in PHASES
        if all(phase in each for each in gathered)
    }
