"""What a run is made of, by protocol. `build` names the classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millrace.data.packing import TokenWeights
from millrace.protocols import Engine, Environment, Reward, Scorer, WeightTransport
from millrace.training.policy import PolicyTrainer
from millrace.types import Prompt


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
        reinforcer: the policy's trainer, given the version it starts at.
        reference: the reference policy from a model folder, or None without a KL penalty.
        token_weights: how tokens share a loss.
        demonstrations: the tokens of each demonstration that fits, its end included, by prompt id; empty
            without a warm-up.
        save_model: writes the policy as a Hugging Face folder, tokenizer included.
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
    reinforcer: Callable[[int], PolicyTrainer]
    reference: Callable[[Path], Scorer] | None
    token_weights: TokenWeights
    demonstrations: dict[str, tuple[int, ...]]
    save_model: Callable[[Path], None]
    num_parameters: int
    device: str
    environment: Callable[[Prompt], Environment]

    @property
    def num_long_demonstrations(self) -> int:
        """Training problems whose demonstration is too long to imitate."""
        return len(self.train_prompts) - len(self.demonstrations) if self.demonstrations else 0
