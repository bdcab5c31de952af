"""The sections of a recipe that need no file of their own: how a run samples, learns, looks after itself."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import (
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from millrace.config.method_sections import (
    CorrectionConfig,
    KlConfig,
    LossConfig,
    PpoClipLoss,
    with_default_kind,
)
from millrace.config.section import Section


class WarmupConfig(Section):
    """Supervised training on demonstrations before reinforcement."""

    steps: PositiveInt = Field(description="most optimizer steps")
    sequences_per_step: PositiveInt = Field(128, description="demonstrations per optimizer step")
    learning_rate: PositiveFloat = Field(
        1e-5,
        description="peak learning rate of the warm-up's own optimizer; pretrained models are tuned at 1e-5 "
        "(verl) to 2e-5 (TRL), a small fresh one learns at 1e-3 and above",
    )
    token_weights: Literal["token_mean", "token_sum", "sequence_mean", "sequence_sum"] = Field(
        "token_mean", description="how tokens share the loss of an optimizer step of the warm-up"
    )
    gate: tuple[float, float] | None = Field(
        None,
        description="stop once held-out accuracy, seen at evaluation.every, is in this band; null runs all",
    )

    @model_validator(mode="after")
    def _band(self) -> WarmupConfig:
        if self.gate is not None and not 0 <= self.gate[0] < self.gate[1] <= 1:
            raise ValueError(f"gate {list(self.gate)} is not a band of accuracies [low, high] within 0 and 1")
        return self


class RolloutConfig(Section):
    """How the policy is sampled while it trains."""

    prompts_per_step: PositiveInt = Field(
        32,
        description="prompts in a batch; each becomes a group. 256 answers with 8 samples each suit one "
        "device (verl's defaults: 1024 prompts with 1; TRL's: 8 answers a device)",
    )
    samples_per_prompt: PositiveInt = Field(
        8, description="completions drawn for each prompt; as TRL, few waste less than many and still differ"
    )
    max_tokens: PositiveInt = Field(
        1024,
        description="longest completion; one that is cut off earns little, and pretrained models explain "
        "before they answer (verl: 512, TRL: 256, both raise it to reason)",
    )
    temperature: PositiveFloat = Field(
        1.0, description="sampling temperature; 1 samples what is trained, as verl and TRL"
    )
    top_k: NonNegativeInt = Field(0, description="draw among the k most likely tokens; 0 is off")
    top_p: float = Field(1.0, gt=0, le=1, description="draw among the tokens that hold this mass; 1 is off")
    stop: tuple[str, ...] = Field(
        (), description="texts that end a completion, besides the end-of-text token"
    )
    refill_rounds: NonNegativeInt = Field(
        0,
        description="times new prompts replace groups whose rewards are all equal (DAPO's dynamic sampling)",
    )
    overlong_fraction: float = Field(
        0.0,
        ge=0,
        le=1,
        description="over this last part of max_tokens the reward sinks by up to 1 (DAPO: 0.2)",
    )

    @property
    def overlong_tokens(self) -> int:
        """Tokens before `max_tokens` over which the reward sinks."""
        return math.ceil(round(self.overlong_fraction * self.max_tokens, 6))


class OptimizerConfig(Section):
    """AdamW and the schedule of its learning rate."""

    learning_rate: PositiveFloat = Field(
        1e-6,
        description="peak learning rate; 1e-6 moves a pretrained model without breaking it (verl, TRL), a "
        "small fresh one learns at 1e-3",
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay of the first and second moments")
    weight_decay: NonNegativeFloat = Field(0.0, description="decoupled decay of matrices, not of vectors")
    max_gradient_norm: PositiveFloat = Field(1.0, description="gradients are scaled down to this norm")
    eight_bit: bool = Field(False, description="keep moments as 8-bit codes (needs bitsandbytes)")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="shape after the ramp; constant (as verl) lets a run be prolonged, linear and cosine end "
        "at a tenth of the peak",
    )
    ramp_steps: NonNegativeInt = Field(
        0, description="optimizer steps over which the learning rate rises from 0"
    )


class PolicyConfig(Section):
    """How a batch of scored groups becomes new weights."""

    loss: LossConfig = Field(default_factory=PpoClipLoss, description="policy loss per token")
    proximal: Literal["sampler", "recompute", "interpolate"] = Field(
        "sampler",
        description="what the ratio is taken to: the sampler's own log-probabilities, the trainer's before "
        "the batch (decoupled PPO), or a mean of sampler and policy by version",
    )
    correction: CorrectionConfig | None = Field(
        None, description="importance weight of proximal over sampler, after the clip; null is none"
    )
    kl: KlConfig | None = Field(None, description="penalty on the distance from the reference; null is none")
    entropy_coefficient: FiniteFloat = Field(0.0, description="factor of an entropy bonus")
    token_weights: Literal["token_mean", "token_sum", "sequence_mean", "sequence_sum", "fixed_length"] = (
        Field("token_mean", description="how tokens share the loss of an optimizer step")
    )
    optimizer_steps_per_batch: PositiveInt = Field(
        1, description="optimizer steps a batch of groups is divided into"
    )
    router_replay: bool = Field(
        False, description="train each token through the experts that it was sampled with (R3)"
    )
    router_aux_coefficient: NonNegativeFloat = Field(
        0.0, description="factor of the loss that balances the experts of a mixture"
    )
    router_bias_step: NonNegativeFloat = Field(
        0.0, description="step of the biases that balance experts without a loss (DeepSeek-V3)"
    )
    tokens_per_micro_batch: PositiveInt = Field(16_384, description="tokens in one forward and backward")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW and its schedule")

    @property
    def needs_experts(self) -> str:
        """The first setting that needs expert routing from the engine; empty if there is none."""
        names = ("router_replay", "router_aux_coefficient", "router_bias_step")
        return next((f"policy.{name}" for name in names if getattr(self, name)), "")

    @field_validator("loss", mode="before")
    @classmethod
    def _default_loss(cls, value: Any) -> Any:
        return with_default_kind(value, "policy.loss")


class KernelConfig(Section):
    """Which implementation computes what has several; all give the same numbers."""

    scan: Literal["auto", "loop", "chunked", "numba", "triton"] = Field(
        "auto", description="of returns and advantages per token; auto is the fastest for the device"
    )


class EvaluationConfig(Section):
    """Greedy answers to held-out prompts, before, during and after."""

    every: PositiveInt = Field(
        20, description="batches (in the warm-up: optimizer steps) between evaluations"
    )
    measure: str = Field(
        "reward/mean",
        description="metric that decides which checkpoint is the best and that is reported: reward/mean; "
        "accuracy, the share of answers with full marks; or of several rewards the mean of one, such as "
        "reward/format/mean",
    )


class CheckpointConfig(Section):
    """What is kept to resume from and to load."""

    every: PositiveInt = Field(
        50, description="batches (in the warm-up: optimizer steps) between checkpoints"
    )
    keep: PositiveInt = Field(2, description="newest checkpoints kept, the best one besides")


class LimitConfig(Section):
    """When a run that goes wrong stops."""

    nonfinite_steps: PositiveInt = Field(
        5, description="optimizer steps in a row without a finite gradient, then stop"
    )
    failed_rewards: float = Field(
        0.2, ge=0, le=1, description="share of a batch whose rewards may fail, else stop"
    )
    mismatch: PositiveFloat | None = Field(
        None,
        description="mean difference between the trainer's and the sampler's log-probabilities of tokens "
        "that the current weights sampled (mismatch/current) above which a run with flow.staleness 0 stops, "
        "in nats; null is what rounding in the recipe's dtypes explains: 0.0014, in bfloat16 0.35",
    )
    mismatch_warning: PositiveFloat | None = Field(
        None,
        description="likewise, above which a run warns, also with flow.staleness above 0; null is a quarter "
        "of limits.mismatch",
    )
    mismatch_k3: PositiveFloat | None = Field(
        None,
        description="divergence between trainer and sampler (mismatch/k3) above which a batch is kept as "
        "evidence, with a warning; null never is",
    )
    effective_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of tokens that importance weights would leave in effect "
        "(mismatch/effective_share) below which a batch is kept likewise; null never is",
    )
    bounded_share: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share of tokens whose importance weight policy.correction cuts (policy/bounded_share) "
        "above which a batch is kept likewise; null never is",
    )
    canary: PositiveFloat | None = Field(
        None,
        description="how far trainer and sampler may lie apart over the canary of a hand-over, in nats a "
        "token; null is what rounding in the recipe's dtypes explains",
    )
    run_s: PositiveFloat | None = Field(
        None,
        description="seconds from start or resumption within which a run saves and leaves, as after Ctrl-C: "
        "after a step, when less is left than its longest step and longest save have taken; null is any",
    )
    phase_s: PositiveFloat = Field(
        3_600.0,
        description="seconds that sampling, scoring, training or any other phase of a step may take; a run "
        "that stalls longer ends and says who waits for whom",
    )
