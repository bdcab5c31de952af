from __future__ import annotations

import json

from millrace.distributed.ranks import Ranks
from millrace.run.health import memory_peaks
from tests.run.pieces import make_train_step, recipe, reference


def test_everyone_on_the_trainers_side_is_an_owner():
    config = recipe(advantage={"kind": "gae"}, critic={}, policy={"kl": {"coefficient": 0.1}})
    teacher, whole = reference(seed=3), make_train_step(config)
    trainer, critic = whole.trainer, whole.critic
    assert memory_peaks.owners(None, None, None) == []
    policy = ("the policy", trainer.model, trainer.optimizer)
    assert memory_peaks.owners(trainer, None, teacher) == [policy, ("the teacher", teacher.model, None)]
    assert memory_peaks.owners(trainer, whole, None) == [
        policy,
        ("the critic", critic.model, critic.optimizer),
        ("the reference", whole.reference.model, None),
    ]


class TwoRanks(Ranks):
    """Another rank sampled with more memory and does not know what it scored with."""

    def all_gather(self, mine: bytes) -> list[bytes]:
        return [mine, json.dumps({"sample": 9, "train": 4, "save": 99}).encode()]


def test_a_peak_is_that_of_the_fullest_rank_where_all_know_theirs():
    peaks = {"sample": 8, "train": 5, "score": 7, "save": 9}
    assert memory_peaks.fullest(TwoRanks(), peaks) == {
        "memory/sample_peak_bytes": 9,
        "memory/train_peak_bytes": 5,
    }
    assert memory_peaks.fullest(Ranks(), peaks) == {
        "memory/sample_peak_bytes": 8,
        "memory/score_peak_bytes": 7,
        "memory/train_peak_bytes": 5,
    }
