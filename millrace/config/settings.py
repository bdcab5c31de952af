"""RunConfig: every setting of a run, its meaning and its default, in one place.

A setting is defined once, with its default: the field of its name, here or in the section's class.
`recipe.py` builds a RunConfig from a recipe and overrides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from millrace.config.engine_section import FOREIGN, EngineConfig, idle_engine
from millrace.config.environment_section import EnvironmentConfig, idle_environment
from millrace.config.evaluation_section import (
    SET_PREFIX,
    EvaluationConfig,
    idle_evaluation,
    unknown_set_measure,
)
from millrace.config.inputs import (
    AUTO,
    ENVIRONMENT_ROWS,
    FRESH_MODEL,
    TASK_PREFIX,
    TRAINED_TOKENIZER,
    DataConfig,
    ModelConfig,
    TokenizerConfig,
    idle_model,
)
from millrace.config.mesh_section import MeshConfig, idle_mesh
from millrace.config.method_sections import (
    ACTING,
    COMPARING,
    TURN_SECTIONS,
    VALUED,
    WITHOUT_RATIO,
    AdvantageConfig,
    CriticConfig,
    FunctionName,
    GaeAdvantage,
    GmpoLoss,
    GroupAdvantage,
    GspoLoss,
    ImportanceCorrection,
    refuse_credit,
    with_default_kind,
)
from millrace.config.reward_sections import RewardConfig, idle_rewards, reward_names
from millrace.config.rollout_section import RolloutConfig, idle_rollout
from millrace.config.section import Section, given_in, is_function
from millrace.config.sections import (
    EIGHT_BIT,
    CheckpointConfig,
    LimitConfig,
    PolicyConfig,
    SftConfig,
    TimeoutConfig,
)

# The settings to know first, in the order of the reference; a section stands for all its settings.
BASIC = (
    *("model.path", "model.adapter", "data.train", "data.eval", "data.prompt_column", "data.answer_column"),
    *("data.template", "rewards", "sft", "steps", "seed", "precision", "loggers"),
    *("rollout.prompts_per_step", "rollout.samples_per_prompt", "rollout.max_tokens", "rollout.temperature"),
    *("rollout.max_staleness", "engine.num_engines", "mesh.dp_shard"),
    *("advantage.kind", "policy.loss.kind", "policy.kl", "policy.optimizer_steps_per_batch"),
    *("policy.optimizer.learning_rate", "evaluation.every", "checkpoint.every"),
)
LOGGERS = ("tensorboard", "wandb", "mlflow")
NOTHING_TRAINED = (
    "steps is 0, so there is no reinforcement, and the recipe has no sft section; set sft.steps, or steps "
    "above 0"
)


class RunConfig(Section):
    """One run: supervised fine-tuning, then reinforcement learning.

    `recipe.derivation` prints how the sizes of a step follow.
    """

    name: str | None = Field(None, description="folder of the run; null takes recipe-1, recipe-2, ...")
    output: str = Field("runs", description="folder that holds run folders")
    seed: NonNegativeInt = Field(0, description="seed of weights, data order and sampling")
    steps: NonNegativeInt = Field(
        200,
        description="batches of reinforcement learning; 0 is supervised fine-tuning alone. Some hundreds "
        "show whether a method works",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes CUDA where there is one")
    deterministic: bool = Field(
        False,
        description="trainer and sampler give every token the same log-probability, bit for bit, whatever "
        "the batch; slower",
    )
    precision: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="dtype of the weights"
    )
    threads: NonNegativeInt = Field(0, description="CPU threads; 0 takes every core this process may use")
    profile_steps: tuple[PositiveInt, ...] = Field(
        (), description="batches of reinforcement that torch's profiler records, in the run's folder profile"
    )
    loggers: tuple[str, ...] = Field(
        ("tensorboard",),
        description="where metrics go besides metrics.jsonl: tensorboard, wandb, mlflow, or your own "
        "module:Class",
    )
    project: str = Field("millrace", description="project of wandb, experiment of mlflow")
    run_group: str | None = Field(
        None, description="group of the run in wandb, tag `group` in mlflow; null is none"
    )
    callbacks: tuple[FunctionName, ...] = Field(
        (), description="your own module:Class, whose methods such as after_step are called during the run"
    )
    model: ModelConfig = Field(
        default_factory=ModelConfig, description="which weights the policy starts from"
    )
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="which tokenizer")
    data: DataConfig = Field(description="prompts, their answers, and how they are split")
    sft: SftConfig | None = Field(None, description="supervised fine-tuning first; null is none")
    rollout: RolloutConfig = Field(
        default_factory=RolloutConfig,
        description="how completions are sampled, and how far ahead of training",
    )
    engine: EngineConfig = Field(default_factory=EngineConfig, description="what generates completions")
    environment: EnvironmentConfig | None = Field(
        None, description="environment of episodes with several turns; null is one completion of each prompt"
    )
    rewards: tuple[RewardConfig, ...] = Field(
        (),
        description="rewards of the last completion; their weighted sum, and the environment's score, are "
        "trained on",
    )
    advantage: AdvantageConfig = Field(
        default_factory=GroupAdvantage, description="how advantages are estimated from rewards"
    )
    critic: CriticConfig | None = Field(
        None, description="a value model beside the policy, for advantages such as gae; null is none"
    )
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="the loss and its optimizer")
    mesh: MeshConfig = Field(default_factory=MeshConfig, description="parallelism over ranks")
    evaluation: EvaluationConfig = Field(
        default_factory=EvaluationConfig, description="evaluation on held-out prompts"
    )
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="checkpoints to keep")
    limits: LimitConfig = Field(
        default_factory=LimitConfig, description="when a run stops, warns or keeps evidence"
    )
    timeouts: TimeoutConfig = Field(default_factory=TimeoutConfig, description="deadlines")

    @field_validator("advantage", mode="before")
    @classmethod
    def _default_advantage(cls, value: Any) -> Any:
        value = with_default_kind(value, "advantage")
        refuse_credit(value)
        return value

    @field_validator("loggers")
    @classmethod
    def _known_loggers(cls, loggers: tuple[str, ...]) -> tuple[str, ...]:
        for name in loggers:
            if name not in LOGGERS and not is_function(name):
                raise ValueError(
                    f"{name!r} is no logger; there are: {', '.join(LOGGERS)}, or your own module:Class"
                )
        return loggers

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


def num_processes(config: RunConfig) -> int:
    """Engines in processes of their own; none where sampling and training take turns."""
    wanted = config.engine.num_engines
    if wanted is None and config.engine.is_served:
        return max(1, len(config.engine.urls))
    if wanted is None and config.engine.disaggregation is not None:
        return 1
    return int(config.rollout.max_staleness > 0) if wanted is None else wanted


def num_answers(config: RunConfig) -> int:
    """Answers to a prompt of a batch, a greedy baseline included."""
    return config.rollout.samples_per_prompt + (config.advantage.kind == "greedy_baseline")


def ineffective_settings(config: RunConfig) -> list[str]:
    """One sentence for each setting that was given and can have no effect in this recipe."""
    found = [*_idle_inputs(config), *idle_model(config.model), *idle_engine(config.engine)]
    if config.environment is not None:
        found += idle_environment(config.environment)
        if config.environment.kind == "tools" and not config.rewards:
            found.append("environment kind tools scores nothing itself; add rewards for the last completion")
        found += _foreign_prompts(config.environment, config.data)
    elif not all(rewards_of(config).values()):
        found.append("the recipe has no rewards and no environment; add one of them")
    found += idle_rewards(config.rewards, samples_per_prompt=config.rollout.samples_per_prompt)
    found += _idle_sources(config)
    found += _unknown_measure(config)
    found += idle_evaluation(config.evaluation, has_environment=config.environment is not None)
    named = config.project != "millrace" or config.run_group is not None
    if named and not {"wandb", "mlflow"} & set(config.loggers):
        found.append(
            "project and run_group are of the loggers wandb and mlflow; add one of them to loggers, "
            "or remove them"
        )
    used = {
        "deterministic": config.deterministic,
        "policy.kl.estimator full": config.policy.kl is not None and config.policy.kl.estimator == "full",
        "advantage kind token_baseline": config.advantage.kind == "token_baseline",
        "rollout.top_k": config.rollout.top_k > 0,
        "rollout.top_p": config.rollout.top_p < 1,
        "model.adapter": config.model.adapter is not None,
        "policy.router_replay": config.policy.router_replay,
        "policy.router_aux_coefficient": config.policy.router_aux_coefficient > 0,
        "policy.router_bias_step": config.policy.router_bias_step > 0,
        "policy.optimizer.kind adamw_8bit": config.policy.optimizer.kind == EIGHT_BIT,
        "policy.optimizer.kind muon": config.policy.optimizer.kind == "muon",
        "policy.optimizer.kind module:function": is_function(config.policy.optimizer.kind),
    }
    found += idle_mesh(config.mesh, precision=config.precision, used=used)
    found += [*_not_disaggregated(config), *_unshared(config)]
    if config.steps == 0:
        # All that belongs to reinforcement waits, so that steps=0 over any recipe is SFT alone.
        return [*found, *([] if config.sft else [NOTHING_TRAINED])]
    limits = config.limits
    if limits.mismatch is not None and limits.mismatch < (limits.mismatch_warning or 0.0):
        found.append(
            f"limits.mismatch_warning {limits.mismatch_warning:g} is above limits.mismatch "
            f"{limits.mismatch:g}, at which a run stops; lower it"
        )
    if limits.mismatch is not None and config.rollout.max_staleness:
        found.append(
            "limits.mismatch has no effect with rollout.max_staleness above 0, where a mismatch alone stops "
            "no run; set limits.mismatch_warning"
        )
    found += _not_served(config)
    found += idle_rollout(config.rollout, corrected=config.policy.correction is not None)
    return [
        *found,
        *_idle_ahead(config),
        *_idle_sampling(config),
        *_idle_advantage(config),
        *_idle_credit(config),
        *_idle_policy(config),
    ]


def rewards_of(config: RunConfig) -> dict[str, tuple[RewardConfig, ...]]:
    """The rewards of each source by name, and by an empty name those of prompts without one."""
    sources = config.data.sources
    found = {one.name: one.rewards or config.rewards for one in sources}
    if not sources or config.data.eval is not None:
        found[""] = config.rewards
    return found


def every_reward(config: RunConfig) -> tuple[RewardConfig, ...]:
    """The rewards of the recipe and those of its sources."""
    return (*config.rewards, *(reward for one in config.data.sources for reward in one.rewards))


def marks_of(rewards: Sequence[RewardConfig]) -> float:
    """Return the sum of the positive weights, which a right answer earns."""
    return sum(max(0.0, reward.weight) for reward in rewards)


def _idle_sources(config: RunConfig) -> Iterator[str]:
    """What rewards of sources do not go with."""
    sources = config.data.sources
    own = [one for one in sources if one.rewards]
    if not own:
        return
    for one in own:
        yield from idle_rewards(one.rewards, samples_per_prompt=config.rollout.samples_per_prompt)
        if any(reward.kind == "task" for reward in one.rewards):
            yield (
                f"source {one.name} has a reward of kind task, which scores generated problems alone; choose "
                "another"
            )
    if config.environment is not None:
        yield (
            f"source {own[0].name} has rewards of its own, which do not go with an environment; move them "
            "to rewards"
        )
    if config.advantage.kind == "group_decoupled":
        yield (
            f"source {own[0].name} has rewards of its own, and advantage kind group_decoupled compares the "
            "same rewards over the batch; move them to rewards"
        )
    if len(own) == len(sources) and config.rewards and config.data.eval is None:
        yield "rewards has no effect where every source has its own; remove it"
    marks = {name or "data.eval": marks_of(each) for name, each in rewards_of(config).items()}
    if len(set(marks.values())) > 1:
        shown = ", ".join(f"{name} {value:g}" for name, value in marks.items())
        yield (
            f"the rewards of a right answer differ by source ({shown}), so that one would count more; give "
            "the rewards of each source weights with the same sum"
        )


def _foreign_prompts(environment: EnvironmentConfig, data: DataConfig) -> Iterator[str]:
    """Refuse prompts that an environment which reads the row itself would not see."""
    columns = {"trl": "prompt", "skyrl_gym": "prompt", "nemo_gym": "responses_create_params.input"}
    if environment.kind not in columns:
        return
    expected = columns[environment.kind]
    if data.prompt_column != expected:
        yield (
            f"environment kind {environment.kind} reads the prompt from the column {expected} of the row; "
            f"set data.prompt_column to {expected}"
        )
    if data.template not in (AUTO, "chat", "{prompt}"):
        yield (
            f"environment kind {environment.kind} writes prompts by the chat template, or as they are; set "
            "data.template to chat or auto"
        )


def _idle_inputs(config: RunConfig) -> Iterator[str]:
    given = {name: given_in(getattr(config, name)) for name in ("model", "tokenizer", "data")}
    is_task = config.data.train.startswith(TASK_PREFIX)
    is_generated = is_task or config.data.train == ENVIRONMENT_ROWS
    if config.data.train == ENVIRONMENT_ROWS and config.environment is None:
        yield "data.train environment needs an environment that generates its problems; add one"
    has_folder = config.model.path is not None
    untrained = config.tokenizer.path is not None or has_folder
    idle = {
        "because model.path names a folder that fixes it": (
            has_folder,
            tuple(f"model.{name}" for name in FRESH_MODEL),
        ),
        "because the tokenizer comes from a folder": (
            untrained,
            tuple(f"tokenizer.{name}" for name in TRAINED_TOKENIZER),
        ),
        f"because data.train is not a {TASK_PREFIX} task": (not is_task, ("data.task",)),
        "because data.train is not generated": (not is_generated, ("data.task_size",)),
        "without data.answer_column": (config.data.answer_column is None, ("data.answer_pattern",)),
        "without an sft section": (
            config.sft is None and config.steps > 0,
            ("data.demonstration_column",),
        ),
        "because a task generates its held-out problems itself": (is_task, ("data.eval",)),
    }
    for why, (holds, keys) in idle.items():
        for key in keys:
            section, _, name = key.partition(".")
            if holds and name in given[section]:
                yield f"{key} has no effect {why}; remove it"
    if config.data.streaming and is_function(config.data.train):
        yield "data.streaming reads files, and data.train is a function, whose rows are in memory; remove it"
    if config.data.streaming and is_generated:
        yield "data.streaming has no effect because data.train is generated; remove it"
    if any(reward.kind == "task" for reward in config.rewards) and not is_task:
        yield f"a reward of kind task needs data.train to be a {TASK_PREFIX} task; choose another reward"


def _unknown_measure(config: RunConfig) -> Iterator[str]:
    measure, known = config.evaluation.measure, ["reward/mean", "accuracy"]
    if measure.startswith(SET_PREFIX):
        yield from unknown_set_measure(config.evaluation)
        return
    if len(config.rewards) > 1:
        known += [f"reward/{name}/mean" for name in reward_names(config.rewards)]
    if measure not in known:
        yield f"evaluation.measure {measure} is not a measure of this recipe, which has {', '.join(known)}"


def _unshared(config: RunConfig) -> Iterator[str]:
    """Refuse what an engine over several ranks does not go with."""
    name, size = "engine.tensor_parallel_size", config.engine.tensor_parallel_size
    if size == 1:
        return
    needs = {
        "deterministic": config.deterministic,
        "engine.cuda_graphs": bool(config.engine.cuda_graphs),
        "policy.router_replay": config.policy.router_replay,
        "policy.router_aux_coefficient": config.policy.router_aux_coefficient > 0,
        "policy.router_bias_step": config.policy.router_bias_step > 0,
    }
    for other, holds in needs.items():
        if holds:
            yield f"{other} does not go with {name} above 1; set that to 1, or remove {other}"
    if num_processes(config):
        yield (
            f"{name} {size} shares an engine between ranks of the trainer, which does not go with engines in "
            "processes of their own; set it to 1, or remove rollout.max_staleness and engine.num_engines"
        )
    elif config.mesh.num_ranks % size:
        yield (
            f"{name} is {size}, which does not divide the {config.mesh.num_ranks} ranks of the mesh; choose "
            "one that does, or raise mesh.dp_shard"
        )


def _not_disaggregated(config: RunConfig) -> Iterator[str]:
    """Refuse what an engine in worker processes does not go with."""
    engine = config.engine
    workers = engine.disaggregation
    if workers is None:
        return
    if workers.cost is not None and workers.apart_above != type(workers).model_fields["apart_above"].default:
        yield "engine.disaggregation.apart_above has no effect with engine.disaggregation.cost; remove one"
    needs = {
        f"engine.kind {engine.kind}": engine.is_served,
        "engine.num_engines 0": engine.num_engines == 0,
        "engine.tensor_parallel_size": engine.tensor_parallel_size > 1,
        "engine.cuda_graphs": bool(engine.cuda_graphs),
        "engine.colocated": engine.colocated,
        "mesh.launcher ray": config.mesh.launcher == "ray",
        "device cuda": config.device == "cuda",
    }
    for name, holds in needs.items():
        if holds:
            yield (
                f"{name} does not go with engine.disaggregation, which starts engines of its own on this "
                "machine's CPU; remove one of them"
            )


def _idle_ahead(config: RunConfig) -> Iterator[str]:
    ahead, processes = config.rollout.max_staleness > 0, config.engine.num_engines
    if config.engine.delta_updates and not (config.mesh.launcher == "ray" and (ahead or processes)):
        yield (
            "engine.delta_updates is for engines that Ray starts; remove it, or set mesh.launcher ray and "
            "engine.num_engines"
        )
    if ahead and processes == 0:
        yield (
            "rollout.max_staleness above 0 needs engines in processes of their own; remove "
            "engine.num_engines 0"
        )
    if not (ahead or processes):
        return
    why = "rollout.max_staleness above 0" if ahead else f"engine.num_engines {processes}"
    if config.engine.colocated:
        yield (
            f"engine.colocated does not go with {why}, where the engine generates while the trainer trains; "
            "remove one of them"
        )


def _not_served(config: RunConfig) -> Iterator[str]:
    """Refuse what needs the engine itself where it is a server."""
    engine = config.engine
    if not engine.is_served:
        return
    needs = {
        "deterministic": config.deterministic,
        "policy.router_replay": config.policy.router_replay,
        "engine.colocated": engine.colocated,
        "engine.delta_updates": engine.delta_updates,
        "precision float64": engine.kind in FOREIGN and config.precision == "float64",
    }
    for name, holds in needs.items():
        if holds:
            yield f"{name} does not go with engine.kind {engine.kind}; remove one of them"
    if engine.kind == "vllm" and config.rollout.top_p < 1 and not config.rollout.top_k:
        yield (
            "rollout.top_p needs rollout.top_k with engine.kind vllm, which returns the candidates of each "
            "token; set rollout.top_k"
        )
    if engine.kind == "sglang" and config.rollout.top_p < 1 and config.rollout.top_k:
        yield (
            "rollout.top_k and rollout.top_p together mean something else with engine.kind sglang, where "
            "top_p is a fraction of the whole vocabulary's probability; remove one of them"
        )


def _idle_sampling(config: RunConfig) -> Iterator[str]:
    rollout, kind = config.rollout, config.advantage.kind
    if rollout.samples_per_prompt == 1 and kind in COMPARING:
        yield (
            f"rollout.samples_per_prompt is 1, but advantage kind {kind} compares the samples of a prompt; "
            "raise it to 2 or more, or choose another kind"
        )
    if rollout.samples_per_prompt == 1 and rollout.dynamic_sampling_rounds:
        yield (
            "rollout.dynamic_sampling_rounds replaces groups whose rewards are all equal, which is every "
            "group of one sample; remove it, or raise rollout.samples_per_prompt"
        )
    batch, parts = rollout.prompts_per_step, config.policy.optimizer_steps_per_batch
    if batch % parts:
        yield f"policy.optimizer_steps_per_batch {parts} does not divide rollout.prompts_per_step {batch}"


def _idle_advantage(config: RunConfig) -> Iterator[str]:
    advantage = config.advantage
    if advantage.kind in VALUED and config.critic is None:
        yield f"advantage kind {advantage.kind} needs a critic; add `critic: {{}}`"
    if advantage.kind not in VALUED and config.critic is not None:
        yield (
            f"critic has no effect with advantage kind {advantage.kind}, which needs no value model; remove "
            "it"
        )
    if isinstance(advantage, GroupAdvantage):
        if not advantage.divide_by_std and "epsilon" in given_in(advantage):
            yield "advantage.epsilon has no effect with divide_by_std false; remove it"
        if advantage.lone_reward and (advantage.baseline == "others" or not advantage.divide_by_std):
            yield "advantage.lone_reward needs baseline mean and divide_by_std; remove it"
    if isinstance(advantage, GaeAdvantage) and advantage.length_adaptive and "lam" in given_in(advantage):
        yield "advantage.lam has no effect with advantage.length_adaptive; remove one of them"
    if advantage.kind == "group_decoupled" and len(config.rewards) == 1:
        yield "advantage kind group_decoupled needs two rewards or more; with one, use kind group"
    if advantage.kind in ("group_decoupled", "teacher"):
        in_reward = config.policy.kl is not None and config.policy.kl.place == "reward"
        idle = {
            "rollout.overlong_fraction": config.rollout.overlong_fraction > 0,
            "policy.kl.place reward": in_reward,
            "data.curriculum": advantage.kind == "teacher" and config.data.curriculum,
        }
        for key, given in idle.items():
            if given:
                yield f"{key} has no effect with advantage kind {advantage.kind}, which does not look at it"
    if advantage.kind == "v_trace" and config.policy.proximal != "recompute":
        yield (
            "advantage kind v_trace weighs the trainer's log-probabilities against the sampler's; set "
            "policy.proximal: recompute"
        )


def _idle_credit(config: RunConfig) -> Iterator[str]:
    advantage, loss = config.advantage, config.policy.loss
    if not isinstance(advantage, (*TURN_SECTIONS, GaeAdvantage)):
        return
    credit, given = advantage.credit, given_in(advantage)
    idle = {"turn_discount": credit == "episode", "state_weight": credit not in ("anchor", "progress")}
    yield from (
        f"advantage.{name} has no effect with credit {credit}; remove it"
        for name, holds in idle.items()
        if holds and name in given
    )
    if credit == "episode":
        return
    averages = isinstance(loss, GmpoLoss) or (isinstance(loss, GspoLoss) and loss.gradient == "sequence")
    if averages:
        yield (
            f"advantage.credit {credit} has no effect with policy.loss kind {loss.kind}, which gives every "
            "token of an answer the mean of their advantages; choose another loss"
        )
    if isinstance(advantage, GroupAdvantage):
        if advantage.lone_reward:
            yield f"advantage.lone_reward does not go with credit {credit}; remove it"
        if credit == "return_to_go" and advantage.baseline == "others" and advantage.divide_by_std:
            yield (
                "advantage.credit return_to_go with baseline others is not divided by a deviation; set "
                "advantage.divide_by_std false"
            )
    if isinstance(advantage, GaeAdvantage):
        if advantage.gamma != 1:
            yield "advantage.gamma discounts per token; with credit gae_turn set advantage.turn_discount"
        for name in ("length_adaptive", "critic_lam"):
            if getattr(advantage, name) is not None:
                yield f"advantage.{name} does not go with credit gae_turn; remove it"


def _idle_policy(config: RunConfig) -> Iterator[str]:
    policy = config.policy
    staleness = config.rollout.max_staleness
    num_steps = policy.optimizer_steps_per_batch * policy.epochs_per_batch
    if policy.shuffle_minibatches and policy.optimizer_steps_per_batch == 1:
        yield (
            "policy.shuffle_minibatches has no effect with policy.optimizer_steps_per_batch 1, which "
            "takes the "
            "whole batch; raise that, or remove it"
        )
    if num_steps == 1 and (staleness == 0 or policy.proximal == "recompute"):
        # The first optimizer step after what the ratio is taken to has a ratio of 1, which no bound touches.
        for name in sorted(given_in(policy.loss) - {"kind", *ACTING.get(policy.loss.kind, ())}):
            yield (
                f"policy.loss.{name} has no effect with one optimizer step per batch, where nothing is "
                "clipped; remove it, or raise policy.optimizer_steps_per_batch"
            )
    if num_steps == 1 and config.critic is not None and "clip" in given_in(config.critic):
        yield (
            "critic.clip has no effect with one optimizer step per batch, where no value has moved; "
            "remove it, or raise policy.optimizer_steps_per_batch"
        )
    if policy.proximal == "interpolate" and (staleness + 1) * num_steps < 3:
        yield (
            "policy.proximal interpolate has no effect with fewer than three optimizer steps per batch, "
            "whose tokens are at most one version old; remove it, or raise policy.optimizer_steps_per_batch "
            "or rollout.max_staleness"
        )
    yield from _idle_correction(config)
    yield from _idle_kl(config)


def _idle_kl(config: RunConfig) -> Iterator[str]:
    kl = config.policy.kl
    if kl is None:
        return
    if kl.place == "reward" and kl.estimator in ("full", "k1+", "k3+"):
        yield (
            f"policy.kl.estimator {kl.estimator} is made for its gradient, and a reward has none; set k1, "
            "k2, k3 or abs"
        )
    sequences = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if kl.target is not None and kl.horizon < sequences:
        yield f"policy.kl.horizon {kl.horizon} is less than the {sequences} sequences of a batch; raise it"
    if kl.target is None and "horizon" in given_in(kl):
        yield "policy.kl.horizon has no effect without policy.kl.target; remove it"
    if not kl.offload:
        return
    if kl.estimator == "full":
        yield "policy.kl.offload does not go with estimator full, which reads it throughout; remove it"
    if config.mesh.offload:
        yield "policy.kl.offload has no effect with mesh.offload, which keeps all weights there; remove it"
    adapter = config.model.adapter
    if adapter is not None and adapter.path is None and config.sft is None and kl.path is None:
        yield "policy.kl.offload has no effect with a fresh adapter, whose base is the reference; remove it"


def _idle_correction(config: RunConfig) -> Iterator[str]:
    policy, correction = config.policy, config.policy.correction
    importance = correction if isinstance(correction, ImportanceCorrection) else None
    weighs = importance is not None and importance.action != "none"
    if config.limits.correction_clip_fraction is not None and not weighs:
        yield (
            "limits.correction_clip_fraction has no effect without policy.correction of kind importance, "
            "which cuts weights; remove it"
        )
    if weighs and policy.proximal == "sampler" and policy.loss.kind not in WITHOUT_RATIO:
        yield (
            f"with policy.proximal sampler the ratio of policy.loss kind {policy.loss.kind} is that of "
            "policy.correction, which would count twice; set policy.proximal: recompute, policy.loss.kind: "
            "reinforce, or policy.correction.action: none to reject alone"
        )
    if importance is not None and importance.normalise and policy.proximal != "recompute":
        yield (
            "policy.correction.normalise needs the weights of the whole optimizer step beforehand; set "
            "policy.proximal: recompute"
        )
