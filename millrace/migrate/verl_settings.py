"""The values of verl's settings as values of millrace's: batch sizes, bounds, penalties, steps, ranks.

Defaults are verl's, since a script names only what differs from them. What contradicts itself, or cannot be
taken over, becomes a sentence in `problems`.
"""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.config.evaluation_section import HELD_OUT
from millrace.migrate.verl_source import VerlSource

ARR = "actor_rollout_ref."
CORRECTION = "algorithm.rollout_correction."
# policy.loss.kind by loss_type, with bypass_mode.
BYPASS_LOSSES = {"ppo_clip": "ppo_clip", "reinforce": "reinforce"}
# advantage.kind by verl's estimator.
ESTIMATORS = {
    "gae": "gae",
    "grpo": "group",
    "grpo_vectorized": "group",
    "rloo": "leave_one_out",
    "rloo_vectorized": "leave_one_out",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "greedy_baseline",
    "opo": "length_weighted",
    "gpg": "gpg",
    "grpo_passk": "pass_at_k",
    "gdpo": "group_decoupled",
    "optimal_token_baseline": "token_baseline",
}
# policy.loss.kind by verl's loss_mode.
LOSSES = {
    "vanilla": "ppo_clip",
    "gspo": "gspo",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "sapo": "sapo",
    "gpg": "reinforce",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
}
CLIPPED = ("ppo_clip", "gspo", "gmpo", "cispo", "clip_cov", "dppo")
KL_ESTIMATORS = {
    **dict.fromkeys(("kl", "k1"), "k1"),
    **dict.fromkeys(("mse", "k2"), "k2"),
    **dict.fromkeys(("low_var_kl", "k3"), "k3"),
    **{"abs": "abs", "full": "full", "kl+": "k1+", "k1+": "k1+", "low_var_kl+": "k3+", "k3+": "k3+"},
}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "fixed_length",
}
REJECTIONS = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}
# Kind of reward by the data_source of verl's rows, or by what the file's path contains.
REWARDS = {
    **{"openai/gsm8k": "gsm8k", "gsm8k": "gsm8k", "lighteval/MATH": "number"},
    **{"DigitalLearningGmbH/MATH-lighteval": "number", "HuggingFaceH4/MATH-500": "number", "math": "number"},
    **{"math_dapo": "number", "math_dapo_reasoning": "number", "dapo": "number", "aime": "number"},
}
MANY_ROUNDS = 10
FULL_LENGTH = 512


@dataclass(frozen=True, slots=True)
class Known:
    """What is known beside the script: rows to train on, the sources they name, and a reward to take.

    `file_sources` has the sources that the rows of each file name, where there are several files.
    """

    num_rows: int | None = None
    sources: Sequence[str] = ()
    reward: str | None = None
    file_sources: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass
class Conversion:
    """Dotted settings of millrace, problems, and what differs from the table for a key's value.

    Attributes:
        unneeded: why a key needs no setting here.
        absent: what to do instead of a key.
        instead: another setting than the table's for a key, and the rule.
        more_eval: validation files behind the first, by the name of a set.
    """

    source: VerlSource
    known: Known
    settings: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unneeded: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    instead: dict[str, tuple[str, str]] = field(default_factory=dict)
    more_eval: dict[str, str] = field(default_factory=dict)

    @property
    def train_data(self) -> str:
        """The files to train on, for a message."""
        sources = self.settings.get("data.sources", [])
        return ", ".join(one["data"] for one in sources) or str(self.settings["data.train"])

    def given(self, key: str) -> bool:
        """Whether the script sets the key, to a known value other than null."""
        value = self.source.values.get(key)
        return value is not None and value.value is not None and not value.problem

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key; verl's default where it is not given, null or unknown."""
        return self.source.values[key].value if self.given(key) else default

    def flag(self, key: str, default: bool = False) -> bool:
        """As `value`, of a switch."""
        value = self.value(key, default)
        if isinstance(value, bool):
            return value
        if value in (0, 1, "true", "false", "True", "False"):
            return value in (1, "true", "True")
        self.wrong(key, "True or False")
        return default

    def number(self, key: str, default: float) -> float:
        """As `value`, of a number."""
        value = self.value(key, default)
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value) if not isinstance(value, int) else value
        except (TypeError, ValueError):
            self.wrong(key, "a number")
            return default

    def whole(self, key: str, default: int) -> int:
        """As `value`, of a whole number."""
        value = self.number(key, default)
        if value != int(value):
            self.wrong(key, "a whole number")
        return int(value)

    def choice(self, key: str, choices: Mapping[str, str], default: str) -> str:
        """The counterpart of a word."""
        word = str(self.value(key, default))
        if word not in choices:
            self.problems.append(
                f"{self.at(key)} {key} is {word}, which has no counterpart; set one of {', '.join(choices)}"
            )
            word = default
        return choices[word]

    def at(self, key: str) -> str:
        """Where a key is set, for a message."""
        return self.source.place(self.source.values.get(key))

    def wrong(self, key: str, needed: str) -> None:
        """Note a value of the wrong type."""
        self.problems.append(f"{self.at(key)} {key} is {self.value(key)!r}, not {needed}; correct it")


def num_gpus(verl: Conversion) -> int:
    """All GPUs of the training."""
    return max(1, verl.whole("trainer.n_gpus_per_node", 8) * verl.whole("trainer.nnodes", 1))


def data_files(verl: Conversion) -> None:
    """Training and validation files: several to train on are sources, more to validate on are sets."""
    train, held_out = (_files(verl, key) for key in ("data.train_files", "data.val_files"))
    if len(train) > 1:
        names = _file_names(train)
        verl.settings["data.sources"] = [
            {"name": name, "data": file} for name, file in zip(names, train, strict=True)
        ]
        rule = "a source for each file, whose prompts all come once an epoch"
        verl.instead["data.train_files"] = "data.sources", rule
    elif train:
        verl.settings["data.train"] = train[0]
    else:
        verl.settings["data.train"] = os.path.expanduser("~/data/rlhf/gsm8k/train.parquet")
        if not verl.source.values.get("data.train_files"):
            verl.problems.append(
                f"{verl.source.name}: data.train_files is not set; set it to the training data"
            )
    if held_out:
        verl.settings["data.eval"] = held_out[0]
        verl.more_eval = dict(list(zip(_file_names(held_out), held_out, strict=True))[1:])


def _files(verl: Conversion, key: str) -> list[str]:
    """The files of a key: one, or a list; one that is there twice counts once, with a problem."""
    files = verl.value(key)
    if isinstance(files, str) and files.startswith("["):
        files = [each.strip(" '\"") for each in files.strip("[]").split(",")]
    found = [
        os.path.expanduser(str(each)) for each in (files if isinstance(files, list) else [files]) if each
    ]
    unique = list(dict.fromkeys(found))
    for file in unique:
        if found.count(file) > 1:
            verl.problems.append(f"{verl.at(key)} {key} names {file} twice; leave one of them out")
    return unique


def _file_names(files: Sequence[str]) -> list[str]:
    """Names that differ: the files' own, if they do not differ with the folder's in front, else numbered."""
    paths = [Path(file) for file in files]
    own = [path.name.partition(".")[0] for path in paths]
    longer = [f"{path.parent.name}-{name}" for path, name in zip(paths, own, strict=True)]
    chosen = next((each for each in (own, longer) if len(set(each)) == len(files)), None)
    if chosen is None:
        chosen = [f"{name}-{number}" for number, name in enumerate(longer, start=1)]
    names = [re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") for name in chosen]
    plain = all(names) and len(set(names)) == len(names) and HELD_OUT not in names
    return names if plain else [f"file-{number}" for number in range(1, len(files) + 1)]


def columns(verl: Conversion) -> None:
    """Columns of rows as verl writes them, and prompts that are too long."""
    verl.settings["data.prompt_column"] = verl.value("data.prompt_key", "prompt")
    verl.settings["data.answer_column"] = "reward_model.ground_truth"
    verl.settings["data.max_prompt_tokens"] = verl.whole("data.max_prompt_length", 512)
    filters = verl.flag("data.filter_overlong_prompts")
    truncation = str(verl.value("data.truncation", "error"))
    verl.settings["data.too_long"] = "filter" if filters or truncation != "error" else "refuse"
    if truncation != "error" and filters:
        verl.unneeded["data.truncation"] = "prompts that are too long are filtered, so that none is cut"
    elif truncation != "error":
        verl.absent["data.truncation"] = (
            "a prompt is never cut; longer ones are left out (data.too_long filter)"
        )
    max_samples(verl)
    verl.settings["data.shuffle"] = verl.flag("data.shuffle", True)
    if verl.given("data.seed"):
        verl.settings["seed"] = verl.whole("data.seed", 0)


def max_samples(verl: Conversion) -> None:
    """How many rows are trained on and held out; verl's -1 is all of them."""
    for name, setting in (("train", "data.train_size"), ("val", "data.eval_size")):
        if verl.number(f"data.{name}_max_samples", -1) > 0:
            verl.settings[setting] = verl.whole(f"data.{name}_max_samples", 0)


def chat_template(verl: Conversion) -> None:
    """Variables of the chat template."""
    above = "data.apply_chat_template_kwargs."
    for key in [key for key in verl.source.values if key.startswith(above)]:
        value = verl.value(key)
        if isinstance(value, bool | int | float | str):
            verl.settings[f"tokenizer.chat_template.{key.removeprefix(above)}"] = value
        else:
            verl.absent[key] = "a variable of the chat template is true, false, a number or text"


def model(verl: Conversion) -> None:
    """The folder of the model, and its adapter."""
    path = f"{ARR}model.path"
    verl.settings["model.path"] = os.path.expanduser(str(verl.value(path, "~/models/deepseek-llm-7b-chat")))
    if verl.given(f"{ARR}model.tokenizer_path"):
        verl.settings["tokenizer.path"] = verl.value(f"{ARR}model.tokenizer_path")
    adapter(verl, f"{ARR}model.")


def adapter(verl: Conversion, above: str) -> None:
    """LoRA, where its rank is above 0."""
    folder = verl.value(f"{above}lora_adapter_path")
    rank = verl.whole(f"{above}lora_rank", 0)
    if folder:
        verl.settings["model.adapter.path"] = folder
        for name in ("lora_rank", "lora_alpha", "target_modules"):
            verl.unneeded[f"{above}{name}"] = "the adapter's folder fixes it"
    elif rank > 0:
        verl.settings["model.adapter.rank"] = rank
        verl.settings["model.adapter.alpha"] = verl.number(f"{above}lora_alpha", 16)
        targets = verl.value(f"{above}target_modules", "all-linear")
        verl.settings["model.adapter.targets"] = [targets] if isinstance(targets, str) else targets


def sampling(verl: Conversion) -> None:
    """Batch, samples, lengths and the distribution that is sampled."""
    settings = verl.settings
    is_async = verl.given("async_training.require_batches") or verl.given("rollout.total_rollout_steps")
    mini = verl.whole(f"{ARR}actor.ppo_mini_batch_size", 256)
    if is_async:
        parts = verl.whole("async_training.require_batches", 1) * verl.whole(
            "async_training.trigger_parameter_sync_step", 1
        )
        settings["rollout.prompts_per_step"], settings["policy.optimizer_steps_per_batch"] = (
            mini * parts,
            parts,
        )
        settings["rollout.max_staleness"] = math.ceil(verl.number("async_training.staleness_threshold", 0))
        verl.unneeded["data.train_batch_size"] = "an asynchronous run counts ppo_mini_batch_size"
        verl.unneeded["data.gen_batch_size"] = "an asynchronous run samples prompt by prompt"
        if settings["rollout.max_staleness"] and not verl.flag("async_training.partial_rollout", True):
            settings["rollout.partial_rollout"] = False
    else:
        batch = verl.whole("data.train_batch_size", 1024)
        settings["rollout.prompts_per_step"] = batch
        settings["policy.optimizer_steps_per_batch"] = max(1, batch // max(1, mini))
        if mini > batch or batch % max(1, mini):
            verl.problems.append(
                f"{verl.at(f'{ARR}actor.ppo_mini_batch_size')} {ARR}actor.ppo_mini_batch_size {mini} "
                f"{'is above' if mini > batch else 'does not divide'} data.train_batch_size {batch}; set a "
                "divisor of "
                "it (both count prompts)"
            )
    settings["policy.epochs_per_batch"] = verl.whole(f"{ARR}actor.ppo_epochs", 1)
    if settings["policy.optimizer_steps_per_batch"] > 1:
        settings["policy.shuffle_minibatches"] = verl.flag(f"{ARR}actor.shuffle")
    else:
        verl.unneeded[f"{ARR}actor.shuffle"] = "an optimizer step takes the whole batch"
    settings["rollout.samples_per_prompt"] = verl.whole(f"{ARR}rollout.n", 1)
    settings["rollout.max_tokens"] = verl.whole("data.max_response_length", FULL_LENGTH)
    settings["rollout.temperature"] = verl.number(f"{ARR}rollout.temperature", 1.0)
    settings["rollout.top_p"] = verl.number(f"{ARR}rollout.top_p", 1.0)
    settings["rollout.top_k"] = max(0, verl.whole(f"{ARR}rollout.top_k", -1))
    _refill(verl)
    _overlong(verl)


def _refill(verl: Conversion) -> None:
    if verl.flag("algorithm.filter_groups.enable"):
        rounds = verl.whole("algorithm.filter_groups.max_num_gen_batches", 0)
        verl.settings["rollout.dynamic_sampling_rounds"] = rounds or MANY_ROUNDS
        metric = str(verl.value("algorithm.filter_groups.metric", "reward"))
        own = verl.known.reward is not None and ":" in verl.known.reward
        equal = metric in ("reward", "seq_reward", "seq_final_reward", "score") or not own
        verl.settings["rollout.group_filter"] = "reward" if equal else metric
    else:
        for name in ("algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"):
            verl.unneeded[name] = "filter_groups.enable is False"
        if verl.given("data.gen_batch_size") and "data.gen_batch_size" not in verl.unneeded:
            verl.unneeded["data.gen_batch_size"] = "filter_groups.enable is False"
    if (rate := verl.number(f"{ARR}rollout.over_sample_rate", 0)) > 0:
        spare = math.ceil(rate * verl.settings["rollout.prompts_per_step"])
        verl.settings |= {"rollout.batch_order": "completion", "rollout.oversample_groups": spare}


def _overlong(verl: Conversion) -> None:
    above = "reward.reward_kwargs.overlong_buffer_cfg."
    longest = verl.settings["rollout.max_tokens"]
    length = verl.whole(f"{above}len", 0)
    if not verl.flag(f"{above}enable"):
        for name in ("len", "penalty_factor"):
            verl.unneeded[above + name] = "overlong_buffer_cfg.enable is False"
    elif not 0 < length <= longest:
        verl.problems.append(
            f"{verl.at(f'{above}len')} {above}len is {length}, and data.max_response_length {longest}; set "
            "it to at "
            "most that"
        )
    else:
        verl.settings["rollout.overlong_fraction"] = round(length / longest, 9)
        verl.settings["rollout.overlong_penalty"] = verl.number(f"{above}penalty_factor", 1.0)


def advantage(verl: Conversion) -> None:
    """The estimator, and the critic of gae."""
    kind = verl.choice("algorithm.adv_estimator", ESTIMATORS, "gae")
    settings = verl.settings
    settings["advantage.kind"] = kind
    divides = verl.flag("algorithm.norm_adv_by_std_in_grpo", True)
    if kind == "group":
        settings["advantage.divide_by_std"] = divides
        settings |= {"advantage.epsilon": 1e-6, "advantage.lone_reward": True} if divides else {}
    elif kind == "pass_at_k":
        settings["advantage.divide_by_std"] = divides
    if kind in ("gae", "reinforce_plus_plus"):
        settings["advantage.gamma"] = verl.number("algorithm.gamma", 1.0)
    if kind == "gae":
        settings["advantage.lam"] = verl.number("algorithm.lam", 1.0)
        settings["critic.learning_rate"] = verl.number("critic.optim.lr", 1e-5)
        settings["critic.warmup_steps"] = verl.whole("trainer.critic_warmup", 0)
        settings["critic.coefficient"] = 0.5
        if settings["policy.optimizer_steps_per_batch"] * settings["policy.epochs_per_batch"] > 1:
            settings["critic.clip"] = verl.number("critic.cliprange_value", 0.5)
        if verl.number("critic.optim.lr_warmup_steps_ratio", 0):
            verl.absent["critic.optim.lr_warmup_steps_ratio"] = "the critic's rate is constant"
        start = verl.value("critic.model.path", settings["model.path"])
        if start != verl.value(f"{ARR}model.path"):
            settings["critic.path"] = start


def loss(verl: Conversion) -> None:
    """The loss and its bounds, which have no effect with one optimizer step per batch."""
    actor, settings = f"{ARR}actor.", verl.settings
    mode = str(verl.value(f"{actor}policy_loss.loss_mode", "vanilla"))
    if verl.flag(f"{CORRECTION}bypass_mode"):
        kind = verl.choice(f"{CORRECTION}loss_type", BYPASS_LOSSES, "ppo_clip")
        verl.unneeded[f"{actor}policy_loss.loss_mode"] = "with bypass_mode the loss is that of loss_type"
    else:
        kind = verl.choice(f"{actor}policy_loss.loss_mode", LOSSES, "vanilla")
        verl.unneeded[f"{CORRECTION}loss_type"] = "it is of bypass_mode alone"
    settings["policy.loss.kind"] = kind
    moves = settings["policy.optimizer_steps_per_batch"] * settings["policy.epochs_per_batch"] > 1
    bounds = {
        "clip_low": verl.number(f"{actor}clip_ratio_low", verl.number(f"{actor}clip_ratio", 0.2)),
        "clip_high": verl.number(f"{actor}clip_ratio_high", verl.number(f"{actor}clip_ratio", 0.2)),
        "dual_clip": verl.number(f"{actor}clip_ratio_c", 3.0),
    }
    if kind == "cispo":
        bounds["clip_low"] = min(1.0, bounds["clip_low"])  # a ratio is above 0
    idle = "nothing is clipped with one optimizer step per batch" if not moves else ""
    for name, key in zip(bounds, ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"), strict=True):
        if idle or kind not in (("ppo_clip",) if name == "dual_clip" else CLIPPED):
            verl.unneeded[actor + key] = idle or f"policy.loss kind {kind} has no such bound"
        else:
            settings[f"policy.loss.{name}"] = bounds[name]
    if idle:
        verl.unneeded[f"{actor}clip_ratio"] = idle
    if kind == "dppo":
        settings["policy.loss.divergence"] = mode.removeprefix("dppo_")
    own = {
        "sapo": {"positive": ("tau_pos", 1.0), "negative": ("tau_neg", 1.05)},
        "clip_cov": {
            "fraction": ("policy_loss.clip_cov_ratio", 2e-4),
            "covariance_low": ("policy_loss.clip_cov_lb", 1.0),
            "covariance_high": ("policy_loss.clip_cov_ub", 5.0),
        },
        "kl_cov": {
            "fraction": ("policy_loss.kl_cov_ratio", 2e-4),
            "coefficient": ("policy_loss.ppo_kl_coef", 0.1),
        },
    }
    for name, (key, default) in own.get(kind, {}).items():
        if moves or kind == "clip_cov":
            settings[f"policy.loss.{name}"] = verl.number(actor + key, default)
    settings["policy.loss_aggregation"] = verl.choice(f"{actor}loss_agg_mode", AGGREGATIONS, "token-mean")
    settings["policy.entropy_coefficient"] = verl.number(f"{actor}entropy_coeff", 0)
    correction(verl)


def correction(verl: Conversion) -> None:
    """What the ratio is taken to, and the weights for the distance to the sampler."""
    above, settings = CORRECTION, verl.settings
    bypasses = verl.flag(f"{above}bypass_mode")
    settings["policy.proximal"] = "sampler" if bypasses else "recompute"
    level, rejects = verl.value(f"{above}rollout_is"), verl.value(f"{above}rollout_rs")
    weighs = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
    if bypasses and settings["policy.loss.kind"] == "ppo_clip":
        for name in weighs:
            verl.unneeded[above + name] = "the ratio of ppo_clip is that weight, in verl too"
        level = None
    if level in ("token", "sequence"):
        settings["policy.correction.level"] = level
        settings["policy.correction.high"] = verl.number(f"{above}rollout_is_threshold", 2.0)
        normalises = verl.flag(f"{above}rollout_is_batch_normalize")
        if bypasses and normalises:
            verl.absent[above + weighs[2]] = "weights of a policy that moves are not divided by their mean"
        else:
            settings["policy.correction.normalise"] = normalises
    elif level:
        verl.problems.append(
            f"{verl.at(f'{above}rollout_is')} {above}rollout_is is {level}; set token or sequence"
        )
    if not rejects:
        return
    found = re.fullmatch(r"(token|seq_sum|seq_mean|seq_max)_(k[123])", str(rejects))
    threshold = re.fullmatch(r"(?:([\d.]+)_)?([\d.]+)", str(verl.value(f"{above}rollout_rs_threshold", "")))
    if found is None or threshold is None:
        for name in ("rollout_rs", "rollout_rs_threshold"):
            verl.absent[above + name] = "one rejection is taken: LEVEL_ESTIMATOR with a threshold"
        return
    if level is None:
        settings["policy.correction.action"] = "none"
    settings["policy.correction.reject.level"] = REJECTIONS[found[1]]
    settings["policy.correction.reject.estimator"] = found[2]
    settings["policy.correction.reject.high"] = float(threshold[2])
    if threshold[1] is not None and found[2] == "k1":
        settings["policy.correction.reject.low"] = float(threshold[1])


def penalty(verl: Conversion) -> None:
    """The KL penalty, in the loss or in the reward."""
    actor, control = f"{ARR}actor.", "algorithm.kl_ctrl."
    in_loss, in_reward = verl.flag(f"{actor}use_kl_loss"), verl.flag("algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        verl.problems.append(
            f"{verl.at('algorithm.use_kl_in_reward')} algorithm.use_kl_in_reward and {actor}use_kl_loss "
            "are both "
            "True, and policy.kl has one place; set one of them to False"
        )
    keys = {
        True: (f"{actor}kl_loss_coef", f"{actor}kl_loss_type"),
        False: (f"{control}kl_coef", "algorithm.kl_penalty"),
    }
    for place, names in keys.items():
        if not (in_loss if place else in_reward):
            why = f"{actor}use_kl_loss is False" if place else "algorithm.use_kl_in_reward is False"
            verl.unneeded |= dict.fromkeys(names, why)
    if not in_reward:
        for name in ("type", "target_kl", "horizon"):
            verl.unneeded[control + name] = "algorithm.use_kl_in_reward is False"
    if not (in_loss or in_reward):
        return
    coefficient, estimator = keys[in_loss]
    amount = verl.number(coefficient, 0.001)
    if amount == 0:
        verl.unneeded |= dict.fromkeys((coefficient, estimator), "a coefficient of 0 is no penalty")
        return
    verl.settings["policy.kl.coefficient"] = amount
    default = "low_var_kl" if in_loss else "kl"
    verl.settings["policy.kl.estimator"] = verl.choice(estimator, KL_ESTIMATORS, default)
    verl.settings["policy.kl.place"] = "loss" if in_loss else "reward"
    if (own := verl.value(f"{ARR}ref.model.path")) is not None:
        verl.settings["policy.kl.path"] = own
    parts = [f"{ARR}ref.{backend}.param_offload" for backend in ("fsdp_config", "megatron")]
    # With a fresh adapter the policy's own base is the reference.
    fresh = verl.whole(f"{ARR}model.lora_rank", 0) and not verl.given(f"{ARR}model.lora_adapter_path")
    if any(map(verl.flag, parts)) and verl.settings["policy.kl.estimator"] != "full" and not fresh:
        verl.settings["policy.kl.offload"] = True
    if in_reward and verl.value(f"{control}type", "fixed") == "adaptive":
        verl.settings["policy.kl.target"] = verl.number(f"{control}target_kl", 0.1)
        verl.settings["policy.kl.horizon"] = verl.whole(f"{control}horizon", 10_000)


def steps(verl: Conversion) -> None:
    """How many batches, from epochs and rows or as given."""
    batch = max(1, verl.settings["rollout.prompts_per_step"])
    if verl.given("trainer.total_training_steps"):
        verl.settings["steps"] = verl.whole("trainer.total_training_steps", 0)
        verl.unneeded["trainer.total_epochs"] = "total_training_steps is given"
    elif verl.given("rollout.total_rollout_steps"):
        verl.settings["steps"] = verl.whole("rollout.total_rollout_steps", 0) // batch
        verl.unneeded["trainer.total_epochs"] = "rollout.total_rollout_steps is given"
    else:
        verl.settings["steps"] = epochs_in_steps(verl, batch, default=30)


def epochs_in_steps(verl: Conversion, batch: int, *, default: int) -> int:
    """Batches of all epochs: verl leaves out the rest of each."""
    epochs = verl.whole("trainer.total_epochs", default)
    rows = verl.known.num_rows
    if rows is not None and verl.number("data.train_max_samples", -1) > 0:
        rows = min(rows, verl.whole("data.train_max_samples", rows))
    if rows is None:
        verl.problems.append(
            f"{verl.at('trainer.total_epochs')} {epochs} epochs of {verl.train_data}, which is not here, "
            "have an unknown number of batches; give --rows N, the rows of the training data"
        )
        return 1
    if rows < batch:
        verl.problems.append(
            f"{verl.at('data.train_batch_size')} data.train_batch_size {batch} is above the {rows} rows of "
            f"{verl.train_data}; lower it, or give more data"
        )
    return max(1, epochs * (rows // batch))


def optimizer(verl: Conversion) -> None:
    """The optimizer, and its schedule in optimizer steps."""
    above, settings = f"{ARR}actor.optim.", verl.settings
    parts = settings["policy.optimizer_steps_per_batch"] * settings["policy.epochs_per_batch"]
    settings["policy.optimizer.learning_rate"] = verl.number(f"{above}lr", 1e-6)
    grad_clip = verl.number(f"{ARR}actor.grad_clip", 1.0)
    settings["policy.optimizer.max_grad_norm"] = verl.number(f"{above}clip_grad", grad_clip)
    adamw(verl, above)
    schedule(verl, above, ("lr_scheduler_type", "warmup_style", "lr_decay_style"), settings["steps"])
    settings["policy.optimizer.warmup_steps"] *= parts


def adamw(verl: Conversion, above: str, betas: Sequence[float] = (0.9, 0.999)) -> None:
    """The kind of the optimizer, its betas and weight decay."""
    settings = verl.settings
    settings["policy.optimizer.weight_decay"] = verl.number(f"{above}weight_decay", 0.01)
    settings["policy.optimizer.betas"] = verl.value(f"{above}betas", list(betas))
    if "bitsandbytes" in str(verl.value(f"{above}optimizer_impl", "")):
        settings["policy.optimizer.kind"] = "adamw_8bit"
    elif str(verl.value(f"{above}optimizer", "AdamW")).lower() == "muon":
        settings["policy.optimizer.kind"] = "muon"
    elif not str(verl.value(f"{above}optimizer", "AdamW")).lower().startswith("adam"):
        verl.absent[f"{above}optimizer"] = "name a function that returns it in policy.optimizer.kind"


def schedule(
    verl: Conversion,
    above: str,
    names: Sequence[str],
    total_steps: int,
    *,
    default: str = "constant",
    warmup_ratio: float = 0.0,
) -> None:
    """The schedule of the learning rate, in `total_steps` steps; `names` are verl's keys of its shape."""
    settings = verl.settings
    schedules = {name: name for name in ("constant", "linear", "cosine")}
    if default != "constant":
        settings["policy.optimizer.schedule"] = default
    for name in names:
        if verl.given(above + name):
            settings["policy.optimizer.schedule"] = verl.choice(above + name, schedules, default)
    if settings.get("policy.optimizer.schedule", "constant") == "constant":
        verl.unneeded[f"{above}min_lr_ratio"] = "a constant rate does not end"
    else:
        settings["policy.optimizer.min_lr_ratio"] = verl.number(f"{above}min_lr_ratio", 0.0)
    warmup = verl.whole(f"{above}lr_warmup_steps", -1)
    if warmup < 0:
        warmup = int(verl.number(f"{above}lr_warmup_steps_ratio", warmup_ratio) * total_steps)
    else:
        verl.unneeded[f"{above}lr_warmup_steps_ratio"] = "lr_warmup_steps is given"
    settings["policy.optimizer.warmup_steps"] = max(0, warmup)


def micro_batch(verl: Conversion) -> None:
    """Tokens of one forward; at least one of the longest sequences."""
    actor, settings = f"{ARR}actor.", verl.settings
    longest = settings["data.max_prompt_tokens"] + settings["rollout.max_tokens"]
    per_gpu, all_gpus = f"{actor}ppo_micro_batch_size_per_gpu", f"{actor}ppo_micro_batch_size"
    if verl.flag(f"{actor}use_dynamic_bsz"):
        tokens = verl.whole(f"{actor}ppo_max_token_len_per_gpu", 16384)
        for name in (per_gpu, all_gpus):
            verl.unneeded[name] = "use_dynamic_bsz is True"
    else:
        verl.unneeded[f"{actor}ppo_max_token_len_per_gpu"] = "use_dynamic_bsz is False"
        answers = verl.whole(per_gpu, max(1, verl.whole(all_gpus, 1) // num_gpus(verl)))
        tokens = answers * longest
    settings["policy.tokens_per_micro_batch"] = max(tokens, longest)


def mesh(verl: Conversion) -> None:
    """Ranks and what they shard."""
    settings, actor = verl.settings, f"{ARR}actor."
    gpus = num_gpus(verl)
    strategy = str(verl.value(f"{actor}strategy", "megatron" if verl.source.is_megatron else "fsdp"))
    sizes = {"tp": 1, "pp": 1, "cp": verl.whole(f"{actor}ulysses_sequence_parallel_size", 1), "ep": 1}
    if strategy == "megatron":
        names = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
        sizes = {name: verl.whole(f"{actor}megatron.{word}_parallel_size", 1) for name, word in names.items()}
        chunks = verl.whole(f"{actor}megatron.virtual_pipeline_model_parallel_size", 1)
        if sizes["pp"] > 1 and chunks > 1:
            settings["mesh.pp_chunks"] = chunks
        if sizes["tp"] > 1:
            settings["mesh.sequence_parallel"] = verl.flag(f"{actor}megatron.sequence_parallel", True)
        if sizes["cp"] > 1:
            settings["mesh.cp_kind"] = "ring"
    divided = sizes["tp"] * sizes["pp"] * sizes["cp"]
    if gpus % divided:
        verl.problems.append(
            f"{verl.at('trainer.n_gpus_per_node')} {gpus} GPUs are not divisible by tp {sizes['tp']} x pp "
            f"{sizes['pp']} x cp {sizes['cp']}; correct trainer.n_gpus_per_node or the sizes"
        )
    settings |= {f"mesh.{name}": size for name, size in sizes.items() if size > 1}
    shard = max(1, gpus // divided)
    fsdp = verl.whole(f"{actor}fsdp_config.fsdp_size", -1)
    if 0 < fsdp < shard and strategy != "megatron":
        settings["mesh.dp_replicate"] = shard // fsdp
        shard = fsdp
    settings["mesh.dp_shard"] = shard
    if verl.whole("trainer.nnodes", 1) > 1:
        settings["mesh.launcher"] = "ray"
    _precision(verl, alone=gpus == 1)
    _offload(verl)


def _offload(verl: Conversion) -> None:
    """Whether trainer and engine use the memory in turns: policy, reference and critic together."""
    above = (f"{ARR}actor.", f"{ARR}ref.", "critic.model.", "critic.")
    names = [
        f"{part}{backend}.{what}_offload"
        for part in above
        for backend in ("fsdp_config", "megatron")
        for what in ("param", "optimizer", "grad")
    ]
    if verl.settings.get("rollout.max_staleness"):
        verl.absent |= {
            name: "the engine samples while the trainer trains, in memory of its own"
            for name in names
            if verl.flag(name)
        }
        verl.unneeded[f"{ARR}rollout.free_cache_engine"] = "engines have devices of their own"
    elif any(verl.flag(name) for name in [*names, f"{ARR}rollout.free_cache_engine"]):
        verl.settings["engine.colocated"] = True


def _precision(verl: Conversion, *, alone: bool) -> None:
    """Dtypes, and what several ranks can do about memory."""
    settings, actor = verl.settings, f"{ARR}actor."
    held = str(verl.value(f"{actor}fsdp_config.model_dtype", verl.value(f"{ARR}model.torch_dtype", "fp32")))
    settings["precision"] = "bfloat16" if held in ("bf16", "bfloat16") else "float32"
    checkpoints = verl.flag(f"{ARR}model.enable_gradient_checkpointing", True)
    granularity = f"{actor}megatron.override_transformer_config.recompute_granularity"
    word = verl.value(granularity, "full" if checkpoints else "none")
    settings["mesh.activation_checkpointing"] = word if word in ("full", "selective") else "none"
    if verl.flag(f"{ARR}model.enable_activation_offload"):
        settings["mesh.activation_offload"] = True
    if alone:
        for name in ("reshard_after_forward", "offload_policy", "dtype", "mixed_precision.param_dtype"):
            verl.unneeded[f"{actor}fsdp_config.{name}"] = "one rank shards nothing"
        return
    if settings["precision"] == "float32":
        settings["mesh.compute_dtype"] = "bfloat16"
    else:
        verl.unneeded[f"{actor}fsdp_config.mixed_precision.param_dtype"] = (
            "the weights are in bfloat16 already"
        )
    if not verl.flag(f"{actor}fsdp_config.reshard_after_forward", True):
        settings["mesh.reshard_after_forward"] = False
    if verl.flag(f"{actor}fsdp_config.offload_policy"):
        settings["mesh.offload"] = True


def engine(verl: Conversion) -> None:
    """What the engine does at once."""
    above = f"{ARR}rollout."
    verl.settings["engine.max_num_seqs"] = verl.whole(f"{above}max_num_seqs", 256)
    verl.settings["engine.max_num_batched_tokens"] = verl.whole(f"{above}max_num_batched_tokens", 8192)
    if verl.given(f"{above}enforce_eager"):
        verl.settings["engine.cuda_graphs"] = not verl.flag(f"{above}enforce_eager")
    replay = str(verl.value(f"{ARR}actor.router_replay.mode", "disabled"))
    if replay == "R3" or verl.flag(f"{above}enable_rollout_routing_replay"):
        verl.settings["policy.router_replay"] = True
    elif replay != "disabled":
        verl.absent[f"{ARR}actor.router_replay.mode"] = "experts are replayed from the sampler (R3)"
    balance = f"{ARR}actor.megatron.override_transformer_config.moe_aux_loss_coeff"
    if verl.number(balance, 0) > 0:
        verl.settings["policy.router_aux_coefficient"] = verl.number(balance, 0)


def validation(verl: Conversion) -> None:
    """Sampled answers to held-out prompts as a set beside the greedy ones; a set for each further file."""
    above, settings = f"{ARR}rollout.val_kwargs.", verl.settings
    names = ("n", "temperature", "top_p", "top_k")
    temperature = verl.number(f"{above}temperature", 0)
    if "data.eval" not in settings and temperature:
        verl.absent |= {above + name: "name data.val_files, which a set needs" for name in names}
        return
    sampling: dict[str, Any] = {}
    files = verl.more_eval
    if temperature == 0:
        why = "the held-out evaluation is greedy, as at temperature 0"
        verl.unneeded |= {above + name: why for name in names}
    else:
        files = {"validation": settings["data.eval"], **files}
        sampling = {
            "samples": verl.whole(f"{above}n", 1),
            "temperature": temperature,
            "top_p": verl.number(f"{above}top_p", 1.0),
        }
    size = settings.get("data.eval_size")
    sized = {} if size is None else {"size": size}
    if files:
        settings["evaluation.sets"] = [
            {"name": name, "data": file} | sampling | sized for name, file in files.items()
        ]


def run(verl: Conversion) -> None:
    """Names, folders, trackers, and how often to evaluate and save."""
    settings = verl.settings
    project = str(verl.value("trainer.project_name", "verl_examples"))
    name = re.sub(r"[^\w.-]+", "-", str(verl.value("trainer.experiment_name", "gsm8k"))).strip("-.") or "run"
    settings["name"] = name
    folder = verl.value("trainer.default_local_dir")
    if folder is None:
        settings["output"] = f"checkpoints/{project}"
    else:
        path = Path(os.path.expanduser(str(folder)))
        settings["output"] = str(
            path.parent if path.name == str(verl.value("trainer.experiment_name")) else path
        )
    loggers = verl.value("trainer.logger", ["console", "wandb"])
    if isinstance(loggers, str):
        loggers = [each.strip(" '\"[]") for each in loggers.split(",")]
    settings["loggers"] = [each for each in loggers if each in ("tensorboard", "wandb", "mlflow")]
    if {"wandb", "mlflow"} & set(settings["loggers"]):
        settings["project"] = project
    elif folder is not None:
        verl.unneeded["trainer.project_name"] = "default_local_dir is given, and no tracker has projects"
    others = set(map(str, loggers)) - {"console", "file", *settings["loggers"]}
    if others:
        verl.absent["trainer.logger"] = (
            f"no tracker {', '.join(sorted(others))}; there are tensorboard, wandb, mlflow"
        )
    device = str(verl.value("trainer.device", "auto"))
    if device in ("cuda", "cpu"):
        settings["device"] = device
    elif device != "auto":
        verl.absent["trainer.device"] = "devices are cuda and cpu"
    for key, setting in (
        ("trainer.test_freq", "evaluation.every"),
        ("trainer.save_freq", "checkpoint.every"),
    ):
        every = verl.whole(key, -1)
        total = settings.get("steps") or settings.get("sft.steps") or 1
        settings[setting] = every if every > 0 else max(1, total)
    if verl.given("trainer.max_actor_ckpt_to_keep"):
        settings["checkpoint.keep"] = verl.whole("trainer.max_actor_ckpt_to_keep", 1)


def rewards(verl: Conversion) -> None:
    """The reward that verl chooses by the data_source of a row, or the one that was given."""
    known, above = verl.known, "reward.custom_reward_function."
    custom = verl.value(f"{above}path")
    if known.reward is not None:
        is_function = ":" in known.reward
        verl.settings["rewards"] = [
            {"kind": "function", "function": known.reward} if is_function else {"kind": known.reward}
        ]
        return
    if custom is not None:
        name = str(verl.value(f"{above}name", "compute_score"))
        if (function := _function_in(str(custom), name)) is not None:
            verl.settings["rewards"] = [{"kind": "function", "function": function}]
            return
        verl.problems.append(
            f"{verl.at(f'{above}path')} {custom} is no path of a .py file below the folder you start in; put "
            f"the file there, and give --reward module:{name}"
        )
        return
    if verl.flag("reward_model.enable") and verl.given("reward_model.model.path"):
        verl.settings["rewards"] = [{"kind": "model", "path": str(verl.value("reward_model.model.path"))}]
        return
    if "data.sources" in verl.settings and _rewards_by_file(verl):
        return
    sources = list(known.sources)
    if not sources and verl.problems:
        return  # the file may not be the one
    if not sources:
        sources = _named_in(verl.settings.get("data.train", ""))
    if (kind := _reward_kind(sources)) is not None:
        verl.settings["rewards"] = [{"kind": kind}]
        return
    what = f"rows of {', '.join(sources)}" if sources else verl.train_data
    verl.problems.append(
        f"{verl.source.name}: no single reward is known for {what}; give --reward gsm8k, number, exact, or "
        "module:function of your own"
    )


def _function_in(path: str, name: str) -> str | None:
    """The function as `module:function`; None if its file cannot be imported from the current folder."""
    parts = Path(path).with_suffix("").parts
    is_module = path.endswith(".py") and all(part.isidentifier() for part in (*parts, name))
    return f"{'.'.join(parts)}:{name}" if is_module else None


def _named_in(path: str) -> list[str]:
    """The first of the known sources that a path contains."""
    return [name for name in ("gsm8k", "math", "dapo", "aime") if name in path.lower()][:1]


def _reward_kind(sources: Sequence[str]) -> str | None:
    """The kind of reward of all sources; None where they have none or several."""
    kinds = {REWARDS.get("aime" if source.startswith("aime") else source) for source in sources}
    return kinds.pop() if len(kinds) == 1 else None


def _rewards_by_file(verl: Conversion) -> bool:
    """Set the first file's reward for all, and another's where it differs; False if one is unknown."""

    def kind_of(file: str) -> str | None:
        return _reward_kind(verl.known.file_sources.get(file) or _named_in(file))

    files = verl.settings["data.sources"]
    first, *others = [kind_of(one["data"]) for one in files]
    if first is None or None in others:
        return False
    verl.settings["rewards"] = [{"kind": first}]
    for one in [*files, *verl.settings.get("evaluation.sets", [])]:
        if (kind := kind_of(one["data"])) not in (None, first):
            one["rewards"] = [{"kind": kind}]
    return True


def convert_rl(verl: Conversion) -> None:
    """Every setting of reinforcement learning, in the order in which they need one another."""
    for part in (
        data_files,
        columns,
        chat_template,
        model,
        sampling,
        advantage,
        loss,
        penalty,
        steps,
        optimizer,
        micro_batch,
    ):
        part(verl)
    for part in (mesh, engine, validation, run, rewards):
        part(verl)
