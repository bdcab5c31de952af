"""How isolated judges start: what is refused, what they are given, and that each kind judges."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from millrace.data.tasks import load_reasoning_gym
from millrace.rewards.isolated import IsolatedReward
from millrace.rewards.reward_errors import RewardError
from millrace.rewards.sandbox import Permissions, visible_environment
from millrace.types import Outcome, Prompt
from tests.close import close_fp64
from tests.rewards.helpers import Clock, hangs, prompts, score, worker_of


@pytest.mark.world
def test_check_is_content_with_a_function_that_can_be_called(make):
    reward = make()
    reward.check()
    reward.check()
    assert score(reward, "value 1")[0].value == 1.0


@pytest.mark.world
def test_check_finds_a_module_that_does_not_exist(make, tmp_path):
    with pytest.raises(RewardError) as refused:
        make({"kind": "function", "function": "my_reward:grade"}).check()
    assert str(refused.value) == (
        f"reward function my_reward:grade: there is no module my_reward in {tmp_path} or among the installed "
        "packages; correct its name or start from the folder it lies in"
    )


@pytest.mark.world
def test_check_finds_a_function_that_does_not_exist(make):
    with pytest.raises(RewardError) as refused:
        make({"kind": "function", "function": "my_rewards:garde"}).check()
    assert str(refused.value) == (
        "reward function my_rewards:garde: module my_rewards does not have a function garde; correct it"
    )


@pytest.mark.slow_beyond(1)
@pytest.mark.world
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('bad day')", "importing broken raised ValueError: bad day (broken.py line 1)"),
        (
            "import os, sys\nsys.stderr.write('oh no')\nos._exit(4)",
            "ended with exit code 4; the last it printed: oh no",
        ),
    ],
)
def test_check_finds_a_module_that_breaks_on_import(make, tmp_path, body, message):
    (tmp_path / "broken.py").write_text(body)
    reward = make({"kind": "function", "function": "broken:f"})
    with pytest.raises(RewardError) as refused:
        reward.check()
    assert str(refused.value).startswith("reward function broken:f") and message in str(refused.value)
    with pytest.raises(RewardError):
        score(reward, "value 1")


@pytest.mark.world
def test_a_judge_that_never_starts_is_named(make, tmp_path):
    (tmp_path / "slow.py").write_text("import my_rewards\nmy_rewards.grade('', 'hang', '', {})")
    with pytest.raises(RewardError) as refused:
        make({"kind": "function", "function": "slow:f"}, clock=Clock(hangs)).check()
    assert str(refused.value) == "reward function slow:f did not start: took longer than 60 s"


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (
            {"kind": "exact"},
            {},
            "there is no isolated reward of kind exact; there are: number, task, format, function",
        ),
        ({"kind": "format"}, {}, "reward format was given []; it takes pattern"),
        ({"kind": "number", "x": 1}, {}, "reward number was given ['x']; it takes no options"),
        (
            {"kind": "number"},
            {"timeout_s": 0.0},
            "timeout_s of reward number is 0.0; it must be a finite number above 0",
        ),
        (
            {"kind": "number"},
            {"timeout_s": math.nan},
            "timeout_s of reward number is nan; it must be a finite number",
        ),
        ({"kind": "number"}, {"num_workers": 0}, "num_workers of reward number is 0; it must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(spec, options, message):
    with pytest.raises(RewardError) as refused:
        IsolatedReward(spec, **({"timeout_s": 1.0} | options))
    assert message in str(refused.value)


def test_each_completion_needs_its_prompt(make):
    with pytest.raises(ValueError, match="1 prompts and 2 completions; each needs its own"):
        make().score(prompts(1), ["value 1", "value 2"])
    assert make().score([], []) == []


SECRETS = ("HF_TOKEN", "aws_secret_id", "DB_PASSWORD", "PYTHON_API_KEY", "DATABASE_URL")


def test_only_harmless_and_named_variables_are_visible():
    given = dict.fromkeys((*SECRETS, "PATH", "LC_ALL", "OMP_NUM_THREADS"), "x")
    harmless = {"PATH": "x", "LC_ALL": "x", "OMP_NUM_THREADS": "x"}
    assert visible_environment(given, ()) == harmless
    assert visible_environment(given, ("HF_TOKEN",)) == harmless | {"HF_TOKEN": "x"}


@pytest.mark.attack("a reward reads secrets of the environment")
@pytest.mark.world
def test_a_function_sees_no_secret_that_the_recipe_does_not_name(make, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "x")
    asked = [f"environment {name}" for name in SECRETS]
    assert [outcome.value for outcome in score(make(), *asked)] == [0.0] * 5
    named = make(permissions=Permissions(env_vars=("HF_TOKEN",), writable=(os.getcwd(),), file_bytes=1 << 20))
    assert [outcome.value for outcome in score(named, *asked)] == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.attack("a reward reads secrets of the environment")
@pytest.mark.world
def test_a_built_in_reward_sees_no_secret(make, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "x")
    reward = make({"kind": "format", "pattern": "x"})
    reward.check()
    given = Path(f"/proc/{worker_of(reward)}/environ").read_bytes().split(b"\0")
    assert not {name.encode() + b"=x" for name in SECRETS} & set(given)
    assert [one for one in given if one.startswith(b"PATH=")]


@pytest.mark.world
def test_a_file_in_the_current_folder_does_not_shadow_what_a_built_in_judge_imports(make, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise RuntimeError('the wrong module')")
    (tmp_path / "json.py").write_text("raise RuntimeError('the wrong module')")
    reward = make({"kind": "number"})
    reward.check()
    assert score(reward, "so 4")[0].kind == "failed"  # "the answer" holds no number, says the right module


@pytest.mark.slow
@pytest.mark.world
def test_the_number_task_and_format_judges_run_in_a_child(make):
    row = {"question": "Calculate 5 - 3 - 6.", "answer": "-4", "metadata": {"num_terms": (2, 6)}}
    one = Prompt("train:0", (1,), "", "-4", row)
    completions = ["so \\boxed{-4}", "-4", "what?"]
    number = make({"kind": "number"}).score([one] * 3, completions)
    assert [(outcome.kind, outcome.value) for outcome in number] == [
        ("score", 1),
        ("score", 1),
        ("invalid", 0),
    ]
    task = make({"kind": "task", "name": "basic_arithmetic", "options": {}}).score([one] * 3, completions)
    assert {outcome.kind for outcome in task} == {"score"}
    close_fp64([outcome.value for outcome in task], [2 / 13, 1.0, 0.0])
    form = make({"kind": "format", "pattern": "-?[0-9]"}).score([one] * 3, completions)
    assert [outcome.value for outcome in form] == [0.0, 1.0, 0.0]


def cpu_s(pid: int) -> float:
    """What a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.world
def test_a_pattern_that_never_ends_is_stopped(make):
    begun_s: dict[int, float] = {}

    def computes() -> bool:
        """Whether the judge has computed for 0.3 s since it answered the first of three."""
        for worker in reward._workers.children:
            if len(worker.pending) == 2:
                pid = worker_of(reward)
                used_s = cpu_s(pid)
                return used_s - begun_s.setdefault(pid, used_s) > 0.3
        return False

    reward = make({"kind": "format", "pattern": "(a+)+b"}, timeout_s=200.0, clock=Clock(computes))
    outcomes = score(reward, "aab", "a" * 40, "b")
    assert [outcome.kind for outcome in outcomes] == ["score", "failed", "score"]
    assert outcomes[1].reason == "took longer than 200 s"


@pytest.mark.slow
@pytest.mark.world
def test_an_unknown_task_is_found_at_the_start(make):
    with pytest.raises(RewardError, match="reward task: reasoning-gym has no task sums; correct data.train"):
        make({"kind": "task", "name": "sums", "options": {}}).check()


@pytest.mark.slow
@pytest.mark.world
def test_judges_of_tuples_score_as_in_this_process(make):
    """Through plain JSON, arc_agi's own answer would get 0.05, since its tuples would have become lists."""
    entry = load_reasoning_gym().create_dataset("rearc", seed=3, size=1)[0]
    one = Prompt("train:0", (1,), entry["question"], entry["answer"], entry)
    (outcome,) = make({"kind": "task", "name": "rearc", "options": {}}).score([one], [entry["answer"]])
    assert outcome == Outcome("score", 1.0)
