"""Values of verl as values of millrace: each rule on numbers that could come out otherwise."""

from __future__ import annotations

import pytest

from millrace.config.mesh_section import MeshConfig
from millrace.migrate.verl_settings import Known
from tests.migrate.pieces import imported, recipe

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
ONE_GPU = ("trainer.n_gpus_per_node=1", "actor_rollout_ref.actor.fsdp_config.param_offload=False")


def test_verls_grpo_script_becomes_its_recipe() -> None:
    config = recipe()
    assert (config.data.train, config.data.eval) == ("data/gsm8k/train.parquet", "data/gsm8k/test.parquet")
    assert (config.data.prompt_column, config.data.answer_column) == ("prompt", "reward_model.ground_truth")
    assert (config.data.max_prompt_tokens, config.data.too_long) == (512, "filter")
    rollout = config.rollout
    assert (rollout.prompts_per_step, rollout.samples_per_prompt, rollout.max_tokens) == (1024, 5, 1024)
    # 7473 rows are 7 whole batches, and there are 15 epochs.
    assert config.steps == 15 * 7
    policy = config.policy
    assert policy.optimizer_steps_per_batch == 4
    assert policy.tokens_per_micro_batch == 32 * (512 + 1024)
    assert (policy.proximal, policy.loss_aggregation, policy.entropy_coefficient) == (
        "recompute",
        "token_mean",
        0,
    )
    # What the script leaves to verl's defaults.
    assert policy.loss.model_dump() == {
        "kind": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 3.0,
    }
    assert policy.optimizer.weight_decay == 0.01
    assert policy.kl is not None
    assert (policy.kl.coefficient, policy.kl.estimator, policy.kl.place) == (0.001, "k3", "loss")
    advantage = config.advantage.model_dump()
    assert {name: advantage[name] for name in ("kind", "divide_by_std", "epsilon", "lone_reward")} == {
        "kind": "group",
        "divide_by_std": True,
        "epsilon": 1e-6,
        "lone_reward": True,
    }
    assert (config.mesh.dp_shard, config.mesh.activation_checkpointing) == (4, "full")
    assert config.engine.colocated  # the reference is in host memory
    assert [reward.kind for reward in config.rewards] == ["gsm8k"]
    assert (config.evaluation.every, config.checkpoint.every) == (5, 20)
    assert (config.name, config.output, config.loggers) == (
        "qwen3_8b_function_rm",
        "checkpoints/verl_grpo_example_gsm8k",
        (),
    )


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["trainer.total_training_steps=30"], "steps", 30),
        ([f"{ACTOR}optim.lr_warmup_steps=10"], "policy.optimizer.warmup_steps", 10 * 4),
        ([f"{ACTOR}optim.lr_warmup_steps_ratio=0.1"], "policy.optimizer.warmup_steps", 10 * 4),
        (
            [f"{ACTOR}use_dynamic_bsz=True", f"{ACTOR}ppo_max_token_len_per_gpu=9000"],
            "policy.tokens_per_micro_batch",
            9000,
        ),
        ([f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm"], "policy.loss_aggregation", "fixed_length"),
        ([f"{ACTOR}clip_ratio_high=0.28"], "policy.loss.clip_high", 0.28),
        ([f"{ACTOR}clip_ratio=0.1"], "policy.loss.clip_low", 0.1),
        ([f"{ACTOR}policy_loss.loss_mode=cispo", f"{ACTOR}clip_ratio_low=10"], "policy.loss.clip_low", 1.0),
        ([f"{ACTOR}use_kl_loss=False", "algorithm.use_kl_in_reward=True"], "policy.kl.estimator", "k1"),
        (["algorithm.adv_estimator=rloo"], "advantage.kind", "leave_one_out"),
        (["algorithm.adv_estimator=gae", "critic.optim.lr=2e-6"], "critic.learning_rate", 2e-6),
        (["algorithm.adv_estimator=gae", "critic.model.path=models/rm"], "critic.path", "models/rm"),
        ([], "policy.kl.offload", True),
        (["actor_rollout_ref.ref.fsdp_config.param_offload=False"], "policy.kl.offload", False),
        (["actor_rollout_ref.model.enable_activation_offload=True"], "mesh.activation_offload", True),
        (["actor_rollout_ref.ref.model.path=models/sft"], "policy.kl.path", "models/sft"),
        (["algorithm.norm_adv_by_std_in_grpo=False"], "advantage.divide_by_std", False),
        (["algorithm.rollout_correction.rollout_is=token"], "policy.correction.high", 2.0),
        (["algorithm.rollout_correction.bypass_mode=True"], "policy.proximal", "sampler"),
        ([f"{ROLLOUT}top_k=-1"], "rollout.top_k", 0),
        (["actor_rollout_ref.model.lora_rank=32"], "model.adapter.alpha", 16),
        (["algorithm.filter_groups.enable=True"], "rollout.dynamic_sampling_rounds", 10),
        (
            ["reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 256}"],
            "rollout.overlong_fraction",
            0.25,
        ),
        (
            ["reward_model.reward_kwargs.overlong_buffer_cfg={enable: true, len: 512}"],
            "rollout.overlong_fraction",
            0.5,
        ),
        (["trainer.nnodes=2"], "mesh.dp_shard", 8),
        (["trainer.nnodes=2"], "mesh.launcher", "ray"),
        ([f"{ACTOR}fsdp_config.fsdp_size=2"], "mesh.dp_replicate", 2),
        ([f"{ACTOR}ulysses_sequence_parallel_size=2"], "mesh.dp_shard", 2),
        ([f"{ACTOR}strategy=megatron", f"{ACTOR}megatron.tensor_model_parallel_size=2"], "mesh.dp_shard", 2),
        (
            [f"{ACTOR}strategy=megatron", f"{ACTOR}megatron.tensor_model_parallel_size=2"],
            "mesh.sequence_parallel",
            True,
        ),
        (["trainer.save_freq=-1"], "checkpoint.every", 105),
        ([f"{ACTOR}ppo_epochs=3"], "policy.epochs_per_batch", 3),
        ([f"{ACTOR}ppo_epochs=3", f"{ACTOR}optim.lr_warmup_steps=10"], "policy.optimizer.warmup_steps", 120),
        (
            [f"{ACTOR}ppo_epochs=2", f"{ACTOR}ppo_mini_batch_size=1024", f"{ACTOR}clip_ratio=0.1"],
            "policy.loss.clip_low",
            0.1,
        ),
        ([f"{ACTOR}shuffle=True"], "policy.shuffle_minibatches", True),
        ([f"{ACTOR}optim.lr_scheduler_type=cosine"], "policy.optimizer.min_lr_ratio", 0.0),
        (
            [f"{ACTOR}optim.lr_scheduler_type=cosine", f"{ACTOR}optim.min_lr_ratio=0.3"],
            "policy.optimizer.min_lr_ratio",
            0.3,
        ),
        (
            [f"{ACTOR}optim.optimizer=Muon", f"{ACTOR}strategy=fsdp", *ONE_GPU],
            "policy.optimizer.kind",
            "muon",
        ),
        (
            ["reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 256, penalty_factor: 0.5}"],
            "rollout.overlong_penalty",
            0.5,
        ),
        (["data.train_max_samples=2048"], "data.train_size", 2048),
        (["data.train_max_samples=2048"], "steps", 15 * 2),
        (["trainer.logger=['console','wandb']", "trainer.project_name=mine"], "project", "mine"),
        (
            ["+data.apply_chat_template_kwargs.enable_thinking=False"],
            "tokenizer.chat_template",
            {"enable_thinking": False},
        ),
        (["trainer.logger=['console','wandb']"], "loggers", ("wandb",)),
        (
            [
                "async_training.require_batches=2",
                "async_training.trigger_parameter_sync_step=3",
                "rollout.total_rollout_steps=15360",
            ],
            "rollout.prompts_per_step",
            256 * 6,
        ),
        (
            [
                "async_training.require_batches=2",
                "async_training.staleness_threshold=0.5",
                f"{ACTOR}fsdp_config.param_offload=False",
                "rollout.total_rollout_steps=15360",
            ],
            "rollout.max_staleness",
            1,
        ),
    ],
)
def test_a_value_is_converted(arguments: list[str], key: str, value: object) -> None:
    found: object = recipe(*arguments)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


CORRECTION = "algorithm.rollout_correction."
REJECTS = [f"{CORRECTION}rollout_rs=token_k1", f"{CORRECTION}rollout_rs_threshold=0.5_2.0"]


def test_bypass_with_rejection_takes_the_ratio_to_the_sampler_and_rejects_beside_it() -> None:
    bypass = [f"{CORRECTION}bypass_mode=True", f"{CORRECTION}rollout_is=token", *REJECTS]
    policy = recipe(*bypass).policy
    assert (policy.proximal, policy.loss.kind) == ("sampler", "ppo_clip")
    assert policy.correction.model_dump() == {
        "kind": "importance",
        "level": "token",
        "action": "none",
        "low": 0.0,
        "high": 2.0,
        "normalise": False,
        "reject": {"estimator": "k1", "level": "token", "low": 0.5, "high": 2.0},
    }
    (outcome,) = [each for each in imported(*bypass).outcomes if each.key == f"{CORRECTION}rollout_is"]
    assert (outcome.status, outcome.note) == (
        "not needed",
        "the ratio of ppo_clip is that weight, in verl too",
    )


def test_bypass_with_reinforce_truncates_the_weight_of_the_policy_over_the_sampler() -> None:
    bypass = [f"{CORRECTION}bypass_mode=True", f"{CORRECTION}loss_type=reinforce"]
    weights = [f"{CORRECTION}rollout_is=sequence", f"{CORRECTION}rollout_is_threshold=3.0"]
    policy = recipe(*bypass, *weights, *REJECTS).policy
    assert (policy.proximal, policy.loss.kind) == ("sampler", "reinforce")
    correction = policy.correction
    assert (correction.level, correction.action, correction.high) == ("sequence", "truncate", 3.0)
    assert correction.reject is not None and correction.reject.high == 2.0
    normalised = imported(*bypass, *weights, f"{CORRECTION}rollout_is_batch_normalize=True").outcomes
    (outcome,) = [each for each in normalised if each.key == f"{CORRECTION}rollout_is_batch_normalize"]
    assert outcome.status == "no counterpart"


def test_rejection_alone_has_weights_of_1() -> None:
    correction = recipe(*REJECTS).policy.correction
    assert (correction.action, correction.reject.low) == ("none", 0.5)


def test_one_optimizer_step_per_batch_clips_nothing() -> None:
    one = [f"{ACTOR}ppo_mini_batch_size=1024", f"{ACTOR}clip_ratio_low=0.1"]
    assert recipe(*one).policy.loss.model_dump() == {
        "kind": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
    }
    (outcome,) = [each for each in imported(*one).outcomes if each.key == f"{ACTOR}clip_ratio_low"]
    assert (outcome.status, outcome.note) == (
        "not needed",
        "nothing is clipped with one optimizer step per batch",
    )


def test_a_sampled_validation_is_a_set_beside_the_greedy_one() -> None:
    sampled = [f"{ROLLOUT}val_kwargs.{word}" for word in ("n=8", "temperature=0.6")]
    (found,) = recipe(*sampled, "data.val_max_samples=30").evaluation.sets
    assert (found.data, found.samples, found.temperature, found.top_p, found.size) == (
        *("data/gsm8k/test.parquet", 8, 0.6, 1.0, 30),
    )
    (outcome,) = [each for each in imported(*sampled).outcomes if each.key == f"{ROLLOUT}val_kwargs.n"]
    assert (outcome.status, outcome.settings) == ("converted", ("evaluation.sets",))
    assert recipe(*sampled, f"{ROLLOUT}val_kwargs.temperature=0").evaluation.sets == ()


def test_one_rank_has_no_mesh() -> None:
    assert recipe("trainer.n_gpus_per_node=1").mesh == MeshConfig(activation_checkpointing="full")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            [f"{ACTOR}ppo_mini_batch_size=2048"],
            f"an argument: {ACTOR}ppo_mini_batch_size 2048 is above "
            "data.train_batch_size 1024; set a divisor of it (both count prompts)",
        ),
        (
            ["data.train_batch_size=1000"],
            f"line 37: {ACTOR}ppo_mini_batch_size 256 does not divide "
            "data.train_batch_size 1000; set a divisor of it (both count prompts)",
        ),
        (
            ["algorithm.use_kl_in_reward=True"],
            "an argument: algorithm.use_kl_in_reward and "
            f"{ACTOR}use_kl_loss are both True, and policy.kl has one place; set one of them to False",
        ),
        (
            ["trainer.n_gpus_per_node=many"],
            "an argument: trainer.n_gpus_per_node is 'many', not a number; correct it",
        ),
        ([f"{ROLLOUT}n=2.5"], f"an argument: {ROLLOUT}n is 2.5, not a whole number; correct it"),
        (
            ["algorithm.use_kl_in_reward=maybe"],
            "an argument: algorithm.use_kl_in_reward is 'maybe', not True or False; correct it",
        ),
        (
            [f"{ACTOR}kl_loss_type=jeffreys"],
            f"an argument: {ACTOR}kl_loss_type is jeffreys, which has no "
            "counterpart; set one of kl, k1, mse, k2, low_var_kl, k3, abs, full, kl+, k1+, low_var_kl+, k3+",
        ),
        (
            ["data.train_files=['a.parquet','b.parquet','a.parquet']"],
            "an argument: data.train_files names a.parquet twice; leave one of them out",
        ),
        (
            ["data.train_files=['gsm8k/train.parquet','b.parquet']"],
            ": no single reward is known for gsm8k/train.parquet, b.parquet; "
            "give --reward gsm8k, number, exact, or module:function of your own",
        ),
        (
            ["data.train_files=deepscaler.parquet"],
            ": no single reward is known for deepscaler.parquet; "
            "give --reward gsm8k, number, exact, or module:function of your own",
        ),
        (
            ["custom_reward_function.path=/rewards/score.py", "custom_reward_function.name=gold"],
            "an argument: /rewards/score.py is no path of a .py file below the folder you start in; put the "
            "file there, and give --reward module:gold",
        ),
        (
            ["data.seed=${data.nothing}"],
            "an argument: data.seed is ${data.nothing}, a reference that has no value here; write its value",
        ),
        (
            [f"{ACTOR}ulysses_sequence_parallel_size=3"],
            "line 50: 4 GPUs are not divisible by tp 1 x pp 1 x "
            "cp 3; correct trainer.n_gpus_per_node or the sizes",
        ),
        (
            [f"{ACTOR}entropy_coef=0.1"],
            f"an argument: {ACTOR}entropy_coef is no setting of verl that is "
            f"known; did you mean {ACTOR}entropy_coeff? Or leave it out with the argument "
            f"~{ACTOR}entropy_coef",
        ),
        (
            [f"{ROLLOUT}n=1"],
            "rollout.samples_per_prompt is 1, but advantage kind group compares the "
            "samples of a prompt; raise it to 2 or more, or choose another kind",
        ),
    ],
)
def test_a_contradiction_is_one_sentence_with_the_change(arguments: list[str], problem: str) -> None:
    found = imported(*arguments)
    assert found.recipe == ""
    assert [each.removeprefix("grpo_gsm8k.sh").strip().removeprefix(": ") for each in found.problems] == [
        problem.removeprefix(": ")
    ]


def test_epochs_need_rows() -> None:
    (problem,) = imported(known=Known()).problems
    assert problem == (
        "grpo_gsm8k.sh line 54: 15 epochs of data/gsm8k/train.parquet, which is not here, have an unknown "
        "number of "
        "batches; give --rows N, the rows of the training data"
    )


@pytest.mark.parametrize(
    ("sources", "kind"),
    [
        (["openai/gsm8k"], "gsm8k"),
        (["aime2024", "math_dapo"], "number"),
        (["openai/gsm8k", "lighteval/MATH"], None),
    ],
)
def test_rows_choose_the_reward(sources: list[str], kind: str | None) -> None:
    found = imported(known=Known(num_rows=7473, sources=sources))
    if kind is None:
        assert len(found.problems) == 1 and "rows of openai/gsm8k, lighteval/MATH" in found.problems[0]
    else:
        assert f'rewards: [{{"kind": "{kind}"}}]' in found.recipe


def test_a_function_of_ones_own_is_the_reward() -> None:
    (reward,) = recipe(known=Known(7473, (), "mine:score")).rewards
    assert reward.model_dump()["function"] == "mine:score"


def test_lists_of_files_are_sources_and_sets() -> None:
    words = [
        "data.train_files=['data/gsm8k/train.parquet','data/math/train.parquet']",
        "data.val_files=['data/gsm8k/test.parquet','data/math/test.parquet']",
    ]
    found = recipe(*words)
    assert [(one.name, one.data, one.weight) for one in found.data.sources] == [
        ("gsm8k-train", "data/gsm8k/train.parquet", None),
        ("math-train", "data/math/train.parquet", None),
    ]
    assert (found.data.eval, [reward.kind for reward in found.rewards]) == (
        "data/gsm8k/test.parquet",
        ["gsm8k"],
    )
    assert [[reward.kind for reward in one.rewards] for one in found.data.sources] == [[], ["number"]]
    (further,) = found.evaluation.sets
    assert (further.name, further.data, further.samples) == ("math-test", "data/math/test.parquet", 1)
    assert [reward.kind for reward in further.rewards] == ["number"]
    (outcome,) = [one for one in imported(*words).outcomes if one.key == "data.train_files"]
    assert (outcome.status, outcome.settings) == ("converted", ("data.sources",))
    sampled = recipe(*words, f"{ROLLOUT}val_kwargs.n=4", f"{ROLLOUT}val_kwargs.temperature=1.0")
    assert [(one.name, one.samples) for one in sampled.evaluation.sets] == [
        ("validation", 4),
        ("math-test", 4),
    ]
    # What the rows of the files name goes before their paths.
    rows = {"data/gsm8k/train.parquet": ["math_dapo"], "data/math/train.parquet": ["openai/gsm8k"]}
    named = recipe(*words, known=Known(14_000, ("math_dapo", "openai/gsm8k"), None, rows))
    assert [reward.kind for reward in named.rewards] == ["number"]
    assert [[reward.kind for reward in one.rewards] for one in named.data.sources] == [[], ["gsm8k"]]


def test_a_reward_function_of_verl_is_called_as_verl_does() -> None:
    (reward,) = recipe("custom_reward_function.path=./mine/score.py").rewards
    assert reward.model_dump()["function"] == "mine.score:compute_score"
    words = ["custom_reward_function.path=score.py", "custom_reward_function.name=gold"]
    (reward,) = recipe(*words).rewards
    assert reward.model_dump()["function"] == "score:gold"
    outcomes = {one.key: one.status for one in imported(*words).outcomes}
    assert outcomes["custom_reward_function.path"] == outcomes["custom_reward_function.name"] == "converted"
