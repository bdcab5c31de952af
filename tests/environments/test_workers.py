"""Environments in worker processes: the same replies, and no fault costs more than its episode."""

from __future__ import annotations

import json
import queue
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.config.environment_section import (
    CalculatorEnvironmentConfig,
    FunctionEnvironmentConfig,
    McpServerSection,
    ProgramEnvironmentConfig,
    ToolEnvironmentConfig,
)
from millrace.environments.running_episodes import CloseEpisode, EnvironmentReply, StepEnvironment
from millrace.environments.sandbox.wasm_interpreter import is_installed
from millrace.environments.tool_messages import ToolMessages
from millrace.environments.workers import EnvironmentWorkers
from millrace.errors import SetupError
from millrace.types import ROOT, Action, Prompt
from tests.data.chat_templates import tokenizer_with
from tests.environments.steps import ENCODE, PROMPT, TASK, letters, step
from tests.environments.test_reply_tokens import CALLED, encoder, ids, text
from tests.rewards.helpers import ends_within, is_running

pytestmark = pytest.mark.world
PATIENCE_S = 100.0


class Host:
    """Waits for the reply to each step."""

    def __init__(self, name, *, clock=time.monotonic, encode=ENCODE, config=None, **given):
        self.replies = queue.SimpleQueue()
        function = f"tests.environments.games:{name}"
        deadlines = {"begin_s": PATIENCE_S, "step_s": PATIENCE_S, "episode_s": PATIENCE_S}
        config = config or FunctionEnvironmentConfig(kind="function", function=function, **deadlines | given)
        self.workers = EnvironmentWorkers(config, encode, self.replies.put, max_tokens=100, clock=clock)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.workers.close()

    def step(self, *texts, episode="0.0.0"):
        self.workers.execute(step(*texts, episode=episode))
        return self.replies.get(timeout=PATIENCE_S)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("name", ["Counting", "counting", "Asynchronous", "Waiting", "Impure"])
def test_the_replies_are_those_of_the_environment(name):
    with Host(name) as host:
        replies = [host.step(*texts) for texts in [(), ("a",), ("a", "b"), ("a", "b", "c")]]
    assert replies == [
        EnvironmentReply("0.0.0.0", PROMPT.token_ids, state="start"),
        EnvironmentReply("0.0.0.1", letters("1a"), 0.5, "turn 1"),
        EnvironmentReply("0.0.0.2", letters("2b"), 0.5, "turn 2"),
        EnvironmentReply("0.0.0.3", (), 0.5, "turn 3", True, 1.0),
    ]


def test_many_episodes_are_in_progress_on_several_workers():
    episodes = [f"0.{place}.0" for place in range(40)]
    with Host("Asynchronous", workers=2) as host:
        for texts in [(), ("a",), ("a", "b")]:
            for episode in episodes:
                host.workers.execute(step(*texts, episode=episode))
            found = [host.replies.get(timeout=PATIENCE_S) for _ in episodes]
            assert {reply.id for reply in found} == {f"{episode}.{len(texts)}" for episode in episodes}
            assert not any(reply.failure for reply in found)


def test_faults_cost_their_own_episode():
    with Host("Bad", step_s=5.0) as host:
        for episode in ("good", "bad"):
            host.step(episode=episode)
        assert host.step("raise", episode="bad").failure.startswith("step 1 raised OSError: the tool is down")
        assert host.step("fine", episode="good").token_ids == letters("fine")
        assert host.step("fine", "rubbish", episode="good").token_ids == letters("fine")
        assert len(host.step("fine", "rubbish", "huge", episode="good").token_ids) == 101
        for episode in ("hangs", "text"):
            host.step(episode=episode)
        # A hang ends by its deadline, while other episodes go on.
        host.workers.execute(step("hang", episode="hangs"))
        assert host.step("text", episode="text").failure == "replied with text of type int in step"
        assert host.replies.get(timeout=PATIENCE_S).failure == "step 1 took longer than 5 s"


@pytest.mark.slow
def test_a_coroutine_that_hangs_is_cancelled():
    with Host("Hanging", step_s=1.0) as host:
        host.step()
        assert host.step("a").failure == "step 1 took longer than 1 s"
        assert not host.step(episode="0.1.0").failure


@pytest.mark.slow
def test_a_crash_repeats_pure_episodes_and_fails_the_others():
    with Host("Bad") as host:
        host.step(episode="victim")
        host.step(episode="crash")
        # The step is tried once more, on a new worker, where its episode cannot be repeated.
        assert "it is not pure" in host.step("exit", episode="crash").failure
        assert "it is not pure" in host.step("fine", episode="victim").failure
        assert not host.step(episode="new").failure
    with Host("Counting") as host:
        host.step()
        host.step("a")
        host.workers._supervisor.children[0].end()
        assert host.step("a", "b") == EnvironmentReply("0.0.0.2", letters("2b"), 0.5, "turn 2")


def test_an_episode_goes_on_from_its_saved_state_when_its_worker_was_lost():
    with Host("Saving") as host:
        host.step()
        saved = host.step("a").saved
        host.workers._supervisor.children[0].end()
        # Its step is not run again: this one repeats another action.
        host.workers.execute(replace(step("?", "b"), saved=saved))
        reply = host.replies.get(timeout=PATIENCE_S)
        assert (reply.failure, reply.state) == ("", "turn 2")
        assert reply.saved == {"state": {"num": 2, "note": "?"}}


def test_a_process_that_an_environment_leaves_behind_ends_with_its_worker():
    with Host("Bad") as host:
        host.step()
        daemon = int(host.step("daemon").state)
        assert not host.step("daemon", "fine").failure and is_running(daemon)
    assert ends_within(daemon)


def test_an_episode_ends_by_its_own_deadline():
    now_s = [0.0]
    with Host("Counting", episode_s=50.0, clock=lambda: now_s[0]) as host:
        assert not host.step().failure
        now_s[0] = 51.0
        assert host.step("a").failure == "took longer than 50 s for its episode"


def test_a_closed_episode_gets_no_reply():
    with Host("Impure") as host:
        host.step()
        host.workers.execute(CloseEpisode("0.0.0"))
        assert "it is not pure" in host.step("a").failure


def test_an_episode_that_is_closed_right_after_a_step_leaves_nothing():
    with Host("Asynchronous") as host:
        host.workers.execute(step())
        host.workers.execute(CloseEpisode("0.0.0"))
        assert not host.step(episode="0.1.0").failure
        assert host.workers._worker_of.keys() == {"0.1.0"}


@pytest.mark.slow
def test_a_step_that_hangs_its_worker_costs_no_other_pure_episode():
    """The worker cannot even report that a step is late, so that it is killed."""
    with Host("Holding", step_s=5.0) as host:
        host.step(episode="bad")
        host.step(episode="good")
        host.workers.execute(step("hold", episode="bad"))
        assert host.replies.get(timeout=PATIENCE_S).failure == "took longer than 10 s"
        assert host.step("fine", episode="good").token_ids == letters("fine")


def test_an_error_of_the_encoder_fails_steps_instead_of_hanging_them():
    class Encoder:
        reads_calls = False

        def __call__(self, step, reply, tools):
            raise KeyError("no such token")

    replies = queue.SimpleQueue()
    config = CalculatorEnvironmentConfig(kind="calculator", workers=1)
    workers = EnvironmentWorkers(config, Encoder(), replies.put, max_tokens=100)
    try:
        for episode in ("0.0.0", "0.1.0"):
            workers.execute(step(episode=episode))
            assert "cannot run any more: KeyError" in replies.get(timeout=PATIENCE_S).failure
    finally:
        workers.close()


def refused(clock=time.monotonic) -> EnvironmentReply:
    """The reply of a program after one that its branch has no room for."""
    task = replace(TASK, row={"does": "writes too much"})
    command = ["python", str(Path(__file__).with_name("agent_program.py"))]
    config = ProgramEnvironmentConfig(
        kind="program", command=command, sandbox="none", max_turns=8, task_columns=["does"]
    )
    with Host("", config=config, clock=clock) as host:
        host.workers.execute(replace(step(), task=task))
        assert host.replies.get(timeout=PATIENCE_S).token_ids == letters("prompt")
        action = Action("b", (1,), "stop", num_context_tokens=6)
        host.workers.execute(replace(step("b"), task=task, actions=(action,)))
        return host.replies.get(timeout=PATIENCE_S)


def test_a_program_goes_on_after_a_request_that_its_branch_has_no_room_for():
    found = refused()
    assert (found.token_ids, found.after, found.refused) == (letters("0"), 0, 1)


def test_a_refused_request_and_the_next_one_have_one_deadline(monkeypatch):
    now_s, is_refused = [0.0], EnvironmentWorkers._is_refused

    def slowly(self, step, reply):
        if found := is_refused(self, step, reply):
            now_s[0] += 60.0
        return found

    monkeypatch.setattr(EnvironmentWorkers, "_is_refused", slowly)
    assert refused(lambda: now_s[0]).failure == "a reply after a refused one took longer than 0 s"


def test_workers_see_no_secret_that_the_recipe_does_not_name(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "secret")
    with Host("Telling") as host:
        assert host.step().state == ""
    with Host("Telling", env_vars=("MY_API_KEY",)) as host:
        assert host.step().state == "secret"


def test_an_environment_that_cannot_start_is_refused():
    with pytest.raises(SetupError, match="does not have a function Nothing"):
        Host("Nothing")


def called(host, *said, saved=None):
    prompt = Prompt("train:0", (7, 8), "prompt", "answer", {"number": 3})
    actions = tuple(Action(text, ids(text), "stop") for text in said)
    host.workers.execute(StepEnvironment(f"0.0.0.{len(said)}", "0.0.0", prompt, TASK, actions, saved))
    return host.replies.get(timeout=PATIENCE_S)


@pytest.mark.slow
def test_calls_and_messages_reach_the_environment_and_return():
    texts = [CALLED + "<|im_end|>", CALLED + CALLED]
    with Host("Called", encode=encoder()) as host:
        assert '"calc"' in text(called(host).token_ids)
        reply = called(host, texts[0])
        assert "1+2" in text(reply.token_ids) and (reply.state, reply.calls) == ("1", 1)
        # On a new worker the episode is repeated, all its calls included.
        host.workers._supervisor.children[0].end()
        assert called(host, *texts).state == "3"
        assert called(host, *texts, "3").done
    with Host("Called", encode=encoder()) as host:  # of a run that was resumed
        assert called(host, *texts).state == "3"
        assert host.workers._tools.keys() == {"0.0.0"}
        assert called(host, *texts, "3").done and not host.workers._tools
    with Host("Impure", encode=encoder()) as host:
        assert "it is not pure" in called(host, texts[0]).failure


def test_the_calls_of_a_branch_are_read_by_its_tools():
    said = '<tool_call>{"name": "calc", "arguments": {}}</tool_call>'
    with Host("Branching", encode=encoder()) as host:
        assert '"calc"' in text(called(host).token_ids)
        for count, status in ((1, "ok"), (2, "unknown_tool")):
            reply = called(host, *[said] * count)
            assert (reply.after, f"user\n{status}<" in text(reply.token_ids)) == (ROOT, True)
            assert '"other"' in text(reply.token_ids)


SAMPLES = "tests.environments.tool_samples"


def tools_host(**given):
    tools = tuple(f"{SAMPLES}:{name}" for name in ("multiply", "fail"))
    messages = ToolMessages(tokenizer_with("hermes"), 90)
    deadlines = {"begin_s": PATIENCE_S, "step_s": PATIENCE_S, "episode_s": PATIENCE_S}
    config = ToolEnvironmentConfig(**{"kind": "tools", "tools": tools} | deadlines | given)
    return Host("", config=config, encode=encoder(tool_messages=messages))


def calling(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.slow
def test_tools_run_in_a_worker_until_the_policy_answers():
    with tools_host(step_s=8.0) as host:
        assert "Multiply two numbers" in text(called(host).token_ids)
        calls = calling("multiply", product="3*4") * 50
        reply = called(host, calls)
        assert reply.calls == 50 and text(reply.token_ids).startswith("<|im_end|>")
        broken = "<tool_call>{</tool_call>"
        reply = called(host, calls, broken)
        assert (reply.invalid_calls, reply.state) == (1, "invalid") and "is not JSON" in text(reply.token_ids)
        host.workers._supervisor.children[0].end()
        host.workers._tools.clear()
        # With its tools and the number of its invalid calls, but without a call.
        assert reply.saved.keys() == {"state", "tools"} and reply.saved["state"] == {"num_invalid": 1}
        assert called(host, calls, broken, "12", saved=reply.saved).done
        called(host)
        assert "took longer than 8 s" in called(host, calling("fail", how="hang")).failure


def test_tools_that_cannot_be_used_stop_the_run():
    config = ToolEnvironmentConfig(kind="tools", tools=(f"{SAMPLES}:undocumented",))
    with pytest.raises(SetupError, match=r"undocumented cannot be used: it has no docstring"):
        Host("", config=config)


@pytest.mark.slow
def test_a_worker_calls_the_tools_of_an_mcp_server():
    server = McpServerSection(command=("python", str(Path(__file__).with_name("mcp_server.py"))))
    with tools_host(tools=(), mcp_servers=(server,)) as host:
        assert "Count the calls." in text(called(host).token_ids)
        calls = [calling("echo", text="one") + calling("count"), calling("process"), calling("broken")]
        reply = called(host, calls[0])
        assert reply.calls == 2 and "one" in text(reply.token_ids)
        numbers = json.loads(re.search(r"\{.*\}", text(called(host, *calls[:2]).token_ids))[0])
        assert called(host, *calls).failure.endswith("mcp_server.py: the disk is full")
        called(host)
        called(host, calling("process"))
    for number in numbers.values():
        assert ends_within(number, PATIENCE_S)


@pytest.mark.slow
def test_an_mcp_server_that_does_not_start_stops_the_run():
    server = McpServerSection(command=("python", str(Path(__file__).with_name("mcp_server.py")), "exit"))
    config = ToolEnvironmentConfig(kind="tools", mcp_servers=(server,))
    with pytest.raises(SetupError, match=r"mcp_server.py exit did not start: Connection closed"):
        Host("", config=config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "wasm"])
def test_the_tool_python_runs_programs_in_a_sandbox_of_the_episode(kind):
    if kind == "wasm" and not is_installed():
        pytest.skip("needs wasmtime and its CPython: pip install 'millrace-rl[wasm]'")
    config = ToolEnvironmentConfig(kind="tools", tools=("python",), sandbox=kind, step_s=PATIENCE_S)
    with Host("", config=config, encode=encoder()) as host:
        called(host)
        code = calling("python", code="open('a', 'w').write('kept')\nprint(6 * 7)")
        assert "42" in text(called(host, code).token_ids)
        code = calling("python", code="print(open('a').read())\n1 / 0")
        assert "kept\nTraceback" in text(called(host, code, code).token_ids)
        assert called(host, code, code, "42").done
