"""Judges in child processes, and everything that can happen to them."""

from __future__ import annotations

import datetime
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from millrace.rewards import isolated
from millrace.rewards.errors import RewardError
from millrace.rewards.isolated import IsolatedReward
from millrace.types import Outcome
from tests.rewards.helpers import LIMIT_S, Clock, calls, ends_within, hangs, is_running, prompts, score

pytestmark = pytest.mark.world


def test_the_three_outcomes_of_a_function(make):
    good, bad, odd, none = score(make(), "value 0.25", "raise it", "text 0.25", "nothing")
    assert good == Outcome("score", 0.25)
    assert bad.kind == "failed" and bad.reason.startswith("raised KeyError: 'it' (my_rewards.py line ")
    assert math.isnan(bad.value)
    assert (odd.kind, odd.reason) == ("failed", "returned '0.25' (str), which is not a number")
    assert none == Outcome("invalid", 0.0, "my_rewards:grade returned None")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_a_failure(make, value):
    (outcome,) = score(make(), f"value {value}")
    assert outcome.kind == "failed" and math.isnan(outcome.value)
    assert outcome.reason == f"returned {value}, which is not a finite number"


@pytest.mark.parametrize("hang", ["loop", "hang", "regex"])
def test_a_hang_fails_alone_and_nothing_is_judged_twice(make, hang):
    completions = [*(f"value {i}" for i in range(5)), hang, *(f"value {i}" for i in range(6, 10))]
    outcomes = score(make(timeout_s=200.0, clock=Clock(hangs)), *completions)
    assert outcomes[5].kind == "failed" and outcomes[5].reason == "took longer than 200 s"
    assert [outcome.value for outcome in outcomes[:5]] == [0, 1, 2, 3, 4]
    assert [outcome.value for outcome in outcomes[6:]] == [6, 7, 8, 9]
    assert calls() == completions


def test_each_answer_has_the_whole_time(make):
    """Each takes 9 s of a clock that runs on when the next one begins."""

    def now_s() -> float:
        return 9.0 * len(calls()) if Path("calls.txt").exists() else 0.0

    outcomes = score(make(timeout_s=10.0, clock=now_s), *["sleep 0.05"] * 3)
    assert [outcome.kind for outcome in outcomes] == ["score"] * 3


def test_a_hang_kills_what_the_function_started(make):
    (outcome,) = score(make(timeout_s=200.0, clock=Clock(hangs)), "child")
    assert outcome.reason == "took longer than 200 s"
    assert ends_within(int(Path("child.pid").read_text()))


@pytest.mark.parametrize(
    ("death", "reason"),
    [
        ("die 0", "its process ended with exit code 0 after printing: last words"),
        ("die 3", "its process ended with exit code 3 after printing: last words"),
        ("kill", "its process was killed by signal 9 (SIGKILL) without a word"),
    ],
)
def test_a_judge_that_dies_fails_one_answer_and_says_how(make, death, reason):
    outcomes = score(make(), "value 1", death, "value 2")
    assert [outcome.kind for outcome in outcomes] == ["score", "failed", "score"]
    assert outcomes[1].reason == reason
    assert calls() == ["value 1", death, "value 2"]


def test_leaving_python_is_a_failure_and_the_judge_goes_on(make):
    before, left, after = score(make(), "pid", "leave 5", "pid")
    assert left.kind == "failed" and left.reason.startswith("raised SystemExit: 5")
    assert before.value == after.value


def test_what_a_function_prints_is_shown_and_harms_nothing(make, capsys):
    outcomes = score(make(), 'print {"error": "no"}', "print [0, 1]", "value 3")
    assert [outcome.value for outcome in outcomes] == [1.0, 1.0, 3.0]
    shown = capsys.readouterr().err
    assert '{"error": "no"}\n[raw]from a child\n[0, 1]\n[raw]from a child\n' in shown


def test_a_function_cannot_read_the_questions(make):
    empty, after = score(make(), "input", "value 2")
    assert (empty.value, after.value) == (0.0, 2.0)


def test_a_function_is_given_prompt_answer_and_row_with_their_types(make):
    (outcome,) = make().score(prompts(1, {"pair": (1, 2), "of": {3: "x"}}), ["fields"])
    assert outcome.value == 1.0


@pytest.mark.parametrize("text", ["line\nbreak", "\ud800", "\x00", "é" * 100_000])
def test_any_text_reaches_the_judge_and_comes_back(make, text):
    (outcome,) = score(make(), f"raise {text}" if len(text) > 99 else f"text {text}")
    assert outcome.kind == "failed"
    assert repr(text) in outcome.reason


def test_a_row_that_json_cannot_carry_fails_with_its_type(make):
    good, bad = prompts(1)[0], prompts(1, {"day": datetime.date(2026, 1, 1)})[0]
    outcomes = make().score([good, bad, good], ["value 1", "value 2", "value 3"])
    assert [outcome.kind for outcome in outcomes] == ["score", "failed", "score"]
    assert outcomes[1].reason == (
        "the row of prompt train:0 holds a datetime.date, which JSON cannot carry to the judge; "
        "turn it into text or numbers in the data"
    )


def test_more_answers_than_pipes_hold_come_back_in_order_from_several_judges(make):
    reward = make(num_workers=3)
    completions = [f"value {i}" for i in range(1000)]
    outcomes = reward.score(prompts(1000, {"long": "x" * 300_000}), completions)
    assert [outcome.value for outcome in outcomes] == list(range(1000))
    assert sorted(calls()) == sorted(completions)


def test_several_judges_work_at_once(make):
    """Each waits until the other has begun."""
    outcomes = score(make(num_workers=2), *["meet 2"] * 80)
    assert {outcome.kind for outcome in outcomes} == {"score"}
    assert len({outcome.value for outcome in outcomes}) == 2


def test_a_judge_is_kept_between_calls_and_replaced_if_it_died_meanwhile(make):
    reward = make()
    first, second = score(reward, "pid")[0].value, score(reward, "pid")[0].value
    assert first == second
    os.kill(int(first), signal.SIGKILL)
    assert ends_within(int(first))
    (third,) = score(reward, "pid")
    assert third.kind == "score" and third.value != first


def test_close_ends_the_judges_and_score_starts_them_again(make):
    reward = make()
    pid = int(score(reward, "pid")[0].value)
    reward.close()
    assert not is_running(pid)
    assert score(reward, "value 2")[0].value == 2.0


def test_close_ends_a_call_of_another_thread(make):
    reward, raised = make(timeout_s=600.0), []

    def call() -> None:
        try:
            score(reward, "value 1", "hang", "value 2")
        except RewardError as error:
            raised.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    while not hangs():
        time.sleep(0.01)
    reward.close()
    thread.join(LIMIT_S)
    assert raised == ["reward function my_rewards:grade was closed while it judged"]
    assert score(reward, "value 2")[0].value == 2.0


def test_calls_from_several_threads_do_not_mix(make):
    reward = make()
    found: dict[int, list[float]] = {}

    def call(base: int) -> None:
        found[base] = [outcome.value for outcome in score(reward, *(f"value {base + i}" for i in range(50)))]

    threads = [threading.Thread(target=call, args=(base,)) for base in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert found == {base: [float(base + i) for i in range(50)] for base in (0, 1000, 2000)}


def test_an_interrupted_call_leaves_no_judge_behind(make, monkeypatch):
    reward = make()
    pid = int(score(reward, "pid")[0].value)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(IsolatedReward, "_receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            score(reward, "value 1", "value 2")
    assert not is_running(pid)
    assert [outcome.value for outcome in score(reward, "value 3", "value 4")] == [3.0, 4.0]


@pytest.mark.parametrize("judging", ["nothing", "hang", "loop", "regex", "child"])
def test_a_judge_dies_with_its_parent(make, judging, tmp_path):
    script = (
        "from millrace.rewards.isolated import IsolatedReward\n"
        "from millrace.types import Prompt\n"
        "reward = IsolatedReward({'kind': 'function', 'function': 'my_rewards:grade'}, timeout_s=600)\n"
        "ask = lambda text: reward.score([Prompt('train:0', (1,), '')], [text])\n"
        "print(int(ask('pid')[0].value), flush=True)\n"
        f"ask({judging!r})\n"
        "input()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(isolated.__file__).parents[2])}
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        judge = int(parent.stdout.readline())
        while len(calls()) < 2 or (judging != "nothing" and not hangs()):
            time.sleep(0.02)
        assert is_running(judge)
        parent.kill()
        assert ends_within(judge)
    if judging == "child":
        assert ends_within(int(Path("child.pid").read_text()))
