"""Memory of a run: what an engine's cache may take, who holds weights, and each phase's peak."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import torch

from millrace.config.engine import EngineConfig
from millrace.models.facts import facts_of
from millrace.models.load import Model
from millrace.orchestration.learn import Learner
from millrace.orchestration.ranks import Ranks
from millrace.training.offload import Owner
from millrace.training.policy import PolicyTrainer
from millrace.training.scorer import ModelScorer

# Of the memory that is free when the engine is built; the trainer's gradients and activations need the rest.
SHARE = 0.25
# Phases of a step whose peaks are metrics.
PHASES = ("sample", "score", "train", "sync")


def cache_tokens(config: EngineConfig, model: Model, longest: int) -> int:
    """Tokens whose keys and values are kept.

    Args:
        config: the recipe's engine; its `cache_tokens` is taken as it is.
        model: whose keys and values they are.
        longest: tokens of the longest sequence.
    """
    if config.cache_tokens is not None:
        return config.cache_tokens
    token_bytes = facts_of(model).token_numbers * model.dtype.itemsize
    # A sequence's last block may be almost empty.
    wanted = config.max_requests * (longest + config.block_size)
    return max(longest + config.block_size, min(wanted, int(SHARE * free_bytes(model.device)) // token_bytes))


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    # Not every system says what is free; a quarter of what there is, is a careful guess.
    names = os.sysconf_names
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in names else "SC_PHYS_PAGES"
    share = 1.0 if pages == "SC_AVPHYS_PAGES" else 0.25
    return int(share * os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE"))


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
