from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from millrace.data.chat import as_text, plain_text, read_messages, render
from millrace.data.rows import DataError
from millrace.data.tokenizers import train_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(frame: str = "$A", chat: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, whose special tokens stand as `frame` says."""
    made = train_tokenizer([], vocab_size=257, across_words=False)
    made.add_special_tokens({"bos_token": "<s>"})
    special = [(token, made.convert_tokens_to_ids(token)) for token in ("<s>", "<|endoftext|>")]
    made.backend_tokenizer.post_processor = TemplateProcessing(single=frame, special_tokens=special)
    made.chat_template = chat
    return made


def refusal(prompt: Any, template: str = "chat", chat: str | None = TEMPLATE) -> str:
    with pytest.raises(DataError) as caught:
        render(tokenizer(chat=chat), template, prompt, "data.jsonl line 3")
    return str(caught.value)


def test_a_plain_template_is_filled_literally() -> None:
    text, token_ids = render(tokenizer(), "Q {x}: {prompt}\nA:", "set {prompt} = {0}", "x")
    assert text == "Q {x}: set {prompt} = {0}\nA:"
    assert tokenizer().decode(token_ids) == text
    assert len(token_ids) == len(text)


@pytest.mark.parametrize("frame", ["<s> $A", "<s> $A <|endoftext|>"])
def test_a_start_token_is_kept_and_an_end_token_is_not(frame: str) -> None:
    made = tokenizer(frame)
    text, token_ids = render(made, "{prompt}", "ab", "x")
    assert text == "ab"
    assert token_ids[0] == made.bos_token_id
    assert made.decode(token_ids[1:]) == "ab"
    assert len(token_ids) == 3


@pytest.mark.parametrize("frame", ["$A", "<s> $A", "<s> $A <|endoftext|>"])
def test_an_end_token_the_template_writes_itself_is_kept_once(frame: str) -> None:
    made = tokenizer(frame)
    _, token_ids = render(made, "{prompt}<|endoftext|>", "a", "x")
    assert token_ids[-1] == made.eos_token_id
    assert token_ids.count(made.eos_token_id) == 1


def test_a_prompt_longer_than_the_tokenizer_likes_is_not_cut() -> None:
    made = tokenizer()
    made.model_max_length = 4
    assert len(render(made, "{prompt}", "a" * 50, "x")[1]) == 50


def test_chat_opens_the_turn_of_the_assistant() -> None:
    made = tokenizer("<s> $A <|endoftext|>", TEMPLATE)
    text, token_ids = render(made, "chat", "1+1?", "x")
    assert text == "<user>1+1?</><assistant>"
    assert made.decode(token_ids) == text
    assert len(token_ids) == len(text)
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "{prompt}"}]
    assert render(made, "chat", messages, "x")[0] == "<system>add</><user>{prompt}</><assistant>"


def test_a_tokenizer_without_chat_template_is_refused() -> None:
    assert refusal("a", chat=None) == (
        "the tokenizer has no chat template; set data.template to a plain one, text around {prompt}, or take "
        "a model that was trained to chat"
    )


USER = {"role": "user", "content": "a"}
CALL = {"name": "calc", "arguments": {"sum": "1"}}


def calling(calls: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "1"}]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (None, "the prompt is null, not text or a list of messages"),
        ({"role": "user"}, "the prompt is an object, not text or a list of messages"),
        ([], "the prompt is an empty list of messages"),
        (["a"], "message 1 is not an object with role and content"),
        ([USER, {"role": "user"}], "message 2 is not an object with role and content"),
        ([{"role": 1, "content": "a"}], "the role of message 1 is a number, not text"),
        ([{"role": "user", "content": None}], "the content of message 1 is null, not text"),
        (
            [USER, {"role": "assistant", "content": "2"}],
            "the last message is the assistant's, so there is nothing left for it to answer",
        ),
        (
            [{"role": "assitant", "content": "a"}],
            "the role of message 1 is 'assitant'; did you mean assistant?",
        ),
        (
            [{"role": "critic", "content": "a"}],
            "the role of message 1 is 'critic'; there are: system, developer, user, assistant, tool",
        ),
        ([{"role": "assistant"}, USER], "message 1 is not an object with role and content"),
        ([{"role": "assistant", "content": None}, USER], "the content of message 1 is null, not text"),
        ([{**USER, "tool_calls": [CALL]}], "message 1 has tool_calls, which only an assistant's may have"),
        (calling(CALL), "tool_calls of message 1 is an object, not a list of calls"),
        (calling(["calc"]), "tool_calls of message 1: a call is not an object with name and arguments"),
        (
            calling([{"name": "calc"}]),
            "tool_calls of message 1: a call is not an object with name and arguments",
        ),
        (calling([{**CALL, "name": 1}]), "tool_calls of message 1: the name of a call is a number, not text"),
        (
            calling([{**CALL, "arguments": "{"}]),
            "tool_calls of message 1: the arguments of calc are not JSON: Expecting property name enclosed "
            "in double quotes: line 1 column 2 (char 1)",
        ),
        (
            calling([{**CALL, "arguments": "[]"}]),
            "tool_calls of message 1: the arguments of calc are a list, not an object",
        ),
        (calling([{**CALL, "id": 7}]), "tool_calls of message 1: the id of a call is a number, not text"),
        ([USER, {"role": "tool", "content": "3", "name": 1}], "name of message 2 is a number, not text"),
        (
            [{"role": "tool", "content": "a"}],
            "the tokenizer's chat template refuses the messages: no tools here",
        ),
    ],
)
def test_malformed_messages_are_refused_with_their_place(prompt: Any, said: str) -> None:
    assert refusal(prompt) == f"data.jsonl line 3: {said}"


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function", "id": "c1", "function": CALL},
        {**CALL, "id": "c1", "type": None, "function": None},
        {"id": "c1", "function": {"name": "calc", "arguments": '{"sum": "1"}'}},
    ],
)
def test_messages_with_tools_have_one_form(call: dict[str, Any]) -> None:
    # Parquet writes null for what a message has not.
    answer = {"role": "tool", "content": "1", "tool_call_id": "c1", "name": "calc", "tool_calls": None}
    messages = [{**USER, "name": None}, {"role": "assistant", "content": None, "tool_calls": [call]}, answer]
    assert read_messages(messages, "x") == [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "id": "c1", "function": CALL}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c1", "name": "calc"},
    ]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([USER], "the prompt is a list of messages; set data.template to chat"),
        (7, "the prompt is a number, not text"),
        (True, "the prompt is true or false, not text"),
        (b"a", "the prompt is of type bytes, not text"),
        ("", "the prompt is empty"),
        ("ab\ud800", "the prompt holds half a character (at 2) that is not Unicode text"),
    ],
)
def test_a_prompt_that_is_not_text_is_refused_with_its_place(prompt: Any, said: str) -> None:
    assert refusal(prompt, "{prompt}") == f"data.jsonl line 3: {said}"


def test_a_trained_tokenizer_has_no_chat_template() -> None:
    with pytest.raises(DataError) as caught:
        plain_text("chat", "a", "x")
    assert str(caught.value) == (
        "data.template chat needs a tokenizer with a chat template, which one trained on the data has not; "
        "set data.template to text around {prompt}, or tokenizer.path to a folder"
    )


def test_messages_of_a_fresh_model_have_no_template() -> None:
    assert plain_text("auto", "a {b}", "x") == "a {b}"
    with pytest.raises(DataError) as caught:
        plain_text("auto", [USER], "data.jsonl line 3")
    assert str(caught.value) == (
        "data.jsonl line 3: a prompt that is a list of messages needs a tokenizer with a chat template, "
        "which one trained on the data has not; set data.template to text around {prompt}, or tokenizer.path "
        "to a folder"
    )


def test_text_passes_unchanged() -> None:
    assert as_text(" é\n", "it", "x") == " é\n"
