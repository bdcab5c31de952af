"""From text to tokens and back, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest

from millrace.data.chat import CHAT
from millrace.inference.server.text_worker import MAX_MESSAGE, Refused, Texts, allowed_s
from tests.inference.server.running import tokenizer


def texts(chat_template: str | None = None, template: str = CHAT, max_length: int = 64) -> Texts:
    words = copy.deepcopy(tokenizer())
    words.chat_template = chat_template or words.chat_template
    return Texts(words, template, max_length)


def say(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_texts_and_conversations_become_tokens():
    several = json.loads(texts().answer("prompts", ["the wheel", "水車"]))
    assert several == [tokenizer()(text)["input_ids"] for text in ("the wheel", "水車")]
    written = tokenizer()("<user>turns?<assistant>")["input_ids"]
    assert json.loads(texts().answer("messages", say("turns?"))) == written
    plain = json.loads(texts(template="Q: {prompt}").answer("messages", say("turns?")))
    assert plain == tokenizer()("Q: turns?")["input_ids"]


def test_bodies_of_tokenize_and_detokenize_are_written_whole():
    tokens = tokenizer()("the wheel")["input_ids"]
    expected = {"tokens": tokens, "count": len(tokens), "max_model_len": 64}
    assert json.loads(texts().answer("tokenize", {"prompt": "the wheel"})) == expected
    assert json.loads(texts().answer("detokenize", tokens)) == {"prompt": "the wheel"}
    chat = json.loads(texts().answer("tokenize", {"messages": say("turns?")}))
    assert chat["tokens"] == tokenizer()("<user>turns?<assistant>")["input_ids"]


def test_a_prompt_that_never_fits_is_refused_without_its_tokens():
    with pytest.raises(Refused) as refused:
        texts(max_length=5).answer("prompts", ["a" * 1000])
    assert str(refused.value) == (
        "prompt has 1000 tokens, but prompt and answer have at most 5 together; send less"
    )
    assert refused.value.param == "prompt"
    # Counting is no generation.
    assert json.loads(texts(max_length=5).answer("tokenize", {"prompt": "a" * 1000}))["count"] == 1000


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 1 // 0 }}", "failed with ZeroDivisionError"),
        ("{{ messages[0].nothing.at_all }}", "refuses the messages"),
        ("{{ raise_exception('no') }}", "refuses the messages: no"),
        ("{{ messages[0].content.__class__.__mro__ }}", "refuses the messages"),
        ("{{ 'x' * 10 ** 18 }}", "memory"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "failed with RecursionError"),
    ],
)
def test_whatever_a_template_raises_is_a_refusal(template, message):
    with pytest.raises(Refused, match=message) as refused:
        texts(template).answer("messages", say("a"))
    assert refused.value.param == "messages"


def test_a_text_that_the_tokenizer_cannot_spell_comes_back_short():
    assert MAX_MESSAGE <= 1000
    with pytest.raises(Refused, match="half a character"):
        texts().answer("prompts", ["\ud800"])


def test_a_long_request_may_take_longer():
    assert allowed_s(2.0, 0) == 2.0
    assert allowed_s(2.0, 4 << 20) == 10.0
