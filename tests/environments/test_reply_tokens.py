"""Replies of messages become tokens of the chat template; completions become messages with their calls."""

from __future__ import annotations

import pytest

from millrace.data.tool_calls import parser_for
from millrace.environments.in_thread import EnvironmentsInThread
from millrace.environments.kinds import environment_factory
from millrace.environments.reply_tokens import ReplyTokens
from millrace.environments.running_episodes import StepEnvironment
from millrace.types import ROOT, Action, Prompt, Reply
from tests.data.chat_templates import tokenizer_with
from tests.environments.steps import TASK

CALC = {
    "name": "calc",
    "parameters": {"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]},
}
OTHER = {"name": "other", "parameters": {"type": "object", "properties": {}}}
CALLED = '<tool_call>{"name": "calc", "arguments": {"sum": "1+2"}}</tool_call>'
QUESTION = [{"role": "user", "content": "1+2?"}]


def encoder(template="hermes", **given):
    """Tokens in a chat template, or in the pattern `calc(...)` without one."""
    tokenizer = tokenizer_with(template)
    if template is None:
        parser = parser_for("pattern", tokenizer, pattern=r"calc\((?P<argument>[^()]*)\)", tool="calc")
    else:
        parser = parser_for("auto", tokenizer)
    return ReplyTokens(
        tokenizer,
        max_tokens=given.pop("max_tokens", 500),
        is_chat=lambda prompt: template is not None,
        parser=parser,
        messages_of=lambda prompt: QUESTION,
        **given,
    )


def ids(text, template="hermes"):
    return tuple(tokenizer_with(template)(text, add_special_tokens=False)["input_ids"])


def text(token_ids):
    return tokenizer_with(None).decode(token_ids)


def played(make, *said, row=None, encode=None):
    """The replies to completions of an episode, one after another, in this thread."""
    replies, encode = [], encode or encoder()
    host = EnvironmentsInThread(make, encode, replies.append)
    prompt = Prompt("train:0", ids("a prompt"), "a prompt", "", row or {})
    actions = ()
    host.execute(StepEnvironment("0", "0.0.0", prompt, TASK, actions))
    for one in said:
        actions += (Action(one, ids(one), "stop"),)
        host.execute(StepEnvironment("0", "0.0.0", prompt, TASK, actions))
    return replies


class Keeping:
    """Keeps what it is given; its replies are set by a test."""

    pure = True

    def __init__(self, *replies):
        self.replies, self.actions = list(replies), []

    def __call__(self):
        return self

    def begin(self, task):
        return self.replies.pop(0)

    def step(self, action):
        self.actions.append(action)
        return self.replies.pop(0) if self.replies else Reply(done=True)


def test_a_tool_answers_a_call_in_the_chat_template():
    answer = {"role": "tool", "name": "calc", "tool_call_id": "call00000", "content": "3 <|im_end|>"}
    game = Keeping(Reply(tools=(CALC,)), Reply(messages=(answer,), calls=1))
    begun, replied, ended = played(game, f"<think>\nhm\n</think>\n\n{CALLED}<|im_end|>", "3<|im_end|>")
    assert text(begun.token_ids).count('"calc"') == 1 and "1+2?" in text(begun.token_ids)
    call, plain = game.actions
    function = {"name": "calc", "arguments": {"sum": "1+2"}}
    assert call.message == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "id": "call00000", "function": function}],
    }
    assert (call.status, plain.message) == ("ok", {"role": "assistant", "content": "3"})
    # The end of its turn was sampled; the special token of the tool's reply stays text.
    assert text(replied.token_ids).startswith("\n<|im_start|>") and "3 <|im_end|>" in text(replied.token_ids)
    assert list(replied.token_ids).count(*ids("<|im_end|>")) == 1
    assert (replied.calls, ended.done) == (1, True)


def test_calls_are_read_by_the_tools_of_begin_else_of_the_row():
    for given, status in [((CALC,), "ok"), ((OTHER,), "unknown_tool"), ((), "ok")]:
        game = Keeping(Reply(tools=given))
        played(game, CALLED, row={"tools": [CALC]})
        assert game.actions[0].status == status
    game = Keeping(Reply())
    played(game, CALLED)
    assert game.actions[0].error == "there is no tool 'calc'; there are: none"


def test_a_pattern_reads_calls_without_a_chat_template():
    game = Keeping(Reply(tools=(CALC,)), Reply(messages=({"role": "tool", "content": "=3;"},)))
    replies = played(game, "x calc(1+2) y", encode=encoder(None))
    assert game.actions[0].message["tool_calls"][0]["function"]["arguments"] == {"sum": "1+2"}
    assert game.actions[0].message["content"] == "x  y"
    assert [reply.token_ids for reply in replies] == [ids("a prompt", None), ids("=3;", None)]


def test_messages_open_an_episode():
    opening = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"})
    (begun,) = played(Keeping(Reply(messages=opening)))
    assert text(begun.token_ids).index("Be brief.") < text(begun.token_ids).index("Why?")
    (begun,) = played(Keeping(Reply(messages=opening)), encode=encoder(None))
    assert text(begun.token_ids) == "Be brief.Why?"


def test_a_branch_is_bridged_behind_the_turn_that_it_names():
    user, other = {"role": "user", "content": "more"}, {"role": "user", "content": "x"}
    said = {"role": "assistant", "content": "edited"}
    replies = (
        Reply(messages=(user,), tools=(CALC,), after=0),
        Reply(messages=(user,), tools=(CALC,), after=0),
        Reply(messages=(user, said, other), tools=(CALC,), after=1),
        Reply(messages=(other,), tools=(CALC,), after=ROOT),
    )
    game = Keeping(Reply(messages=QUESTION, tools=(CALC,)), *replies)
    begun, *found, _ = played(game, "a", "b<|im_end|>", "c<|im_end|>", "d", "e")
    assert [one.after for one in found] == [0, 0, 1, ROOT]
    # The first turn has no end of its own, also where it is not the newest.
    assert [text(one.token_ids).startswith("<|im_end|>\n<|im_start|>user") for one in found[:2]] == [True] * 2
    assert text(found[2].token_ids) == (
        "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nedited<|im_end|>\n"
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text(found[3].token_ids).count("<|im_start|>") == text(begun.token_ids).count("<|im_start|>")


def test_a_verbatim_text_has_its_special_tokens_and_tokens_are_kept():
    verbatim = Reply("<|im_start|>ab", verbatim=True, after=0)
    game = Keeping(Reply("ab<|im_end|>", verbatim=True), verbatim, Reply(token_ids=(5, 6), after=ROOT))
    replies = played(game, "x", "y", "z")
    assert [one.token_ids for one in replies[:3]] == [ids("ab<|im_end|>"), ids("<|im_start|>ab"), (5, 6)]
    replies = played(Keeping(Reply("a"), Reply(token_ids=(10**6,))), "x")
    assert "token 1000000 is not one of the" in replies[1].failure


def test_the_texts_of_tokens_are_shown_to_a_program():
    shown = encoder(shows_tokens=True).read(Action("ab", ids("a<|im_end|>"), "stop"), Prompt("p", (), ""), ())
    assert shown.token_texts == ("a", "<|im_end|>")


def test_an_episode_that_is_repeated_from_its_actions_begins_before_they_are_read():
    game, replies = Keeping(Reply(tools=(CALC,))), []
    host = EnvironmentsInThread(game, encoder(), replies.append)
    prompt = Prompt("train:0", ids("a prompt"), "a prompt", "", {})
    host.execute(StepEnvironment("0", "0.0.0", prompt, TASK, (Action(CALLED, ids(CALLED), "stop"),)))
    assert game.actions[0].message["tool_calls"] and replies[0].done


def test_a_huge_message_is_cut_to_one_token_more_than_an_episode_may_have():
    huge = {"role": "tool", "content": "x" * 10_000_000}
    game = Keeping(Reply(tools=(CALC,)), Reply(messages=(huge, huge)))
    replies = played(game, CALLED, encode=encoder(max_tokens=300))
    assert len(replies[1].token_ids) == 301


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply("a", messages=({"role": "user", "content": "b"},)), "replied with both text and messages"),
        (Reply(messages=({"role": "robot", "content": "b"},)), "the role of message 1 is 'robot'"),
        (Reply(messages=({"role": "user", "content": object()},)), "object is no value of JSON"),
        (Reply(messages=({"role": "assistant", "content": "b"},)), "the last message is the assistant's"),
        (Reply(tools=(CALC,)), "replied with tools in step; only begin may give tools"),
        (Reply(invalid="why"), "with invalid that is no text, or without done"),
        (Reply("a", calls=-1), "replied with calls -1 in step"),
        (
            Reply("a", after=1),
            "replied with after 1 in step; it is -1, or the index of one of the 1 completions",
        ),
        (Reply("a", after=True), "replied with after True in step"),
        (Reply(done=True, after=0), "with after to an episode that is done"),
        (Reply("a", after=0), "is pure and gave a branch other tools than begin"),
        (Reply("a", token_ids=(1,)), "replied with tokens and a text or messages"),
        (Reply(token_ids=(-1,)), "replied with token_ids in step that are no tuple of tokens"),
        (Reply(verbatim=True), "verbatim that is no bool, or without a text"),
    ],
)
def test_messages_and_tools_that_cannot_be_read_are_failures(reply, reason):
    begun, replied = played(Keeping(Reply(tools=(CALC,)), reply), "a")
    assert not begun.failure
    assert reason in replied.failure


def test_tools_that_cannot_be_read_are_failures():
    (begun,) = played(Keeping(Reply(tools=({"name": 3},))))
    assert "its tools: tool 1 is not an object with a name" in begun.failure


def test_an_invalid_end_has_its_reason():
    make = environment_factory("function", "tests.environments.games:giving_up", {})
    _, ended = played(make, "a")
    assert (ended.done, ended.invalid, ended.invalid_calls) == (True, "it gave up", 1)
