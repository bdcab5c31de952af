"""Which tokens are judged at a hand-over, and how alike the judgements must be."""

from __future__ import annotations

from contextlib import closing

import pytest

from millrace.run.build import build
from millrace.run.rounding import canary_tokens
from tests.close import close_fp64
from tests.end_to_end.tiny import tiny_recipe
from tests.models.tiny import VOCABULARY, tiny_model


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 4 * 2**-11.5),
        ({"precision": "float64"}, 4 * 2**-11.5),
        ({"precision": "bfloat16"}, 4 * 2**-3.5),
        ({"precision": "bfloat16", "limits.canary": 0.5}, 0.5),
    ],
)
def test_rounding_of_the_dtype_or_the_recipe_says_how_alike_they_must_be(tmp_path, changes, most):
    with closing(build(tiny_recipe(tmp_path, changes), None)) as components:
        components.policy_weights.activate(components.reinforcer(0, None, None))
        close_fp64(components.policy_weights.canary().most, most)


def test_canary_tokens_are_distinct_and_no_more_than_fit():
    tokens = canary_tokens(tiny_model("qwen3"), longest=64)
    assert len(tokens) == len(set(tokens)) == 8 and all(0 <= token < VOCABULARY for token in tokens)
    assert canary_tokens(tiny_model("qwen3"), longest=3) == tokens[:3]
