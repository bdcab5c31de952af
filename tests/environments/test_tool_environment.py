"""Episodes with tools: every call gets a reply, whatever the policy or the tool does."""

from __future__ import annotations

import asyncio
import threading

import pytest

from millrace.data.tool_calls import MAX_CALLS
from millrace.environments.kinds import tools_factory
from millrace.environments.running_episodes import checked, is_pure
from millrace.environments.tool_environment import MAX_HANGING, CallThreads
from millrace.environments.tool_messages import ToolMessages
from millrace.types import Action, Reply
from tests.data.chat_templates import tokenizer_with
from tests.environments.steps import TASK

NAMES = ("multiply", "wait", "count", "fail", "large")


def environment(**given):
    rules = {"sandbox": "none", "parallel_calls": 8, "max_characters": 1000, "max_invalid_calls": 1} | given
    names = rules.pop("names", NAMES)
    make = tools_factory([f"tests.environments.tool_samples:{name}" for name in names], **rules)
    return make()


def calling(*calls, status="ok", error=""):
    """A completion with calls, each a name and its arguments."""
    entries = [
        {"type": "function", "id": f"call{number:05d}", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": ""} | ({"tool_calls": entries} if entries else {})
    return Action("", (1,), "stop", message, status, error)


def step(game, *calls, **given):
    return checked(asyncio.run(game.step(calling(*calls, **given))), "step")


def contents(reply):
    return [message["content"] for message in reply.messages]


def test_calls_are_run_until_a_completion_has_none():
    game = environment()
    begun = checked(asyncio.run(game.begin(TASK)), "begin")
    assert [tool["function"]["name"] for tool in begun.tools] == list(NAMES)
    reply = step(game, ("multiply", {"product": "3*4"}), ("count", {"numbers": [1, 2], "scale": 3.0}))
    assert contents(reply) == ["=12;", "9"]
    assert [message["tool_call_id"] for message in reply.messages] == ["call00000", "call00001"]
    assert (reply.state, reply.calls, reply.invalid_calls, reply.done) == ("tool", 2, 0, False)
    assert step(game) == Reply(done=True, calls=0)


def test_the_calls_of_a_turn_run_at_once_up_to_a_limit():
    calls = [("wait", {"seconds": 0.0, "label": str(number)}) for number in range(MAX_CALLS)]
    found = contents(step(environment(parallel_calls=5), *calls))
    assert len(found) == MAX_CALLS
    assert {f'{{"at_once": {n}}}' for n in range(1, 6)} >= set(found)
    assert '{"at_once": 5}' in found


@pytest.mark.parametrize("how", ["file", "exit"])
def test_an_exception_is_a_reply(how):
    (text,) = contents(step(environment(), ("fail", {"how": how})))
    if how == "exit":
        assert text == "error: SystemExit: 3"
    else:
        assert text.startswith(r"error: OSError: \x1b[31mno file\n") and len(text) < 600


def test_a_large_reply_is_cut_in_its_middle():
    (message,) = step(environment(), ("large", {"size": 10_000_000})).messages
    assert len(message["content"]) == 1000 and message["num_characters"] == 10_000_010
    (fitted,) = ToolMessages(tokenizer_with("hermes"), 60).fitted([message])
    assert fitted["content"].startswith("begin xx") and fitted["content"].endswith("xx end")
    left_out = 10_000_010 - len(fitted["content"].replace("x", "")) - fitted["content"].count("x")
    assert "characters left out]" in fitted["content"] and left_out > 0 and "num_characters" not in fitted
    assert len(tokenizer_with("hermes")(fitted["content"])["input_ids"]) <= 60


def test_a_call_that_cannot_be_run_gets_its_reason_and_the_next_ends_the_episode():
    game = environment()
    reply = step(game, ("multiply", {"product": "2*2"}), status="unknown_tool", error="there is no tool 'x'")
    assert contents(reply) == ["=4;", "error: there is no tool 'x'"]
    assert (reply.calls, reply.invalid_calls, reply.state) == (1, 1, "tool")
    # A good turn between does not end it.
    assert step(game, ("multiply", {"product": "2*2"})).done is False
    reply = step(game, status="invalid_json", error="a call is not JSON")
    assert (reply.done, reply.calls, reply.invalid_calls) == (True, 0, 1)
    assert reply.invalid == "2 turns had a call that cannot be run; the last: a call is not JSON"


def test_tools_that_promise_to_be_pure_make_a_pure_environment():
    assert is_pure(environment(names=("multiply",))) and not is_pure(environment())


def test_too_many_threads_that_hang_end_the_worker():
    ended = []
    threads = CallThreads(lambda: ended.append(True))

    async def cancelled(number):
        event = threading.Event()
        events.append(event)
        task = asyncio.create_task(threads.run(lambda: str(event.wait())))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bool(ended) == (number >= MAX_HANGING - 1)

    events = []
    for number in range(MAX_HANGING):
        asyncio.run(cancelled(number))
    for event in events:
        event.set()


class TwoLetters:
    """A tokenizer of `a` and `b`."""

    unk_token_id = 0

    def __call__(self, text, **options):
        return {"input_ids": ["?ab".find(letter) if letter in "ab" else 0 for letter in text]}

    def decode(self, token_ids, **options):
        return "".join("?ab"[token] for token in token_ids)


def test_characters_that_the_tokenizer_cannot_spell_are_left_out():
    fitted = ToolMessages(TwoLetters(), 6).fitted([{"role": "tool", "content": "error: ab"}])
    assert fitted == [{"role": "tool", "content": "ab"}]
    (long,) = ToolMessages(TwoLetters(), 6).fitted([{"role": "tool", "content": "a" * 50 + "b" * 50}])
    assert 0 < len(long["content"]) <= 6 and long["content"].strip("a").strip("b") in ("", "a")
