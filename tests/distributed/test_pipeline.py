"""A pipeline of ranks computes what one process does."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from millrace.data.batch import Batch
from millrace.distributed.fsdp import Sharding, grad_norms, shard
from millrace.distributed.mesh import Mesh, make_mesh
from millrace.distributed.pipeline import Pipeline
from millrace.distributed.pipeline_stages import whole_row
from millrace.kernels.token_logprob import token_logprob
from millrace.models.load import Model
from millrace.models.logprobs import hidden_states, output_head, packed_context
from millrace.models.saving import full_tensors
from millrace.planner.layout import Layout
from millrace.training.optimizer import WeightOptimizer, optimizer_step
from tests.close import close_fp32, comparable_adamw
from tests.models.deep import check_refused, deep_model, weighted_batch
from tests.ranks import cases_of, run_ranks

pytestmark = [pytest.mark.world, pytest.mark.slow, pytest.mark.together]

# Segments of each micro-batch: they differ in tokens.
MICROS = {
    1: [[0, 1, 2, 3, 4, 5]],
    2: [[0, 1, 2, 3], [4, 5]],
    4: [[0], [5, 1], [2, 3], [4]],
    5: [[0], [5, 1], [2], [3], [4]],
}
# Two and five micro-batches are whole rounds of two ranks, and leave a last round of one.
CASES = [
    *(
        (architecture, chunks, micros)
        for architecture, chunks in (("llama", 1), ("gemma2", 2))
        for micros in (1, 2, 5)
    ),
    *((architecture, chunks, 5) for architecture, chunks in (("qwen3", 2), ("gemma2", 1), ("granite", 2))),
]


def loss_of(model: Model, micro: Batch, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
    """A loss that feels log-probability and entropy; beside it the log-probabilities."""
    index_N = micro.action_mask_T.nonzero()[:, 0]
    head = output_head(model)
    logprob_N, entropy_N = token_logprob(
        hidden_TD[index_N - 1], head, micro.token_T[index_N], temperature=0.7
    )
    weight_N = micro.weight_T[index_N]
    return (weight_N * (logprob_N.exp() - 0.1 * entropy_N)).sum(), logprob_N.detach()


@cache
def one_process(architecture: str, num_micros: int, *, num_steps: int = 3) -> dict[str, Tensor]:
    """Log-probabilities, gradient and norm of the first step, and the weights after all."""
    model = deep_model(architecture)
    optimizer = comparable_adamw(model, betas=(0.9, 0.99), weight_decay=0.1)
    found: dict[str, Tensor] = {}
    for step in range(num_steps):
        batch = weighted_batch(step)
        logprobs = []
        for segments in MICROS[num_micros]:
            micro = batch.select(segments)
            context = packed_context(model, micro.length_B)
            hidden_TD = hidden_states(model, micro.token_T, micro.position_T, context)
            loss, logprob_N = loss_of(model, micro, hidden_TD)
            loss.backward()
            logprobs.append(logprob_N)
        if step == 0:
            found["logprob"] = torch.cat(logprobs)
            found |= {f"gradient/{name}": p.grad.clone() for name, p in model.named_parameters()}
        norm = stepped(optimizer, Mesh(Layout(), "cpu", None))
        found.setdefault("norm", torch.tensor(norm))
    return found | {f"weight/{name}": p.detach() for name, p in model.named_parameters()}


def stepped(optimizer: WeightOptimizer, mesh: Mesh, tied: Sequence[nn.Parameter] = ()) -> float:
    """The norm of the gradient over all stages, each tied weight counted once, and a step."""
    report = optimizer_step(
        optimizer,
        learning_rate=1e-2,
        max_grad_norm=1e9,
        metrics={},
        norms=partial(grad_norms, mesh=mesh, elsewhere=tied),
    )
    return report.grad_norm


def on_ranks(mesh: Mesh, architecture: str, num_chunks: int, num_micros: int) -> dict[str, Tensor]:
    """The same by a pipeline, whose data ranks take turns in the micro-batches."""
    pipeline = Pipeline(deep_model(architecture), mesh, num_chunks=num_chunks)
    model = pipeline.model
    optimizer = comparable_adamw(model, betas=(0.9, 0.99), weight_decay=0.1)
    found: dict[str, Tensor] = {}
    mine = MICROS[num_micros][mesh.data_rank :: mesh.num_data_ranks]
    for step in range(3):
        micros = [weighted_batch(step).select(segments) for segments in mine]
        logprobs = pipeline.forward_backward(micros, partial(loss_of, model))
        for parameter in model.parameters():
            if mesh.num_data_ranks > 1:
                dist.all_reduce(parameter.grad, group=mesh.group("dp_shard"))
        if step == 0:
            if logprobs and mesh.num_data_ranks == 1:
                found["logprob"] = torch.cat(logprobs)
            gradients = [(name, p.grad) for name, p in model.named_parameters()]
            found |= {f"gradient/{name}": g.clone() for name, g in pipeline.everywhere(gradients)}
        norm = stepped(optimizer, mesh, [p for name, p in model.named_parameters() if name in pipeline.tied])
        found.setdefault("norm", torch.tensor(norm))
    found |= {f"weight/{name}": p.clone() for name, p in pipeline.everywhere(model.named_parameters())}
    for name, p in model.named_parameters():
        if name in pipeline.tied:
            found[f"weight/{pipeline.tied[name]}"] = p.detach()
    return found


def check_same(got: dict[str, Tensor], architecture: str, num_micros: int) -> None:
    expected = one_process(architecture, num_micros)
    assert expected.keys() - got.keys() <= {"logprob"} and got
    for name, tensor in got.items():
        close_fp32(tensor, expected[name])


def named(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}|{name}": tensor for name, tensor in tensors.items()}


def of(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}|"
    return {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}


def two_ranks(rank: int, cases: list[tuple[str, int, int]]) -> dict[str, Tensor]:
    mesh = make_mesh(Layout(pp=2), "cpu")
    found: dict[str, Tensor] = {}
    for case in cases:
        found |= named(" ".join(map(str, case)), on_ranks(mesh, *case))
    pipeline = Pipeline(deep_model("gemma2"), mesh, num_chunks=2)
    check_accumulates(pipeline)
    found |= named("forward", in_parts(pipeline))
    check_elsewhere(pipeline)
    check_frozen(mesh)
    check_wrapped(mesh)
    check_bfloat16(mesh)
    check_refusals(mesh, pipeline)
    check_failures(rank)
    return found


def four_ranks(rank: int) -> dict[str, Tensor]:
    wide, deep = make_mesh(Layout(pp=2, dp_shard=2), "cpu"), make_mesh(Layout(pp=4), "cpu")
    found = named("data", on_ranks(wide, "gemma2", 2, 5))
    for num_micros in (1, 5):
        found |= named(f"deep {num_micros}", on_ranks(deep, "gemma2", 1, num_micros))
    for architecture, num_chunks in SHARDED:
        found |= named(f"{architecture} {num_chunks}", sharded(wide, architecture, num_chunks))
    return found


SHARDED = [("gemma2", 1), ("qwen3", 2)]


def sharded(mesh: Mesh, architecture: str, num_chunks: int) -> dict[str, Tensor]:
    """Weights after three steps where the weights of a stage are shared out among the data ranks."""
    sharding = Sharding(precision=None, reshard_after_forward=True, offload=False, checkpointing="full")
    wrap = partial(shard, mesh=mesh, sharding=sharding)
    pipeline = Pipeline(deep_model(architecture), mesh, num_chunks=num_chunks, wrap=wrap)
    model = pipeline.model
    optimizer = comparable_adamw(model, betas=(0.9, 0.99), weight_decay=0.1)
    elsewhere = [p for name, p in model.named_parameters() if name in pipeline.tied]
    found = {}
    for step in range(3):
        micros = [weighted_batch(step).select(segments) for segments in MICROS[4][mesh.data_rank :: 2]]
        pipeline.forward_backward(micros, partial(loss_of, model))
        found.setdefault("norm", torch.tensor(stepped(optimizer, mesh, elsewhere)))
    weights = pipeline.everywhere(full_tensors(model))
    return found | {f"weight/{name}": weight.clone() for name, weight in weights}


def check_accumulates(pipeline: Pipeline) -> None:
    """Two calls add up, and the tied gradient of the first is not exchanged again by the second."""
    model = pipeline.model
    loss = partial(loss_of, model)
    one, other = weighted_batch(0), weighted_batch(1)
    gradients = []
    for calls in ([[one, other]], [[one], [other]]):
        for micros in calls:
            pipeline.forward_backward(micros, loss)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        model.zero_grad(set_to_none=True)
    for name, gradient in gradients[0].items():
        assert float(gradient.abs().max()) > 1e-4
        close_fp32(gradients[1][name], gradient)


def in_parts(pipeline: Pipeline) -> dict[str, Tensor]:
    """Log-probabilities without gradient."""
    model = pipeline.model
    micros = [weighted_batch(0).select(segments) for segments in MICROS[5]]
    whole = pipeline.forward(micros, lambda micro, hidden_TD: loss_of(model, micro, hidden_TD)[1])
    assert len(whole) == (5 if pipeline.rank == 1 else 0)
    assert all(not logprob_N.requires_grad for logprob_N in whole)
    return {f"logprob{index}": logprob_N for index, logprob_N in enumerate(whole)}


def check_elsewhere(pipeline: Pipeline) -> None:
    """Each rank says where a weight is, and nobody can compute with what he lacks."""
    model = pipeline.model
    mine = {name for name, rank in pipeline.holders.items() if rank == pipeline.rank}
    held = {name for name, _ in model.named_parameters()}
    assert held - mine == ({"lm_head.weight"} if pipeline.rank == 1 else set())
    assert mine <= held
    assert pipeline.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    # Stages 0 and 2 are rank 0's.
    layers = {name.split(".")[2] for name in held if ".layers." in name}
    assert layers == ({"0", "2"} if pipeline.rank == 0 else {"1", "3"})
    row = whole_row(model, weighted_batch(0))
    check_refused(
        RuntimeError,
        "on another rank of the pipeline",
        lambda: hidden_states(model, row.token_T, row.position_T, row.context),
    )


def check_frozen(mesh: Mesh) -> None:
    """A first stage without a weight to train passes on, and the others learn as before."""
    gradients = []
    for frozen in (False, True):
        pipeline = Pipeline(deep_model("llama"), mesh)
        if pipeline.rank == 0:
            pipeline.model.requires_grad_(not frozen)
        pipeline.forward_backward([weighted_batch(0)], partial(loss_of, pipeline.model))
        gradients.append({name: p.grad for name, p in pipeline.model.named_parameters()})
    for name, gradient in gradients[0].items():
        if pipeline.rank == 0:
            assert gradients[1][name] is None
        else:
            assert torch.equal(gradients[1][name], gradient)


def check_wrapped(mesh: Mesh) -> None:
    """Whatever a rank computes, the loss too, is computed within what was put around its stages."""
    inside = []

    def wrap(model: Model) -> Any:
        def run(compute: Any) -> Any:
            inside.append(True)
            made = compute(model)
            inside.pop()
            return made

        return run

    pipeline = Pipeline(deep_model("llama"), mesh, wrap=wrap)

    def loss(micro: Batch, hidden_TD: Tensor) -> tuple[Tensor, bool]:
        return loss_of(pipeline.model, micro, hidden_TD)[0], inside == [True]

    assert pipeline.forward_backward([weighted_batch(0)], loss) == [True] * pipeline.rank


def check_bfloat16(mesh: Mesh) -> None:
    """The numbers travel as they are: bit for bit those of one process."""
    micro = weighted_batch(0)
    pipeline = Pipeline(deep_model("qwen3", dtype=torch.bfloat16), mesh)
    (hidden_TD,) = pipeline.forward([micro], lambda micro, hidden_TD: hidden_TD) or [None]
    if pipeline.rank == 1:
        whole = deep_model("qwen3", dtype=torch.bfloat16)
        context = packed_context(whole, micro.length_B)
        with torch.no_grad():
            expected_TD = hidden_states(whole, micro.token_T, micro.position_T, context)
        assert hidden_TD.dtype == torch.bfloat16
        assert torch.equal(hidden_TD, expected_TD)


def check_refusals(mesh: Mesh, pipeline: Pipeline) -> None:
    check_refused(ValueError, "was given no micro-batch", lambda: pipeline.forward([], lambda *_: 0))
    model = deep_model("llama")
    check_refused(ValueError, "num_chunks is 0", lambda: Pipeline(model, mesh, num_chunks=0))
    check_refused(
        ValueError,
        "6 stages needs as many layers, but the model has 4",
        lambda: Pipeline(model, mesh, num_chunks=3),
    )
    one = other_mesh(0, 1, None)
    check_refused(ValueError, "mesh.pp is 1; a pipeline needs at least 2", lambda: Pipeline(model, one))
    spread = other_mesh(0, 2, mesh.group("pp"), num_context_ranks=4)
    check_refused(
        ValueError,
        "mesh.pp is 2 and mesh.cp is 4; the stages of a pipeline compute whole rows, so set one of them to 1",
        lambda: Pipeline(model, spread),
    )
    local = list(pipeline.model.named_parameters())
    if pipeline.rank == 0:
        # Rank 0 has the first weight, so nobody has begun to wait.
        check_refused(
            ValueError,
            "weight model.embed_tokens.weight, (40, 32) torch.float32, was to be sent from pipeline rank 0; "
            "it was given model.layers.0",
            lambda: next(pipeline.everywhere(local[1:])),
        )


def other_mesh(rank: int, num_ranks: int, group: Any, *, num_context_ranks: int = 1) -> Any:
    """As a mesh to a pipeline, with a group of its own."""
    return SimpleNamespace(
        group=lambda name: group,
        size=lambda name: {"pp": num_ranks, "cp": num_context_ranks}[name],
        rank=lambda name: rank,
        device=torch.device("cpu"),
    )


def check_failures(rank: int) -> None:
    """A rank that fails says where, and leaves the other waiting no longer than the group's timeout."""
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=5)) for _ in range(2)]
    micros = [weighted_batch(0).select(segments) for segments in MICROS[5]]
    pipeline = Pipeline(deep_model("llama"), other_mesh(rank, 2, groups[0]))
    narrow = Pipeline(deep_model("llama"), other_mesh(rank, 2, groups[1]), dtype=torch.bfloat16)

    def failing(micro: Batch, hidden_TD: Tensor) -> tuple[Tensor, None]:
        if micro.num_tokens == micros[1].num_tokens:
            raise ZeroDivisionError("no such loss")
        return loss_of(pipeline.model, micro, hidden_TD)[0], None

    # Together, so that neither waits for the other before it is meant to.
    dist.barrier()
    with pytest.raises((RuntimeError, ZeroDivisionError)) as caught:
        pipeline.forward_backward(micros, failing)
    said = str(caught.value)
    if rank == 1:
        assert caught.value.__notes__ == ["in the pipeline: forward of micro-batch 1 on stage 1"]
    else:
        assert "in the pipeline stage 0 got no gradient of micro-batch 1 from stage 1" in said, said

    dist.barrier()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        narrow.forward(micros, lambda *_: None)
    said = str(caught.value)
    if rank == 0:
        assert "are torch.float32, but the pipeline was made for torch.bfloat16" in said, said
    else:
        assert "in the pipeline stage 1 got no hidden states of micro-batch 0 from stage 0" in said, said


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> list[dict[str, Tensor]]:
    return run_ranks(2, two_ranks, cases_of(request, "architecture", "num_chunks", "num_micros"))


@pytest.fixture(scope="module")
def four() -> list[dict[str, Tensor]]:
    return run_ranks(4, four_ranks)


@pytest.mark.parametrize(("architecture", "num_chunks", "num_micros"), CASES)
def test_two_ranks_train_as_one_process(two, architecture, num_chunks, num_micros):
    for rank in range(2):
        got = of(f"{architecture} {num_chunks} {num_micros}", two[rank])
        assert ("logprob" in got) == (rank == 1)
        check_same(got, architecture, num_micros)


def test_a_forward_alone_gives_the_log_probabilities_of_one_process(two):
    expected_N = one_process("gemma2", 5, num_steps=1)["logprob"]
    got = of("forward", two[1])
    close_fp32(torch.cat([got[f"logprob{index}"] for index in range(5)]), expected_N)


@pytest.mark.parametrize("rank", range(4))
def test_two_pipelines_with_other_segments_train_as_one_process(four, rank):
    check_same(of("data", four[rank]), "gemma2", 5)


@pytest.mark.parametrize(("architecture", "num_chunks"), SHARDED)
@pytest.mark.parametrize("rank", range(4))
def test_two_pipelines_that_share_out_their_weights_train_as_one_process(
    four, rank, architecture, num_chunks
):
    got, expected = of(f"{architecture} {num_chunks}", four[rank]), one_process(architecture, 4)
    assert {name for name in expected if name.startswith("weight/")} | {"norm"} == got.keys()
    for name, tensor in got.items():
        close_fp32(tensor, expected[name])


@pytest.mark.parametrize("num_micros", [1, 5])
@pytest.mark.parametrize("rank", range(4))
def test_four_stages_train_as_one_process_with_fewer_micro_batches_than_stages_too(four, rank, num_micros):
    check_same(of(f"deep {num_micros}", four[rank]), "gemma2", num_micros)
