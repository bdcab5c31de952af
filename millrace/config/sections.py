"""Settings of supervised fine-tuning, optimization, checkpoints, limits and timeouts."""

from __future__ import annotations

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
from millrace.config.section import Section, given_in, is_function

EIGHT_BIT = "adamw_8bit"
OPTIMIZERS = ("adamw", EIGHT_BIT, "muon")


class SftConfig(Section):
    """Supervised fine-tuning on demonstrations before reinforcement learning."""

    steps: PositiveInt = Field(description="most optimizer steps")
    sequences_per_step: PositiveInt = Field(128, description="demonstrations per optimizer step")
    learning_rate: PositiveFloat = Field(
        1e-5,
        description="peak learning rate of its own optimizer, whose kind, schedule, weight decay and rest "
        "are those of policy.optimizer; 1e-5 (verl) to 2e-5 (TRL) for pretrained "
        "models, 1e-3 and above for small fresh ones",
    )
    loss_aggregation: Literal["token_mean", "token_sum", "sequence_mean", "sequence_sum"] = Field(
        "token_mean", description="how the losses of tokens add up in an optimizer step"
    )
    stop_accuracy: tuple[float, float] | None = Field(
        None,
        description="stop once held-out accuracy, measured every evaluation.every steps, is within [low, "
        "high]; null runs all steps",
    )

    @model_validator(mode="after")
    def _band(self) -> SftConfig:
        band = self.stop_accuracy
        if band is not None and not 0 <= band[0] < band[1] <= 1:
            raise ValueError(f"stop_accuracy {list(band)} is not a range [low, high] within 0 and 1")
        return self


class OptimizerConfig(Section):
    """The optimizer and the schedule of its learning rate."""

    kind: str = Field(
        "adamw",
        description="adamw; adamw_8bit, with moments as 8-bit codes (needs bitsandbytes); muon, for matrices "
        "beside embeddings and head (momentum 0.95, steps scaled to those of AdamW, which does the rest); or "
        "your own module:function",
    )
    learning_rate: PositiveFloat = Field(
        1e-6,
        description="peak learning rate; 1e-6 moves a pretrained model without breaking it (verl, TRL), a "
        "small fresh one learns at 1e-3",
    )
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay of the first and second moments")
    weight_decay: NonNegativeFloat = Field(0.0, description="decoupled decay of matrices, not of vectors")
    max_grad_norm: PositiveFloat = Field(1.0, description="gradients are clipped to this norm")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="shape after warmup_steps; constant (as verl) lets a run be prolonged, linear and "
        "cosine end at min_lr_ratio of the peak",
    )
    min_lr_ratio: float = Field(
        0.1, ge=0, le=1, description="fraction of the peak at which a linear or cosine schedule ends"
    )
    warmup_steps: NonNegativeInt = Field(
        0, description="optimizer steps over which the learning rate rises from 0"
    )

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        if kind not in OPTIMIZERS and not is_function(kind):
            raise ValueError(
                f"{kind!r} is no optimizer; there are: {', '.join(OPTIMIZERS)}, or your own module:function"
            )
        return kind

    @model_validator(mode="after")
    def _effects(self) -> OptimizerConfig:
        if self.schedule == "constant" and "min_lr_ratio" in given_in(self):
            raise ValueError(
                "min_lr_ratio has no effect with schedule constant; set linear or cosine, or remove it"
            )
        return self


class PolicyConfig(Section):
    """How a batch of scored groups becomes new weights."""

    loss: LossConfig = Field(default_factory=PpoClipLoss, description="policy loss per token")
    proximal: Literal["sampler", "recompute", "interpolate"] = Field(
        "sampler",
        description="what the ratio is taken to: the sampler's own log-probabilities, the trainer's before "
        "the batch (decoupled PPO), or a mean of sampler and policy by version",
    )
    correction: CorrectionConfig | None = Field(
        None,
        description="importance weight of proximal over sampler, after the clip; with proximal sampler, of "
        "the policy over the sampler; null is none",
    )
    kl: KlConfig | None = Field(None, description="penalty on the distance from the reference; null is none")
    entropy_coefficient: FiniteFloat = Field(0.0, description="factor of an entropy bonus")
    entropy_coefficient_final: FiniteFloat | None = Field(
        None,
        description="value that entropy_coefficient reaches at the last step, in a straight line; null keeps "
        "it constant",
    )
    loss_aggregation: Literal["token_mean", "token_sum", "sequence_mean", "sequence_sum", "fixed_length"] = (
        Field("token_mean", description="how the losses of tokens add up in an optimizer step")
    )
    optimizer_steps_per_batch: PositiveInt = Field(
        1, description="optimizer steps a batch of groups is divided into"
    )
    epochs_per_batch: PositiveInt = Field(
        1, description="passes over a batch, each of optimizer_steps_per_batch steps (verl: ppo_epochs)"
    )
    shuffle_minibatches: bool = Field(
        False, description="divide each pass over a batch into steps in a new order of its groups, by seed"
    )
    truncated_answers: Literal["train", "mask", "filter"] = Field(
        "train",
        description="answers that ran out of tokens: train on them, mask their tokens (their rewards still "
        "count in their group), or filter them out before advantages are computed",
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
    optimizer: OptimizerConfig = Field(
        default_factory=OptimizerConfig, description="the optimizer and its schedule"
    )

    @property
    def needs_experts(self) -> str:
        """The first setting that needs expert routing from the engine; empty if there is none."""
        names = ("router_replay", "router_aux_coefficient", "router_bias_step")
        return next((f"policy.{name}" for name in names if getattr(self, name)), "")

    @field_validator("loss", mode="before")
    @classmethod
    def _default_loss(cls, value: Any) -> Any:
        return with_default_kind(value, "policy.loss")

    @field_validator("correction", mode="before")
    @classmethod
    def _default_correction(cls, value: Any) -> Any:
        return with_default_kind(value, "policy.correction")


class CheckpointConfig(Section):
    """Checkpoints to resume from and to load."""

    every: PositiveInt = Field(
        50, description="batches (in supervised fine-tuning: optimizer steps) between checkpoints"
    )
    keep: PositiveInt = Field(2, description="newest checkpoints kept, besides the best one")


class LimitConfig(Section):
    """Limits beyond which a run stops, warns or keeps evidence."""

    nonfinite_steps: PositiveInt = Field(
        5, description="consecutive optimizer steps with a non-finite gradient after which a run stops"
    )
    failed_rewards: float = Field(
        0.2, ge=0, le=1, description="fraction of a batch's rewards that may fail before a run stops"
    )
    mismatch: PositiveFloat | None = Field(
        None,
        description="mean difference between the trainer's and the sampler's log-probabilities of tokens "
        "sampled by the current weights (mismatch/current), in nats, above which a run with "
        "rollout.max_staleness 0 stops; null is what rounding in the recipe's dtypes explains: 0.0014, in "
        "bfloat16 0.35",
    )
    mismatch_warning: PositiveFloat | None = Field(
        None,
        description="the same difference above which a run warns, also with rollout.max_staleness above 0; "
        "null is a quarter of limits.mismatch",
    )
    mismatch_k3: PositiveFloat | None = Field(
        None,
        description="divergence between trainer and sampler (mismatch/k3) above which a run warns and keeps "
        "the batch as evidence; null is never",
    )
    ess: float | None = Field(
        None,
        gt=0,
        le=1,
        description="effective sample size of the importance weights, as a fraction of the tokens "
        "(mismatch/ess), below which a run warns and keeps the batch; null is never",
    )
    correction_clip_fraction: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="fraction of tokens whose importance weight policy.correction clips "
        "(policy/correction_clip_fraction) above which a run warns and keeps the batch; null is never",
    )
    canary: PositiveFloat | None = Field(
        None,
        description="difference between trainer and sampler on the canary of a weight update, in nats per "
        "token, above which the update fails; null is what rounding in the recipe's dtypes explains",
    )


class TimeoutConfig(Section):
    """Deadlines, in seconds."""

    phase_s: PositiveFloat = Field(
        3_600.0,
        description="longest time of a phase of a step, such as sampling, scoring or training; a run that "
        "stalls longer stops and names what it waited for",
    )
    walltime_s: PositiveFloat | None = Field(
        None,
        description="time from start or resume within which a run saves and exits, as after Ctrl-C: after "
        "the step when less is left than the longest step and save have taken; null is unlimited",
    )
