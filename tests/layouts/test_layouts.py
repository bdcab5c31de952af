"""Every layout of ranks trains what one process trains: each gradient, loss and norm, and the last weights.

Whole batches go through `train_on`, from scored groups to new weights, with a reference and several optimizer
steps, so that everything that has weights is dealt: policy, reference and critic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millrace.config.settings import RunConfig
from millrace.distributed import expert
from millrace.models.adapters import adapted_layers, add_adapter, trained_weights
from millrace.models.facts import experts_of
from millrace.models.heads import scalar_model
from millrace.models.load import Model
from millrace.models.saving import whole
from millrace.rollout.sampled_batch import SampledBatch
from millrace.run.build_algorithm import build_control, build_method, build_objective, build_optimizer
from millrace.run.train_step import TrainStep, train_on
from millrace.training.optimizer import WeightOptimizer
from millrace.training.parallel_model import mesh_of, spread_over
from millrace.training.policy import BaseScorer, PolicyTrainer
from millrace.training.scorer import ModelScorer
from millrace.training.value import ValueTrainer
from millrace.types import Completion, Group, Outcome, Prompt, Trajectory, Turn
from tests.close import close_fp32, comparable_adamw
from tests.models.tiny import VOCABULARY, tiny_model
from tests.ranks import cases_of, run_ranks
from tests.run.pieces import recipe

pytestmark = pytest.mark.together

CPU = torch.device("cpu")
STEPS = 3
KL = {"coefficient": 0.05, "estimator": "k3"}
OPTIMIZERS = {"muon": "muon", "sgd": "tests.plugin_functions:sgd"}
METHODS: dict[str, dict[str, Any]] = {
    **{
        name: {"policy": {"optimizer": {"kind": kind, "weight_decay": 0.1}}}
        for name, kind in OPTIMIZERS.items()
    },
    "grpo": {"policy": {"kl": KL}},
    "full": {"policy": {"kl": {"coefficient": 0.05, "estimator": "full"}}},
    "gspo": {"policy": {"loss": {"kind": "gspo"}, "loss_aggregation": "sequence_mean"}},
    "ppo": {
        "advantage": {"kind": "gae"},
        "critic": {},
        "policy": {"kl": KL, "proximal": "recompute", "optimizer_steps_per_batch": 2},
    },
}


@dataclass(frozen=True)
class Case:
    """A model, a method and how ranks are laid out.

    Attributes:
        architecture: of `tests.models.tiny`.
        method: of METHODS.
        mesh: settings.
        max_tokens: of a micro-batch.
        adapter: whether one learns in the model's stead, with the model itself for the reference.
    """

    architecture: str
    method: str
    mesh: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 60
    adapter: bool = False

    def __str__(self) -> str:
        mesh = ",".join(f"{name}={value}" for name, value in self.mesh.items())
        return f"{self.architecture}-{self.method}-{mesh}-{self.max_tokens}{'-adapter' * self.adapter}"


LAYOUTS_OF_TWO: list[dict[str, Any]] = [
    {"dp_shard": 2},
    {"dp_replicate": 2},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"cp": 2},
    {"cp": 2, "cp_kind": "ring"},
    {"pp": 2},
]
LAYOUTS_OF_FOUR: list[dict[str, Any]] = [
    {"dp_shard": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"tp": 2, "dp_shard": 2},
    {"pp": 2, "dp_shard": 2},
    {"cp": 2, "dp_shard": 2},
    {"pp": 2, "tp": 2},
    {"cp": 2, "tp": 2, "cp_kind": "ring"},
]
LAYOUTS_OF_EXPERTS: list[dict[str, Any]] = [{"dp_shard": 4, "ep": 2}, {"tp": 2, "dp_shard": 2, "ep": 2}]
# What the tests show each time; more of the same is marked slow.
QUICK = [
    *(Case("qwen3", "grpo", mesh) for mesh in LAYOUTS_OF_TWO),
    Case("qwen3_moe", "ppo", {"dp_shard": 2, "ep": 2}),
    Case("qwen3", "full", {"dp_shard": 2}, 30),
    Case("qwen3", "grpo", {"dp_shard": 2}, adapter=True),
    *(Case("qwen3", name, {"dp_shard": 2}) for name in OPTIMIZERS),
]
TWO = [
    *(Case("llama", "gspo", mesh) for mesh in LAYOUTS_OF_TWO),
    *(Case("qwen3", "ppo", mesh) for mesh in LAYOUTS_OF_TWO),
    Case("qwen3_moe", "grpo", {"dp_shard": 2}),
    *(Case("qwen3_moe", "grpo", {"dp_shard": 2, "ep": 2}, max_tokens) for max_tokens in (30, 1000)),
    # From one micro-batch to one for each segment.
    *(Case("qwen3", "grpo", {"dp_shard": 2}, max_tokens) for max_tokens in (25, 35, 1000)),
    *(Case("llama", "grpo", {"pp": 2}, max_tokens) for max_tokens in (25, 1000)),
    Case(
        "qwen3", "grpo", {"dp_shard": 2, "activation_checkpointing": "full", "reshard_after_forward": False}
    ),
    Case("llama", "gspo", {"pp": 2, "activation_checkpointing": "selective", "activation_offload": True}),
    Case("qwen3", "ppo", {"dp_shard": 2, "activation_offload": True}),
    Case("llama", "grpo", {"tp": 2, "activation_offload": True}),
    *(Case("qwen3", "grpo", mesh, adapter=True) for mesh in ({"dp_replicate": 2}, {"cp": 2})),
    Case("qwen3_moe", "full", {"dp_shard": 2, "ep": 2}),
    Case("llama", "full", {"dp_replicate": 2}),
    Case("qwen3", "full", {"dp_shard": 2, "activation_checkpointing": "full"}, 30, adapter=True),
    Case("qwen3", "ppo", {"dp_shard": 2}, adapter=True),
    Case("qwen3_moe", "grpo", {"dp_shard": 2, "ep": 2}, adapter=True),
    *(Case("llama", name, {over: 2}) for name in OPTIMIZERS for over in ("dp_replicate", "cp", "pp")),
    Case("qwen3_moe", "muon", {"dp_shard": 2, "ep": 2}),
]
FOUR = [
    *(Case("qwen3", "grpo", mesh) for mesh in LAYOUTS_OF_FOUR),
    *(Case("llama", "ppo", mesh) for mesh in LAYOUTS_OF_FOUR),
    *(Case("qwen3_moe", "gspo", mesh) for mesh in LAYOUTS_OF_EXPERTS),
    Case("qwen3", "gspo", {"dp_shard": 4}, 1000),
    *(Case("qwen3", name, {"dp_replicate": 2, "dp_shard": 2}) for name in OPTIMIZERS),
]


def config_of(case: Case) -> RunConfig:
    return recipe(**METHODS[case.method], mesh=case.mesh)


def groups(seed: int) -> list[Group]:
    """Scored answers of very different lengths, in groups of two."""
    numbers = np.random.default_rng(seed)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(numbers.integers(1, VOCABULARY, numbers.integers(1, most + 1)).tolist())

    made = []
    for index in range(4):
        asked, answered = tokens(6), []
        for _ in range(2):
            drawn = tokens(14)
            logprobs = (-3.0 + 0.3 * numbers.standard_normal(len(drawn))).astype(np.float32)
            said = Completion(drawn, logprobs, np.zeros(len(drawn), np.int32), "stop", "")
            answered.append(Trajectory((Turn(asked, said),), Outcome("score", float(numbers.normal()))))
        made.append(Group(Prompt(f"train:{index}", asked, "text"), tuple(answered)))
    return made


def adapted(model: Model) -> Model:
    """The model beside an adapter that changes what it says."""
    add_adapter(model, rank=3, alpha=6.0, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B.weight.copy_(torch.randn(layer.lora_B.weight.shape, generator=generator) * 0.1)
    return model


def model_of(architecture: str, seed: int = 0) -> Model:
    model = tiny_model(architecture, seed=seed)
    if experts_of(model):
        # The same sums, whether experts are dealt out or not.
        expert.register()
        model.set_experts_implementation(expert.NAME)
    return model


def make_train_step(case: Case) -> TrainStep:
    """As `run.build` makes one, over tiny models."""
    config = config_of(case)
    mesh, control = mesh_of(config.mesh, CPU), build_control(config.policy.kl)
    model, frozen = model_of(case.architecture), model_of(case.architecture, 1).requires_grad_(False)
    made = scalar_model(model) if config.critic else None
    if case.adapter:
        model = adapted(model)
    options = {"max_tokens": case.max_tokens, "max_grad_norm": 0.1, "learning_rate": lambda step: 1e-3}
    spread = spread_over(model, mesh, config.mesh)
    if case.adapter:
        reference = BaseScorer(model, temperature=0.8, max_tokens=case.max_tokens, spread=spread)
    else:
        asked = spread_over(frozen, mesh, config.mesh)
        reference = ModelScorer(frozen, temperature=0.8, max_tokens=case.max_tokens, spread=asked)
    policy = PolicyTrainer(
        model,
        build_objective(config.policy, control, config.steps),
        temperature=0.8,
        spread=spread,
        optimizer=optimizer_of(spread.model, config),
        reference=reference if config.policy.kl and config.policy.kl.estimator == "full" else None,
        **options,
    )
    critic = None
    if made is not None and config.critic is not None:
        # A head of zeros would leave all other weights without a gradient.
        torch.nn.init.normal_(made.score.weight, generator=torch.Generator().manual_seed(4))
        held = spread_over(made, mesh, config.mesh)
        critic = ValueTrainer(
            made, optimizer_of(made, config), clip=config.critic.clip, coefficient=0.5, spread=held, **options
        )
    return TrainStep(policy, build_method(config), critic, reference if control else None, None, control)


def optimizer_of(model: Model, config: RunConfig) -> WeightOptimizer:
    if config.policy.optimizer.kind != "adamw":
        optimizer = build_optimizer(config.policy.optimizer, model)
        for group in optimizer.param_groups:
            # As in `comparable_adamw`.
            group |= {"eps": 1e-4} if "eps" in group else {}
        return optimizer
    return comparable_adamw(trained_weights(model), betas=(0.9, 0.999), weight_decay=0.1)


def learned(case: Case) -> dict[str, Tensor]:
    """What three batches show: metrics, the first gradients, and the weights afterwards."""
    one = make_train_step(case)
    told: dict[str, Tensor] = {}
    trainers = {"policy": one.trainer} | ({"critic": one.critic} if one.critic else {})
    for name, trainer in trainers.items():
        keep_gradients(name, trainer, told)
    for step in range(STEPS):
        result = train_on(one, SampledBatch(groups(step), frozenset(), None), seed=5, step=step)
        told |= {f"step {step}/{name}": torch.tensor(value) for name, value in result.record.items()}
    for name, trainer in trainers.items():
        told |= {f"{name}/{weight}": tensor.clone() for weight, tensor in trainer.named_tensors()}
    return told


def keep_gradients(name: str, trainer: Any, told: dict[str, Tensor]) -> None:
    """Note the gradient of the first optimizer step, as it stands before it."""
    real = trainer.optim_step

    def noting() -> Any:
        if not any(key.startswith(f"{name} gradient/") for key in told):
            for weight, parameter in trainer.model.named_parameters():
                # One that is nobody's concern here is made up for, as the step itself does.
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                told[f"{name} gradient/{weight}"] = whole(gradient).clone()
        return real()

    trainer.optim_step = noting


def on_ranks(rank: int, cases: list[Case]) -> dict[str, Tensor]:
    return {f"{case}/{name}": value for case in cases for name, value in learned(case).items()}


@cache
def alone(architecture: str, method: str, adapter: bool) -> dict[str, Tensor]:
    """What one process learns, in one micro-batch."""
    return learned(Case(architecture, method, {}, 1000, adapter))


@pytest.fixture(scope="module")
def quick(request: pytest.FixtureRequest) -> list[dict[str, Tensor]]:
    return run_ranks(2, on_ranks, cases_of(request, "case"))


@pytest.fixture(scope="module")
def on_two(request: pytest.FixtureRequest) -> list[dict[str, Tensor]]:
    return run_ranks(2, on_ranks, cases_of(request, "case"))


@pytest.fixture(scope="module")
def on_four(request: pytest.FixtureRequest) -> list[dict[str, Tensor]]:
    return run_ranks(4, on_ranks, cases_of(request, "case"))


def check_one_process(case: Case, ranks: list[dict[str, Tensor]]) -> None:
    expected = alone(case.architecture, case.method, case.adapter)
    for told in ranks:
        found = {name.removeprefix(f"{case}/"): x for name, x in told.items() if name.startswith(f"{case}/")}
        # A rank of a pipeline has the gradients of its own stages.
        missing = expected.keys() - found.keys()
        assert not missing or (case.mesh.get("pp") and all(" gradient/" in name for name in missing))
        for name, value in expected.items():
            if name in found:
                try:
                    # An entry is a sum of others of the tensor's size, so that is what it is rounded to. Muon
                    # makes matrices orthogonal in bfloat16; it moves an entry by 2e-4 at a step.
                    rtol, atol = (2e-3, 5e-5) if case.method == "muon" else (1e-5, 1e-5)
                    atol *= max(1.0, float(value.abs().max()))
                    close_fp32(found[name], value, rtol=rtol, atol=atol)
                except AssertionError as error:
                    raise AssertionError(f"{name}: {error}") from None


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_two_ranks_learn_what_one_process_learns(case, quick):
    check_one_process(case, quick)


@pytest.mark.slow
@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_ranks_learn_the_same_by_other_methods_and_models(case, on_two):
    check_one_process(case, on_two)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks_learn_what_one_process_learns(case, on_four):
    check_one_process(case, on_four)
