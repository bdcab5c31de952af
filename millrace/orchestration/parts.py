"""What a run is made of, by protocol. `build` names the classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from millrace.orchestration.methods import Method
from millrace.protocols import Engine, Environment, Reward, WeightTransport
from millrace.training.kl_control import KlControl
from millrace.training.policy import PolicyTrainer
from millrace.training.scorer import ModelScorer
from millrace.training.value import ValueTrainer
from millrace.types import Prompt


class SetupError(ValueError):
    """Settings that fit the schema and not each other or this machine; the message says what to change."""


class SaveModel(Protocol):
    """Writes a model as a Hugging Face folder."""

    def __call__(self, folder: Path, *, weights: bool = True) -> None:
        """Make the folder, tokenizer included.

        Args:
            folder: its parents are there.
            weights: whether its weights are written too, for which they must be whole on this rank.
        """


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
        reference: the reference policy from a model folder, or None without a KL penalty.
        teacher: whom on-policy distillation follows, or None.
        control: a KL penalty's coefficient at the start, or None without one.
        method: the arithmetic of the recipe.
        demonstrations: the tokens of each demonstration that fits, its end included, by prompt id; empty
            without a warm-up.
        save_model: writes the policy.
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
    reference: Callable[[Path], ModelScorer] | None
    teacher: ModelScorer | None
    control: KlControl | None
    method: Method
    demonstrations: dict[str, tuple[int, ...]]
    save_model: SaveModel
    num_parameters: int
    device: str
    environment: Callable[[Prompt], Environment]

    @property
    def num_long_demonstrations(self) -> int:
        """Training problems whose demonstration is too long to imitate."""
        return len(self.train_prompts) - len(self.demonstrations) if self.demonstrations else 0
