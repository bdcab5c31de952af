"""Judges in child processes, and everything that can happen to them."""

from __future__ import annotations

import datetime
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from millrace.rewards import isolated
from millrace.rewards.isolated import IsolatedReward
from millrace.rewards.reward_errors import RewardError
from millrace.rewards.sandbox import Permissions
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


@pytest.mark.slow_beyond(1)
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


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("death", "reason"),
    [
        ("die 0", "its process ended with exit code 0; the last it printed: last words"),
        ("die 3", "its process ended with exit code 3; the last it printed: last words"),
        ("kill", "its process was killed by signal 9 (SIGKILL)"),
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


@pytest.mark.attack("control characters for the terminal")
def test_what_a_function_prints_is_shown_without_control_characters_and_not_without_end(
    make, capsys, monkeypatch
):
    monkeypatch.setattr(isolated, "_MAX_ECHO", 20)
    score(make(), "print \x1b[2Jgone\x07 and much more", "print again")
    assert capsys.readouterr().err == (
        "\\x1b[2Jgone\\x07 and much m\n(reward function my_rewards:grade printed more than 20 characters)\n"
    )


@pytest.mark.attack("a completion forges a verdict")
@pytest.mark.parametrize("what", ["line", "endless"])
def test_a_forged_verdict_is_one_failed_answer(make, what):
    outcomes = score(make(), "value 0.5", f"forge {what}", "value 0.25", "value 0.125")
    assert [outcome.kind for outcome in outcomes] == ["score", "failed", "score", "score"]
    assert [outcomes[index].value for index in (0, 2, 3)] == [0.5, 0.25, 0.125]
    forged = {"line": '["score",1.0,""]', "endless": "x" * 80}[what]
    assert outcomes[1].reason.startswith(f"wrote into its socket what is no frame: b'{forged}")


@pytest.mark.attack("a reward leaves a daemon behind")
def test_a_daemon_ends_with_the_reward(make):
    reward = make()
    assert score(reward, "daemon")[0].value == 1.0
    daemon = int(Path("child.pid").read_text())
    assert is_running(daemon)
    reward.close()
    assert not is_running(daemon)


@pytest.mark.attack("a reward takes 3 GB of memory")
def test_a_function_that_takes_too_much_memory_fails_alone(make, tmp_path):
    allowed = Permissions(memory_bytes=1 << 30, writable=(str(tmp_path),), file_bytes=1 << 20)
    outcomes = score(make(permissions=allowed), "allocate 3000", "allocate 10")
    assert outcomes[0].kind == "failed" and outcomes[0].reason.startswith("raised MemoryError")
    assert outcomes[1] == Outcome("score", float(10 << 20))


@pytest.mark.attack("a reward function writes elsewhere or connects")
def test_a_function_writes_only_where_it_may(make, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    Path("link").symlink_to(elsewhere / "file")
    outcomes = score(make(), f"write {elsewhere}/file", "write link", "write here", "temporary")
    refused = (
        f"raised PermissionError: a reward function may not write {elsewhere}/file; name its folder under"
    )
    assert [outcome.reason.startswith(refused) for outcome in outcomes] == [True, True, False, False]
    assert [outcome.value for outcome in outcomes[2:]] == [1.0, 1.0]
    assert list(elsewhere.iterdir()) == []


@pytest.mark.attack("a reward function writes elsewhere or connects")
def test_a_function_connects_only_if_it_may(make, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked = f"connect {server.getsockname()[1]}"
        (refused,) = score(make(), asked)
        allowed = Permissions(network=True, writable=(str(tmp_path),), file_bytes=1 << 20)
        (done,) = score(make(permissions=allowed), asked)
    assert refused.kind == "failed" and refused.reason.startswith(
        "raised PermissionError: a reward function may not use the network; set network: true for it"
    )
    assert done == Outcome("score", 1.0)


def test_nothing_is_left_of_temporary_files(make, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reward = make()
    score(reward, "value 1")
    (folder,) = tmp_path.glob("millrace-reward-*")
    reward.close()
    assert not folder.exists()


def test_a_function_cannot_read_the_questions(make):
    empty, after = score(make(), "input", "value 2")
    assert (empty.value, after.value) == (0.0, 2.0)


def test_a_function_is_given_prompt_answer_and_row_with_their_types(make):
    (outcome,) = make().score(prompts(1, {"pair": (1, 2), "of": {3: "x"}}), ["fields"])
    assert outcome.value == 1.0


@pytest.mark.parametrize("text", ["line\nbreak", "\ud800", "\x00"])
def test_any_text_reaches_the_judge_and_comes_back(make, text):
    (outcome,) = score(make(), f"text {text}")
    assert outcome.kind == "failed"
    assert repr(text) in outcome.reason


@pytest.mark.attack("control characters for the terminal")
def test_a_reason_is_cut_and_holds_no_control_characters(make):
    cut, clean = score(make(), "raise " + "é" * 100_000, "error \x1b[2J\x07\u202e")
    assert cut.reason.startswith("raised KeyError: 'ééé") and len(cut.reason) < 600
    assert clean.reason.startswith(r"raised ValueError: \x1b[2J\x07\u202e (")


def test_a_row_that_json_cannot_carry_fails_with_its_type(make):
    good, bad = prompts(1)[0], prompts(1, {"day": datetime.date(2026, 1, 1)})[0]
    outcomes = make().score([good, bad, good], ["value 1", "value 2", "value 3"])
    assert [outcome.kind for outcome in outcomes] == ["score", "failed", "score"]
    assert outcomes[1].reason == (
        "the row of prompt train:0 holds a datetime.date, which JSON cannot carry to the reward worker; "
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


def test_few_answers_that_take_long_have_a_judge_each(make):
    """A worker that is asked for waits for no more answers than there are: the three wait for each other."""
    outcomes = score(make(num_workers=3), *["meet 3"] * 3)
    assert [outcome.kind for outcome in outcomes] == ["score"] * 3
    assert len({outcome.value for outcome in outcomes}) == 3


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("num_workers", [1, 4])
def test_outcomes_do_not_depend_on_how_many_judges_there_are(make, num_workers):
    """A judge that dies or raises fails the same answers, however they were dealt."""
    completions = [["value 1", "die 3", "raise it", "value 2"][i % 4] for i in range(8)]
    outcomes = score(make(num_workers=num_workers), *completions)
    assert [outcome.kind for outcome in outcomes] == ["score", "failed", "failed", "score"] * 2
    assert [outcome.value for outcome in outcomes if outcome.kind == "score"] == [1.0, 2.0] * 2
    assert sorted(calls()) == sorted(completions)


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
    assert raised == ["reward function my_rewards:grade was closed while it scored"]
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


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("judging", ["nothing", "hang", "loop", "regex", "child"])
def test_a_judge_dies_with_its_parent(make, judging, tmp_path):
    script = (
        "from millrace.rewards import isolated\n"
        "from millrace.rewards.isolated import IsolatedReward\n"
        "from millrace.rewards.sandbox import Permissions\n"
        "from millrace.types import Prompt\n"
        "isolated.find_bubblewrap = lambda: None\n"
        f"allowed = Permissions(writable=({str(tmp_path)!r},), file_bytes=1 << 20)\n"
        "spec = {'kind': 'function', 'function': 'my_rewards:grade'}\n"
        "reward = IsolatedReward(spec, timeout_s=600, permissions=allowed)\n"
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
        worker = int(parent.stdout.readline())
        while len(calls()) < 2 or (judging != "nothing" and not hangs()):
            time.sleep(0.02)
        assert is_running(worker)
        parent.kill()
        assert ends_within(worker)
    if judging == "child":
        assert ends_within(int(Path("child.pid").read_text()))
