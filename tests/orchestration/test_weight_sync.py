"""The canary sings when trainer and sampler agree, and only then."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from millrace.models.load import Model
from millrace.orchestration.weight_sync import Canary, WeightSync
from millrace.training.scorer import ModelScorer
from millrace.transport.local import LocalTransport, WeightSyncError
from tests.inference.fresh import paged
from tests.models.tiny import tiny_model

PROMPT = (5, 6, 7, 8)


class Rig:
    """Two models of one shape, one that is trained and one that an engine samples with."""

    def __init__(self, tolerance: float = 1e-4) -> None:
        self.trained, self.held = tiny_model("qwen3", seed=1), tiny_model("qwen3", seed=2)
        self.engine = paged(self.held)
        self.scorer = ModelScorer(self.trained, temperature=0.8, max_tokens=100)
        self.canary = Canary(self.engine, PROMPT, num_tokens=8, temperature=0.8, tolerance=tolerance)
        self.sync = WeightSync(LocalTransport(self.engine.load_weights, self.engine.fingerprint), self.canary)

    def publish(self, version: int) -> dict[str, float]:
        return self.sync.publish(lambda: weights(self.trained), version, self.scorer)


def weights(model: Model) -> Iterable[tuple[str, Tensor]]:
    return ((name, parameter.detach()) for name, parameter in model.named_parameters())


def test_equal_weights_give_equal_log_probabilities() -> None:
    rig = Rig()
    with pytest.raises(WeightSyncError, match="log-probabilities of the canary are"):
        rig.canary.check(rig.scorer, 0)
    found = rig.publish(3)
    assert found.keys() == {"sync/canary_distance"}
    assert 0.0 <= found["sync/canary_distance"] <= 1e-4
    assert (rig.engine.version, rig.sync.num_retries) == (3, 0)


def test_a_trainer_that_computes_with_something_else_is_found() -> None:
    """The bits agree: only the canary can tell."""
    rig = Rig()
    rig.publish(1)
    with torch.no_grad():
        rig.trained.get_parameter("model.norm.weight").mul_(1.01)
    with pytest.raises(WeightSyncError, match=r"from the trainer's at version 1; rounding explains 0.0001$"):
        rig.canary.check(rig.scorer, 1)


def test_a_token_of_another_version_is_found() -> None:
    rig = Rig()
    rig.publish(1)
    with pytest.raises(WeightSyncError, match="^after version 2 was loaded, version 1 drew the canary$"):
        rig.canary.check(rig.scorer, 2)


def test_what_is_no_number_is_within_no_tolerance() -> None:
    rig = Rig(tolerance=math.inf)
    rig.publish(1)
    with torch.no_grad():
        rig.trained.get_parameter("model.norm.weight").fill_(math.nan)
    with pytest.raises(WeightSyncError, match="are nan from the trainer's"):
        rig.canary.check(rig.scorer, 1)


class Fails:
    """A transport that fails a number of times."""

    def __init__(self, times: int) -> None:
        self.left, self.sent = times, 0

    def send(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.sent += len(list(named_tensors)) == len(list(weights(tiny_model("llama"))))
        if self.left:
            self.left -= 1
            raise WeightSyncError(f"failure {self.left}")


@pytest.mark.parametrize("times", [0, 1])
def test_a_hand_over_that_fails_once_is_tried_again_with_all_weights(times: int) -> None:
    transport, model = Fails(times), tiny_model("llama")
    scorer = ModelScorer(model, temperature=1.0, max_tokens=100)
    sync = WeightSync(transport)
    assert sync.publish(lambda: weights(model), 7, scorer) == {}
    assert (transport.sent, sync.num_retries) == (times + 1, times)


def test_a_hand_over_that_fails_twice_stops_the_run_by_name() -> None:
    transport, model = Fails(3), tiny_model("llama")
    scorer = ModelScorer(model, temperature=1.0, max_tokens=100)
    with pytest.raises(WeightSyncError) as error:
        WeightSync(transport).publish(lambda: weights(model), 7, scorer)
    assert str(error.value) == "version 7 could not be handed over in 2 tries: failure 1"
    assert transport.sent == 2
