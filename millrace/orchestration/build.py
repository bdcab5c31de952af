"""The one file that names concrete classes: from a RunConfig to the parts of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from millrace.config.inputs import TASK_PREFIX
from millrace.config.rewards import RewardConfig
from millrace.config.settings import RunConfig
from millrace.data.prompts import Split, corpus, make_demonstrations, make_prompts, read_split
from millrace.data.tokenizers import check_vocabulary, load_tokenizer, stop_token_ids, train_tokenizer
from millrace.environments.single_turn import SingleTurn
from millrace.inference.engine import PagedEngine
from millrace.inference.reference import ReferenceEngine
from millrace.models.adapters import merged, trained_weights
from millrace.models.decoding import prepare
from millrace.models.fused import set_deterministic
from millrace.models.load import (
    Model,
    check_folder,
    fresh_config,
    fresh_model,
    load_model,
    num_parameters,
)
from millrace.orchestration.companions import critic, reference, teacher
from millrace.orchestration.memory import cache_tokens
from millrace.orchestration.methods import build_control, build_method, build_objective
from millrace.orchestration.parts import Parts, SetupError
from millrace.orchestration.ranks import Ranks
from millrace.orchestration.shared import SharedEngine, SharedReward
from millrace.orchestration.trainable import choose_weights, save_policy
from millrace.protocols import Engine, Reward
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
from millrace.training.spread import Spread, mesh_of, spread_over
from millrace.transport.local import LocalTransport

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer


def build(config: RunConfig, checkpoint: Path | None, ranks: Ranks | None = None) -> Parts:
    """Every part of a run as one rank has it, with the weights of `checkpoint` if there is one.

    Raises:
        ValueError: a DataError, ModelError, RewardError or SetupError that says what to change.
    """
    device, ranks = choose_device(config.device), ranks or Ranks()
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // neighbours))
    if checkpoint is None and config.model.path is not None:
        check_folder(config.model.path)
    split = read_split(config.data, seed=config.seed)
    saved = None if checkpoint is None else checkpoint / "model"
    tokenizer = _tokenizer(config, saved, split)
    model, base = _policy(config, tokenizer, saved, device)
    count = num_parameters(model)
    check_vocabulary(tokenizer, model.config.get_text_config().vocab_size)
    limit = longest_prompt(config, model)
    prompts = partial(make_prompts, config=config.data, tokenizer=tokenizer, max_prompt_tokens=limit)
    train_prompts, num_dropped = prompts(split.train, prefix="train")
    eval_prompts, num_dropped_eval = prompts(split.eval, prefix="eval")
    demonstrations = {}
    if config.warmup:
        longest = _longest_sequence(config, model)
        demonstrations = make_demonstrations(train_prompts, config.data, tokenizer, max_tokens=longest)
    engine: Engine = build_engine(config, model, tokenizer)
    reward = build_reward(config, device)
    if ranks.size > 1:
        engine, reward = SharedEngine(engine, ranks), SharedReward(reward, ranks)
    mesh = mesh_of(config.mesh, device)
    # Last: from here on each rank has a part of the weights.
    spread = spread_over(model, mesh, config.mesh)
    return Parts(
        engine=engine,
        transport=build_transport(engine),
        reward=reward,
        full_marks=full_marks(config),
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        num_filtered=num_dropped + num_dropped_eval,
        stop_token_ids=stop_token_ids(tokenizer, getattr(model.generation_config, "eos_token_id", None)),
        imitator=partial(_imitator, config, spread),
        reinforcer=partial(_reinforcer, config, spread),
        critic=partial(critic, config, spread, mesh, checkpoint, rate=_rate) if config.critic else None,
        reference=partial(reference, config, model, mesh) if config.policy.kl else None,
        teacher=teacher(config, model, mesh, tokenizer),
        control=build_control(config),
        method=build_method(config),
        demonstrations=demonstrations,
        save_model=partial(save_policy, model, tokenizer, base),
        num_parameters=count,
        device=_device_name(device),
        environment=SingleTurn,
    )


def _tokenizer(config: RunConfig, saved: Path | None, split: Split) -> Tokenizer:
    """From a checkpoint, from a folder of the recipe, or trained on the data."""
    folder = saved or config.tokenizer.path or config.model.path
    if folder is not None:
        return load_tokenizer(folder)
    options = config.tokenizer
    return train_tokenizer(
        corpus(split, config.data),
        vocab_size=options.vocab_size,
        across_words=options.across_words,
        alphabet=options.alphabet,
    )


def _policy(
    config: RunConfig, tokenizer: Tokenizer, saved: Path | None, device: torch.device
) -> tuple[Model, str]:
    """The policy, in which it is settled what learns, and a checksum of an adapter's base."""
    # An adapter goes on beside the model it began with; what a checkpoint calls its model is both, merged.
    model = build_model(config, tokenizer, None if config.model.adapter else saved).to(device)
    if config.deterministic:
        set_deterministic(model)
    # A fresh model is drawn from the seed itself.
    return model, choose_weights(config.model, model, saved, seed=config.seed + 1)


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
    copied = merged(model).requires_grad_(False)
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


def build_transport(engine: Engine) -> LocalTransport:
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
    config: RunConfig,
    spread: Spread,
    version: int,
    *,
    objective: Objective,
    rate: Callable[[int], float],
    reference: ModelScorer | None = None,
) -> PolicyTrainer:
    options, model = config.policy.optimizer, spread.model
    return PolicyTrainer(
        model,
        objective,
        adamw(trained_weights(model), betas=options.betas, weight_decay=options.weight_decay),
        learning_rate=rate,
        temperature=1.0 if objective is imitation else config.rollout.temperature,
        max_tokens=config.policy.tokens_per_micro_batch,
        max_gradient_norm=options.max_gradient_norm,
        version=version,
        spread=spread,
        reference=reference,
    )


def _imitator(config: RunConfig, spread: Spread, version: int) -> PolicyTrainer:
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
    return _trainer(config, spread, version, objective=imitation, rate=rate)


def _reinforcer(
    config: RunConfig, spread: Spread, version: int, control: KlControl | None, reference: ModelScorer | None
) -> PolicyTrainer:
    objective = build_objective(config, control)
    rate = _rate(config, config.policy.optimizer.learning_rate)
    full = config.policy.kl is not None and config.policy.kl.estimator == "full"
    return _trainer(
        config, spread, version, objective=objective, rate=rate, reference=reference if full else None
    )


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


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"
