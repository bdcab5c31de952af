"""Memory of a run: the models that hold weights, and the peak of each phase."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from millrace.distributed.ranks import Ranks
from millrace.run.train_step import Learner
from millrace.training.offload import Owner
from millrace.training.policy import PolicyTrainer
from millrace.training.scorer import ModelScorer

# Phases of a step whose peaks are metrics.
PHASES = ("sample", "score", "train", "sync")


def total_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def owners(
    trainer: PolicyTrainer | None, learner: Learner | None, teacher: ModelScorer | None
) -> list[Owner]:
    """All on the trainer's side that hold weights, with their optimizers."""
    found: list[Owner] = []
    if trainer is not None:
        found.append(("the policy", trainer.model, trainer.optimizer))
    if learner is not None and learner.critic is not None:
        found.append(("the critic", learner.critic.model, learner.critic.optimizer))
    if learner is not None and learner.reference is not None:
        found.append(("the reference", learner.reference.model, None))
    if teacher is not None:
        found.append(("the teacher", teacher.model, None))
    return found


def fullest(ranks: Ranks, peaks: Mapping[str, int]) -> dict[str, int]:
    """Metrics of the peaks on the rank where they were highest; all ranks ask in step.

    Args:
        ranks: of the run.
        peaks: bytes of this rank, by phase; those of other phases are left out, and those not known.
    """
    told = [json.loads(each) for each in ranks.gather(json.dumps(dict(peaks)).encode())]
    return {
        f"memory/{phase}_peak_bytes": max(each[phase] for each in told)
        for phase in PHASES
        if all(phase in each for each in told)
    }
