"""A setting that was given and can have no effect is refused: each sentence provoked, and not provoked."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from millrace.config.engine_section import EngineConfig
from millrace.config.recipe import validate
from millrace.config.settings import ineffective_settings
from tests.config.trees import BASE, data, kl, message_of, task

TEACHER: dict[str, Any] = {"kind": "teacher", "path": "runs/one"}
TWO: list[dict[str, Any]] = [{"kind": "exact"}, {"kind": "gsm8k"}]
UNCLIPPED = (
    "has no effect with one optimizer step per batch, where nothing is clipped; remove it, or raise "
    "policy.optimizer_steps_per_batch"
)

APART = {"prefill": 1, "decode": 1}
NOT_APART = (
    "does not go with engine.disaggregation, which starts engines of its own on this machine's CPU; remove "
    "one of them"
)
SET = {"name": "aime", "data": "aime.jsonl"}
INEFFECTIVE: list[tuple[dict[str, Any], str]] = [
    (
        {"model": {"path": "m", "architecture": "llama"}},
        "model.architecture has no effect because model.path names a folder that fixes it; remove it",
    ),
    (
        {"model": {"path": "m", "shape": {"hidden_size": 8}}},
        "model.shape has no effect because model.path names a folder that fixes it; remove it",
    ),
    (
        {"tokenizer": {"path": "t", "vocab_size": 9}},
        "tokenizer.vocab_size has no effect because the tokenizer comes from a folder; remove it",
    ),
    (
        {"model": {"path": "m"}, "tokenizer": {"vocab_size": 9}},
        "tokenizer.vocab_size has no effect because the tokenizer comes from a folder; remove it",
    ),
    (
        {"tokenizer": {"path": "t", "across_words": True}},
        "tokenizer.across_words has no effect because the tokenizer comes from a folder; remove it",
    ),
    (
        data(task={"size": 3}),
        "data.task has no effect because data.train is not a reasoning-gym: task; remove it",
    ),
    (
        data(task_size=3),
        "data.task_size has no effect because data.train is not generated; remove it",
    ),
    (
        data(answer_column=None, answer_pattern="(.)"),
        "data.answer_pattern has no effect without data.answer_column; remove it",
    ),
    (
        data(demonstration_column="proof"),
        "data.demonstration_column has no effect without an sft section; remove it",
    ),
    (
        task(eval="held.jsonl"),
        "data.eval has no effect because a task generates its held-out problems itself; remove it",
    ),
    (
        {"rewards": [{"kind": "exact"}, {"kind": "task"}]},
        "a reward of kind task needs data.train to be a reasoning-gym: task; choose another reward",
    ),
    (
        {"engine": {"cache_tokens": 15}},
        "engine.cache_tokens 15 is less than one block of engine.block_size 16; raise it",
    ),
    (
        {"steps": 0},
        "steps is 0, so there is no reinforcement, and the recipe has no sft section; set sft.steps, "
        "or steps above 0",
    ),
    (
        {"limits": {"mismatch": 0.1, "mismatch_warning": 0.2}},
        "limits.mismatch_warning 0.2 is above limits.mismatch 0.1, at which a run stops; lower it",
    ),
    (
        {"limits": {"mismatch": 0.1}, "rollout": {"max_staleness": 1}},
        "limits.mismatch has no effect with rollout.max_staleness above 0, where a mismatch alone stops no "
        "run; set limits.mismatch_warning",
    ),
    (
        {"rollout": {"samples_per_prompt": 1}},
        "rollout.samples_per_prompt is 1, but advantage kind group compares the samples of a prompt; raise "
        "it to 2 or more, or choose another kind",
    ),
    (
        {
            "rollout": {"samples_per_prompt": 1, "dynamic_sampling_rounds": 1},
            "advantage": {"kind": "returns"},
        },
        "rollout.dynamic_sampling_rounds replaces groups whose rewards are all equal, which is every group "
        "of one sample; remove it, or raise rollout.samples_per_prompt",
    ),
    (
        {"rollout": {"prompts_per_step": 32}, "policy": {"optimizer_steps_per_batch": 3}},
        "policy.optimizer_steps_per_batch 3 does not divide rollout.prompts_per_step 32",
    ),
    ({"advantage": {"kind": "gae"}}, "advantage kind gae needs a critic; add `critic: {}`"),
    (
        {"critic": {}},
        "critic has no effect with advantage kind group, which needs no value model; remove it",
    ),
    (
        {"advantage": {"divide_by_std": False, "epsilon": 1e-4}},
        "advantage.epsilon has no effect with divide_by_std false; remove it",
    ),
    (
        {"advantage": {"lone_reward": True, "divide_by_std": False}},
        "advantage.lone_reward needs baseline mean and divide_by_std; remove it",
    ),
    (
        {"advantage": {"lone_reward": True, "baseline": "others"}},
        "advantage.lone_reward needs baseline mean and divide_by_std; remove it",
    ),
    (
        {"advantage": {"kind": "gae", "lam": 0.9, "length_adaptive": 0.05}, "critic": {}},
        "advantage.lam has no effect with advantage.length_adaptive; remove one of them",
    ),
    (
        {"advantage": {"kind": "group_decoupled"}},
        "advantage kind group_decoupled needs two rewards or more; with one, use kind group",
    ),
    (
        {"advantage": TEACHER, "rollout": {"overlong_fraction": 0.1}},
        "rollout.overlong_fraction has no effect with advantage kind teacher, which does not look at it",
    ),
    (
        {"advantage": {"kind": "group_decoupled"}, "rewards": TWO, "policy": kl(place="reward")},
        "policy.kl.place reward has no effect with advantage kind group_decoupled, which does not look at it",
    ),
    (
        {"advantage": {"kind": "v_trace"}, "critic": {}},
        "advantage kind v_trace weighs the trainer's log-probabilities against the sampler's; set "
        "policy.proximal: recompute",
    ),
    ({"policy": {"loss": {"clip_high": 0.28}}}, f"policy.loss.clip_high {UNCLIPPED}"),
    ({"policy": {"loss": {"kind": "kl_cov", "fraction": 0.5}}}, f"policy.loss.fraction {UNCLIPPED}"),
    (
        {"policy": {"loss": {"kind": "clip_cov", "clip_low": 0.1, "fraction": 0.5}}},
        f"policy.loss.clip_low {UNCLIPPED}",
    ),
    (
        {"advantage": {"kind": "gae"}, "critic": {"clip": 0.2}},
        "critic.clip has no effect with one optimizer step per batch, where no value has moved; remove it, "
        "or raise policy.optimizer_steps_per_batch",
    ),
    (
        {"policy": {"proximal": "interpolate", "optimizer_steps_per_batch": 2}},
        "policy.proximal interpolate has no effect with fewer than three optimizer steps per batch, whose "
        "tokens are at most one version old; remove it, or raise policy.optimizer_steps_per_batch or "
        "rollout.max_staleness",
    ),
    (
        {"rollout": {"max_staleness": 1}, "policy": {"proximal": "recompute", "loss": {"clip_low": 0.1}}},
        "policy.loss.clip_low has no effect with one optimizer step per batch, where nothing is clipped; "
        "remove it, or raise policy.optimizer_steps_per_batch",
    ),
    (
        {"rollout": {"max_staleness": 1}, "policy": {"proximal": "interpolate"}},
        "policy.proximal interpolate has no effect with fewer than three optimizer steps per batch, whose "
        "tokens are at most one version old; remove it, or raise policy.optimizer_steps_per_batch or "
        "rollout.max_staleness",
    ),
    (
        {"rollout": {"max_staleness": 1}, "engine": {"num_engines": 0}},
        "rollout.max_staleness above 0 needs engines in processes of their own; remove engine.num_engines 0",
    ),
    (
        {"engine": {"num_engines": 2, "delta_updates": True}},
        "engine.delta_updates is for engines that Ray starts; remove it, or set mesh.launcher ray and "
        "engine.num_engines",
    ),
    (
        {"mesh": {"dp_shard": 2, "launcher": "ray"}, "engine": {"delta_updates": True}},
        "engine.delta_updates is for engines that Ray starts; remove it, or set mesh.launcher ray and "
        "engine.num_engines",
    ),
    (
        {"rollout": {"max_staleness": 1}, "engine": {"colocated": True}},
        "engine.colocated does not go with rollout.max_staleness above 0, where the engine "
        "generates while the trainer trains; remove one of them",
    ),
    (
        {"engine": {"tensor_parallel_size": 2}},
        "engine.tensor_parallel_size is 2, which does not divide the 1 ranks of the mesh; choose one that "
        "does, or raise mesh.dp_shard",
    ),
    (
        {"mesh": {"dp_shard": 3}, "engine": {"tensor_parallel_size": 2}},
        "engine.tensor_parallel_size is 2, which does not divide the 3 ranks of the mesh; choose one that "
        "does, or raise mesh.dp_shard",
    ),
    (
        {"mesh": {"dp_shard": 2}, "engine": {"tensor_parallel_size": 2}, "rollout": {"max_staleness": 1}},
        "engine.tensor_parallel_size 2 shares an engine between ranks of the trainer, which does not go with "
        "engines in processes of their own; set it to 1, or remove rollout.max_staleness and "
        "engine.num_engines",
    ),
    (
        {"mesh": {"dp_shard": 2}, "engine": {"tensor_parallel_size": 2}, "deterministic": True},
        "deterministic does not go with engine.tensor_parallel_size above 1; set that to 1, or remove "
        "deterministic",
    ),
    (
        {"mesh": {"dp_shard": 2}, "engine": {"tensor_parallel_size": 2, "cuda_graphs": True}},
        "engine.cuda_graphs does not go with engine.tensor_parallel_size above 1; set that to 1, or remove "
        "engine.cuda_graphs",
    ),
    (
        {"mesh": {"dp_shard": 2}, "engine": {"tensor_parallel_size": 2, "kind": "vllm"}},
        "engine.tensor_parallel_size has no effect with engine.kind vllm; use engine.arguments",
    ),
    (
        {"mesh": {"dp_shard": 2}, "engine": {"tensor_parallel_size": 2, "kind": "server"}},
        "engine.tensor_parallel_size 2 shares an engine between ranks of the trainer, which does not go with "
        "engines in processes of their own; set it to 1, or remove rollout.max_staleness and "
        "engine.num_engines",
    ),
    ({"engine": {"disaggregation": APART, "kind": "vllm"}}, f"engine.kind vllm {NOT_APART}"),
    ({"engine": {"disaggregation": APART, "num_engines": 0}}, f"engine.num_engines 0 {NOT_APART}"),
    ({"engine": {"disaggregation": APART, "cuda_graphs": True}}, f"engine.cuda_graphs {NOT_APART}"),
    ({"engine": {"disaggregation": APART, "colocated": True}}, f"engine.colocated {NOT_APART}"),
    (
        {"engine": {"disaggregation": APART, "tensor_parallel_size": 2}, "mesh": {"dp_shard": 2}},
        f"engine.tensor_parallel_size {NOT_APART}",
    ),
    (
        {"engine": {"disaggregation": APART}, "mesh": {"dp_shard": 2, "launcher": "ray"}},
        f"mesh.launcher ray {NOT_APART}",
    ),
    ({"engine": {"disaggregation": APART}, "device": "cuda"}, f"device cuda {NOT_APART}"),
    (
        {"engine": {"urls": ["http://127.0.0.1:8000"]}},
        "engine.urls has no effect with engine.kind millrace; set engine.kind to server, vllm or sglang",
    ),
    (
        {"engine": {"kind": "vllm", "urls": ["http://127.0.0.1:8000"], "python": "python3"}},
        "engine.python has no effect with engine.urls, whose servers run already",
    ),
    (
        {"engine": {"kind": "server", "api_key_env": "KEY"}},
        "engine.api_key_env has no effect without engine.urls",
    ),
    (
        {"engine": {"kind": "server", "arguments": ["--port", "1"]}},
        "engine.arguments has no effect with engine.kind server, which has the settings of the recipe",
    ),
    (
        {"engine": {"kind": "vllm", "cuda_graphs": True}},
        "engine.cuda_graphs has no effect with engine.kind vllm; use engine.arguments",
    ),
    (
        {"engine": {"kind": "server", "num_engines": 0}},
        "engine.num_engines 0 generates in the trainer, and engine.kind is server; remove one",
    ),
    (
        {"engine": {"kind": "vllm", "urls": ["http://a:1", "http://b:1"], "num_engines": 3}},
        "engine.num_engines is 3 and engine.urls has 2 servers; add servers, or remove engine.num_engines",
    ),
    (
        {"engine": {"kind": "vllm"}, "deterministic": True},
        "deterministic does not go with engine.kind vllm; remove one of them",
    ),
    (
        {"engine": {"kind": "sglang"}, "rollout": {"top_p": 0.9, "top_k": 5}},
        "rollout.top_k and rollout.top_p together mean something else with engine.kind sglang, where top_p "
        "is a fraction of the whole vocabulary's probability; remove one of them",
    ),
    (
        {"engine": {"kind": "sglang", "block_size": 32}},
        "engine.block_size has no effect with engine.kind sglang; use engine.arguments",
    ),
    (
        {"engine": {"kind": "vllm"}, "rollout": {"top_p": 0.9}},
        "rollout.top_p needs rollout.top_k with engine.kind vllm, which returns the candidates of each "
        "token; set rollout.top_k",
    ),
    (
        {"rollout": {"stale_policy": "drop"}},
        "rollout.stale_policy has no effect with rollout.max_staleness 0, where no group becomes stale; "
        "remove it",
    ),
    (
        {"policy": {"correction": {}}},
        "with policy.proximal sampler the ratio of policy.loss kind ppo_clip is that of policy.correction, "
        "which would count twice; set policy.proximal: recompute, policy.loss.kind: reinforce, or "
        "policy.correction.action: none to reject alone",
    ),
    (
        {"policy": {"loss": {"kind": "reinforce"}, "correction": {"normalise": True}}},
        "policy.correction.normalise needs the weights of the whole optimizer step beforehand; set "
        "policy.proximal: recompute",
    ),
    (
        {
            "policy": {
                "optimizer_steps_per_batch": 4,
                "proximal": "interpolate",
                "correction": {"normalise": True},
            }
        },
        "policy.correction.normalise needs the weights of the whole optimizer step beforehand; set "
        "policy.proximal: recompute",
    ),
    *(
        (
            {"policy": kl(place="reward", estimator=estimator)},
            f"policy.kl.estimator {estimator} is made for its gradient, and a reward has none; set k1, k2, "
            "k3 or abs",
        )
        for estimator in ("full", "k1+", "k3+")
    ),
    (
        {"limits": {"correction_clip_fraction": 0.1}},
        "limits.correction_clip_fraction has no effect without policy.correction of kind importance, which "
        "cuts weights; "
        "remove it",
    ),
    (
        {"policy": kl(horizon=5000)},
        "policy.kl.horizon has no effect without policy.kl.target; remove it",
    ),
    (
        {"policy": kl(offload=True, estimator="full")},
        "policy.kl.offload does not go with estimator full, which reads it throughout; remove it",
    ),
    (
        {"policy": kl(offload=True), "mesh": {"dp_shard": 2, "offload": True}},
        "policy.kl.offload has no effect with mesh.offload, which keeps all weights there; remove it",
    ),
    (
        {"policy": kl(offload=True), "model": {"adapter": {}}},
        "policy.kl.offload has no effect with a fresh adapter, whose base is the reference; remove it",
    ),
    (
        {"policy": kl(target=0.1, horizon=255)},
        "policy.kl.horizon 255 is less than the 256 sequences of a batch; raise it",
    ),
    (
        {"environment": {"kind": "function", "function": "my:game", "tool_format": "pattern"}},
        "environment.tool_format pattern needs environment.tool_pattern, the pattern of a call",
    ),
    (
        {"environment": {"kind": "function", "function": "my:game", "tool_pattern": "x"}},
        "environment.tool_pattern has no effect unless environment.tool_format is pattern; set that",
    ),
    (
        {"environment": {"kind": "function", "function": "my:game", "tool": "calc"}},
        "environment.tool has no effect without environment.tool_pattern; remove it, or give one",
    ),
    (
        {"environment": {"kind": "tools", "tools": ["my:tool"], "sandbox": "none"}},
        "environment.sandbox has no effect without the tool python; remove it",
    ),
    (
        {"environment": {"kind": "tools", "tools": ["my:tool"], "workers": 0}},
        "environment kind tools runs in workers; set environment.workers to 1 or more",
    ),
    (
        {"environment": {"kind": "tools", "tools": ["my:tool"]}, "rewards": []},
        "environment kind tools scores nothing itself; add rewards for the last completion",
    ),
    (
        {"environment": {"kind": "program", "command": ["python", "a.py"], "workers": 0}},
        "environment kind program runs in workers; set environment.workers to 1 or more",
    ),
    (
        {"environment": {"kind": "program", "command": ["a"], "sandbox": "none", "readable": ["b"]}},
        "environment.readable has no effect with environment.sandbox none; remove it",
    ),
    (
        {"evaluation": {"sets": [SET, SET]}},
        "evaluation.sets.1.name aime is that of an earlier set; choose another",
    ),
    (
        {"evaluation": {"every": 4, "sets": [SET | {"every": 6}]}},
        "evaluation.sets.0.every is 6, which is no multiple of evaluation.every 4; set 8",
    ),
    (
        {"evaluation": {"sets": [SET | {"rewards": [{"kind": "task"}]}]}},
        "evaluation.sets.0.rewards has the kind task, which scores generated problems alone; choose another",
    ),
    (
        {"environment": {"kind": "guess"}, "evaluation": {"sets": [SET | {"rewards": [{"kind": "exact"}]}]}},
        "evaluation.sets.0.rewards has no effect with an environment, which scores all episodes; remove it",
    ),
    (
        {"evaluation": {"measure": "eval/amie/avg@1", "sets": [SET]}},
        "evaluation.measure eval/amie/avg@1 is of no set in evaluation.sets; there are: aime",
    ),
    (
        {
            "evaluation": {
                "measure": "eval/aime/pass@8",
                "sets": [SET | {"samples": 4, "k": [4], "greedy": True}],
            }
        },
        "evaluation.measure eval/aime/pass@8 is not a metric of the set aime, which has eval/aime/avg@4, "
        "eval/aime/greedy, eval/aime/reward/mean, eval/aime/pass@4, eval/aime/pass^4, eval/aime/maj@4",
    ),
    (
        {"evaluation": {"every": 5, "measure": "eval/aime/avg@1", "sets": [SET | {"every": 10}]}},
        "evaluation.measure eval/aime/avg@1 is needed at each evaluation, and evaluation.sets.0.every is 10; "
        "remove it",
    ),
    (
        {"evaluation": {"measure": "reward"}},
        "evaluation.measure reward is not a measure of this recipe, which has reward/mean, accuracy",
    ),
    (
        {"evaluation": {"measure": "reward/exact/mean"}},
        "evaluation.measure reward/exact/mean is not a measure of this recipe, which has reward/mean, "
        "accuracy",
    ),
    (
        {
            "evaluation": {"measure": "format"},
            "rewards": [
                {"kind": "format", "pattern": "a"},
                {"kind": "function", "function": "mine:near"},
                {"kind": "format", "pattern": "b"},
            ],
        },
        "evaluation.measure format is not a measure of this recipe, which has reward/mean, accuracy, "
        "reward/format/mean, reward/near/mean, reward/format-2/mean",
    ),
]


@pytest.mark.parametrize(
    ("tree", "sentence"), INEFFECTIVE, ids=[sentence[:60] for _, sentence in INEFFECTIVE]
)
def test_a_setting_that_can_have_no_effect_is_refused(tree: dict[str, Any], sentence: str) -> None:
    assert message_of(tree) == f"recipe mine: {sentence}"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"samples": 4, "k": [2, 8]},
            "k is 8, but a question gets 4 answers, which say nothing about 8; lower k, or raise samples",
        ),
        (
            {"samples": 4, "temperature": 0},
            "samples is 4 at temperature 0, where all answers to a question are equal; remove temperature",
        ),
        (
            {"greedy": True},
            "greedy has no effect where the one answer is greedy; raise samples, or remove it",
        ),
    ],
)
def test_a_set_whose_samples_say_nothing_is_refused(more: dict[str, Any], sentence: str) -> None:
    assert message_of({"evaluation": {"sets": [SET | more]}}) == f"recipe mine: evaluation.sets.0: {sentence}"


CREDIT: list[tuple[dict[str, Any], str]] = [
    (
        {"credit": "episode", "turn_discount": 0.9},
        "advantage.turn_discount has no effect with credit episode",
    ),
    (
        {"kind": "leave_one_out", "state_weight": 2.0},
        "advantage.state_weight has no effect with credit episode",
    ),
    (
        {"kind": "leave_one_out", "credit": "return_to_go", "state_weight": 2.0},
        "advantage.state_weight has no effect with credit return_to_go; remove it",
    ),
    (
        {"credit": "anchor", "lone_reward": True},
        "advantage.lone_reward does not go with credit anchor; remove it",
    ),
    (
        {"credit": "return_to_go", "baseline": "others"},
        "advantage.credit return_to_go with baseline others is not divided by a deviation; set "
        "advantage.divide_by_std false",
    ),
    (
        {"kind": "gae", "credit": "gae_turn", "gamma": 0.9},
        "advantage.gamma discounts per token; with credit gae_turn set advantage.turn_discount",
    ),
    (
        {"kind": "gae", "credit": "gae_turn", "length_adaptive": 0.05},
        "advantage.length_adaptive does not go with credit gae_turn; remove it",
    ),
    (
        {"kind": "gae", "credit": "gae_turn", "critic_lam": 0.5},
        "advantage.critic_lam does not go with credit gae_turn; remove it",
    ),
    ({"credit": "gae_turn"}, "advantage: credit gae_turn goes with kind gae, not with group; change one"),
    (
        {"kind": "gae", "credit": "anchor"},
        "advantage: credit anchor goes with kind group or leave_one_out, not with gae; change one",
    ),
    (
        {"kind": "gpg", "credit": "return_to_go"},
        "advantage: credit return_to_go goes with kind group or leave_one_out, not with gpg; change one",
    ),
]


def with_critic(advantage: dict[str, Any]) -> dict[str, Any]:
    return {"advantage": advantage, **({"critic": {}} if advantage.get("kind") == "gae" else {})}


@pytest.mark.parametrize(("advantage", "sentence"), CREDIT, ids=[sentence for _, sentence in CREDIT])
def test_a_credit_that_does_not_fit_its_advantage_is_refused(
    advantage: dict[str, Any], sentence: str
) -> None:
    assert message_of(with_critic(advantage)).startswith(f"recipe mine: {sentence}")


@pytest.mark.parametrize(
    "loss",
    [{"kind": "gmpo"}, {"kind": "gspo"}, {"kind": "gspo", "gradient": "token"}, {"kind": "topr"}],
    ids=str,
)
def test_a_loss_that_averages_advantages_refuses_credit(loss: dict[str, Any]) -> None:
    tree = {"advantage": {"credit": "return_to_go"}, "policy": {"loss": loss}}
    if loss["kind"] == "topr" or "gradient" in loss:
        assert ineffective_settings(validate({**BASE, **tree}, "mine")) == []
        return
    assert message_of(tree).startswith(
        f"recipe mine: advantage.credit return_to_go has no effect with policy.loss kind {loss['kind']}"
    )
    assert message_of({"advantage": {"credit": 3}}).startswith("recipe mine: advantage.credit is 3: input")


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"advantage": {"credit": "return_to_go", "turn_discount": 0.9}},
        {"advantage": {"credit": "anchor", "turn_discount": 0.9, "state_weight": 0.5, "baseline": "others"}},
        {"advantage": {"credit": "return_to_go", "baseline": "others", "divide_by_std": False}},
        {"advantage": {"kind": "leave_one_out", "credit": "turn_index"}},
        {"advantage": {"kind": "gae", "credit": "gae_turn", "lam": 0.9, "turn_discount": 0.9}, "critic": {}},
        {"model": {"path": "m"}, "tokenizer": {"path": "t"}},
        {"model": {"architecture": "llama", "shape": {"hidden_size": 8}}, "tokenizer": {"vocab_size": 9}},
        {**task(task={"size": 3}, task_size=5), "rewards": [{"kind": "task"}]},
        data(answer_pattern="(.)", eval="held.jsonl"),
        {**data(demonstration_column="proof"), "sft": {"steps": 1}},
        {**data(demonstration_column="proof"), "sft": {"steps": 1}, "steps": 0},
        {
            **{"steps": 0, "sft": {"steps": 1}, "advantage": {"kind": "gae"}, "critic": {}},
            **{
                "policy": {"optimizer_steps_per_batch": 3, **kl()},
                "rollout": {"max_staleness": 1},
                "profile_steps": [1],
            },
        },
        {"rollout": {"prompts_per_step": 32}, "policy": {"optimizer_steps_per_batch": 4}},
        {"rewards": [{"kind": kind} for kind in ("exact", "gsm8k", "number")]},
        {"rollout": {"samples_per_prompt": 1}, "advantage": {"kind": "returns"}},
        {"rollout": {"dynamic_sampling_rounds": 1, "max_tokens": 8, "overlong_fraction": 1.0}},
        {"advantage": {"kind": "gae"}, "critic": {}},
        {"advantage": {"kind": "gae", "length_adaptive": 0.05}, "critic": {}},
        {"advantage": {"kind": "v_trace"}, "critic": {}, "policy": {"proximal": "recompute"}},
        {"advantage": {"epsilon": 1e-4, "lone_reward": True, "whiten": True}},
        {"advantage": {"baseline": "others", "epsilon": 1e-4}},
        {"advantage": {"kind": "group_decoupled"}, "rewards": TWO, "policy": kl()},
        {"advantage": TEACHER, "policy": kl(target=0.1, horizon=256)},
        {"policy": kl(place="reward", estimator="abs")},
        {"evaluation": {"measure": "accuracy"}},
        {
            "rewards": [{"kind": "exact"}, {"kind": "function", "function": "mine:near"}],
            "evaluation": {"measure": "reward/near/mean"},
        },
        {"policy": kl(estimator="full")},
        {"policy": {"loss": {"kind": "clip_cov", "fraction": 0.5, "covariance_low": 0.5}}},
        {"policy": {"loss": {"kind": "gspo", "gradient": "token"}}},
        {"policy": {"loss": {"kind": "cispo", "clip_low": 1.0}, "optimizer_steps_per_batch": 2}},
        {"policy": {"proximal": "recompute", "correction": {"normalise": True}}},
        {"rollout": {"max_staleness": 1}, "policy": {"loss": {"clip_low": 0.1}}},
        {"rollout": {"max_staleness": 2}, "policy": {"proximal": "interpolate"}},
        {
            "rollout": {"max_staleness": 2, "kv_on_update": "keep"},
            "engine": {"num_engines": 2},
            "profile_steps": [1],
        },
        {
            "rollout": {
                "max_staleness": 1,
                "batch_order": "completion",
                "stale_policy": "drop",
                "partial_rollout": False,
            }
        },
        {"rollout": {"batch_order": "completion", "oversample_groups": 4}, "engine": {"num_engines": 1}},
        {
            "advantage": {"kind": "gae"},
            "critic": {"clip": None},
            "policy": {"optimizer_steps_per_batch": 4, "proximal": "interpolate", "correction": {}},
        },
    ],
    ids=str,
)
def test_settings_with_an_effect_are_accepted(tree: dict[str, Any]) -> None:
    assert ineffective_settings(validate({**BASE, **tree}, "mine")) == []


def test_a_run_folder_that_names_the_paged_engine_is_still_read():
    assert EngineConfig.model_validate({"name": "paged", "block_size": 4}) == EngineConfig(block_size=4)
    with pytest.raises(ValidationError, match="name"):
        EngineConfig.model_validate({"name": "reference"})
