"""One engine and one thread: everything in order, in one call each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from millrace.engines.in_process import InProcessBackend
from millrace.rollout.backend import (
    Abort,
    Event,
    GenerateRequest,
    GenerateResult,
    LoadWeights,
    Score,
    ScoreResult,
    StopEngine,
    Submit,
    UpdateWeights,
    WeightsLoaded,
)
from millrace.types import Completion, Outcome, Prompt, SamplingParams
from tests.engines.test_subprocesses import Judge

PROMPT = Prompt("train:0", (1,), "text")


class Engine:
    """Draws the length of the prompt, and remembers what it was asked."""

    version = 0

    def __init__(self) -> None:
        self.calls: list[list[tuple[tuple[int, ...], int]]] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Completion]:
        self.calls.append([(tuple(prompt), one.seed) for prompt, one in zip(prompts, params, strict=True)])
        nothing = np.zeros(1, np.float32), np.zeros(1, np.int32)
        return [Completion((len(prompt),), *nothing, "stop", "") for prompt in prompts]


class Rewards(Judge):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[str]] = []

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[str], episodes: Sequence[object] = ()
    ) -> list[Outcome]:
        assert len(prompts) == len(completions)
        self.calls.append(list(completions))
        return super().score(prompts, completions)


def backend() -> tuple[InProcessBackend, Engine, Rewards, list[int]]:
    engine, rewards, sent = Engine(), Rewards(), list[int]()
    return InProcessBackend(engine, rewards, sent.append), engine, rewards, sent


def waited(backend: InProcessBackend) -> list[Event]:
    """The events of one wait."""
    backend.wait(0.0)
    return backend.poll()


def request(id: str, *prompt: int) -> GenerateRequest:
    return GenerateRequest(id, prompt, SamplingParams(seed=len(id)))


def test_all_that_was_submitted_is_drawn_in_one_call_and_in_order() -> None:
    inline, engine, _, sent = backend()
    (name,) = inline.engines()
    inline.execute(UpdateWeights(4))
    inline.execute(LoadWeights(name, 4))
    assert sent == [4]
    assert waited(inline) == [WeightsLoaded(name, 4, 0)]
    inline.execute(Submit(name, [request("a", 1), request("bb", 1)]))
    inline.execute(Submit(name, [request("c", 2, 3)]))
    assert engine.calls == []
    completed = waited(inline)
    assert engine.calls == [[((1,), 1), ((1,), 2), ((2, 3), 1)]]
    assert [
        (e.id, e.completion.token_ids, e.began, e.ended) for e in completed if isinstance(e, GenerateResult)
    ] == [
        ("a", (1,), 0, 1),
        ("bb", (1,), 0, 1),
        ("c", (2,), 0, 1),
    ]
    inline.execute(UpdateWeights(5))
    inline.execute(LoadWeights(name, 5))
    inline.execute(Submit(name, [request("d", 1)]))
    loaded, last = waited(inline)
    assert loaded == WeightsLoaded(name, 5, 1)
    assert isinstance(last, GenerateResult) and (last.began, last.ended) == (1, 2)


def test_all_that_is_to_be_judged_is_judged_in_one_call() -> None:
    inline, _, rewards, _ = backend()
    inline.execute(Score("x", [PROMPT] * 2, ["right", "wrong"]))
    inline.execute(Score("none", [], []))
    inline.execute(Score("y", [PROMPT], ["right"]))
    events = waited(inline)
    assert rewards.calls == [["right", "wrong", "right"]]
    values = {e.id: [outcome.value for outcome in e.outcomes] for e in events if isinstance(e, ScoreResult)}
    assert values == {"x": [1.0, 0.0], "none": [], "y": [1.0]}
    assert list(values) == ["x", "none", "y"]
    inline.close()
    assert rewards.closed


def test_what_is_ended_before_it_is_drawn_is_empty() -> None:
    inline, engine, _, _ = backend()
    inline.execute(Submit("engine-0", [request("a", 1), request("bb", 2)]))
    inline.execute(Abort("engine-0", ["a", "nobody"]))
    first, second = waited(inline)
    assert isinstance(first, GenerateResult) and isinstance(second, GenerateResult)
    assert (first.id, first.completion.finish_reason, first.completion.token_ids) == ("a", "abort", ())
    assert (second.id, engine.calls) == ("bb", [[((2,), 2)]])


def test_nothing_happens_by_itself() -> None:
    inline, _, _, _ = backend()
    with pytest.raises(RuntimeError, match="no request is in flight in this thread"):
        inline.wait(9.0)
    with pytest.raises(
        RuntimeError, match="^engine-0 is the only engine of this thread, .*'it drew nothing'"
    ):
        inline.execute(StopEngine("engine-0", "it drew nothing"))
