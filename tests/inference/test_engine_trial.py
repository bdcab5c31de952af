"""The trial of the engine: it sees what goes wrong after prefill, and what it cannot see it says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from millrace.inference import engine_trial
from millrace.inference.engine import PagedEngine
from millrace.inference.engine_trial import check_engine, try_engine
from millrace.inference.runner import Runner
from millrace.models.load import LANGUAGE, ModelError
from millrace.models.twin import twin_of
from tests.models.tiny import tiny_model

READING = LANGUAGE.reading


@pytest.fixture(scope="module")
def mistral() -> Any:
    return twin_of(AutoConfig.for_model("mistral"), READING.make)


def test_a_right_engine_passes(mistral: Any) -> None:
    assert try_engine(mistral, READING) == ""


def forget_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Runner, "copy_blocks", lambda *_: None)


def keep_old_keys(patch: pytest.MonkeyPatch) -> None:
    load = PagedEngine.update_weights
    patch.setattr(
        PagedEngine, "update_weights", lambda self, named, version: load(self, named, version, kv="keep")
    )


def shift_steps(patch: pytest.MonkeyPatch) -> None:
    inputs = Runner.inputs

    def wrong(self: Runner, table: Any, plan: Any) -> Any:
        made = inputs(self, table, plan)
        # Steps of decoding alone: every row computes one token.
        if made.rows.max_count == 1:
            return replace(made, position_T=made.position_T + (made.position_T > 30))
        return made

    patch.setattr(Runner, "inputs", wrong)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("fault", [forget_copies, keep_old_keys, shift_steps])
def test_a_wrong_engine_is_found(mistral: Any, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    fault(monkeypatch)
    assert try_engine(mistral, READING).startswith("the paged engine's log-probabilities differ by")


@pytest.mark.slow
def test_without_power_it_does_not_count(mistral: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_trial, "POWER", 1e9)
    assert try_engine(mistral, READING).startswith(
        "the trial of the engine has no power: it does not see where"
    )
    monkeypatch.setattr(engine_trial, "CACHE_TOKENS", 512)
    assert "no request was preempted" in try_engine(mistral, READING)


@pytest.mark.slow
def test_a_model_that_cannot_be_sampled_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    check_engine(model)
    monkeypatch.setattr(engine_trial, "answer", lambda *_: "the engine is wrong")
    with pytest.raises(ModelError) as error:
        check_engine(model)
    assert str(error.value) == "model type llama cannot be sampled by millrace: the engine is wrong"
