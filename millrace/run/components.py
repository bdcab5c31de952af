"""The components of a run, by protocol, and its length limit; `build` names the concrete classes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from millrace.data.demonstrations import Demonstrations
from millrace.errors import SetupError
from millrace.models.load import Model
from millrace.protocols import Engine, EpisodeReward, NamedTensors, Trainer, WeightTransport
from millrace.rollout.backend import EngineBackend
from millrace.rollout.episodes import EpisodeView
from millrace.rollout.group_filter import GroupFilter
from millrace.run.build_environments import Environments
from millrace.run.evaluation_sets import EvaluationSet
from millrace.run.train_step import Method
from millrace.training.kl_control import KlControl
from millrace.training.policy import PolicyTrainer
from millrace.training.scorer import ModelScorer
from millrace.training.value import ValueTrainer
from millrace.transport.canary import Canary
from millrace.types import Prompt


class SleepableEngine(Protocol):
    """An engine that can release its memory; see `inference.engine.PagedEngine`."""

    def sleep(self, tags: Collection[Literal["weights", "kv_cache"]]) -> None:
        """Release memory."""
        ...

    def wake(self, tags: Collection[Literal["weights", "kv_cache"]]) -> None:
        """Allocate it again; weights are undefined until they are loaded."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """Allocated bytes, by tag."""
        ...


class SaveModel(Protocol):
    """Writes a model as a Hugging Face folder."""

    def __call__(self, folder: Path, *, weights: bool = True) -> None:
        """Write the folder, tokenizer included.

        Args:
            folder: to create; its parent exists.
            weights: whether to write weights too, for which they must be whole on this rank.
        """


class PolicyWeights:
    """The current weights of the active trainer, and the canary computed with them."""

    def __init__(self, token_ids: Sequence[int], most: float) -> None:
        """Start without a trainer.

        Args:
            token_ids: of the canary.
            most: see `Canary`.
        """
        self._trainer: Trainer | None = None
        self._token_ids, self._most = tuple(token_ids), most

    def activate(self, trainer: Trainer) -> None:
        """Take the weights from this trainer from now on."""
        self._trainer = trainer

    def __call__(self) -> NamedTensors:
        """Return every weight with its name."""
        return self._active_trainer().named_tensors()

    def canary(self) -> Canary:
        """Compute the canary: log-probabilities of its tokens. A collective call of all ranks."""
        return Canary(self._token_ids, tuple(self._active_trainer().logprobs_of(self._token_ids)), self._most)

    def _active_trainer(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("no trainer is active yet, so there are no weights to send")
        return self._trainer


@dataclass(slots=True)
class Components:
    """The components of one run.

    Attributes:
        engine: the sampler.
        sleeper: this rank's own engine behind it; None if it cannot sleep.
        backend: engines in their own processes, one of which serves `engine`; None where the engine is in
            this process, and on all ranks but rank 0.
        num_engines: number of engines in their own processes, the same on all ranks.
        policy_weights: the policy weights that engines load, those of the active trainer.
        exit_stack: closes rewards and engines that own processes.
        transport: updates the sampler's weights.
        reward: scores completions.
        full_marks: the reward of a right answer (the sum of the positive weights).
        train_prompts: training prompts.
        eval_prompts: held-out prompts.
        num_filtered: prompts dropped because they are too long.
        stop_token_ids: tokens that end a completion.
        imitator: makes SFT's trainer, given its first policy version.
        reinforcer: makes the policy's trainer, given its first policy version and what a full KL penalty
            needs.
        critic: makes the critic, from the last checkpoint or fresh; None if the recipe has none.
        reference: loads the reference policy from a model folder; None without a KL penalty.
        teacher: the teacher of on-policy distillation, or None.
        control: a KL penalty's coefficient at the start, or None without one.
        method: the arithmetic of the recipe.
        group_filter: which scored groups have nothing to learn from.
        demonstrations: what SFT imitates; None without SFT.
        save_model: writes the policy.
        num_parameters: number of policy weights.
        trains_all: whether all of them are trained, rather than some of them or an adapter.
        device: name of the policy's device.
        environments: where episodes of several turns are played, or None.
        view_episode: returns what a reward that sees episodes gets of one; None without such a reward.
        evaluation_sets: further sets of questions to evaluate.
    """

    engine: Engine
    sleeper: SleepableEngine | None
    backend: EngineBackend | None
    num_engines: int
    policy_weights: PolicyWeights
    exit_stack: ExitStack
    transport: WeightTransport
    reward: EpisodeReward
    full_marks: float
    train_prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    num_filtered: int
    stop_token_ids: tuple[int, ...]
    imitator: Callable[[int], PolicyTrainer]
    reinforcer: Callable[[int, KlControl | None, ModelScorer | None], PolicyTrainer]
    critic: Callable[[], ValueTrainer] | None
    reference: Callable[[Path], ModelScorer] | None
    teacher: ModelScorer | None
    control: KlControl | None
    method: Method
    group_filter: GroupFilter
    demonstrations: Demonstrations | None
    save_model: SaveModel
    num_parameters: int
    trains_all: bool
    device: str
    environments: Environments | None
    view_episode: EpisodeView | None
    evaluation_sets: Sequence[EvaluationSet] = ()

    def close(self) -> None:
        """Close rewards and engines that own processes."""
        self.exit_stack.close()

    @property
    def num_long_demonstrations(self) -> int:
        """Number of training prompts whose demonstration is too long to imitate."""
        return self.demonstrations.num_long if self.demonstrations else 0


def longest_sequence(model: Model, *, max_tokens: int, tokens_per_micro_batch: int) -> int:
    """Return the tokens of the longest sequence that the model and a micro-batch hold.

    Args:
        model: the policy.
        max_tokens: of a completion.
        tokens_per_micro_batch: of the recipe.

    Raises:
        SetupError: a completion of `max_tokens` leaves no room for a prompt.
    """
    micro = tokens_per_micro_batch
    allowed = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or micro)
    if max_tokens >= allowed:
        raise SetupError(
            f"rollout.max_tokens is {max_tokens} but the model allows {allowed} tokens in all, prompt "
            "included; lower rollout.max_tokens"
        )
    if max_tokens >= micro:
        raise SetupError(
            f"rollout.max_tokens is {max_tokens} but a micro-batch holds {micro} tokens, prompt included; "
            "raise policy.tokens_per_micro_batch"
        )
    return min(allowed, micro)
