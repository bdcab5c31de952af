"""The one file that names concrete classes: from a RunConfig to the parts of a run."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from millrace.config.inputs import TASK_PREFIX
from millrace.config.methods import TeacherAdvantage
from millrace.config.rewards import RewardConfig
from millrace.config.settings import RunConfig
from millrace.data.prompts import corpus, make_demonstrations, make_prompts, read_split
from millrace.data.tokenizers import check_vocabulary, load_tokenizer, stop_token_ids, train_tokenizer
from millrace.environments.single_turn import SingleTurn
from millrace.inference.engine import PagedEngine
from millrace.inference.reference import ReferenceEngine
from millrace.models.decoding import prepare
from millrace.models.fused import set_deterministic
from millrace.models.heads import load_scalar_model, save_scalar_model, scalar_model
from millrace.models.load import (
    Model,
    check_folder,
    fresh_config,
    fresh_model,
    load_model,
    num_parameters,
    save_model,
)
from millrace.orchestration.memory import cache_tokens
from millrace.orchestration.methods import build_control, build_method, build_objective
from millrace.orchestration.parts import Parts
from millrace.orchestration.run_folder import model_folder
from millrace.protocols import Reward
from millrace.rewards.combine import CombinedReward
from millrace.rewards.isolated import IsolatedReward
from millrace.rewards.text import ExactReward, Gsm8kReward
from millrace.training.kl_control import KlControl
from millrace.training.objective import Objective, imitation
from millrace.training.optimizer import adamw
from millrace.training.policy import PolicyTrainer
from millrace.training.reward_model import load_reward_model
from millrace.training.schedule import learning_rate
from millrace.training.scorer import ModelScorer
from millrace.training.value import ValueTrainer
from millrace.transport.local import LocalTransport

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer


# Folder of the critic within a checkpoint.
CRITIC = "critic"


class SetupError(ValueError):
    """Settings that fit the schema and not each other or this machine; the message says what to change."""


def build(config: RunConfig, checkpoint: Path | None) -> Parts:
    """Every part of a run, with the weights of `checkpoint` if there is one.

    Raises:
        ValueError: a DataError, ModelError, RewardError or SetupError that says what to change.
    """
    device = choose_device(config.device)
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    if checkpoint is None and config.model.path is not None:
        check_folder(config.model.path)
    split = read_split(config.data, seed=config.seed)
    saved = None if checkpoint is None else checkpoint / "model"
    tokenizer_folder = config.tokenizer.path or config.model.path
    if saved is not None or tokenizer_folder is not None:
        tokenizer = load_tokenizer(saved or tokenizer_folder or "")
    else:
        options = config.tokenizer
        tokenizer = train_tokenizer(
            corpus(split, config.data),
            vocab_size=options.vocab_size,
            across_words=options.across_words,
            alphabet=options.alphabet,
        )
    model = build_model(config, tokenizer, saved).to(device)
    if config.deterministic:
        set_deterministic(model)
    check_vocabulary(tokenizer, model.config.get_text_config().vocab_size)
    limit = longest_prompt(config, model)
    prompts = partial(make_prompts, config=config.data, tokenizer=tokenizer, max_prompt_tokens=limit)
    train_prompts, num_dropped = prompts(split.train, prefix="train")
    eval_prompts, num_dropped_eval = prompts(split.eval, prefix="eval")
    demonstrations = {}
    if config.warmup:
        longest = _longest_sequence(config, model)
        demonstrations = make_demonstrations(train_prompts, config.data, tokenizer, max_tokens=longest)
    engine = build_engine(config, model, tokenizer)
    method = build_method(config)
    return Parts(
        engine=engine,
        transport=build_transport(engine),
        reward=build_reward(config, device),
        full_marks=full_marks(config),
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        num_filtered=num_dropped + num_dropped_eval,
        stop_token_ids=stop_token_ids(tokenizer, getattr(model.generation_config, "eos_token_id", None)),
        imitator=partial(_imitator, config, model),
        reinforcer=partial(_reinforcer, config, model),
        critic=partial(_critic, config, model, checkpoint) if config.critic else None,
        save_critic=_save_critic,
        reference=partial(_frozen, config, model) if config.policy.kl else None,
        teacher=_teacher(config, model, tokenizer),
        control=build_control(config),
        method=method,
        demonstrations=demonstrations,
        save_model=partial(_save, model, tokenizer),
        num_parameters=num_parameters(model),
        device=_device_name(device),
        environment=SingleTurn,
    )


def build_model(config: RunConfig, tokenizer: Tokenizer, saved: Path | None) -> Model:
    """The policy: from a checkpoint, from the recipe's folder, or fresh."""
    dtype = getattr(torch, config.precision)
    if saved is not None:
        return load_model(saved, dtype=dtype)
    if config.model.path is not None:
        return load_model(config.model.path, dtype=dtype)
    fresh = fresh_config(
        config.model.architecture,
        config.model.shape,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
    )
    return fresh_model(fresh, seed=config.seed, dtype=dtype)


def build_engine(config: RunConfig, model: Model, tokenizer: Tokenizer) -> PagedEngine | ReferenceEngine:
    """A sampler with weights of its own, equal to the model's at first."""
    copied = copy.deepcopy(model).requires_grad_(False)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    options = config.engine
    if options.cuda_graphs and model.device.type != "cuda":
        raise SetupError(
            f"engine.cuda_graphs needs a CUDA device, and the model is on {model.device}; remove it"
        )
    prepare(copied)
    longest = _longest_sequence(config, model)
    tokens = cache_tokens(options, model, longest)
    if options.name == "reference":
        return ReferenceEngine(
            copied, decode, max_cache_tokens=tokens, max_prefill_tokens=options.tokens_per_step
        )
    return PagedEngine(
        copied,
        decode,
        max_cache_tokens=tokens,
        block_size=options.block_size,
        max_batch_tokens=options.tokens_per_step,
        max_requests=options.max_requests,
        cuda_graphs=options.cuda_graphs,
    )


def build_transport(engine: PagedEngine | ReferenceEngine) -> LocalTransport:
    """Weights go to a sampler in this process."""
    return LocalTransport(engine.load_weights, engine.fingerprint)


def build_reward(config: RunConfig, device: torch.device) -> Reward:
    """The weighted sum of the recipe's rewards, each tried before the run begins; models go to `device`.

    Raises:
        RewardError: a reward cannot start.
    """
    parts: list[tuple[str, float, Reward]] = []
    try:
        for entry in config.rewards:
            parts.append((entry.kind, entry.weight, _one_reward(config, entry, device)))
    except ValueError:
        for _, _, reward in parts:
            reward.close()
        raise
    return CombinedReward(parts)


def _one_reward(config: RunConfig, entry: RewardConfig, device: torch.device) -> Reward:
    if entry.kind == "model":
        dtype, limit = getattr(torch, config.precision), config.policy.tokens_per_micro_batch
        return load_reward_model(entry.path, dtype=dtype, device=device, max_tokens=limit)
    if entry.kind == "exact":
        return ExactReward()
    if entry.kind == "gsm8k":
        return Gsm8kReward()
    spec: dict[str, object] = {"kind": entry.kind}
    if entry.kind == "task":
        spec |= {"name": config.data.train.removeprefix(TASK_PREFIX), "options": config.data.task}
    elif entry.kind == "format":
        spec["pattern"] = entry.pattern
    elif entry.kind == "function":
        spec["function"] = entry.function
    reward = IsolatedReward(spec, timeout_s=entry.timeout_s)
    try:
        reward.check()
    except ValueError:
        reward.close()
        raise
    return reward


def choose_device(wanted: str) -> torch.device:
    """The device a setting means on this machine.

    Raises:
        SetupError: CUDA was asked for and is not there.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SetupError("device is cuda but torch sees no CUDA device; set device: auto or cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def full_marks(config: RunConfig) -> float:
    """The reward of a right answer: the sum of the positive weights."""
    return sum(max(0.0, reward.weight) for reward in config.rewards)


def longest_prompt(config: RunConfig, model: Model) -> int:
    """The recipe's limit, or what the model and a micro-batch leave beside a completion.

    Raises:
        SetupError: nothing is left.
    """
    return min(config.data.max_prompt_tokens, _longest_sequence(config, model) - config.rollout.max_tokens)


def _longest_sequence(config: RunConfig, model: Model) -> int:
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


def _trainer(
    config: RunConfig, model: Model, version: int, *, objective: Objective, rate: Callable[[int], float]
) -> PolicyTrainer:
    options = config.policy.optimizer
    return PolicyTrainer(
        model,
        objective,
        adamw(model, betas=options.betas, weight_decay=options.weight_decay),
        learning_rate=rate,
        temperature=1.0 if objective is imitation else config.rollout.temperature,
        max_tokens=config.policy.tokens_per_micro_batch,
        max_gradient_norm=options.max_gradient_norm,
        version=version,
    )


def _imitator(config: RunConfig, model: Model, version: int) -> PolicyTrainer:
    assert config.warmup is not None
    warmup = config.warmup
    options = config.policy.optimizer
    rate = partial(
        learning_rate,
        peak=warmup.learning_rate,
        # Where the warm-up ends at a gate, nobody knows when: its learning rate stays up after the ramp.
        shape="constant" if warmup.gate else options.schedule,
        ramp_steps=options.ramp_steps,
        total_steps=warmup.steps,
    )
    return _trainer(config, model, version, objective=imitation, rate=rate)


def _reinforcer(
    config: RunConfig, model: Model, version: int, control: KlControl | None, reference: ModelScorer | None
) -> PolicyTrainer:
    objective = build_objective(config, control, reference)
    rate = _rate(config, config.policy.optimizer.learning_rate)
    return _trainer(config, model, version, objective=objective, rate=rate)


def _rate(config: RunConfig, peak: float) -> Callable[[int], float]:
    """The learning rate of reinforcement's n-th optimizer step."""
    options = config.policy.optimizer
    return partial(
        learning_rate,
        peak=peak,
        shape=options.schedule,
        ramp_steps=options.ramp_steps,
        total_steps=config.steps * config.policy.optimizer_steps_per_batch,
    )


def _critic(config: RunConfig, model: Model, checkpoint: Path | None) -> ValueTrainer:
    """The critic of a checkpoint, or a fresh one on the policy's present weights."""
    assert config.critic is not None
    saved = None if checkpoint is None else checkpoint / CRITIC
    if saved is not None and saved.is_dir():
        critic = load_scalar_model(saved, dtype=model.dtype).to(model.device)
    else:
        critic = scalar_model(model)
    options = config.policy.optimizer
    return ValueTrainer(
        critic,
        adamw(critic, betas=options.betas, weight_decay=options.weight_decay),
        learning_rate=_rate(config, config.critic.learning_rate),
        clip=config.critic.clip,
        coefficient=config.critic.coefficient,
        max_tokens=config.policy.tokens_per_micro_batch,
        max_gradient_norm=options.max_gradient_norm,
    )


def _save_critic(critic: ValueTrainer, folder: Path) -> None:
    save_scalar_model(critic.model, folder / CRITIC)


def _frozen(config: RunConfig, model: Model, folder: Path) -> ModelScorer:
    """What the weights of a folder say of tokens; they never change."""
    frozen = load_model(folder, dtype=model.dtype).to(model.device).requires_grad_(False)
    limit = config.policy.tokens_per_micro_batch
    return ModelScorer(frozen, temperature=config.rollout.temperature, max_tokens=limit)


def _teacher(config: RunConfig, model: Model, tokenizer: Tokenizer) -> ModelScorer | None:
    """Whom on-policy distillation follows.

    Raises:
        SetupError: the teacher is not there, or reads other tokens than the policy.
    """
    if not isinstance(config.advantage, TeacherAdvantage):
        return None
    path = Path(config.advantage.path)
    if not path.is_dir():
        raise SetupError(
            f"teacher {path} does not exist; train one first (millrace train quickstart makes "
            "runs/quickstart-1) or set advantage.path to a run or a model folder"
        )
    folder = model_folder(path)
    if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
        raise SetupError(
            f"teacher {folder} reads other tokens than the policy; distillation needs one tokenizer, so "
            "train both on the same data and tokenizer settings, or set tokenizer.path to the teacher's"
        )
    return _frozen(config, model, folder)


def _save(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    save_model(model, folder)
    tokenizer.save_pretrained(folder)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"
