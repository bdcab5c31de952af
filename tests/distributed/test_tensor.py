"""Sliced over ranks, a model gives the numbers of one process.

T = packed tokens, N = chosen tokens, D = model width.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from millrace.data.batch import Batch
from millrace.distributed import expert, tensor
from millrace.distributed.fsdp import Root, Sharding, shard
from millrace.distributed.load_sharded import empty_model, read_weights, stored_weights
from millrace.distributed.mesh import Mesh, make_mesh
from millrace.distributed.pipeline import Pipeline, Runner
from millrace.kernels.token_logprob import token_divergence, token_logprob, token_squares
from millrace.models.facts import experts_of
from millrace.models.fused import set_deterministic
from millrace.models.heads import packed_scores, scalar_model
from millrace.models.load import LANGUAGE, Model, fresh_config, fresh_model, save_model
from millrace.models.logprobs import (
    chosen_hidden,
    chosen_logprobs,
    hidden_states,
    output_head,
    packed_context,
)
from millrace.planner.layout import Layout
from tests.close import close_fp32, close_fp64
from tests.data.pieces import truncated
from tests.models.tiny import SHAPES, SIZES, VOCABULARY, WITHOUT, random_batch
from tests.ranks import cases_of, run_ranks

pytestmark = pytest.mark.together

# Beyond those of `tiny`: with a plan of our own.
MORE: dict[str, dict[str, Any]] = {"hunyuan_v1_dense": {"head_dim": 8}}
PADDING = {"mistral": 29}  # in the second half of the vocabulary
SEEDS = (3, 4, 5)  # one batch for each of three steps
SHARDING = Sharding(precision=None, reshard_after_forward=True, offload=False, checkpointing="none")


@dataclass(frozen=True)
class Case:
    """What is compared with one process."""

    architecture: str
    layout: dict[str, int]
    sequence: bool
    dtype: torch.dtype = torch.float64
    key_heads: int = 2
    checkpointing: Any = "none"
    loaded: bool = False  # from a folder, each rank its part
    critic: bool = False

    def __str__(self) -> str:
        layout = [f"{name} {size}" for name, size in self.layout.items()]
        more = ["sequence"] * self.sequence + ["loaded"] * self.loaded + ["critic"] * self.critic
        return ", ".join([self.architecture, *layout, *more, self.checkpointing, str(self.dtype)[6:]])


TWO = [
    *(Case(name, {"tp": 2}, True) for name in (*SHAPES, *MORE)),
    *(Case(name, {"tp": 2}, False) for name in SHAPES if name not in ("gemma3_text", "mixtral")),
    *(Case(name, {"tp": 2}, True, torch.float32) for name in ("llama", "qwen3", "gemma2")),
    Case("llama", {"tp": 2}, True, loaded=True),
    Case("llama", {"tp": 2}, True, critic=True),
]
FOUR = [
    Case("llama", {"tp": 4}, True, key_heads=4),
    Case("qwen3", {"tp": 4}, False, key_heads=4),
    Case("qwen2", {"tp": 2, "dp_shard": 2}, False),
    Case("qwen3", {"tp": 2, "dp_shard": 2}, True, torch.float32),
    Case("gemma2", {"tp": 2, "dp_shard": 2}, True, checkpointing="full"),
    Case("gemma2", {"tp": 2, "dp_shard": 2}, True, loaded=True),
    Case("llama", {"tp": 2, "dp_replicate": 2}, True, checkpointing="selective"),
    Case("qwen3", {"tp": 2, "pp": 2}, True),
    Case("mixtral", {"tp": 2, "dp_shard": 2, "ep": 2}, False),
    Case("qwen3_moe", {"tp": 2, "dp_shard": 2, "ep": 2}, True),
]


@functools.cache
def bold_model(architecture: str, key_heads: int) -> Model:
    """As `tiny_model`, with so many key heads; no bias and no norm is left at its neutral value."""
    shape = {**SIZES, "num_key_value_heads": key_heads, **(SHAPES | MORE)[architecture]}
    shape = {key: value for key, value in shape.items() if key not in WITHOUT.get(architecture, ())}
    config = fresh_config(architecture, shape, vocab_size=VOCABULARY, eos_token_id=0)
    model = fresh_model(config, seed=0, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.3 if parameter.ndim > 1 else parameter + noise * 0.1)
    model.get_input_embeddings().padding_idx = PADDING.get(architecture)
    if experts_of(model):
        expert.register()  # transformers' own have no float64
        model.set_experts_implementation(expert.NAME)
    return model


def model_of(case: Case) -> Model:
    model = copy.deepcopy(bold_model(case.architecture, case.key_heads))
    if case.critic:
        model = scalar_model(model)
        nn.init.constant_(model.score.weight, 0.3)
    return model.to(case.dtype)


def odd_batch(seed: int) -> Batch:
    """Of a number of tokens that no layout divides."""
    batch = random_batch(seed)
    while batch.num_tokens % 2 == 0:
        batch = batch.select(list(range(batch.num_segments - 1)))
    generator = torch.Generator().manual_seed(seed)
    batch.weight_T = torch.randn(batch.num_tokens, generator=generator) * 0.1
    return batch


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x.detach().clone()


def loss_of(model: Model, batch: Batch) -> Tensor:
    if hasattr(model, "score"):
        score_T = packed_scores(model, batch.token_T, batch.position_T, batch.length_B)
        return (score_T.sin() * batch.weight_T).sum()
    return loss_from(model, batch, *chosen_hidden(model, batch))


def loss_from(model: Model, batch: Batch, hidden_ND: Tensor, target_N: Tensor) -> Tensor:
    logprob_N, entropy_N = token_logprob(hidden_ND, output_head(model), target_N, temperature=0.8)
    return ((logprob_N + 0.1 * entropy_N) * batch.weight_T[batch.action_mask_T]).sum()


def trained(root: Root, mesh: Mesh) -> dict[str, Tensor]:
    """What three steps show: hidden states, the first loss and its gradients, and the last weights."""
    told: dict[str, Tensor] = {}
    model = root.model
    # With the usual eps, a gradient of nothing but rounding would move a weight as far as any other.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-4)
    if mesh.num_data_ranks == 1:
        batch = odd_batch(SEEDS[0])
        context = packed_context(model, batch.length_B)
        told["hidden"] = hidden_states(model, batch.token_T, batch.position_T, context).detach()
    for seed in SEEDS:
        batch = odd_batch(seed).shard(mesh.data_rank, mesh.num_data_ranks)
        (loss,) = root(lambda model, batch=batch: (loss_of(model, batch),))
        loss.backward()
        told.setdefault("loss", mesh.sum_over(loss, "dp_replicate", "dp_shard"))
        for name, parameter in model.named_parameters():
            told.setdefault(f"gradient/{name}", whole(parameter.grad))
        optimizer.step()
        optimizer.zero_grad()
    return told | {f"weight/{name}": whole(parameter) for name, parameter in model.named_parameters()}


def piped(model: Model, mesh: Mesh, slice_: Callable[[Model], None]) -> dict[str, Tensor]:
    """What one batch shows where each stage is sliced: the loss, and the gradients of this rank's stage."""

    def wrap(stage: Model) -> Runner:
        slice_(stage)
        return lambda compute: compute(stage)

    def end(micro: Batch, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        index_N = micro.action_mask_T.nonzero()[:, 0]
        loss = loss_from(pipeline.model, micro, hidden_TD[index_N - 1], micro.token_T[index_N])
        return loss, loss.detach()

    pipeline = Pipeline(model, mesh, wrap=wrap)
    losses = pipeline.forward_backward([odd_batch(SEEDS[0])], end)
    gradients = {
        f"gradient/{name}": whole(parameter.grad) for name, parameter in pipeline.model.named_parameters()
    }
    return gradients | ({"loss": losses[0]} if losses else {})


def sliced(rank: int, cases: list[Case], folder: Path) -> dict[str, Tensor]:
    told: dict[str, Tensor] = {}
    # What FSDP has to say of a layer that we changed is no less wrong on another process.
    warnings.simplefilter("error")
    for case in cases:
        mesh = make_mesh(Layout(**case.layout), "cpu")
        sharding = replace(SHARDING, checkpointing=case.checkpointing)
        slice_ = functools.partial(tensor.apply, mesh=mesh, sequence=case.sequence)
        if mesh.size("pp") > 1:
            told |= {f"{case}/{name}": value for name, value in piped(model_of(case), mesh, slice_).items()}
            continue
        if case.loaded:
            path = folder / case.architecture
            model = empty_model(path, dtype=case.dtype)
        else:
            model = model_of(case)
            if mesh.experts is not None:
                expert.apply(model, mesh.experts)
        slice_(model)
        root = shard(model, mesh, sharding)
        if case.loaded:
            with stored_weights(path, model) as stored:
                read_weights([root], model, stored, device=mesh.device)
            root.check(LANGUAGE)
        told |= {f"{case}/{name}": value for name, value in trained(root, mesh).items()}
    return told


@functools.cache
def in_one_process(architecture: str, key_heads: int, dtype: torch.dtype, critic: bool) -> dict[str, Tensor]:
    case = Case(architecture, {}, False, dtype, key_heads, critic=critic)
    return trained(Root(model_of(case)), make_mesh(Layout(), "cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for case in (*TWO, *FOUR):
        if case.loaded:
            save_model(bold_model(case.architecture, case.key_heads), path / case.architecture)
    return path


@pytest.fixture(scope="module")
def on_two(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Tensor]]:
    return run_ranks(2, sliced, cases_of(request, "case"), folder)


@pytest.fixture(scope="module")
def on_four(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Tensor]]:
    return run_ranks(4, sliced, cases_of(request, "case"), folder)


def check_one_process(case: Case, ranks: list[dict[str, Tensor]]) -> None:
    expected = in_one_process(case.architecture, case.key_heads, case.dtype, case.critic)
    # Gemma's norms compute in float32 whatever they are given.
    exact = case.dtype == torch.float64 and not case.architecture.startswith("gemma")
    close: Any = close_fp64 if exact else functools.partial(close_fp32, atol=1e-5)
    for told in ranks:
        names = [name for name in told if name.startswith(f"{case}/")]
        # Hidden states only where a rank sees all segments.
        assert len(names) >= (len(expected) - 1 if "pp" not in case.layout else len(expected) // 5)
        for name in names:
            try:
                close(told[name], expected[name.partition("/")[2]])
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_ranks_give_the_numbers_of_one_process(case: Case, on_two: list[dict[str, Tensor]]) -> None:
    check_one_process(case, on_two)
    assert len(on_two) == 2


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks_give_the_numbers_of_one_process(case: Case, on_four: list[dict[str, Tensor]]) -> None:
    check_one_process(case, on_four)
    assert len(on_four) == 4


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """Of two ranks, of which only the first is there: enough for what is done without a word to the other."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield make_mesh(Layout(tp=2), "cpu")
    dist.destroy_process_group()


def test_one_rank_keeps_the_model_as_it_is() -> None:
    model = bold_model("llama", 2)
    kinds = [type(module) for module in model.modules()]
    tensor.apply(model, make_mesh(Layout(), "cpu"), sequence=True)
    assert [type(module) for module in model.modules()] == kinds
    assert (output_head(model).group, output_head(model).first_row) == (None, 0)


def test_a_rank_keeps_a_slice_of_every_large_weight_and_no_memory_of_the_rest(mesh: Mesh) -> None:
    model = copy.deepcopy(bold_model("gemma2", 2))
    whole_bytes = sum(p.untyped_storage().nbytes() for p in model.parameters())
    tensor.apply(model, mesh, sequence=False)
    locals_ = {name: p.to_local() for name, p in model.named_parameters()}
    assert model.lm_head._parameters["weight"] is model.model.embed_tokens._parameters["weight"]
    assert locals_["model.embed_tokens.weight"].shape == (20, 32)
    assert locals_["model.layers.1.self_attn.k_proj.weight"].shape == (8, 32)
    assert locals_["model.layers.1.mlp.down_proj.weight"].shape == (32, 24)
    assert locals_["model.norm.weight"].shape == (32,)
    held = sum(local.untyped_storage().nbytes() for local in locals_.values())
    norms = 4 * 32 * (4 * 2 + 1)
    assert 2 * (held - norms) == whole_bytes - norms


def test_a_critic_keeps_its_head_whole(mesh: Mesh) -> None:
    critic = scalar_model(bold_model("llama", 2))
    tensor.apply(critic, mesh, sequence=True)
    assert critic.score.weight.shape == (1, 32)
    assert critic.model.embed_tokens.weight.shape == (20, 32)


def check_refused(model: Model, mesh: Mesh, sentence: str, *, sequence: bool = False) -> None:
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=sentence):
        tensor.apply(model, mesh, sequence=sequence)
    assert [type(module) for module in model.modules()] == kinds


def test_what_cannot_be_sliced_is_refused_by_name(mesh: Mesh) -> None:
    model = copy.deepcopy(bold_model("llama", 2))
    plan = dict(model.config.base_model_tp_plan)
    layer = "layers.0.self_attn.q_proj"
    model.config.base_model_tp_plan = None
    check_refused(model, mesh, "a llama has no plan for tensor parallelism; set mesh.tp to 1")
    model.config.base_model_tp_plan = plan | {"layers.*.self_attn.q_proj": "mla_kv_a_proj"}
    check_refused(model, mesh, f"transformers plans mla_kv_a_proj for {layer}, a Linear, which")
    model.config.base_model_tp_plan = plan | {"layers.*.self_attn.q_proj": "colwise_gather_output"}
    check_refused(
        model, mesh, "plans colwise and colwise_gather_output and rowwise within layers.0.self_attn, which"
    )
    model.config.base_model_tp_plan = {name: style for name, style in plan.items() if "mlp" in name}
    check_refused(
        model, mesh, "self_attn, a LlamaAttention, is not sliced by tensor parallelism", sequence=True
    )
    model.config.base_model_tp_plan = plan
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(torch.zeros(47, 32))
    check_refused(
        model, mesh, "mesh.tp is 2, which does not divide the 47 rows or columns of layers.1.mlp.up"
    )
    model.lm_head.weight = nn.Parameter(torch.zeros(41, 32))
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(torch.zeros(48, 32))
    check_refused(model, mesh, "mesh.tp is 2, which does not divide the 41 rows or columns of the head")
    model.model.layers = nn.Sequential(*model.model.layers)
    model.lm_head.weight = nn.Parameter(torch.zeros(40, 32))
    check_refused(model, mesh, "LlamaForCausalLM has 0 lists of layers where tensor parallelism needs one")
    mixture = copy.deepcopy(bold_model("mixtral", 2))
    mixture.set_experts_implementation("eager")
    check_refused(mixture, mesh, "experts of this mixtral are computed by transformers' eager", sequence=True)


def test_what_needs_the_whole_vocabulary_refuses_a_slice_by_name(mesh: Mesh) -> None:
    model, batch = copy.deepcopy(bold_model("qwen2", 2)), odd_batch(0)
    tensor.apply(model, mesh, sequence=False)
    head, hidden_ND = output_head(model), torch.zeros(3, 32)
    assert (head.weight_VD.shape, head.group, head.first_row) == ((20, 32), mesh.group("tp"), 0)
    uses: list[Callable[[], object]] = [
        lambda: token_divergence(hidden_ND, head, hidden_ND, head, temperature=1.0),
        lambda: token_squares(hidden_ND, head, temperature=1.0),
        lambda: chosen_logprobs(model, truncated(batch, VOCABULARY, 0), temperature=1.0),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="head is a shard of the vocabulary, for which there is only"):
            use()


def test_a_deterministic_model_is_not_sliced(mesh: Mesh) -> None:
    model = copy.deepcopy(bold_model("llama", 2))
    set_deterministic(model)
    check_refused(model, mesh, "mesh.tp is 2, and sums over ranks do not give a token the same bits")
    sliced_model = copy.deepcopy(bold_model("llama", 2))
    tensor.apply(sliced_model, mesh, sequence=False)
    with pytest.raises(ValueError, match="is a Linear, whose rows are not known to be independent"):
        set_deterministic(sliced_model)


def test_a_model_is_sliced_once(mesh: Mesh) -> None:
    model = copy.deepcopy(bold_model("qwen2", 2))
    tensor.apply(model, mesh, sequence=False)
    check_refused(model, mesh, "plans colwise for layers.0.self_attn.q_proj, a Linear, which")
