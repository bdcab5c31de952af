"""Settings of the flow: how far sampling may run ahead of training, and what becomes of what is too old."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeInt

from millrace.config.section import Section


class FlowConfig(Section):
    """What lies between sampling and training."""

    staleness: NonNegativeInt = Field(
        0,
        description="batches that sampling may be ahead of training; 0 samples and trains in turn, 1 at once",
    )
    order: Literal["submission", "completion"] = Field(
        "submission", description="train on the groups that started first, or on those that finished first"
    )
    stale: Literal["wait", "drop", "keep", "withhold"] = Field(
        "wait",
        description="with order completion, a group that would be too old next: wait for it, drop it and ask "
        "its prompt again, keep it, or withhold the samples that are too old",
    )
    spare_groups: NonNegativeInt = Field(
        0,
        description="with order completion and staleness 0, groups started beyond a batch; the slowest are "
        "ended, and their prompts asked again",
    )
    kv: Literal["recompute", "keep"] = Field(
        "recompute",
        description="keys and values of running completions when new weights arrive: compute them again, or "
        "keep those of the old weights",
    )
    interrupt: bool = Field(
        True,
        description="load new weights between two tokens of running completions; false lets them end first",
    )


def idle_flow(flow: FlowConfig, *, corrected: bool) -> Iterator[str]:
    """One sentence for each setting that was given and can have no effect, or needs another one.

    Args:
        flow: of the recipe.
        corrected: whether the loss has an importance correction for the weights that sampled the tokens.
    """
    given = {name for name in type(flow).model_fields if getattr(flow, name) != _default(name)}
    in_order, at_once = flow.order == "submission", flow.staleness == 0
    idle = {
        "with flow.staleness 0, where nothing runs while weights are loaded": (at_once, ("kv", "interrupt")),
        "with flow.staleness 0, where no group grows too old": (at_once, ("stale",)),
        "with flow.order submission, where no group grows too old": (in_order and not at_once, ("stale",)),
        "with flow.order submission, which trains on the first that started": (in_order, ("spare_groups",)),
        "with flow.staleness above 0, where slow groups go on while others are trained on": (
            not in_order and not at_once,
            ("spare_groups",),
        ),
        "with flow.interrupt false, where no completion outlives its weights": (
            not flow.interrupt and not at_once,
            ("kv",),
        ),
        "with flow.staleness 0 and no flow.spare_groups, where a batch is all that started": (
            at_once and not flow.spare_groups,
            ("order",),
        ),
    }
    for why, (holds, names) in idle.items():
        for name in names:
            if holds and name in given:
                yield f"flow.{name} has no effect {why}; remove it"
    if flow.stale == "keep" and not in_order and not at_once and not corrected:
        yield (
            "flow.stale keep trains on tokens of any age, which the loss does not correct for; set "
            "policy.correction, or another flow.stale"
        )


def _default(name: str) -> object:
    return FlowConfig.model_fields[name].default
