"""The one file that names concrete classes: it builds the components of a run from a RunConfig."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch

from millrace.config.environment_section import EnvironmentConfig
from millrace.config.inputs import (
    TASK_PREFIX,
    DataConfig,
    ModelConfig,
    SourceConfig,
    TokenizerConfig,
    source_fractions,
)
from millrace.config.reward_sections import FunctionRewardConfig, RewardConfig, reward_names
from millrace.config.rollout_section import RolloutConfig
from millrace.config.sections import PolicyConfig, SftConfig
from millrace.config.settings import RunConfig, every_reward, marks_of, num_processes, rewards_of
from millrace.data.chat_template import set_chat_template
from millrace.data.demonstrations import Demonstrations
from millrace.data.prompts import Split, corpus, make_prompts, read_split
from millrace.data.streamed_prompts import of_source
from millrace.data.tokenizers import check_vocabulary, load_tokenizer, stop_token_ids, train_tokenizer
from millrace.distributed.mesh import Mesh
from millrace.distributed.ranks import Ranks
from millrace.engines.build_engine import engine_over
from millrace.engines.subprocesses import SubprocessBackend
from millrace.engines.tensor_parallel import (
    engine_mesh,
    first_problem,
    load_shards,
    own_shards,
    shard_model,
)
from millrace.environments.sandbox.code_reward import CodeReward
from millrace.errors import SetupError
from millrace.inference.engine import PagedEngine
from millrace.models.adapters import merged
from millrace.models.fused import set_deterministic
from millrace.models.load import (
    Model,
    check_folder,
    fresh_config,
    fresh_model,
    load_model,
    num_parameters,
    read_config,
)
from millrace.models.router_replay import Routing
from millrace.models.routing import Routers
from millrace.protocols import Engine, EpisodeReward, Reward, WeightTransport
from millrace.rewards.by_source import SourceReward
from millrace.rewards.chat_scores import ChatReward
from millrace.rewards.combine import CombinedReward, NoReward
from millrace.rewards.isolated import IsolatedReward
from millrace.rewards.reward_errors import RewardError
from millrace.rewards.sandbox import FUNCTION_PERMISSIONS, Permissions
from millrace.rewards.text import ExactReward, Gsm8kReward
from millrace.rollout.episodes import EpisodeView
from millrace.rollout.remote import FirstEngine, GatherOnly, SharedEngine, SharedReward
from millrace.run.answer_table import QuestionColumns
from millrace.run.build_algorithm import (
    build_control,
    build_group_filter,
    build_method,
    build_objective,
    build_optimizer,
    check_policy,
)
from millrace.run.build_engines import LockedReward, num_threads, start_engines
from millrace.run.build_environments import Environments, build_environments, episode_view, rows_of
from millrace.run.build_models import (
    check_base,
    choose_weights,
    critic,
    critic_start,
    other_model,
    reference,
    save_policy,
    teacher,
)
from millrace.run.build_rewards import (
    chat_reward,
    check_groups,
    check_tests,
    code_reward,
    records_scores,
)
from millrace.run.components import Components, PolicyWeights, longest_sequence
from millrace.run.evaluation import sampling_plan
from millrace.run.evaluation_sets import EvaluationSet, SetQuestions, read_set
from millrace.run.health.memory_peaks import total_memory
from millrace.run.recorded_scores import RecordedScores
from millrace.run.rounding import canary_tokens, rounding
from millrace.training.kl_control import KlControl
from millrace.training.loading import loaded
from millrace.training.parallel_model import ParallelModel, mesh_of, spread_over
from millrace.training.policy import Objective, PolicyTrainer, imitation
from millrace.training.reward_model import load_reward_model
from millrace.training.schedule import learning_rate
from millrace.training.scorer import ModelScorer
from millrace.training.value import ValueTrainer
from millrace.transport.weight_update import LocalTransport
from millrace.types import Prompt

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer


# Host memory of one token of a batch, at most: as a completion, and while batches are packed (measured).
TOKEN_BYTES = 150


# Rewards that compute outside this process.
APART = (IsolatedReward, CodeReward, ChatReward)


class _Sampling(TypedDict):
    """The fields of `Components` that concern sampling."""

    engine: Engine
    sleeper: PagedEngine | None
    backend: SubprocessBackend | None
    num_engines: int
    policy_weights: PolicyWeights
    environments: Environments | None
    view_episode: EpisodeView | None
    transport: WeightTransport
    reward: EpisodeReward
    evaluation_sets: Sequence[EvaluationSet]
    exit_stack: ExitStack


def build(config: RunConfig, checkpoint: Path | None, ranks: Ranks | None = None) -> Components:
    """Build every component of a run for one rank, with the weights of `checkpoint` if there is one.

    Raises:
        ValueError: a DataError, ModelError, RewardError or SetupError; its message names the fix.
    """
    device, ranks = choose_device(config.device), ranks or Ranks()
    torch.set_num_threads(num_threads(config))
    if checkpoint is None and config.model.path is not None:
        check_folder(config.model.path)
    split = read_split(config.data, seed=config.seed, environment_rows=rows_of(config.environment))
    saved = None if checkpoint is None else checkpoint / "model"
    tokenizer = _tokenizer(
        config.tokenizer, config.data, split, saved or config.tokenizer.path or config.model.path
    )
    if saved is None:
        set_chat_template(tokenizer, config.tokenizer.chat_template)
    mesh = mesh_of(config.mesh, device)
    spread, sampled, base = _policy(config, tokenizer, saved, mesh, device)
    model = spread.model
    check_policy(config.policy, model)
    check_vocabulary(tokenizer, model.config.get_text_config().vocab_size)
    micro = config.policy.tokens_per_micro_batch
    longest = longest_sequence(model, max_tokens=config.rollout.max_tokens, tokens_per_micro_batch=micro)
    limit = min(config.data.max_prompt_tokens, longest - config.rollout.max_tokens)
    prompts = partial(make_prompts, config=config.data, tokenizer=tokenizer, max_prompt_tokens=limit)
    train_prompts, num_dropped = prompts(split.train, prefix="train")
    eval_prompts, num_dropped_eval = prompts(split.eval, prefix="eval")
    check_sources(config.data, train_prompts)
    demonstrations = None
    if config.sft:
        demonstrations = Demonstrations(train_prompts, config.data, tokenizer, max_tokens=longest)
        check_sources(config.data, demonstrations.prompts)
    _check_prompts(config, train_prompts, ranks, longest=limit + config.rollout.max_tokens)
    routing = _routing(config.policy, model, sampled)
    asked = teacher(config, mesh, device, tokenizer) if config.steps else None
    questions = _set_questions(config, tokenizer, split, longest)
    return Components(
        **_sampling(config, sampled, tokenizer, ranks, device, longest=longest, questions=questions),
        full_marks=full_marks(reference_rewards(config), config.environment),
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        num_filtered=num_dropped + num_dropped_eval,
        stop_token_ids=stop_token_ids(tokenizer, getattr(model.generation_config, "eos_token_id", None)),
        imitator=partial(_imitator, config.sft, config.policy, spread),
        reinforcer=_reinforcer(config, spread, routing),
        critic=_critic(config, spread, mesh, checkpoint, device, tokenizer),
        reference=_reference(config, spread, mesh, device, tokenizer),
        teacher=asked,
        control=build_control(config.policy.kl),
        method=build_method(config),
        group_filter=build_group_filter(config.rollout.group_filter),
        demonstrations=demonstrations,
        save_model=partial(save_policy, model, tokenizer, base),
        num_parameters=num_parameters(sampled),
        trains_all=config.model.adapter is None and not config.model.frozen,
        device=_device_name(device),
    )


def _check_prompts(config: RunConfig, prompts: Sequence[Prompt], ranks: Ranks, *, longest: int) -> None:
    """Refuse prompts, or batches of them, that the recipe cannot train on."""
    check_all_answers(config, prompts)
    if ranks.size > 1 and not num_processes(config):
        check_groups(every_reward(config))
    if config.steps:
        check_shares(config.data.sources, prompts, num_prompts=config.rollout.prompts_per_step)
        check_batch(config.rollout, prompts, longest=longest)


def _sampling(
    config: RunConfig,
    sampled: Model,
    tokenizer: Tokenizer,
    ranks: Ranks,
    device: torch.device,
    *,
    longest: int,
    questions: Sequence[SetQuestions],
) -> _Sampling:
    """Build what generates and scores."""
    most = config.limits.canary or rounding(config.precision, config.mesh.compute_dtype)
    policy_weights = PolicyWeights(canary_tokens(sampled, longest=longest), most)
    with ExitStack() as undone:
        closes = undone.enter_context(ExitStack())
        environments = build_environments(config, tokenizer, longest, ranks, closes)
        reward: EpisodeReward = undone.enter_context(closing(build_all_rewards(config, device)))
        backend, sleeper, number = None, None, num_processes(config)
        engine: Engine
        transport: WeightTransport
        if number:
            if ranks.first:  # all engines belong to it
                reward = LockedReward(reward)
                backend = start_engines(
                    config,
                    sampled,
                    tokenizer,
                    reward,
                    policy_weights,
                    longest=longest,
                    make_environments=None if environments is None else environments.host,
                    exit_stack=undone,
                )
            engine = FirstEngine(backend, ranks)
            transport = backend or GatherOnly(policy_weights.canary)
        else:
            engine, sleeper, transport = _own_engine(
                config, sampled, tokenizer, ranks, policy_weights, longest=longest
            )
        shared = _of_all_ranks(reward, ranks, is_recorded=records_scores(every_reward(config)))
        sets = _evaluation_sets(
            config, questions, shared, environments, ranks, device=device, exit_stack=undone
        )
        return {
            "engine": engine,
            "sleeper": sleeper,
            "backend": backend,
            "num_engines": number,
            "policy_weights": policy_weights,
            "environments": environments,
            "view_episode": episode_view(reward, environments),
            "transport": transport,
            "reward": shared,
            "evaluation_sets": sets,
            "exit_stack": undone.pop_all(),
        }


def _own_engine(
    config: RunConfig,
    sampled: Model,
    tokenizer: Tokenizer,
    ranks: Ranks,
    policy_weights: PolicyWeights,
    *,
    longest: int,
) -> tuple[Engine, PagedEngine, WeightTransport]:
    """Build the engine in this process: for all ranks, this rank's own, and what updates its weights."""
    own = engine_over(
        config.engine,
        sampled,
        tokenizer,
        longest=longest,
        record_experts=bool(config.policy.needs_experts),
    )
    size = config.engine.tensor_parallel_size
    transport = LocalTransport(
        own.update_weights,
        own.fingerprint,
        own.logprobs_of,
        policy_weights.canary,
        take=partial(own_shards, sampled) if size > 1 else iter,
        agree=first_problem(ranks) if size > 1 else str,
    )
    engine = SharedEngine(own, ranks, ranks_per_engine=size) if ranks.size > 1 else own
    return engine, own, transport


def _set_questions(config: RunConfig, tokenizer: Tokenizer, split: Split, longest: int) -> list[SetQuestions]:
    """Read the questions of each set; SetupError if one has no room for prompts, or lacks answers."""
    found = []
    for one in config.evaluation.sets:
        most = one.max_tokens or config.rollout.max_tokens
        if most >= longest:
            raise SetupError(
                f"evaluation set {one.name} has max_tokens {most}, but model and micro-batch hold {longest} "
                "tokens, prompt included; lower it"
            )
        limit = min(config.data.max_prompt_tokens, longest - most)
        questions = read_set(one, config.data, tokenizer, split.train, max_prompt_tokens=limit)
        try:
            check_answers(one.rewards or config.rewards, questions.prompts)
        except SetupError as error:
            raise SetupError(f"evaluation set {one.name}: {error}") from None
        found.append(questions)
    return found


def _evaluation_sets(
    config: RunConfig,
    questions: Sequence[SetQuestions],
    shared: EpisodeReward,
    environments: Environments | None,
    ranks: Ranks,
    *,
    device: torch.device,
    exit_stack: ExitStack,
) -> list[EvaluationSet]:
    """Build the sets, each with its own reward or that of the run, `shared`; rewards close with the run."""
    found = []
    for one, asked in zip(config.evaluation.sets, questions, strict=True):
        reward, rewards = shared, one.rewards or config.rewards
        if one.rewards:
            own = build_reward(config.model_copy(update={"rewards": one.rewards}), device)
            exit_stack.enter_context(closing(own))
            reward = _of_all_ranks(own, ranks, is_recorded=records_scores(one.rewards))
        found.append(
            EvaluationSet(
                name=one.name,
                every=one.every,
                prompts=asked.prompts,
                plan=sampling_plan(
                    one.samples, one.temperature, one.top_p, greedy=one.greedy, rollout=config.rollout
                ),
                limit=one.max_tokens,
                ks=one.k or None,
                columns=QuestionColumns.of(
                    asked.data, rewards, source=one.source_column, cluster=one.cluster_column
                ),
                reward=reward,
                full_marks=full_marks(rewards, config.environment),
                view_episode=episode_view(reward, environments),
                seed=config.seed,
            )
        )
    return found


def _of_all_ranks(reward: EpisodeReward, ranks: Ranks, *, is_recorded: bool) -> EpisodeReward:
    """Return the reward that all ranks call together."""
    if ranks.size > 1:
        reward = SharedReward(reward, ranks)
    if is_recorded:
        reward = RecordedScores(reward, ranks.broadcast_text if ranks.size > 1 else None)
    return reward


def _tokenizer(
    options: TokenizerConfig, data: DataConfig, split: Split, folder: str | Path | None
) -> Tokenizer:
    """Load the tokenizer of a folder, or train one on the data."""
    if folder is not None:
        return load_tokenizer(folder)
    return train_tokenizer(
        corpus(split, data),
        vocab_size=options.vocab_size,
        across_words=options.across_words,
        alphabet=options.alphabet,
    )


def _policy(
    config: RunConfig, tokenizer: Tokenizer, saved: Path | None, mesh: Mesh | None, device: torch.device
) -> tuple[ParallelModel, Model, str]:
    """Build the policy, parallel over the mesh, with its trainable weights chosen.

    Also returned: a model with weights of its own for the sampler, whole or this rank's slices of it, and a
    checksum of an adapter's base.
    """
    if config.mesh.activation_offload and device.type != "cuda":
        raise SetupError(
            f"mesh.activation_offload has no effect on {device.type}, whose memory is the host's; remove it"
        )
    # An adapter resumes on the model it was trained with; the model folder of a checkpoint has it merged in.
    folder = saved if saved is not None and config.model.adapter is None else config.model.path
    dtype = getattr(torch, config.precision)
    whole = partial(_whole, config.model, tokenizer, folder, dtype=dtype, seed=config.seed)

    shared = engine_mesh(config.engine.tensor_parallel_size, config.mesh.num_ranks, device)

    def settle(model: Model) -> None:
        if config.deterministic:
            set_deterministic(model)
        # The fresh model itself is initialized from the seed.
        choose_weights(config.model, model, saved, seed=config.seed + 1)

    if mesh is None or folder is None:
        # Every rank initializes all of a fresh model, so that its weights do not depend on the number of
        # ranks.
        model = whole().to(device)
        settle(model)
        sampled = merged(model)
        if shared is not None:
            shard_model(sampled, shared)
        spread = spread_over(model, mesh, config.mesh)
    else:
        # The adapter reaches the sampler with the first weight update.
        if shared is not None:
            sampled = load_shards(folder, shared, dtype=dtype, device=device)
        else:
            sampled = whole().to(device)
        if config.deterministic:
            set_deterministic(sampled)
        spread = loaded(folder, mesh, config.mesh, dtype=dtype, device=device, prepare=settle)
    return spread, sampled, check_base(config.model, spread.model, saved)


def check_answers(rewards: Sequence[RewardConfig], prompts: Sequence[Prompt]) -> None:
    """Refuse rewards that compare with an answer, or run tests, where no prompt has one.

    Raises:
        SetupError: the message has the reward and the setting to change.
    """
    for reward in rewards:
        if reward.kind == "code":
            check_tests(reward, prompts)
    for kind in [reward.kind for reward in rewards if reward.kind in ("exact", "gsm8k", "number")]:
        if not any(prompt.answer for prompt in prompts):
            raise SetupError(
                f"a reward of kind {kind} compares with the reference answer, and no row has one; set "
                "data.answer_column to the answer's column, or choose another reward"
            )


def check_all_answers(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Check the rewards of each source as `check_answers`; SetupError has the source's name.

    `prompts` may be of some of the sources.
    """
    if not config.data.sources:
        check_answers(config.rewards, prompts)
        return
    for name, rewards in rewards_of(config).items():
        own = of_source(prompts, name)
        try:
            if own:
                check_answers(rewards, own)
        except SetupError as error:
            raise SetupError(f"source {name}: {error}") from None


def reference_rewards(config: RunConfig) -> tuple[RewardConfig, ...]:
    """Return the rewards whose full marks count; those of all sources have the same."""
    return next(iter(rewards_of(config).values()))


def check_sources(data: DataConfig, prompts: Sequence[Prompt]) -> None:
    """Refuse a source without prompts to train on.

    Raises:
        SetupError: the message has the source.
    """
    for one in data.sources:
        if not of_source(prompts, one.name):
            raise SetupError(
                f"all prompts of source {one.name} are longer than data.max_prompt_tokens "
                f"{data.max_prompt_tokens} or, with a completion, than what the model holds; raise it, or "
                "remove the source"
            )


def check_shares(sources: Sequence[SourceConfig], prompts: Sequence[Prompt], *, num_prompts: int) -> None:
    """Refuse a source with fewer prompts than a batch of `num_prompts` takes of it.

    Raises:
        SetupError: the message has the source and its numbers.
    """
    counts = [len(of_source(prompts, one.name)) for one in sources]
    for one, count, part in zip(sources, counts, source_fractions(sources, counts), strict=True):
        needed = math.ceil(num_prompts * part)
        if needed > count:
            raise SetupError(
                f"a batch of {num_prompts} prompts takes up to {needed} of source {one.name}, which has "
                f"{count} to train on, so that it would hold one twice; lower rollout.prompts_per_step or "
                "its weight, or give it more data"
            )


def check_batch(rollout: RolloutConfig, prompts: Sequence[Prompt], *, longest: int) -> None:
    """Refuse a batch that the data or this machine's memory cannot hold.

    Args:
        rollout: how completions are sampled.
        prompts: to train on.
        longest: tokens of the longest sequence, prompt and completion.

    Raises:
        SetupError: the message has the numbers and the setting to change.
    """
    if rollout.prompts_per_step > len(prompts):
        raise SetupError(
            f"rollout.prompts_per_step is {rollout.prompts_per_step}, but there are {len(prompts)} prompts "
            f"to train on besides those held out, so that a batch would hold one twice; lower it to "
            f"{len(prompts)} or less, or give more data"
        )
    num_sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    asked, there = num_sequences * longest * TOKEN_BYTES, total_memory()
    if asked > there:
        raise SetupError(
            f"a batch of {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples of up to "
            f"{longest} tokens takes up to {asked / 1e9:.1f} GB of this machine's {there / 1e9:.1f} GB; "
            "lower rollout.prompts_per_step, rollout.samples_per_prompt or rollout.max_tokens"
        )


def _whole(
    config: ModelConfig, tokenizer: Tokenizer, folder: str | Path | None, *, dtype: torch.dtype, seed: int
) -> Model:
    """Load a model from a folder, or initialize a fresh one."""
    if folder is not None:
        return load_model(folder, dtype=dtype)
    if not config.shape:
        raise SetupError(
            "no model is named; set model.path to a model folder (safetensors), or model.shape to the sizes "
            "of a fresh one"
        )
    fresh = fresh_config(
        config.architecture,
        config.shape,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
    )
    return fresh_model(fresh, seed=seed, dtype=dtype)


def build_reward(config: RunConfig, device: torch.device) -> EpisodeReward:
    """Build the weighted sum of the recipe's rewards, each tested at once; models go to `device`.

    Raises:
        RewardError: a reward cannot start.
    """
    if not config.rewards:
        return NoReward()
    parts: list[tuple[str, float, Reward]] = []
    try:
        for name, entry in zip(reward_names(config.rewards), config.rewards, strict=True):
            parts.append((name, entry.weight, _one_reward(config, entry, device)))
    except ValueError:
        for _, _, reward in parts:
            reward.close()
        raise
    apart = [reward for *_, reward in parts if isinstance(reward, APART)]
    return CombinedReward(parts, apart=apart)


def build_all_rewards(config: RunConfig, device: torch.device) -> EpisodeReward:
    """Build the rewards of the recipe and of its sources, as `build_reward`."""
    sources = [one for one in config.data.sources if one.rewards]
    if not sources:
        return build_reward(config, device)
    with ExitStack() as undone:
        other = undone.enter_context(closing(build_reward(config, device)))
        own = {}
        for one in sources:
            reward = build_reward(config.model_copy(update={"rewards": one.rewards}), device)
            own[one.name] = undone.enter_context(closing(reward))
        undone.pop_all()
        return SourceReward(own, other)


def _one_reward(config: RunConfig, entry: RewardConfig, device: torch.device) -> Reward:
    if entry.kind == "model":
        dtype, limit = getattr(torch, config.precision), config.policy.tokens_per_micro_batch
        return load_reward_model(entry.path, dtype=dtype, device=device, max_tokens=limit)
    if entry.kind == "exact":
        return ExactReward()
    if entry.kind == "gsm8k":
        return Gsm8kReward()
    if entry.kind == "code":
        return code_reward(entry)
    if entry.kind == "judge":
        return chat_reward(entry)
    spec: dict[str, object] = {"kind": entry.kind}
    if entry.kind == "task":
        spec |= {"name": config.data.train.removeprefix(TASK_PREFIX), "options": config.data.task}
    elif entry.kind == "format":
        spec["pattern"] = entry.pattern
    elif entry.kind == "function":
        spec["function"] = entry.function
    permissions, concurrency = None, None
    if entry.kind == "function":
        permissions, concurrency = function_permissions(entry), entry.concurrency
    reward = IsolatedReward(
        spec,
        timeout_s=entry.timeout_s,
        num_workers=entry.workers,
        concurrency=concurrency,
        permissions=permissions,
    )
    try:
        reward.check()
    except ValueError:
        reward.close()
        raise
    return reward


def function_permissions(entry: FunctionRewardConfig) -> Permissions:
    """Return the sandbox permissions of a reward function.

    Raises:
        RewardError: a variable is not set, or a folder does not exist.
    """
    for name in entry.env_vars:
        if name not in os.environ:
            raise RewardError(
                f"reward function {entry.function} is to see the variable {name}, which is not set; set it "
                "or take it out of env_vars"
            )
    folders = [str(Path(folder).expanduser().resolve()) for folder in entry.writable]
    for folder in folders:
        if not os.path.isdir(folder):
            raise RewardError(
                f"reward function {entry.function} is to write to {folder}, which is not a folder; make it "
                "first"
            )
    return replace(
        FUNCTION_PERMISSIONS,
        network=entry.network,
        env_vars=entry.env_vars,
        writable=tuple(folders),
        memory_bytes=round(entry.memory_gb * 2**30),
    )


def choose_device(wanted: str) -> torch.device:
    """Return the device that a setting means on this machine.

    Raises:
        SetupError: CUDA was requested and is not available.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SetupError("device is cuda but torch sees no CUDA device; set device: auto or cpu")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def full_marks(rewards: Sequence[RewardConfig], environment: EnvironmentConfig | None) -> float:
    """Return the reward of a right answer: the sum of the positive weights, and that of a right episode."""
    episode = 0.0 if environment is None else environment.full_marks
    return episode + marks_of(rewards)


def _trainer(
    config: PolicyConfig,
    spread: ParallelModel,
    version: int,
    *,
    objective: Objective,
    rate: Callable[[int], float],
    temperature: float = 1.0,
    reference: ModelScorer | None = None,
    routing: Routing | None = None,
) -> PolicyTrainer:
    options, model = config.optimizer, spread.model
    return PolicyTrainer(
        model,
        objective,
        build_optimizer(options, model),
        learning_rate=rate,
        temperature=temperature,
        max_tokens=config.tokens_per_micro_batch,
        max_grad_norm=options.max_grad_norm,
        version=version,
        spread=spread,
        reference=reference,
        routing=routing,
    )


def _imitator(
    sft: SftConfig | None, policy: PolicyConfig, spread: ParallelModel, version: int
) -> PolicyTrainer:
    assert sft is not None
    options = policy.optimizer
    rate = partial(
        learning_rate,
        peak=sft.learning_rate,
        # SFT that ends at an accuracy has no known length, so its learning rate stays constant after the
        # ramp.
        shape="constant" if sft.stop_accuracy else options.schedule,
        warmup_steps=options.warmup_steps,
        total_steps=sft.steps,
        floor=options.min_lr_ratio,
    )
    return _trainer(policy, spread, version, objective=imitation, rate=rate)


def _reinforcer(
    config: RunConfig, spread: ParallelModel, routing: Routing | None
) -> Callable[[int, KlControl | None, ModelScorer | None], PolicyTrainer]:
    policy, temperature = config.policy, config.rollout.temperature
    rate = _rate(policy, config.steps, policy.optimizer.learning_rate)
    full = policy.kl is not None and policy.kl.estimator == "full"

    def reinforcer(version: int, control: KlControl | None, reference: ModelScorer | None) -> PolicyTrainer:
        return _trainer(
            policy,
            spread,
            version,
            objective=build_objective(policy, control, config.steps),
            rate=rate,
            temperature=temperature,
            reference=reference if full else None,
            routing=routing,
        )

    return reinforcer


def _reference(
    config: RunConfig,
    spread: ParallelModel,
    mesh: Mesh | None,
    device: torch.device,
    tokenizer: Tokenizer,
) -> Callable[[Path], ModelScorer] | None:
    penalty = config.policy.kl
    if penalty is None:
        return None
    own = None
    if penalty.path and config.steps:
        own = other_model("policy.kl.path", penalty.path, tokenizer)
        sizes = [each.get_text_config().vocab_size for each in (spread.model.config, read_config(own))]
        if penalty.estimator == "full" and sizes[0] != sizes[1]:
            raise SetupError(
                f"policy.kl.estimator full sums over the {sizes[0]} logits of the policy, and policy.kl.path "
                f"{own} has {sizes[1]}; choose another estimator"
            )
    return partial(reference, config, spread, mesh, device, own)


def _critic(
    config: RunConfig,
    spread: ParallelModel,
    mesh: Mesh | None,
    checkpoint: Path | None,
    device: torch.device,
    tokenizer: Tokenizer,
) -> Callable[[], ValueTrainer] | None:
    if config.critic is None:
        return None
    given = config.critic.path
    return partial(
        critic,
        config.critic,
        config.policy,
        spread,
        mesh,
        checkpoint,
        mesh_config=config.mesh,
        device=device,
        rate=_rate(config.policy, config.steps, config.critic.learning_rate),
        start=critic_start(given, tokenizer) if given and config.steps else None,
    )


def _routing(policy: PolicyConfig, trained: Model, sampled: Model) -> Routing | None:
    """Expert replay and bias balancing for the policy; None where the recipe uses neither.

    Raises:
        SetupError: the policy is no mixture of experts, or has no router bias to balance.
    """
    name = policy.needs_experts
    if not name:
        return None
    try:
        routers = Routers(trained)
        if policy.router_bias_step:
            name = "policy.router_bias_step"
            for each in (routers, Routers(sampled)):
                each.prepare_biases()
    except ValueError as error:
        raise SetupError(f"{name} does not go with this policy: {error}; remove it") from None
    return Routing(routers, policy.router_replay, policy.router_aux_coefficient, policy.router_bias_step)


def _rate(policy: PolicyConfig, num_batches: int, peak: float) -> Callable[[int], float]:
    """The learning rate of reinforcement as a function of the optimizer step."""
    options = policy.optimizer
    return partial(
        learning_rate,
        peak=peak,
        shape=options.schedule,
        warmup_steps=options.warmup_steps,
        total_steps=num_batches * policy.optimizer_steps_per_batch * policy.epochs_per_batch,
        floor=options.min_lr_ratio,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"
