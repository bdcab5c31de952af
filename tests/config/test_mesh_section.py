"""How a recipe spreads a run over ranks: how many there are, and what does not go together."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.config.mesh_section import MeshConfig
from millrace.config.recipe import ConfigError, validate

TREE: dict[str, Any] = {"steps": 9, "data": {"train": "none.jsonl"}, "rewards": [{"kind": "exact"}]}
FULL_KL = {"policy": {"kl": {"coefficient": 0.1, "estimator": "full"}}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"mesh": {"sequence_parallel": True}},
        "mesh.sequence_parallel has no effect with mesh.tp 1; remove it, or raise mesh.tp",
    ),
    ({"mesh": {"pp_chunks": 2}}, "mesh.pp_chunks has no effect with mesh.pp 1; remove it, or raise mesh.pp"),
    ({"mesh": {"cp_kind": "ring"}}, "mesh.cp_kind has no effect with mesh.cp 1; remove it, or raise mesh.cp"),
    (
        {"mesh": {"reshard_after_forward": False}},
        "mesh.reshard_after_forward has no effect with one rank; remove it, or raise mesh.dp_shard",
    ),
    *(
        (
            {"mesh": {name: 2}, "model": {"adapter": {}}},
            f"model.adapter does not go with mesh.{name} above 1; set that to 1, or remove model.adapter",
        )
        for name in ("tp", "pp")
    ),
    (
        {"mesh": {"dp_shard": 2, "compute_dtype": "bfloat16"}, "precision": "bfloat16"},
        "mesh.compute_dtype needs weights in float32, and precision is bfloat16; remove one of them",
    ),
    *(
        (
            {"mesh": {name: 2}, **FULL_KL},
            f"policy.kl.estimator full does not go with mesh.{name} above 1; set that to 1, or remove "
            "policy.kl.estimator full",
        )
        for name in ("tp", "cp", "pp")
    ),
    *(
        (
            {"mesh": {name: 2}, "policy": {"optimizer": {"kind": "adamw_8bit"}}},
            f"policy.optimizer.kind adamw_8bit does not go with mesh.{name} above 1; set that to 1, or "
            "remove policy.optimizer.kind adamw_8bit",
        )
        for name in ("dp_shard", "dp_replicate", "tp", "pp", "cp")
    ),
    *(
        (
            {"mesh": {"tp": 2}, "policy": {"optimizer": {"kind": kind}}},
            f"policy.optimizer.kind {name} does not go with mesh.tp above 1; set that to 1, or remove "
            f"policy.optimizer.kind {name}",
        )
        for name, kind in (("muon", "muon"), ("module:function", "mine:sgd"))
    ),
    *(
        (
            {"mesh": {name: 2}, "policy": {f"router_{what}": value}},
            f"policy.router_{what} does not go with mesh.{name} above 1; set that to 1, or remove "
            f"policy.router_{what}",
        )
        for name in ("tp", "pp", "cp")
        for what, value in (("replay", True), ("aux_coefficient", 0.1), ("bias_step", 0.1))
    ),
    *(
        (
            {"mesh": {"tp": 2}, **tree},
            f"{key} does not go with mesh.tp above 1; set that to 1, or remove {key}",
        )
        for key, tree in {
            "deterministic": {"deterministic": True},
            "rollout.top_k": {"rollout": {"top_k": 3}},
            "rollout.top_p": {"rollout": {"top_p": 0.9}},
            "advantage kind token_baseline": {"advantage": {"kind": "token_baseline"}},
        }.items()
    ),
    (
        {"mesh": {"cp": 2, "cp_kind": "ring"}, "deterministic": True},
        "deterministic does not go with mesh.cp_kind ring; set ulysses, or remove deterministic",
    ),
]
FINE: list[dict[str, Any]] = [
    {"mesh": {"tp": 2, "sequence_parallel": True, "pp": 2, "pp_chunks": 2}},
    {"mesh": {"cp": 2}, "deterministic": True},
    {"mesh": {"cp": 2}, "rollout": {"top_k": 3}},
    {"mesh": {"dp_shard": 2}, **FULL_KL},
    {"mesh": {"dp_shard": 2, "dp_replicate": 2, "ep": 2}, "model": {"adapter": {}}},
    {"mesh": {"dp_shard": 2, "cp": 2, "cp_kind": "ring"}, "model": {"adapter": {}}},
    {"mesh": {"dp_shard": 2, "ep": 2}, "advantage": {"kind": "token_baseline"}},
]


@pytest.mark.parametrize(("tree", "sentence"), REFUSED, ids=[sentence[:50] for _, sentence in REFUSED])
def test_what_has_no_effect_or_does_not_go_together_is_refused(tree, sentence):
    with pytest.raises(ConfigError) as caught:
        validate(TREE | tree, "mine")
    assert str(caught.value) == f"recipe mine: {sentence}"


@pytest.mark.parametrize("tree", FINE, ids=str)
def test_what_goes_together_is_taken(tree):
    mesh = validate(TREE | tree, "mine").mesh
    assert mesh.model_dump(exclude_defaults=True) == tree["mesh"]


def test_experts_are_dealt_within_the_ranks_that_share_weights():
    sizes = {"dp_shard": 6, "dp_replicate": 2, "tp": 3, "pp": 5, "cp": 7}
    assert MeshConfig(**sizes, ep=2).num_ranks == 6 * 2 * 3 * 5 * 7
    assert MeshConfig(ep=1).num_ranks == 1
