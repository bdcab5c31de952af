from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from millrace.data.batch import Batch
from millrace.distributed.context import Kind, deal, shard_row
from millrace.distributed.mesh import Mesh, make_mesh
from millrace.distributed.ring import Ring
from millrace.distributed.ulysses import Ulysses
from millrace.kernels.token_logprob import Supports, token_logprob
from millrace.models import logprobs
from millrace.models.attention import Packed
from millrace.models.facts import LayerFacts
from millrace.models.fused import set_deterministic
from millrace.models.load import Model
from millrace.planner.layout import Layout
from tests.close import close_fp32
from tests.models.families import bold_family
from tests.models.tiny import VOCABULARY, random_batch, tiny_model
from tests.ranks import cases_of, run_ranks

pytestmark = pytest.mark.together

KINDS: tuple[Kind, ...] = ("ulysses", "ring")
# Mistral has a window, Gemma 2 one in every other layer and caps on its scores.
ARCHITECTURES = ("llama", "qwen3", "mistral", "gemma2", "qwen3_moe")
# Values narrower than keys; chunks, and positions that layers ask a cache for; keys of other layers.
FURTHER = ("minicpm3", "llama4_text", "gemma3n_text")


def weighted(batch: Batch) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return replace(batch, weight_T=torch.randn(batch.num_tokens, generator=generator) / batch.num_tokens)


def row(seed: int, lengths: list[int], *, chosen: float = 0.7, support: bool = False) -> Batch:
    """Random tokens in segments of these lengths, a share of them chosen, and supports where asked."""
    generator = torch.Generator().manual_seed(seed)
    length_B = torch.tensor(lengths)
    num_tokens = int(length_B.sum())
    position_T = torch.cat([torch.arange(n) for n in lengths])
    token_T = torch.randint(0, VOCABULARY, (num_tokens,), generator=generator)
    mask_T = (torch.rand(num_tokens, generator=generator) < chosen) & (position_T > 0)
    zero_T = torch.zeros(num_tokens)
    supports = None
    if support:
        # Each token and the next ones of the vocabulary; every third token has the whole.
        count_T = torch.arange(num_tokens) % 3 * 5
        offset_M = torch.cat([torch.arange(int(count)) for count in count_T])
        supports = Supports((token_T.repeat_interleave(count_T) + offset_M) % VOCABULARY, count_T)
    batch = Batch(
        token_T=token_T,
        position_T=position_T,
        segment_T=torch.arange(len(lengths)).repeat_interleave(length_B),
        action_mask_T=mask_T,
        sampler_logprob_T=zero_T,
        version_T=torch.zeros(num_tokens, dtype=torch.int64),
        reward_T=zero_T,
        advantage_T=zero_T,
        weight_T=zero_T,
        support=supports,
    )
    return weighted(batch)


ROWS: dict[str, Batch] = {
    "uneven": row(0, [1, 37, 5, 1, 2, 18, 7]),
    "trajectories": weighted(random_batch(1)),
    "supports": row(1, [9, 1, 22], support=True),
    "few": row(2, [1, 2], chosen=1.0),  # fewer tokens than four ranks
    "lonely": row(3, [1, 30], chosen=0.04),
    "nothing": row(4, [6, 3], chosen=0.0),
}


def pieces(model: Model, batch: Batch, logprob_N: Tensor, entropy_N: Tensor) -> dict[str, Tensor]:
    """What training takes from a forward and a backward."""
    weight_N = batch.weight_T[batch.action_mask_T]
    loss = (weight_N * (logprob_N + 0.3 * entropy_N)).sum()
    model.zero_grad()
    loss.backward()
    found = {"logprob": logprob_N, "entropy": entropy_N, "loss": loss}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None or "experts" in name, name
        found[f"gradient of {name}"] = (
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        )
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def one_process(model: Model, batch: Batch) -> dict[str, Tensor]:
    return pieces(model, batch, *logprobs.chosen_logprobs(model, batch, temperature=0.8))


def predicting(batch: Batch) -> Tensor:
    """The tokens that the chosen ones are predicted from."""
    return batch.action_mask_T.nonzero()[:, 0] - 1


def chosen_logprobs(
    model: Model, batch: Batch, mesh: Mesh, *, kind: Kind, temperature: float
) -> tuple[Tensor, Tensor]:
    """As `models.logprobs.chosen_logprobs`, over the ranks along `cp`."""
    share = shard_row(model, batch, mesh, predicting(batch), kind=kind)
    target_N, support = batch.token_T[batch.action_mask_T], batch.chosen_support
    logprob_M, entropy_M = token_logprob(
        share.hidden(model),
        logprobs.output_head(model),
        target_N[share.read_M],
        temperature=temperature,
        support=None if support is None else support[share.read_M],
    )
    return share.gather(logprob_M), share.gather(entropy_M)


def spread(model: Model, batch: Batch, mesh: Mesh, kind: Kind) -> dict[str, Tensor]:
    return pieces(model, batch, *chosen_logprobs(model, batch, mesh, kind=kind, temperature=0.8))


def together(ranks: list[dict[str, Tensor]], prefix: str, what: str) -> list[Tensor]:
    """A number of each rank, or the sum of a gradient's parts."""
    parts = [found[f"{prefix} {what}"] for found in ranks]
    return [torch.stack(parts).sum(0)] if what.startswith("gradient") else parts


def trials() -> list[tuple[str, str]]:
    """Every architecture on one row, and one architecture on every row."""
    return [(architecture, "uneven") for architecture in (*ARCHITECTURES, *FURTHER)] + [
        ("gemma2", name) for name in ROWS if name != "uneven"
    ]


def model_of(architecture: str) -> Model:
    # In float32, rounding of the large gradients of bold weights is beyond the tolerance on some processors.
    return bold_family(architecture).double() if architecture in FURTHER else tiny_model(architecture)


def ranks_compute(rank: int, num_ranks: int, cases: list[tuple[str, str]]) -> dict[str, Tensor]:
    mesh = make_mesh(Layout(cp=num_ranks), "cpu")
    found = {}
    for architecture, name in cases:
        model = model_of(architecture)
        for kind in KINDS:
            for what, tensor in spread(model, ROWS[name], mesh, kind).items():
                found[f"{kind} {architecture} {name} {what}"] = tensor
    narrow = tiny_model("llama", dtype=torch.bfloat16)
    for kind in KINDS:
        for what, tensor in spread(narrow, ROWS["uneven"], mesh, kind).items():
            found[f"{kind} bfloat16 {what}"] = tensor
    found["deterministic"] = deterministic_logprobs(mesh)
    check_ulysses_refuses_heads_that_ranks_do_not_divide(mesh)
    check_ranks_refuse_batches_that_differ(mesh)
    return found


def deterministic_logprobs(mesh: Mesh | None = None) -> Tensor:
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    set_deterministic(model)
    batch = ROWS["uneven"]
    with torch.no_grad():
        if mesh is None:
            return logprobs.chosen_logprobs(model, batch, temperature=1.0)[0]
        return chosen_logprobs(model, batch, mesh, kind="ulysses", temperature=1.0)[0]


def check_ulysses_refuses_heads_that_ranks_do_not_divide(mesh: Mesh) -> None:
    batch = ROWS["uneven"]
    context = shard_row(tiny_model("llama"), batch, mesh, predicting(batch), kind="ulysses").context
    assert isinstance(context, Ulysses)
    layer, x_THK = LayerFacts("layer", None, None, None, (0,), writes=True), torch.zeros(1, 5, 4)
    with pytest.raises(ValueError) as error:
        context.attend(layer, (x_THK, x_THK, x_THK), {})
    assert str(error.value) == (
        f"mesh.cp is {mesh.size('cp')}, which does not divide the 5 query heads that ulysses deals out; "
        "choose a cp that does, or the kind ring"
    )


def check_ranks_refuse_batches_that_differ(mesh: Mesh) -> None:
    token_T, num_ranks = torch.tensor([5, 6, 7]), mesh.size("cp")
    token_T[2] += mesh.rank("cp") // (num_ranks - 1)  # the last rank's alone
    batch = replace(row(0, [1, 2], chosen=1.0), token_T=token_T)
    with pytest.raises(ValueError) as error:
        shard_row(tiny_model("llama"), batch, mesh, predicting(batch), kind="ring")
    assert str(error.value) == (
        f"the ranks along mesh.cp have rows of {[3] * num_ranks} tokens, {[2] * num_ranks} segments and "
        f"{[1] * num_ranks} tokens that are read, with checksums {[38] * (num_ranks - 1) + [41]}; give all "
        "of them the same row"
    )


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Tensor]]:
    """What each of two ranks computed, and of four."""
    return run_ranks(request.param, ranks_compute, request.param, cases_of(request, "architecture", "name"))


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize(("architecture", "name"), trials())
def test_ranks_compute_what_one_process_does(
    ranks: list[dict[str, Tensor]], architecture: str, name: str
) -> None:
    expected = one_process(model_of(architecture), ROWS[name])
    for kind in KINDS:
        for what, tensor in expected.items():
            for found in together(ranks, f"{kind} {architecture} {name}", what):
                close_fp32(found, tensor, atol=1e-5)


@pytest.mark.slow
@pytest.mark.world
def test_narrow_weights_are_trained_as_well(ranks: list[dict[str, Tensor]]) -> None:
    """As close as bfloat16 in one process is to float32."""
    expected = one_process(tiny_model("llama", dtype=torch.bfloat16).float(), ROWS["uneven"])
    narrow = one_process(tiny_model("llama", dtype=torch.bfloat16), ROWS["uneven"])
    for kind in KINDS:
        ours = {what: together(ranks, f"{kind} bfloat16", what)[0] for what in expected}
        assert ours["gradient of lm_head.weight"].dtype == torch.bfloat16
        assert distance(ours, expected) < 1.5 * distance(narrow, expected)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(sum((one[what] - other[what]).square().sum() for what in other)) ** 0.5


@pytest.mark.slow
@pytest.mark.world
def test_ulysses_keeps_every_bit_of_a_deterministic_model(ranks: list[dict[str, Tensor]]) -> None:
    expected = deterministic_logprobs()
    for found in ranks:
        assert torch.equal(found["deterministic"], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_computes_the_plain_forward(kind: Kind) -> None:
    model, batch, mesh = tiny_model("llama"), ROWS["supports"], make_mesh(Layout(), "cpu")
    share = shard_row(model, batch, mesh, predicting(batch), kind=kind)
    assert isinstance(share.context, Packed) and torch.equal(share.token_T, batch.token_T)
    expected = one_process(model, batch)
    found = pieces(model, batch, *chosen_logprobs(model, batch, mesh, kind=kind, temperature=0.8))
    for what, tensor in expected.items():
        assert torch.equal(found[what], tensor), what


def test_a_kind_that_there_is_not_is_refused() -> None:
    kind: Any = "rings"
    with pytest.raises(ValueError) as error:
        shard_row(tiny_model("llama"), ROWS["uneven"], make_mesh(Layout(), "cpu"), torch.arange(2), kind=kind)
    assert str(error.value) == "kind is 'rings'; context parallelism is ulysses or ring"


def test_a_deterministic_model_is_refused_by_the_ring() -> None:
    model = tiny_model("llama")
    set_deterministic(model)
    with pytest.raises(ValueError) as error:
        shard_row(model, ROWS["uneven"], make_mesh(Layout(), "cpu"), torch.arange(2), kind="ring")
    assert str(error.value) == (
        "a deterministic model cannot use kind ring, whose sums depend on the ranks; use ulysses"
    )


def test_the_first_and_the_last_chunk_go_to_the_first_rank() -> None:
    dealt = deal(torch.tensor([8, 1, 5]), 2)
    # The odd token of each segment goes to the rank with fewer tokens.
    assert [place_T.tolist() for place_T in dealt] == [[0, 1, 6, 7, 8, 9, 13], [2, 3, 4, 5, 10, 11, 12]]
    assert [place_T.tolist() for place_T in deal(torch.tensor([1, 1]), 3)] == [[0], [1], []]
    assert torch.equal(deal(torch.tensor([4, 9]), 1)[0], torch.arange(13))


def causal_work(place_T: Tensor, length_B: Tensor) -> int:
    first_W = (length_B.cumsum(0) - length_B).repeat_interleave(length_B)
    return int((place_T - first_W[place_T] + 1).sum())


@pytest.mark.slow_beyond(12)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(10))
def test_ranks_share_tokens_and_causal_work_evenly(seed: int, num_ranks: int) -> None:
    """Long-tailed lengths: half below 400, the longest of some thousands."""
    generator = torch.Generator().manual_seed(seed)
    length_B = (6 + 1.2 * torch.randn(16, generator=generator)).exp().long().clamp(min=1)
    dealt = deal(length_B, num_ranks)
    assert torch.equal(torch.cat(dealt).sort().values, torch.arange(int(length_B.sum())))
    assert all(bool((place_T.diff() > 0).all()) for place_T in dealt)
    counts = [len(place_T) for place_T in dealt]
    assert max(counts) - min(counts) <= 1
    work = [causal_work(place_T, length_B) for place_T in dealt]
    assert max(work) < 1.01 * sum(work) / num_ranks


class Alone:
    """A group of which only the rank is asked."""

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("lengths", "window", "hops"),
    [
        ([30], None, [2, 1, 0]),
        ([30], 3, [1, 1, 0]),
        ([30], 1, [0, 0, 0]),
        ([30], 12, [2, 1, 0]),  # token 20 sees token 9
        ([30], 11, [1, 1, 0]),
        ([10, 10, 10], None, [0, 0, 0]),
        ([10, 20], None, [0, 1, 0]),
    ],
)
def test_keys_travel_no_further_than_they_are_seen(
    lengths: list[int], window: int | None, hops: list[int]
) -> None:
    group: Any = Alone()
    ring = Ring(torch.tensor(lengths), list(torch.arange(30).split(10)), group)
    plan = ring.plan(window, None, torch.device("cpu"))
    assert plan.hops_P == hops
    assert [bool(tiles.rectangles) for tiles in plan.tiles_P] == [True, False, False]
    assert ring.plan(window, None, torch.device("cpu")) is plan
