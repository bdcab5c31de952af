"""A layout in words becomes numbers, and one that cannot be is refused in a sentence."""

from __future__ import annotations

import pytest

from millrace.planner.errors import PlanError
from millrace.planner.layout import Split
from millrace.planner.model_shape import ModelShape
from tests.planner import shapes

LLAMA = ModelShape.of(shapes.LLAMA_8B)
MIXTURE = ModelShape.of(shapes.MIXTRAL)


def test_a_layout_is_read_and_written():
    split = Split.parse(" dp_shard=4, tp=2 ,ep=2")
    assert split == Split(dp_shard=4, tp=2, ep=2)
    assert str(split) == "dp_shard=4,tp=2,ep=2"
    assert str(Split()) == "dp_shard=1"


def test_experts_take_no_ranks_of_their_own():
    split = Split(dp_replicate=3, dp_shard=4, tp=5, pp=7, ep=2)
    assert (split.num_ranks, split.num_data_ranks) == (3 * 4 * 5 * 7, 12)
    assert Split(dp_shard=2, cp=11).num_ranks == 22


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dp_shard", "--layout has 'dp_shard'; write it like dp_shard=4,tp=2"),
        ("tp=two", "--layout has 'tp=two'; write it like dp_shard=4,tp=2"),
        ("dp_shrad=2", "--layout has dp_shrad; did you mean dp_shard?"),
        ("zero=3", "--layout has zero; there are: dp_replicate, dp_shard, tp, pp, cp, ep"),
        ("tp=2,tp=4", "--layout has tp twice; keep one"),
        ("tp=0", "tp is 0 in the layout; it must be at least 1"),
        ("dp_shard=6,ep=4", "ep 4 does not divide dp_shard 6, a part of which it is"),
        ("dp_shard=2,ep=2,cp=3", "ep is 2 and cp is 3 in the layout; set one of them to 1"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused(text, sentence):
    with pytest.raises(PlanError) as refused:
        Split.parse(text)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("shape", "split", "sentence"),
    [
        (LLAMA, Split(tp=3), "tp 3 does not divide the model's query heads, 32"),
        (LLAMA, Split(tp=16), "tp 16 does not divide the model's key heads, 8"),
        (LLAMA, Split(pp=33), "pp 33 is more than the model's 32 layers"),
        (LLAMA, Split(dp_shard=2, ep=2), "ep is 2, but the model has no experts; leave it at 1"),
        (
            ModelShape.of(shapes.QWEN3_30B | {"moe_intermediate_size": 770}),
            Split(tp=4),
            "tp 4 does not divide the model's expert width, 770",
        ),
        (MIXTURE, Split(dp_shard=3, ep=3), "ep 3 does not divide the model's 8 experts"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(shape, split, sentence):
    with pytest.raises(PlanError) as refused:
        split.check(shape)
    assert str(refused.value) == sentence


def test_a_layout_that_divides_the_model_passes():
    Split(tp=8, pp=32).check(LLAMA)
    Split(dp_shard=8, ep=8, tp=8).check(MIXTURE)
    with pytest.raises(PlanError, match="MLP width, 14336"):
        Split(tp=3).check(
            ModelShape.of(shapes.LLAMA_8B | {"num_attention_heads": 3, "num_key_value_heads": 3})
        )
