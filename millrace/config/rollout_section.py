"""Settings of rollouts: how the policy is sampled, and how far sampling may run ahead of training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from millrace.config.section import Section, given_in


class RolloutConfig(Section):
    """How completions are sampled for training."""

    prompts_per_step: PositiveInt = Field(
        32,
        description="prompts in a batch; each becomes a group. 256 completions with 8 samples each suit one "
        "device (verl's defaults: 1024 prompts with 1; TRL's: 8 completions a device)",
    )
    samples_per_prompt: PositiveInt = Field(
        8, description="completions sampled for each prompt: the group size (TRL: 8)"
    )
    max_tokens: PositiveInt = Field(
        1024,
        description="longest completion; a truncated one earns little, and pretrained models explain before "
        "they answer (verl: 512, TRL: 256, both raise it for reasoning)",
    )
    temperature: PositiveFloat = Field(
        1.0, description="sampling temperature; 1 samples the distribution that is trained (verl, TRL)"
    )
    top_k: NonNegativeInt = Field(0, description="sample from the k most likely tokens; 0 is off")
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the most likely tokens of this total probability; 1 is off"
    )
    stop: tuple[str, ...] = Field(
        (), description="strings that end a completion, besides the end-of-text token"
    )
    dynamic_sampling_rounds: NonNegativeInt = Field(
        0,
        description="rounds in which new prompts replace groups whose rewards are all equal (DAPO's dynamic "
        "sampling)",
    )
    group_filter: str = Field(
        "reward",
        description="groups that dynamic sampling replaces: those whose answers all have the same reward, "
        "length, or number of this name (a reward, or what a reward function returns beside its score), or "
        "those for which your own module:function returns False",
    )
    overlong_fraction: float = Field(
        0.0,
        ge=0,
        le=1,
        description="last part of max_tokens over which a penalty grows to overlong_penalty (DAPO's soft "
        "overlong "
        "punishment: 0.2)",
    )
    overlong_penalty: PositiveFloat = Field(
        1.0, description="what that penalty grows to, taken off the reward (verl: penalty_factor)"
    )
    max_staleness: NonNegativeInt = Field(
        0,
        description="batches that sampling may run ahead of training; 0 is synchronous, 1 one step "
        "off-policy, more is fully asynchronous",
    )
    batch_order: Literal["submission", "completion"] = Field(
        "submission", description="train on the groups that started first, or on those that finished first"
    )
    stale_policy: Literal["wait", "drop", "keep", "withhold"] = Field(
        "wait",
        description="with batch_order completion, a group that would exceed max_staleness in the next batch: "
        "wait for it, drop it and sample its prompt again, keep it, or withhold its stale samples",
    )
    oversample_groups: NonNegativeInt = Field(
        0,
        description="with batch_order completion and max_staleness 0, groups started beyond a batch; the "
        "slowest are aborted, and their prompts sampled again",
    )
    partial_rollout: bool = Field(
        True,
        description="load new weights between two tokens of running completions; false lets them finish "
        "first",
    )
    kv_on_update: Literal["recompute", "keep"] = Field(
        "recompute",
        description="keys and values of running completions when new weights arrive: recompute them, or keep "
        "those of the old weights",
    )

    @property
    def overlong_tokens(self) -> int:
        """Tokens before `max_tokens` over which the penalty grows."""
        return math.ceil(round(self.overlong_fraction * self.max_tokens, 6))


def synchronous(rollout: RolloutConfig) -> RolloutConfig:
    """The same settings of sampling with `max_staleness` 0 and the defaults of what depends on it."""
    names = ("batch_order", "stale_policy", "oversample_groups", "partial_rollout", "kv_on_update")
    fields = RolloutConfig.model_fields
    return rollout.model_copy(update={name: fields[name].default for name in ("max_staleness", *names)})


def idle_rollout(rollout: RolloutConfig, *, corrected: bool) -> Iterator[str]:
    """One sentence for each setting of asynchrony that was given and has no effect, or needs another one.

    `corrected` is whether the loss has an importance correction for the weights that sampled the tokens.
    """
    given = given_in(rollout)
    if "group_filter" in given and not rollout.dynamic_sampling_rounds:
        yield (
            "rollout.group_filter has no effect with rollout.dynamic_sampling_rounds 0, where no group is "
            "replaced; raise that to 1 or more"
        )
    if "overlong_penalty" in given and not rollout.overlong_fraction:
        yield (
            "rollout.overlong_penalty has no effect with rollout.overlong_fraction 0; set that, or remove it"
        )
    in_order, at_once = rollout.batch_order == "submission", rollout.max_staleness == 0
    idle = {
        "with rollout.max_staleness 0, where nothing runs while weights are loaded": (
            at_once,
            ("kv_on_update", "partial_rollout"),
        ),
        "with rollout.max_staleness 0, where no group becomes stale": (at_once, ("stale_policy",)),
        "with rollout.batch_order submission, where no group becomes stale": (
            in_order and not at_once,
            ("stale_policy",),
        ),
        "with rollout.batch_order submission, which trains on the groups that started first": (
            in_order,
            ("oversample_groups",),
        ),
        "with rollout.max_staleness above 0, where slow groups run on while others are trained on": (
            not in_order and not at_once,
            ("oversample_groups",),
        ),
        "with rollout.partial_rollout false, where no completion outlives its weights": (
            not rollout.partial_rollout and not at_once,
            ("kv_on_update",),
        ),
        "with rollout.max_staleness 0 and no rollout.oversample_groups, where a batch is all that started": (
            at_once and not rollout.oversample_groups,
            ("batch_order",),
        ),
    }
    for why, (holds, names) in idle.items():
        for name in names:
            if holds and name in given:
                yield f"rollout.{name} has no effect {why}; remove it"
    if rollout.stale_policy == "keep" and not in_order and not at_once and not corrected:
        yield (
            "rollout.stale_policy keep trains on tokens of any age, which the loss does not correct for; set "
            "policy.correction, or another rollout.stale_policy"
        )
