from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from millrace.distributed.mesh import Mesh, make_mesh
from millrace.errors import PlanError
from millrace.models.load import fresh_config
from millrace.planner.layout import DIMENSIONS, Layout
from tests.models.tiny import SHAPES, SIZES, WITHOUT, tiny_model


def _config(architecture: str, **changes: int):
    shape = {**SIZES, **SHAPES[architecture], **changes}
    shape = {key: value for key, value in shape.items() if key not in WITHOUT.get(architecture, ())}
    return fresh_config(architecture, shape, vocab_size=40, eos_token_id=0)


@contextmanager
def _as_rank(rank: int, num_ranks: int) -> Iterator[None]:
    """One rank of a group whose other ranks do not exist: enough to see who would talk to whom."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


LAYOUTS = [
    Layout(dp_replicate=2, dp_shard=2, cp=2),
    Layout(pp=2, dp_shard=4, tp=3, ep=2),
    Layout(dp_replicate=2, dp_shard=6, ep=3, tp=2),
    Layout(dp_replicate=2, cp=3, tp=2),
    Layout(pp=3, tp=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_groups_of_every_rank_are_those_that_differ_from_it_along_one_dimension(layout):
    places = [layout.coordinates(rank) for rank in range(layout.num_ranks)]
    for rank in range(0, layout.num_ranks, 5):
        with _as_rank(rank, layout.num_ranks):
            mesh = make_mesh(layout, "cpu")
            for name in DIMENSIONS:
                others = set(DIMENSIONS) - {name}
                along = [
                    r for r, place in enumerate(places) if all(place[o] == places[rank][o] for o in others)
                ]
                _check_group(mesh, name, along)
            part = [
                r
                for r in _along(places, rank, "dp_shard")
                if _part(places[r], layout) == _part(places[rank], layout)
            ]
            _check_group(mesh, "ep", part)
            assert {name: mesh.rank(name) for name in places[rank]} == places[rank]


def _along(places, rank, name):
    others = set(DIMENSIONS) - {name}
    return [r for r, place in enumerate(places) if all(place[o] == places[rank][o] for o in others)]


def _part(place, layout):
    return place["dp_shard"] // layout.ep


def _check_group(mesh: Mesh, name: str, expected: list[int]) -> None:
    group = mesh.group(name)
    assert mesh.size(name) == len(expected)
    if len(expected) == 1:
        assert group is None
    else:
        assert dist.get_process_group_ranks(group) == expected


def test_weights_are_shared_among_the_ranks_that_see_other_tokens():
    with _as_rank(5, 16):
        mesh = make_mesh(Layout(dp_replicate=2, dp_shard=2, cp=2, tp=2), "cpu")
        assert mesh.weights.mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]
        assert (mesh.data_rank, mesh.num_data_ranks) == (1, 4)
        assert mesh.expert_weights is mesh.weights
        assert mesh.experts is None
    with _as_rank(5, 8):
        mesh = make_mesh(Layout(dp_shard=2, cp=2, tp=2), "cpu")
        assert mesh.weights.mesh.tolist() == [1, 3, 5, 7]
        assert (mesh.data_rank, mesh.num_data_ranks) == (1, 2)


def test_experts_are_shared_among_the_ranks_that_hold_the_same_ones():
    with _as_rank(9, 16):
        mesh = make_mesh(Layout(dp_replicate=2, dp_shard=4, tp=2, ep=2), "cpu")
        assert mesh.weights.mesh.tolist() == [[1, 3, 5, 7], [9, 11, 13, 15]]
        assert mesh.expert_weights.mesh.tolist() == [[1, 5], [9, 13]]
        assert mesh.experts.mesh.tolist() == [9, 11]
        assert (mesh.data_rank, mesh.num_data_ranks) == (4, 8)
    with _as_rank(3, 4):
        mesh = make_mesh(Layout(dp_shard=4, ep=2), "cpu")
        assert mesh.expert_weights.mesh.tolist() == [1, 3]


def test_one_process_needs_no_group():
    mesh = make_mesh(Layout(), "cpu")
    assert mesh.weights is None
    assert mesh.group("tp") is None
    assert (mesh.data_rank, mesh.num_data_ranks, mesh.size("ep"), mesh.rank("pp")) == (0, 1, 1, 0)
    mine = torch.tensor([2.5])
    total = mesh.sum_over(mine, *DIMENSIONS)
    assert total.item() == 2.5
    assert total is not mine
    with pytest.raises(PlanError, match="^the layout tp=2 needs 2 ranks, and there are 1;"):
        make_mesh(Layout(tp=2), "cpu")


def test_a_mesh_is_of_as_many_ranks_as_there_are():
    with (
        _as_rank(0, 3),
        pytest.raises(PlanError, match="^the layout dp_shard=4 needs 4 ranks, and there are 3;"),
    ):
        make_mesh(Layout(dp_shard=4), "cpu")


@pytest.mark.parametrize("ask", ["size", "rank", "group"])
def test_a_dimension_that_is_not_there_is_named(ask):
    sentence = "^the mesh has no dimension 'dp'; it has pp, dp_replicate, dp_shard, cp, tp, ep$"
    with pytest.raises(ValueError, match=sentence):
        getattr(make_mesh(Layout(), "cpu"), ask)("dp")


@pytest.mark.parametrize(
    ("layout", "architecture", "changes", "sentence"),
    [
        (Layout(tp=3), "llama", {}, "mesh.tp is 3, which does not divide the model's 4 attention heads; "),
        (Layout(tp=4), "llama", {}, "mesh.tp is 4, which does not divide the model's 2 key heads; "),
        (
            Layout(tp=4),
            "llama",
            {"num_key_value_heads": 4, "intermediate_size": 50},
            "mesh.tp is 4, which does not divide the model's 50 numbers across an MLP; choose a tp that "
            "divides 2",
        ),
        (
            Layout(tp=3),
            "gpt_neox",
            {"num_attention_heads": 6, "hidden_size": 36},
            "mesh.tp is 3, which does not divide the model's 40 tokens in the vocabulary; choose a tp that",
        ),
        (Layout(pp=3), "llama", {}, "mesh.pp is 3, but the model has 2 layers; choose a pp of at most that"),
        (Layout(dp_shard=2, ep=2), "llama", {}, "mesh.ep is 2, but the model has no experts; set mesh.ep to"),
        (
            Layout(dp_shard=3, ep=3),
            "mixtral",
            {},
            "mesh.ep is 3, which does not divide the model's 4 experts; choose an ep that does",
        ),
    ],
)  # fmt: skip
def test_a_model_that_the_layout_does_not_divide_is_refused(layout, architecture, changes, sentence):
    with pytest.raises(PlanError, match=f"^{sentence}"):
        Mesh(layout, "cpu", None).check(_config(architecture, **changes))


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("architecture", SHAPES)
def test_a_model_that_the_layout_divides_is_taken(architecture):
    experts = "moe" in architecture or architecture == "mixtral"
    layout = Layout(pp=2, tp=2, dp_replicate=3, dp_shard=4, ep=4 if experts else 1)
    assert Mesh(layout, "cpu", None).check(tiny_model(architecture).config) is None
