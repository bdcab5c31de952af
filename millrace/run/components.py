"""What a run is made of, by protocol, and how long its sequences may be. `build` names the classes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from millrace.config.settings import RunConfig
from millrace.errors import SetupError
from millrace.models.load import Model
from millrace.protocols import Engine, Environment, Reward, WeightTransport
from millrace.rollout.backend import Runtime
from millrace.rollout.policy_weights import Newest
from millrace.training.kl_control import KlControl
from millrace.training.method import Method
from millrace.training.policy import PolicyTrainer
from millrace.training.scorer import ModelScorer
from millrace.training.value import ValueTrainer
from millrace.types import Prompt


class Sleeper(Protocol):
    """An engine whose memory can be given back; see `inference.engine.PagedEngine`."""

    def sleep(self, tags: Collection[Literal["weights", "kv_cache"]]) -> None:
        """Give memory back."""
        ...

    def wake(self, tags: Collection[Literal["weights", "kv_cache"]]) -> None:
        """Take it again; weights are nothing until they are loaded."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """What it holds, by tag."""
        ...


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
        sleeper: this rank's own engine behind it; None for one that cannot sleep.
        runtime: engines in processes of their own, of which `engine` asks one; None where it is in this one,
            and on all ranks but the first.
        newest: what those engines are given; whoever trains is entered there.
        held: ends what has processes of its own: rewards and engines.
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
    sleeper: Sleeper | None
    runtime: Runtime | None
    newest: Newest
    held: ExitStack
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

    def close(self) -> None:
        """End what has processes of its own."""
        self.held.close()

    @property
    def num_long_demonstrations(self) -> int:
        """Training problems whose demonstration is too long to imitate."""
        return len(self.train_prompts) - len(self.demonstrations) if self.demonstrations else 0


def longest_prompt(config: RunConfig, model: Model) -> int:
    """The recipe's limit, or what the model and a micro-batch leave beside a completion.

    Raises:
        SetupError: nothing is left.
    """
    return min(config.data.max_prompt_tokens, longest_sequence(config, model) - config.rollout.max_tokens)


def longest_sequence(config: RunConfig, model: Model) -> int:
    """Tokens of the longest sequence that the model and a micro-batch hold.

    Raises:
        SetupError: a completion of `rollout.max_tokens` leaves no room for a prompt.
    """
    micro = config.policy.tokens_per_micro_batch
    allowed = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or micro)
    asked = config.rollout.max_tokens
    if asked >= allowed:
        raise SetupError(
            f"rollout.max_tokens is {asked} but the model allows {allowed} tokens in all, prompt included; "
            "lower rollout.max_tokens"
        )
    if asked >= micro:
        raise SetupError(
            f"rollout.max_tokens is {asked} but a micro-batch holds {micro} tokens, prompt included; raise "
            "policy.tokens_per_micro_batch"
        )
    return min(allowed, micro)
