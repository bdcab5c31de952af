"""OpenAI's endpoints, through the official client."""

from __future__ import annotations

import copy

import pytest

from millrace.inference.server.service import sample_seed
from tests.clients import openai
from tests.inference.server.running import DEADLINE_S, Running, running, tokenizer

pytestmark = pytest.mark.world

QUESTION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "turns?"}]


@pytest.fixture(scope="module")
def mill():
    with running() as found:
        yield found


@pytest.fixture(scope="module")
def client(mill):
    with openai.OpenAI(base_url=f"{mill.url}/v1", api_key="any", max_retries=0, timeout=DEADLINE_S) as found:
        yield found


def drawn(mill: Running, prompt: list[int], seed: int, count: int) -> list[int]:
    return [mill.engine.token(tuple(prompt), seed, position) for position in range(count)]


def test_a_completion_is_what_the_engine_draws(mill, client):
    answer = client.completions.create(model="mill", prompt="the wheel", seed=7, max_tokens=9, logprobs=0)
    prompt = tokenizer()("the wheel")["input_ids"]
    tokens = drawn(mill, prompt, 7, 9)
    (choice,) = answer.choices
    assert choice.text == tokenizer().decode(tokens)
    assert choice.finish_reason == "length"
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", "mill", "cmpl-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 9)
    assert answer.usage.total_tokens == len(prompt) + 9
    assert choice.logprobs.tokens == [tokenizer().decode([token]) for token in tokens]
    assert choice.logprobs.token_logprobs == [-n / 8 for n in range(1, 10)]
    lengths = [len(token) for token in choice.logprobs.tokens]
    assert max(lengths) > 1
    assert choice.logprobs.text_offset == [sum(lengths[:n]) for n in range(9)]


def test_a_completion_has_sixteen_tokens_if_nobody_says_otherwise(client):
    answer = client.completions.create(
        model="mill", prompt="the wheel", seed=1, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 16


def test_samples_of_several_prompts_come_in_order_each_with_its_own_seed(mill, client):
    prompts = [[5, 6], [7]]
    answer = client.completions.create(model="mill", prompt=prompts, n=2, seed=8, max_tokens=5)
    seeds = [sample_seed(8, i) for i in range(4)]
    assert seeds[0] == 8
    assert len(set(seeds)) == 4
    expected = [drawn(mill, prompts[i // 2], seed, 5) for i, seed in enumerate(seeds)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [tokenizer().decode(t) for t in expected]
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 20


def test_texts_and_their_tokens_are_the_same_prompts(client):
    texts = ["the water", "runs"]
    as_tokens = [tokenizer()(text)["input_ids"] for text in texts]
    first, second = (
        client.completions.create(model="mill", prompt=prompt, seed=1) for prompt in (texts, as_tokens)
    )
    assert [c.text for c in first.choices] == [c.text for c in second.choices]


@pytest.mark.slow_beyond(8)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("stop", [None, "e", ["w", "ä", "the"]])
def test_the_deltas_of_a_stream_are_the_whole_completion(client, seed, stop):
    asked = {"model": "mill", "prompt": "the", "seed": seed, "n": 3, "max_tokens": 30, "logprobs": 0}
    whole = client.completions.create(**asked, stop=stop)
    texts, reasons, logprobs, usages = [""] * 3, [None] * 3, [[], [], []], []
    for chunk in client.completions.create(
        **asked, stop=stop, stream=True, stream_options={"include_usage": True}
    ):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            logprobs[choice.index] += (
                zip(
                    *(getattr(choice.logprobs, name) for name in ("tokens", "token_logprobs", "text_offset")),
                    strict=True,
                )
                if choice.logprobs
                else []
            )
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert logprobs == [
        list(zip(c.logprobs.tokens, c.logprobs.token_logprobs, c.logprobs.text_offset, strict=True))
        for c in whole.choices
    ]
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1] == whole.usage


def test_a_turn_of_a_conversation_is_rendered_by_the_chat_template(mill, client):
    answer = client.chat.completions.create(
        model="mill", messages=QUESTION, seed=2, max_completion_tokens=7, logprobs=True
    )
    prompt = tokenizer()("<system>be brief<user>turns?<assistant>")["input_ids"]
    tokens = drawn(mill, prompt, 2, 7)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", tokenizer().decode(tokens))
    assert answer.usage.prompt_tokens == len(prompt)
    assert [entry.logprob for entry in choice.logprobs.content] == [-n / 8 for n in range(1, 8)]
    whole = [entry for entry in choice.logprobs.content if entry.bytes is not None]
    assert [bytes(entry.bytes).decode() for entry in whole] == [entry.token for entry in whole]
    assert len(whole) < 7 or "\N{REPLACEMENT CHARACTER}" not in choice.message.content


@pytest.mark.parametrize("seed", range(6))
def test_a_streamed_turn_says_who_speaks_then_what_and_how_it_ended(client, seed):
    asked = {"model": "mill", "messages": QUESTION, "seed": seed, "stop": "th"}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_a_turn_may_be_as_long_as_the_model_allows(mill, client):
    answer = client.chat.completions.create(
        model="mill", messages=QUESTION, seed=2, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == mill.service.served.max_length


def test_text_parts_of_a_message_are_one_text(client):
    parts = [{"type": "text", "text": "tur"}, {"type": "text", "text": "ns?"}]
    first, second = (
        client.chat.completions.create(
            model="mill", messages=[{"role": "user", "content": content}], seed=1, max_tokens=5
        )
        for content in ("turns?", parts)
    )
    assert first.choices[0].message.content == second.choices[0].message.content


def test_end_of_text_ends_a_completion_unless_it_is_to_be_ignored(mill, client):
    end = tokenizer().eos_token_id
    for ignored in (False, True):
        id = f"end-{ignored}"
        client.completions.create(
            model="mill",
            prompt="the",
            extra_body={"ignore_eos": ignored, "stop_token_ids": [9], "request_id": id},
        )
        assert mill.engine.params[f"{id}-0"].stop_token_ids == ((9,) if ignored else (end, 9))


def test_every_sampling_field_reaches_the_engine(mill, client):
    client.completions.create(
        model="mill",
        prompt="the",
        max_tokens=6,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"5": 2.5},
        stop=["zz"],
        seed=77,
        extra_body={
            "top_k": 40,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "allowed_token_ids": [5, 6, 7],
            "forbidden_token_ids": [8],
            "request_id": "all",
        },
    )
    params = mill.engine.params["all-0"]
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (6, 0.5, 0.9, 77)
    assert (params.presence_penalty, params.frequency_penalty) == (0.25, -0.5)
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (40, 0.125, 1.5, 2)
    assert (params.allowed_token_ids, params.forbidden_token_ids) == ((5, 6, 7), (8,))
    assert (params.logit_bias, params.stop) == (((5, 2.5),), ("zz",))


def test_without_a_seed_two_requests_differ(mill, client):
    for id in ("one", "two"):
        client.completions.create(model="mill", prompt="the", extra_body={"request_id": id})
    assert mill.engine.params["one-0"].seed != mill.engine.params["two-0"].seed


def test_the_models_are_the_one_that_is_served(client):
    (card,) = client.models.list().data
    assert (card.id, card.owned_by, card.max_model_len) == ("mill", "millrace", 64)
    assert client.models.retrieve("mill").id == "mill"
    with pytest.raises(openai.NotFoundError, match="there is no model other/one; this server has mill"):
        client.models.retrieve("other/one")
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="other", prompt="the")
    assert refused.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_request_gives_its_reason_and_the_server_lives_on(client, mill, stream):
    mill.engine.broken = 5
    try:
        with pytest.raises(openai.APIError, match="the request failed: its logits are not finite") as failed:
            list(client.completions.create(model="mill", prompt=[5, 6], n=2, stream=stream))
        if not stream:
            assert isinstance(failed.value, openai.InternalServerError)
    finally:
        mill.engine.broken = None
    assert client.completions.create(model="mill", prompt=[5, 6], max_tokens=2).usage.completion_tokens <= 2
    assert mill.engine.num_live == 0


def test_a_run_trained_on_single_prompts_writes_its_template_around_a_message():
    with running(template="Q: {prompt}\nA:") as mill:
        ask = {"messages": [{"role": "user", "content": "turns?"}], "max_tokens": 3, "seed": 1}
        answer = mill.post("/v1/chat/completions", ask).json()
        tokens = drawn(mill, tokenizer()("Q: turns?\nA:")["input_ids"], 1, 3)
        assert answer["choices"][0]["message"]["content"] == tokenizer().decode(tokens)
        refused = mill.post("/v1/chat/completions", ask | {"messages": QUESTION})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == (
            "messages has 2 messages, but this model was trained on single prompts; send one message of role "
            "user, or use /v1/completions"
        )


def test_a_model_without_a_chat_template_says_so():
    words = copy.deepcopy(tokenizer())
    words.chat_template = None
    with running(tokenizer=words) as mill:
        refused = mill.post("/v1/chat/completions", {"messages": QUESTION})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == (
            "this model has no chat template; write the prompt yourself and use /v1/completions"
        )
