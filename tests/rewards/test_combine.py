from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import pytest

from millrace.rewards.combine import CombinedReward
from millrace.rewards.reward_errors import RewardError
from millrace.types import Outcome, Prompt
from tests.close import close_fp64
from tests.rewards.helpers import LIMIT_S

PROMPT = Prompt("train:0", (1,), "text")


class Always:
    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = outcomes
        self.closed = False

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        return list(self.outcomes)

    def close(self) -> None:
        self.closed = True


class BreaksOnClose(Always):
    def close(self) -> None:
        raise RuntimeError("cannot close")


def combined(*parts: tuple[str, float, Outcome]) -> Outcome:
    reward = CombinedReward([(name, weight, Always(outcome)) for name, weight, outcome in parts])
    (outcome,) = reward.score([PROMPT], ["text"])
    return outcome


def test_the_value_is_the_weighted_sum_and_parts_are_unweighted():
    outcome = combined(("number", 1.0, Outcome("score", 0.5)), ("format", 0.2, Outcome("score", 1.0)))
    assert outcome.kind == "score" and outcome.reason == ""
    close_fp64(outcome.value, 0.7)
    assert outcome.parts == {"number": 0.5, "format": 1.0}


def test_what_a_part_returns_beside_its_score_follows_its_name():
    one = Outcome("score", 1.0, extras={"steps": 3.0})
    other = Outcome.failure("it hung")
    for last, kind in ((Outcome("score", 2.0, extras={"note": "x"}), "score"), (other, "failed")):
        reward = CombinedReward([("a", 1.0, Always(one)), ("b", 1.0, Always(last))])
        (found,) = reward.score([Prompt("", (1,), "")], [""])
        assert found.kind == kind
        assert found.extras == {"a/steps": 3.0} | ({"b/note": "x"} if kind == "score" else {})


def test_an_invalid_part_makes_the_outcome_invalid_and_the_others_still_count():
    outcome = combined(
        ("number", 1.0, Outcome("invalid", 0.0, "no number")), ("format", 0.2, Outcome("score", 1.0))
    )
    assert (outcome.kind, outcome.value, outcome.reason) == ("invalid", 0.2, "number: no number")
    assert outcome.parts == {"number": 0.0, "format": 1.0}


def test_a_failed_part_makes_the_outcome_failed_even_beside_an_invalid_one_and_at_weight_zero():
    outcome = combined(
        ("number", 1.0, Outcome("invalid", 0.0, "no number")),
        ("format", 1.0, Outcome("score", 1.0)),
        ("function", 0.0, Outcome.failure("took longer than 10 s")),
    )
    assert outcome.kind == "failed" and math.isnan(outcome.value)
    assert outcome.reason == "function: took longer than 10 s"
    assert outcome.parts["format"] == 1.0 and math.isnan(outcome.parts["function"])


def test_every_failed_part_is_named():
    outcome = combined(("a", 1.0, Outcome.failure("x")), ("b", 1.0, Outcome.failure("y")))
    assert outcome.reason == "a: x; b: y"


def test_each_completion_gets_its_own_sum():
    reward = CombinedReward(
        [
            ("a", 2.0, Always(Outcome("score", 1.0), Outcome("score", 3.0))),
            ("b", -1.0, Always(Outcome("score", 0.5), Outcome("score", 0.0))),
        ]
    )
    assert [outcome.value for outcome in reward.score([PROMPT, PROMPT], ["x", "y"])] == [1.5, 6.0]


def test_equal_names_are_told_apart():
    names = ["format", "format-2", "format", "exact", "format"]
    parts = [(name, 1.0, Always(Outcome("score", float(i)))) for i, name in enumerate(names)]
    reward = CombinedReward(parts)
    assert reward.names == ["format", "format-2", "format-3", "exact", "format-4"]
    (outcome,) = reward.score([PROMPT], ["text"])
    assert outcome.parts == {"format": 0.0, "format-2": 1.0, "format-3": 2.0, "exact": 3.0, "format-4": 4.0}


def test_no_parts_are_refused():
    with pytest.raises(RewardError, match="there is no reward to combine; name at least one under rewards"):
        CombinedReward([])


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_refused(weight):
    with pytest.raises(
        RewardError, match=f"the weight of reward exact is {weight}; it must be a finite number"
    ):
        CombinedReward([("exact", weight, Always())])


def test_a_part_that_gives_too_few_outcomes_is_an_error():
    reward = CombinedReward([("a", 1.0, Always(Outcome("score", 1.0))), ("b", 1.0, Always())])
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        reward.score([PROMPT], ["text"])


def test_every_part_is_closed_even_if_one_raises():
    first, last = Always(), Always()
    reward = CombinedReward([("a", 1.0, first), ("b", 1.0, BreaksOnClose()), ("c", 1.0, last)])
    with pytest.raises(RuntimeError, match="cannot close"):
        reward.close()
    assert first.closed and last.closed


class Calls(Always):
    """Does something first, and remembers the thread."""

    def __init__(self, value: float, first: Callable[[], object]) -> None:
        super().__init__(Outcome("score", value))
        self.first = first
        self.thread = ""

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        self.thread = threading.current_thread().name
        self.first()
        return super().score(prompts, completions)


def test_rewards_that_judge_elsewhere_do_so_side_by_side_and_the_others_where_they_are_asked():
    """Each waits until all have begun; one after the other they would break the barrier."""
    together = threading.Barrier(3, timeout=LIMIT_S)
    first, here, last = (Calls(value, together.wait) for value in (1.0, 2.0, 4.0))
    reward = CombinedReward([("a", 1.0, first), ("b", 1.0, here), ("c", 1.0, last)], apart=[first, last])
    for _ in range(2):
        (outcome,) = reward.score([PROMPT], ["text"])
        assert (outcome.value, outcome.parts) == (7.0, {"a": 1.0, "b": 2.0, "c": 4.0})
        assert here.thread == threading.current_thread().name
    names = {first.thread, last.thread}
    assert names == {"millrace-score_0", "millrace-score_1"}
    reward.close()
    assert first.closed and here.closed and last.closed
    assert not names & {thread.name for thread in threading.enumerate()}


def test_a_reward_alone_is_asked_by_whoever_calls():
    alone = Calls(1.0, lambda: None)
    CombinedReward([("a", 1.0, alone)], apart=[alone]).score([PROMPT], ["text"])
    assert alone.thread == threading.current_thread().name


@pytest.mark.parametrize("apart", [(0, 1, 2), (0, 2), (1, 2), (2,), ()])
def test_of_several_errors_the_first_rewards_is_raised_once_all_have_ended(apart):
    done = threading.Event()

    def raise_late() -> None:
        if apart != ():
            assert done.wait(LIMIT_S)
        raise ValueError("first")

    def raise_soon() -> None:
        done.set()
        raise ValueError("last")

    rewards = [Calls(1.0, lambda: None), Calls(1.0, raise_late), Calls(1.0, raise_soon)]
    parts = [(str(place), 1.0, part) for place, part in enumerate(rewards)]
    reward = CombinedReward(parts, apart=[rewards[place] for place in apart])
    with pytest.raises(ValueError, match="first"):
        reward.score([PROMPT], ["text"])
    assert rewards[2].thread
    reward.close()


def test_ctrl_c_closes_rewards_that_judge_elsewhere_so_that_nobody_waits_for_them():
    begun, over, ended = threading.Event(), threading.Event(), threading.Event()

    class Endless(Calls):
        def close(self) -> None:
            over.set()

    def scoring() -> None:
        begun.set()
        assert over.wait(LIMIT_S)
        ended.set()

    def interrupt() -> None:
        assert begun.wait(LIMIT_S)
        raise KeyboardInterrupt

    endless = Endless(1.0, scoring)
    reward = CombinedReward([("a", 1.0, endless), ("b", 1.0, Calls(1.0, interrupt))], apart=[endless])
    with pytest.raises(KeyboardInterrupt):
        reward.score([PROMPT], ["text"])
    assert ended.wait(LIMIT_S)
    reward.close()
