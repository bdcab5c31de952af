from __future__ import annotations

import json

import pytest
import torch

from millrace.config.engine import EngineConfig
from millrace.orchestration import memory
from millrace.orchestration.ranks import Ranks
from tests.models.tiny import tiny_model
from tests.orchestration.pieces import learner, recipe, reference

# Two layers, two key heads of width 8, keys and values, float32.
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4


def test_the_cache_holds_what_the_requests_can_need_and_no_more():
    config = EngineConfig(max_requests=10, block_size=4)
    assert memory.cache_tokens(config, tiny_model("llama"), 50) == 10 * 54


@pytest.mark.parametrize(("free", "tokens"), [(TOKEN_BYTES * 4 * 100, 100), (TOKEN_BYTES * 4 * 3, 54)])
def test_where_memory_is_short_it_takes_a_quarter_of_it_but_always_one_sequence(monkeypatch, free, tokens):
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    config = EngineConfig(max_requests=10, block_size=4)
    assert memory.cache_tokens(config, tiny_model("llama"), 50) == tokens


def test_what_the_recipe_says_is_taken_as_it_is():
    assert memory.cache_tokens(EngineConfig(cache_tokens=77), tiny_model("llama"), 50) == 77


def test_some_memory_is_free():
    assert 1 << 20 < memory.free_bytes(torch.device("cpu")) < 1 << 50


def test_everyone_on_the_trainers_side_is_an_owner():
    config = recipe(advantage={"kind": "gae"}, critic={}, policy={"kl": {"coefficient": 0.1}})
    teacher, whole = reference(seed=3), learner(config)
    trainer, critic = whole.trainer, whole.critic
    assert memory.owners(None, None, None) == []
    policy = ("the policy", trainer.model, trainer.optimizer)
    assert memory.owners(trainer, None, teacher) == [policy, ("the teacher", teacher.model, None)]
    assert memory.owners(trainer, whole, None) == [
        policy,
        ("the critic", critic.model, critic.optimizer),
        ("the reference", whole.reference.model, None),
    ]


class TwoRanks(Ranks):
    """Another rank sampled with more memory and does not know what it scored with."""

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine, json.dumps({"sample": 9, "train": 4, "save": 99}).encode()]


def test_a_peak_is_that_of_the_fullest_rank_where_all_know_theirs():
    peaks = {"sample": 8, "train": 5, "score": 7, "save": 9}
    assert memory.fullest(TwoRanks(), peaks) == {"memory/sample_peak_bytes": 9, "memory/train_peak_bytes": 5}
    assert memory.fullest(Ranks(), peaks) == {
        "memory/sample_peak_bytes": 8,
        "memory/score_peak_bytes": 7,
        "memory/train_peak_bytes": 5,
    }
