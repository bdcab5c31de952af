"""How ranks are laid out, in numbers: what is refused, who stands where, and what divides a model."""

from __future__ import annotations

import re

import pytest

from millrace.cli.main import MISUSED, exit_code
from millrace.errors import PlanError
from millrace.planner.layout import DIMENSIONS, Layout
from millrace.planner.model_shape import ModelShape
from tests.planner import shapes

LLAMA = ModelShape.of(shapes.LLAMA_8B)
MIXTURE = ModelShape.of(shapes.MIXTRAL)
NAMES = ["dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"]


def test_a_layout_is_read_and_written():
    layout = Layout.parse(" dp_shard=4, tp=2 ,ep=2")
    assert layout == Layout(dp_shard=4, tp=2, ep=2)
    assert str(layout) == "dp_shard=4,tp=2,ep=2"
    assert str(Layout()) == "dp_shard=1"


def test_a_layout_is_that_of_a_recipes_mesh_and_sets_it():
    sizes = dict(zip(NAMES, (3, 2, 4, 5, 1, 2), strict=True))
    layout = Layout.of({**sizes, "offload": True, "compute_dtype": None})
    assert layout == Layout(dp_replicate=3, dp_shard=2, tp=4, pp=5, ep=2)
    assert layout.settings() == {f"mesh.{name}": size for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dp_shard", "the layout has 'dp_shard'; write it like dp_shard=4,tp=2"),
        ("tp=two", "the layout has 'tp=two'; write it like dp_shard=4,tp=2"),
        ("dp_shrad=2", "the layout has dp_shrad; did you mean dp_shard?"),
        ("zero=3", "the layout has zero; there are: dp_replicate, dp_shard, tp, pp, cp, ep"),
        ("tp=2,tp=4", "the layout has tp twice; keep one"),
        ("tp=0", "mesh.tp is 0; it must be at least 1, which means not split"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused(text, sentence):
    with pytest.raises(PlanError) as refused:
        Layout.parse(text)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("name", NAMES)
def test_a_dimension_below_1_is_refused(name):
    with pytest.raises(PlanError, match=f"^mesh.{name} is 0; it must be at least 1, which means not split$"):
        Layout(**{name: 0})


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        (
            {"dp_shard": 6, "ep": 4},
            "mesh.ep is 4, which does not divide mesh.dp_shard 6: experts are dealt over a part of it; make "
            "dp_shard a multiple of ep",
        ),
        ({"dp_shard": 2, "ep": 2, "cp": 3}, "mesh.ep is 2 and mesh.cp is 3; set one of them to 1"),
        (
            {"pp": 2, "cp": 4},
            "mesh.pp is 2 and mesh.cp is 4; the stages of a pipeline compute whole segments, so set one of "
            "them to 1",
        ),
    ],
)
def test_dimensions_that_do_not_go_together_are_refused(sizes, sentence):
    with pytest.raises(PlanError) as refused:
        Layout(**sizes)
    assert str(refused.value) == sentence
    # A mistake in a recipe, which ends with a sentence and not with a traceback.
    assert exit_code(refused.value) == MISUSED


def test_experts_take_no_ranks_of_their_own():
    layout = Layout(dp_replicate=3, dp_shard=4, tp=5, pp=7, ep=2)
    assert (layout.num_ranks, layout.num_data_ranks) == (3 * 4 * 5 * 7, 12)
    assert Layout(dp_shard=2, cp=11).num_ranks == 22


def test_a_number_of_ranks_that_is_not_the_layouts_is_refused():
    Layout(dp_shard=2, tp=2).check_ranks(4)
    with pytest.raises(PlanError) as refused:
        Layout(dp_shard=2, tp=2).check_ranks(2)
    sentence = "the layout dp_shard=2,tp=2 needs 4 ranks, and there are 2; change one or the other"
    assert str(refused.value) == sentence


def test_neighbouring_ranks_differ_in_the_last_dimension_first():
    layout = Layout(pp=2, dp_replicate=3, dp_shard=4, tp=5, ep=2)
    assert layout.coordinates(0) == dict.fromkeys((*DIMENSIONS, "ep"), 0)
    expected = {"pp": 1, "dp_replicate": 0, "dp_shard": 3, "cp": 0, "tp": 2, "ep": 1}
    assert layout.coordinates(1 * 60 + 0 * 20 + 3 * 5 + 2) == expected
    with pytest.raises(ValueError, match="^rank is 120, but the layout .* has ranks 0 to 119$"):
        layout.coordinates(120)
    with pytest.raises(ValueError, match="^rank is -1, but the layout"):
        layout.coordinates(-1)


def test_the_table_says_where_each_rank_stands():
    assert Layout(dp_shard=4, tp=2, ep=2).table() == (
        "rank  dp_shard  tp  ep\n"
        "   0         0   0   0\n"
        "   1         0   1   0\n"
        "   2         1   0   1\n"
        "   3         1   1   1\n"
        "   4         2   0   0\n"
        "   5         2   1   0\n"
        "   6         3   0   1\n"
        "   7         3   1   1"
    )
    assert Layout().table() == "rank\n   0"


def test_the_table_of_many_ranks_has_a_line_for_each_dimension():
    assert len(Layout(dp_shard=16).table().splitlines()) == 17
    layout = Layout(pp=2, dp_shard=8, tp=4, ep=2)
    assert layout.table() == (
        "dimension  ranks  apart\n"
        "       pp      2     32\n"
        " dp_shard      8      4\n"
        "       tp      4      1\n"
        "       ep      2      4"
    )
    here = layout.coordinates(0)
    for name, apart in (("pp", 32), ("dp_shard", 4), ("tp", 1)):
        assert layout.coordinates(apart) == here | {name: 1} | ({"ep": 1} if name == "dp_shard" else {})


@pytest.mark.parametrize(
    ("shape", "layout", "sentence"),
    [
        (
            LLAMA,
            Layout(tp=3),
            "mesh.tp is 3, which does not divide the model's 32 attention heads; choose a tp that divides 8",
        ),
        (LLAMA, Layout(tp=16), "mesh.tp is 16, which does not divide the model's 8 key heads; choose a tp"),
        (
            ModelShape.of(shapes.LLAMA_8B | {"vocab_size": 128_257}),
            Layout(tp=2),
            "mesh.tp is 2, which does not divide the model's 128257 tokens in the vocabulary; choose a tp "
            "that divides 1",
        ),
        (
            ModelShape.of(shapes.LLAMA_8B | {"intermediate_size": 14_340}),
            Layout(tp=8),
            "mesh.tp is 8, which does not divide the model's 14340 numbers across an MLP; choose a tp that "
            "divides 4",
        ),
        (LLAMA, Layout(pp=33), "mesh.pp is 33, but the model has 32 layers; choose a pp of at most that"),
        (LLAMA, Layout(dp_shard=2, ep=2), "mesh.ep is 2, but the model has no experts; set mesh.ep to 1"),
        (
            MIXTURE,
            Layout(dp_shard=3, ep=3),
            "mesh.ep is 3, which does not divide the model's 8 experts; choose an ep that does",
        ),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(shape, layout, sentence):
    assert layout.misfit(shape).startswith(sentence)
    with pytest.raises(PlanError, match=f"^{re.escape(sentence)}"):
        layout.check(shape)


def test_a_layout_that_divides_the_model_passes():
    assert Layout(tp=8, pp=32).misfit(LLAMA) is None
    assert Layout(dp_shard=8, ep=8, tp=8).misfit(MIXTURE) is None
    # Experts stay whole, so their width need not divide.
    odd = ModelShape.of(shapes.QWEN3_30B | {"moe_intermediate_size": 770})
    assert Layout(tp=4).check(odd) is None
