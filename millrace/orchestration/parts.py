"""What a run is made of, by protocol. `build` names the classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millrace.models.load import Weights
from millrace.orchestration.methods import Method
from millrace.protocols import Engine, Environment, Reward, WeightTransport
from millrace.training.kl_control import KlControl
from millrace.training.policy import PolicyTrainer
from millrace.training.scorer import ModelScorer
from millrace.training.value import ValueTrainer
from millrace.types import Prompt


class SetupError(ValueError):
    """Settings that fit the schema and not each other or this machine; the message says what to change."""


@dataclass(slots=True)
class Parts:
    """The pieces of one run.

    Attributes:
        engine: the sampler.
        transport: carries weights to it.
        reward: judges completions.
        full_marks: the reward of a right answer (the sum of the positive weights).
        train_prompts: problems to train on.
        eval_prompts: held-out problems.
        num_filtered: prompts left out because they are too long.
        stop_token_ids: tokens that end a completion.
        imitator: the warm-up's trainer, given the version it starts at.
        reinforcer: the policy's trainer, given the version it starts at and what a full KL penalty needs.
        critic: the value of each state, from the last checkpoint or fresh, or None where nothing asks for it.
        save_critic: writes it into a checkpoint being filled; its weights are given where ranks share them.
        reference: the reference policy from a model folder, or None without a KL penalty.
        teacher: whom on-policy distillation follows, or None.
        control: a KL penalty's coefficient at the start, or None without one.
        method: the arithmetic of the recipe.
        demonstrations: the tokens of each demonstration that fits, its end included, by prompt id; empty
            without a warm-up.
        save_model: writes the policy as a Hugging Face folder, tokenizer included; likewise.
        num_parameters: weights of the policy.
        device: where the policy is.
        environment: makes an episode of a prompt.
    """

    engine: Engine
    transport: WeightTransport
    reward: Reward
    full_marks: float
    train_prompts: list[Prompt]
    eval_prompts: list[Prompt]
    num_filtered: int
    stop_token_ids: tuple[int, ...]
    imitator: Callable[[int], PolicyTrainer]
    reinforcer: Callable[[int, KlControl | None, ModelScorer | None], PolicyTrainer]
    critic: Callable[[], ValueTrainer] | None
    save_critic: Callable[[ValueTrainer, Path, Weights | None], None]
    reference: Callable[[Path], ModelScorer] | None
    teacher: ModelScorer | None
    control: KlControl | None
    method: Method
    demonstrations: dict[str, tuple[int, ...]]
    save_model: Callable[[Path, Weights | None], None]
    num_parameters: int
    device: str
    environment: Callable[[Prompt], Environment]

    @property
    def num_long_demonstrations(self) -> int:
        """Training problems whose demonstration is too long to imitate."""
        return len(self.train_prompts) - len(self.demonstrations) if self.demonstrations else 0
