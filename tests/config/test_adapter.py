"""What a recipe may say of adapters and frozen weights."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.config.recipe import load_recipe, to_yaml, validate
from tests.config.trees import BASE, message_of


def test_an_empty_adapter_is_a_fresh_one_with_the_usual_sizes():
    config = validate({**BASE, "model": {"adapter": {}}}, "mine")
    adapter = config.model.adapter
    assert adapter is not None
    assert (adapter.path, adapter.rank, adapter.alpha, adapter.targets) == (None, 16, 32.0, ("all-linear",))
    assert not adapter.rank_stabilised
    assert validate(BASE, "mine").model.adapter is None


def test_a_recipe_that_was_written_down_with_an_adapter_is_read_again(tmp_path):
    for adapter in ({"path": "a"}, {"rank": 4, "targets": ["q_proj", "v_proj"], "rank_stabilised": True}):
        config = validate({**BASE, "model": {"path": "m", "adapter": adapter}}, "mine")
        (tmp_path / "recipe.yaml").write_text(to_yaml(config), encoding="utf-8")
        assert load_recipe(tmp_path / "recipe.yaml") == config


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"adapter": {"path": "a", "rank": 4}},
            "recipe mine: model.adapter.rank has no effect because model.adapter.path fixes it; remove it",
        ),
        (
            {"adapter": {"path": "a", "targets": ["q_proj"]}},
            "recipe mine: model.adapter.targets has no effect because model.adapter.path fixes it; remove it",
        ),
        (
            {"adapter": {}, "frozen": ["lm_head.*"]},
            "recipe mine: model.frozen has no effect with model.adapter, which leaves nothing else to learn; "
            "remove it",
        ),
        (
            {"adapter": {"rank": 0}},
            "recipe mine: model.adapter.rank is 0: input should be greater than 0",
        ),
        (
            {"adapter": {"alpha": -1.0}},
            "recipe mine: model.adapter.alpha is -1.0: input should be greater than 0",
        ),
        (
            {"adapter": {"dropout": 0.1}},
            "recipe mine: unknown key model.adapter.dropout",
        ),
    ],
)
def test_a_setting_that_cannot_act_is_refused_in_a_sentence(model: dict[str, Any], message: str):
    assert message_of({"model": model}).startswith(message)
