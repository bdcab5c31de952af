"""What a client does wrong, and the sentence it gets: nothing is silently ignored."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from millrace.inference.server.schemas import CompletionBody, GenerateBody
from tests.inference.server.running import asking, fake_served, running, tokenizer

pytestmark = pytest.mark.world

TEXT = {"prompt": "the"}
CHAT = {"messages": [{"role": "user", "content": "turns?"}]}
TOKENS = {"prompt_token_ids": [5]}
# What sglang-router 0.3.2 adds to completions and conversations.
ROUTED = {
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}


@pytest.fixture(scope="module")
def mill():
    with running() as found:
        yield found


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (
            "/v1/completions",
            TEXT | {"temprature": 1},
            "temprature",
            "there is no field temprature; did you mean temperature?",
        ),
        ("/v1/completions", TEXT | {"zzz": 1}, "zzz", "there is no field zzz"),
        ("/v1/completions", {}, "prompt", "prompt is missing; add it"),
        ("/v1/completions", {"prompt": None}, "prompt", "prompt is missing; add it"),
        ("/v1/completions", {"prompt": ""}, "prompt", "prompt: the prompt is empty"),
        (
            "/v1/completions",
            {"prompt": []},
            "prompt",
            "prompt is empty; a completion needs something to follow",
        ),
        ("/v1/completions", {"prompt": ["a", ""]}, "prompt", "prompt 1: the prompt is empty"),
        (
            "/v1/completions",
            {"prompt": [[]]},
            None,
            "the prompt is empty; a completion needs at least one token to follow",
        ),
        (
            "/v1/completions",
            {"prompt": "\ud800"},
            "prompt",
            "prompt holds half a character (at 0) that is not Unicode text",
        ),
        (
            "/v1/completions",
            {"prompt": 5},
            "prompt",
            "prompt is 5: input should be a valid string or input should be a valid list",
        ),
        (
            "/v1/completions",
            TEXT | {"max_tokens": 0},
            "max_tokens",
            "max_tokens is 0, which is for echo: true; ask for at least 1",
        ),
        (
            "/v1/completions",
            TEXT | {"max_tokens": 99},
            None,
            "the prompt has 1 tokens and max_tokens is 99; too long",
        ),
        (
            "/v1/completions",
            TEXT | {"max_tokens": "9"},
            "max_tokens",
            "max_tokens is '9': input should be a valid integer",
        ),
        (
            "/v1/completions",
            TEXT | {"temperature": -1},
            "temperature",
            "temperature is -1.0; it must be 0 (greedy)",
        ),
        ("/v1/completions", TEXT | {"top_p": 0}, "top_p", "top_p is 0.0; it must be above 0 and at most 1"),
        ("/v1/completions", TEXT | {"n": 129}, "n", "n is 129: input should be less than or equal to 128"),
        (
            "/v1/completions",
            TEXT | {"n": 9},
            None,
            "the request asks for 9 samples and the server holds 8 at once; split it",
        ),
        (
            "/v1/completions",
            TEXT | {"seed": -1},
            "seed",
            "seed is -1: input should be greater than or equal to 0",
        ),
        ("/v1/completions", TEXT | {"stop": ["a"] * 65}, "stop", None),
        (
            "/v1/completions",
            TEXT | {"stop": [""]},
            "stop",
            "stop holds an empty string, which would end every completion at once",
        ),
        (
            "/v1/completions",
            TEXT | {"skip_special_tokens": False},
            "skip_special_tokens",
            "skip_special_tokens is not supported by this server; leave it out",
        ),
        (
            "/v1/completions",
            TEXT | {"best_of": 2},
            "best_of",
            "best_of is not supported by this server; leave it out",
        ),
        (
            "/v1/completions",
            TEXT | {"echo": True, "stream": True},
            "echo",
            "echo is not supported with stream: true; leave one of them out",
        ),
        (
            "/v1/completions",
            TEXT | {"suffix": "x"},
            "suffix",
            "suffix is not supported by this server; leave it out",
        ),
        (
            "/v1/completions",
            TEXT | {"logprobs": 3},
            "logprobs",
            "logprobs is 3, but only the log-probability of the sampled token is stored, "
            "none of alternatives; ask for logprobs: 0",
        ),
        (
            "/v1/completions",
            TEXT | {"logit_bias": {"x": 1}},
            "logit_bias",
            "logit_bias names 'x', which is not a token id",
        ),
        (
            "/v1/completions",
            TEXT | {"logit_bias": {"²": 1}},
            "logit_bias",
            "logit_bias names '²', which is not a token id",
        ),
        (
            "/v1/completions",
            TEXT | {"stream_options": {"include_usage": True}},
            "stream_options",
            "stream_options has no effect without stream: true; leave it out",
        ),
        (
            "/v1/completions",
            TEXT | {"stream": True, "stream_options": {"include_usages": True}},
            "include_usages",
            "there is no field include_usages; did you mean include_usage?",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"tools": [{}]},
            "tools",
            "tools is not supported by this server; leave it out",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"response_format": {"type": "json_object"}},
            "response_format",
            "response_format is not supported by this server; leave it out",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"logprobs": True, "top_logprobs": 2},
            "top_logprobs",
            "top_logprobs is 2, but only the log-probability of the sampled token is "
            "stored, none of alternatives; leave it out",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"max_tokens": 3, "max_completion_tokens": 4},
            "max_tokens",
            "max_tokens is 3 and max_completion_tokens 4; give one of them",
        ),
        (
            "/v1/chat/completions",
            {"messages": []},
            "messages",
            "messages is []: list should have at least 1 item after validation, not 0",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}]},
            "messages.0.content",
            "messages.0.content is missing; add it",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": "a"}]},
            "messages",
            "messages: the last message is the assistant's, so there is nothing left for it to answer",
        ),
        (
            "/generate",
            TOKENS | {"logprobs": 1},
            "logprobs",
            "logprobs is 1: input should be 'processed' or 'raw'",
        ),
        (
            "/generate",
            {"prompt_token_ids": [-1]},
            "prompt_token_ids.0",
            "prompt_token_ids.0 is -1: input should be greater than or equal to 0",
        ),
        (
            "/generate",
            TOKENS | {"min_tokens": 200},
            "min_tokens",
            "min_tokens is 200; it must ",
        ),
        ("/tokenize", {}, "prompt", "give either prompt or messages"),
        ("/tokenize", TEXT | CHAT, "prompt", "give either prompt or messages"),
        (
            "/detokenize",
            {"tokens": [10**9]},
            "tokens",
            f"tokens holds 1000000000, but the vocabulary ends at {len(tokenizer()) - 1}",
        ),
        ("/pause", {"mode": "now"}, "mode", "mode is 'now': input should be 'finish', 'abort' or 'keep'"),
        ("/sleep", {"tags": ["all"]}, "tags.0", "tags.0 is 'all': input should be 'weights' or 'kv_cache'"),
    ],
)
def test_a_mistake_gets_a_sentence(mill, path, body, param, message):
    answer = mill.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message is None or error["message"].startswith(message)
    assert mill.engine.num_live == 0


@pytest.mark.parametrize(
    "more",
    [
        {"best_of": 1, "echo": False, "suffix": None, "user": None},
        {"n": None, "stop": None, "seed": None, "logit_bias": None, "stream": None},
        {"logit_bias": {}, "stop": []},
        ROUTED,
    ],
)
def test_an_option_that_asks_for_nothing_may_stand(mill, more):
    assert mill.post("/v1/completions", TEXT | more).status_code == 200


def test_a_conversation_may_have_what_a_router_adds(mill):
    added = {"continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True}
    answer = mill.post("/v1/chat/completions", CHAT | ROUTED | added)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the body is not JSON: Expecting property name enclosed in double quotes"),
        ("[1]", "the body is not a JSON object; send one with Content-Type: application/json"),
        ("", "the body is not a JSON object; send one with Content-Type: application/json"),
        ('{"prompt": "the", "temperature": NaN}', "temperature is nan: input should be a finite number"),
    ],
)
def test_a_body_that_is_no_object_gets_a_sentence(mill, content, message):
    answer = mill.post("/v1/completions", content=content)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


def test_a_body_nested_without_end_is_refused(mill):
    content = '{"prompt": ' + "[" * 100_000
    answer = mill.post("/v1/completions", content=content)
    assert answer.status_code == 400


def test_a_route_that_is_not_there_says_so(mill):
    answer = mill.get("/v1/embeddings")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "there is no GET /v1/embeddings")
    answer = mill.get("/v1/completions")
    assert (answer.status_code, answer.json()["error"]["message"]) == (405, "there is no GET /v1/completions")


HALF = "a\ud800"


@pytest.mark.attack("values without a distribution, half characters")
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", TEXT | {"model": HALF}, "model"),
        ("/v1/completions", {"prompt": HALF}, "prompt"),
        ("/v1/completions", {"prompt": ["a", HALF]}, "prompt"),
        ("/v1/completions", TEXT | {"stop": HALF}, "stop"),
        ("/v1/completions", TEXT | {"stop": ["a", HALF]}, "stop"),
        ("/v1/completions", TEXT | {"request_id": HALF}, "request_id"),
        ("/v1/chat/completions", {"messages": [{"role": HALF, "content": "a"}]}, "role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF}]}, "content"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "name": HALF}]}, "name"),
        ("/tokenize", {"prompt": HALF}, "prompt"),
        ("/tokenize", {"model": HALF, "prompt": "a"}, "model"),
        ("/abort", {"id": HALF}, "id"),
        ("/update_weights", {"path": HALF, "version": 1}, "path"),
    ],
)
def test_half_a_character_is_refused_wherever_text_is_taken(mill, path, body, field):
    answer = mill.post(path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        f"{field} holds half a character (at 1) that is not Unicode text"
    )
    assert answer.json()["error"]["param"] == field


def test_half_a_character_in_a_part_of_a_message_is_refused(mill):
    parts = [{"type": "text", "text": HALF}]
    answer = mill.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith(
        "text holds half a character (at 1) that is not Unicode text"
    )


@pytest.mark.parametrize("text", [HALF, "x" * 100_000, "\x1b[2J\r\n"])
def test_what_comes_back_in_a_message_is_short_and_has_no_control_characters(mill, text):
    for path, body in (
        ("/abort", {"id": text}),
        ("/v1/completions", TEXT | {"model": text}),
        ("/v1/completions", TEXT | {"logit_bias": {text: 1.0}}),
        ("/v1/completions", TEXT | {"n": text}),
        ("/v1/completions", TEXT | {text: 1}),
    ):
        message = mill.post(path, body).json()["error"]["message"]
        assert len(message) < 200
        assert message.isprintable()


@pytest.mark.attack("values without a distribution, half characters")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 1e308),
        ("presence_penalty", -1e308),
        ("frequency_penalty", 1e308),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e300),
        ("temperature", 1e308),
        ("temperature", 1e-300),
        ("top_k", 10**30),
        ("top_p", 1.5),
        ("min_p", 1.5),
        ("stop", "x" * 257),
        ("stop", ["x" * 257]),
    ],
)
def test_a_value_without_a_distribution_is_refused(mill, name, value):
    answer = mill.post("/v1/completions", TEXT | {name: value})
    assert (answer.status_code, answer.json()["error"]["param"].split(".")[0]) == (400, name)
    assert mill.post("/v1/completions", TEXT | {"logit_bias": {"5": 1e308}}).status_code == 400


def test_too_many_prompts_are_refused_before_anything_is_made_for_each(mill):
    answer = mill.post("/v1/completions", {"prompt": ["a"] * 100_000, "n": 128})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "the request asks for 12800000 samples and the server holds 8 at once; split it"
    )


HARMLESS = {
    "metadata": {"run": "1"},
    "parallel_tool_calls": False,
    "prompt_cache_key": "key",
    "prompt_cache_retention": "24h",
    "safety_identifier": "me",
    "service_tier": "flex",
    "store": True,
    "user": "me",
}


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_an_option_that_changes_no_answer_is_taken(mill, name):
    expected = mill.post("/v1/chat/completions", CHAT | {"seed": 1}).json()["choices"]
    answer = mill.post("/v1/chat/completions", CHAT | {"seed": 1, name: HARMLESS[name]})
    assert answer.json()["choices"] == expected
    refused = mill.post("/generate", TOKENS | {name: HARMLESS[name]})
    assert refused.json()["error"]["param"] == name


def test_a_field_with_half_a_character_or_an_endless_name_is_named_as_far_as_it_can_be():
    with running() as mill:
        answer = mill.post("/v1/completions", TEXT | {"\ud800" + "x" * 1_000_000: 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "there is no field \\ud800" + "x" * 54


def test_a_long_list_of_another_kind_is_one_mistake_for_each_kind_it_could_be(mill):
    answer = mill.post("/v1/completions", {"prompt": [5] * 100_000})
    assert answer.json()["error"]["message"] == "the prompt has 100000 tokens and max_tokens is 16; too long"
    for kind, body, count in (
        (GenerateBody, {"prompt_token_ids": ["a"] * 50}, 1),
        (CompletionBody, {"prompt": [5.5] * 50}, 4),
        (CompletionBody, TEXT | {"stop": [5] * 50}, 2),
    ):
        with pytest.raises(ValidationError) as refused:
            kind.model_validate(body)
        assert refused.value.error_count() == count


def test_a_name_that_is_in_use_is_refused():
    served = fake_served(delay_s=60.0)
    with running(served) as mill, asking(mill, request_id="mine"):
        answer = mill.post("/generate", TOKENS | {"request_id": "mine", "max_tokens": 4})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == (
            "request_id mine is taken by an unfinished request; choose another"
        )
