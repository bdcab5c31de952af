"""RunConfig: every setting of a run, its meaning and its default, in one place.

A setting has one home and one default: the field below that bears its name. How a recipe and overrides
become a RunConfig stands in `recipe.py`.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from millrace.config.rewards import RewardConfig
from millrace.config.section import Section, compiled

TASK_PREFIX = "reasoning-gym:"


class ModelConfig(Section):
    """Which weights the policy starts from."""

    path: str | None = Field(
        None, description="Hugging Face model folder (safetensors); null makes a fresh model"
    )
    architecture: str = Field("qwen3", description="transformers model type of a fresh model")
    shape: dict[str, Any] = Field(
        default_factory=dict, description="transformers config fields of a fresh model, such as hidden_size"
    )


class TokenizerConfig(Section):
    """Which tokenizer; by default the model folder's, or for a fresh model one trained on the data."""

    path: str | None = Field(
        None, description="tokenizer folder; null takes the model's, or trains one on the data"
    )
    vocab_size: PositiveInt = Field(1024, description="most entries of a trained tokenizer")
    alphabet: Literal["bytes", "seen"] = Field(
        "bytes",
        description="what a trained tokenizer spells with: every byte, or only those of the data (a tiny "
        "model learns faster; other text is refused)",
    )
    across_words: bool = Field(
        False,
        description="let one entry of a trained tokenizer span words (short prompts for templated tasks)",
    )


class DataConfig(Section):
    """Prompts, their answers, and how they are split."""

    train: str = Field(
        description=f"JSONL or Parquet file, Hugging Face dataset folder, or {TASK_PREFIX}NAME"
    )
    eval: str | None = Field(
        None, description="held-out file or folder; null splits off eval_size rows of train"
    )
    task: dict[str, Any] = Field(default_factory=dict, description="options of a reasoning-gym task")
    task_size: PositiveInt = Field(
        10_000, description="problems drawn from a reasoning-gym task before removing twins"
    )
    eval_size: PositiveInt = Field(256, description="most rows that are held out for evaluation")
    prompt_column: str = Field("question", description="column that holds the prompt (text or chat messages)")
    answer_column: str | None = Field(
        "answer", description="column that holds the reference answer; null has none"
    )
    answer_pattern: str | None = Field(
        None, description="regular expression whose first group is the answer within its column"
    )
    demonstration_column: str | None = Field(
        None, description="column that holds a completion to imitate in the warm-up; null uses the answer"
    )
    identity_column: str | None = Field(
        None, description="column that tells problems apart, dotted into objects; null is the prompt"
    )
    template: str = Field(
        "{prompt}", description="text around {prompt}, or `chat` for the tokenizer's own chat template"
    )
    max_prompt_tokens: PositiveInt = Field(512, description="longest prompt")
    too_long: Literal["filter", "refuse"] = Field(
        "filter", description="drop longer prompts with a count, or stop"
    )
    shuffle: bool = Field(True, description="a new order each epoch, by seed")

    @field_validator("answer_pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        if pattern is not None and compiled(pattern).groups < 1:
            raise ValueError(f"{pattern!r} has no group; put the answer in parentheses")
        return pattern

    @field_validator("template")
    @classmethod
    def _names_prompt(cls, template: str) -> str:
        if template != "chat" and "{prompt}" not in template:
            raise ValueError(f"{template!r} does not contain {{prompt}}")
        return template


class WarmupConfig(Section):
    """Supervised training on demonstrations before reinforcement."""

    steps: PositiveInt = Field(description="most optimizer steps")
    sequences_per_step: PositiveInt = Field(128, description="demonstrations per optimizer step")
    learning_rate: PositiveFloat = Field(
        1e-3, description="peak learning rate of the warm-up's own optimizer"
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

    prompts_per_step: PositiveInt = Field(32, description="prompts in a batch; each becomes a group")
    samples_per_prompt: int = Field(8, ge=2, description="completions drawn for each prompt")
    max_tokens: PositiveInt = Field(128, description="longest completion")
    temperature: PositiveFloat = Field(1.0, description="sampling temperature")
    top_k: NonNegativeInt = Field(0, description="draw among the k most likely tokens; 0 is off")
    top_p: float = Field(1.0, gt=0, le=1, description="draw among the tokens that hold this mass; 1 is off")
    stop: tuple[str, ...] = Field(
        (), description="texts that end a completion, besides the end-of-text token"
    )


class AdvantageConfig(Section):
    """Group-relative advantages: reward minus the mean of the prompt's group."""

    divide_by_std: bool = Field(
        True, description="divide by the group's standard deviation (GRPO); false is Dr. GRPO"
    )


class PpoClipConfig(Section):
    """The clipped surrogate objective of PPO."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped at 1 - low")
    high: PositiveFloat = Field(0.2, description="the ratio is clipped at 1 + high")
    dual: float | None = Field(
        None, gt=1, description="bound of the loss for negative advantages; null is off"
    )


class KlConfig(Section):
    """A penalty on the distance from the reference policy (the weights reinforcement starts from)."""

    coefficient: PositiveFloat = Field(description="factor of the penalty in the loss")
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of the divergence, per token")


class OptimizerConfig(Section):
    """AdamW and the schedule of its learning rate."""

    learning_rate: PositiveFloat = Field(1e-6, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay of the first and second moments")
    weight_decay: NonNegativeFloat = Field(
        0.0, description="decoupled decay of matrices (not of norms and biases)"
    )
    max_gradient_norm: PositiveFloat = Field(1.0, description="gradients are scaled down to this norm")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="shape after the ramp; linear and cosine end at a tenth of the peak"
    )
    ramp_steps: NonNegativeInt = Field(
        0, description="optimizer steps over which the learning rate rises from 0"
    )


class PolicyConfig(Section):
    """How a batch of scored groups becomes new weights."""

    loss: PpoClipConfig = Field(default_factory=PpoClipConfig, description="policy loss per token")
    kl: KlConfig | None = Field(None, description="penalty on the distance from the reference; null is none")
    token_weights: Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"] = Field(
        "token_mean", description="how tokens share the loss of an optimizer step"
    )
    optimizer_steps_per_batch: PositiveInt = Field(
        1, description="optimizer steps a batch of groups is divided into"
    )
    tokens_per_micro_batch: PositiveInt = Field(16_384, description="tokens in one forward and backward")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW and its schedule")


class EvaluationConfig(Section):
    """Greedy accuracy on held-out prompts, before, during and after."""

    every: PositiveInt = Field(
        20, description="batches (in the warm-up: optimizer steps) between evaluations"
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


class RunConfig(Section):
    """One run: warm-up, then reinforcement. Sizes derive as `recipe.derivation` prints them."""

    name: str | None = Field(None, description="folder of the run; null takes recipe-1, recipe-2, ...")
    output: str = Field("runs", description="folder that holds run folders")
    seed: NonNegativeInt = Field(0, description="of weights, data order and sampling")
    steps: NonNegativeInt = Field(description="batches of reinforcement; 0 is supervised training alone")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes CUDA where there is one")
    precision: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="dtype of the weights"
    )
    threads: NonNegativeInt = Field(0, description="CPU threads; 0 takes every core this process may use")
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(
        ("tensorboard",), description="where metrics go besides metrics.jsonl"
    )
    model: ModelConfig = Field(
        default_factory=ModelConfig, description="which weights the policy starts from"
    )
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="which tokenizer")
    data: DataConfig = Field(description="prompts, their answers, and how they are split")
    warmup: WarmupConfig | None = Field(None, description="supervised training first; null starts at once")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="how the policy is sampled")
    rewards: tuple[RewardConfig, ...] = Field(
        description="what an answer is worth: the sum of these", min_length=1
    )
    advantage: AdvantageConfig = Field(
        default_factory=AdvantageConfig, description="what is better than expected"
    )
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="how a batch becomes new weights")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="held-out accuracy")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="what is kept")
    limits: LimitConfig = Field(default_factory=LimitConfig, description="when a run that goes wrong stops")

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[\w][\w.-]*", name):
            raise ValueError(f"{name!r} is not a plain folder name (letters, digits, dot, dash, underscore)")
        return name

    @model_validator(mode="after")
    def _every_setting_has_an_effect(self) -> RunConfig:
        for message in ineffective_settings(self):
            raise ValueError(message)
        return self


def ineffective_settings(config: RunConfig) -> list[str]:
    """One sentence for each setting that was given and can have no effect in this recipe."""
    given = {name: _given(getattr(config, name)) for name in ("model", "tokenizer", "data")}
    is_task = config.data.train.startswith(TASK_PREFIX)
    found = []

    def refuse(key: str, condition: bool, why: str) -> None:
        section, _, name = key.partition(".")
        if condition and name in given[section]:
            found.append(f"{key} has no effect {why}; remove it")

    has_folder = config.model.path is not None
    refuse("model.architecture", has_folder, "because model.path names a folder that fixes it")
    refuse("model.shape", has_folder, "because model.path names a folder that fixes it")
    trained = config.tokenizer.path is None and not has_folder
    refuse("tokenizer.vocab_size", not trained, "because the tokenizer comes from a folder")
    refuse("tokenizer.alphabet", not trained, "because the tokenizer comes from a folder")
    refuse("tokenizer.across_words", not trained, "because the tokenizer comes from a folder")
    refuse("data.task", not is_task, f"because data.train is not a {TASK_PREFIX} task")
    refuse("data.task_size", not is_task, f"because data.train is not a {TASK_PREFIX} task")
    refuse("data.answer_pattern", config.data.answer_column is None, "without data.answer_column")
    refuse("data.demonstration_column", config.warmup is None and config.steps > 0, "without a warmup")
    refuse("data.eval", is_task, "because a task's held-out problems are drawn from the task itself")
    if any(reward.kind == "task" for reward in config.rewards) and not is_task:
        found.append(
            f"a reward of kind task needs data.train to be a {TASK_PREFIX} task; choose another reward"
        )
    if config.steps == 0 and config.warmup is None:
        found.append("steps is 0 and there is no warmup, so nothing would be trained; set one of them")
    if config.steps == 0:
        why = "because steps is 0 (supervised training alone)"
        idle = [f"policy.{name}" for name in ("loss", "kl", "token_weights", "optimizer_steps_per_batch")]
        idle = [key for key in idle if key.partition(".")[2] in _given(config.policy)]
        idle += ["policy.optimizer.learning_rate"] * ("learning_rate" in _given(config.policy.optimizer))
        idle += ["advantage"] * ("advantage" in _given(config))
        found += [f"{key} has no effect {why}; remove it" for key in idle]
    if config.steps and config.policy.optimizer_steps_per_batch == 1:
        # The first optimizer step after sampling has a ratio of 1, which no bound touches.
        found += [
            f"policy.loss.{name} has no effect with one optimizer step per batch, where nothing is clipped; "
            "remove it, or raise policy.optimizer_steps_per_batch"
            for name in sorted(_given(config.policy.loss))
        ]
    batch, parts = config.rollout.prompts_per_step, config.policy.optimizer_steps_per_batch
    if batch % parts:
        found.append(
            f"policy.optimizer_steps_per_batch {parts} does not divide rollout.prompts_per_step {batch}"
        )
    return found


def _given(section: Section) -> set[str]:
    """Fields that say something: set, and to another value than their default."""
    kept = set()
    for name in section.model_fields_set:
        info = type(section).model_fields[name]
        if info.is_required() or getattr(section, name) != info.get_default(call_default_factory=True):
            kept.add(name)
    return kept
