from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.inference.engine import PagedEngine, RequestFailed
from millrace.models.load import Model
from millrace.types import Completion, SamplingParams
from tests.close import close_fp32
from tests.inference.fresh import decode, paged, random_prompts, random_requests, same
from tests.inference.invariants import check_engine
from tests.models.tiny import VOCABULARY, tiny_model
from tests.twins.reference import ReferenceEngine

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
DRAW = SamplingParams(max_tokens=12, seed=4)


@pytest.fixture(scope="module")
def llama() -> Model:
    return tiny_model("llama")


def weights(model: Model) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]


def drain(engine: PagedEngine, requests: list[Any]) -> list[Completion]:
    while any(request.finish_reason is None for request in requests):
        engine.step()
    return [engine.completion(request) for request in requests]


def test_a_token_carries_the_version_that_drew_it(llama: Model) -> None:
    engine = paged(llama)
    engine.update_weights(weights(llama), 3)
    (request,) = engine.add((1, 2, 3), [GREEDY])
    for _ in range(5):
        engine.step()
    engine.update_weights(weights(llama), 4)
    (completion,) = drain(engine, [request])
    assert completion.versions.tolist() == [3] * 5 + [4] * 7
    assert completion.versions.dtype == np.int32
    assert completion.logprobs.dtype == np.float32


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_weights_arrive_while_requests_are_in_flight(kv: Any) -> None:
    first, second = tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    engine = paged(tiny_model("llama", seed=1))
    (request,) = engine.add((5, 6, 7, 8, 9), [replace(GREEDY, max_tokens=20)])
    for _ in range(7):
        engine.step()
    drawn = tuple(engine.generated(request)[0].tolist())
    engine.update_weights(weights(second), 1, kv=kv)
    (completion,) = drain(engine, [request])
    alone = ReferenceEngine(first, decode).generate([(5, 6, 7, 8, 9)], [replace(GREEDY, max_tokens=7)])[0]
    assert completion.token_ids[:7] == drawn == alone.token_ids
    # With everything computed again, the rest is what the new weights alone say to prompt and drawn tokens.
    (rest,) = ReferenceEngine(second, decode).generate(
        [(5, 6, 7, 8, 9, *drawn)], [replace(GREEDY, max_tokens=13)]
    )
    if kv == "recompute":
        close_fp32(completion.logprobs[7:], rest.logprobs, atol=1e-4)
    else:
        assert np.abs(completion.logprobs[7:] - rest.logprobs).max() > 1e-2


def test_keys_and_values_of_mixed_weights_are_shared_with_nobody() -> None:
    second = tiny_model("llama", seed=2)
    engine = paged(tiny_model("llama", seed=1))
    prompt = tuple(range(1, 10))
    (request,) = engine.add(prompt, [GREEDY])
    engine.step()
    engine.update_weights(weights(second), 1, kv="keep")
    drain(engine, [request])
    expected = ReferenceEngine(second, decode).generate([prompt], [GREEDY])
    assert same(engine.generate([prompt], [GREEDY]), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sent: sent[1:], "1 weights were not sent, the first being model.embed_tokens.weight"),
        (lambda sent: [*sent, sent[0]], "weight model.embed_tokens.weight was sent twice"),
        (lambda sent: [*sent, ("other", sent[0][1])], "weight other is not one of the engine's"),
        (
            lambda sent: [(sent[0][0], sent[0][1][:5]), *sent[1:]],
            "weight model.embed_tokens.weight was sent as (5, 32) torch.float32; "
            "the engine holds (40, 32) torch.float32",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_whole(change: Callable[[Any], Any], message: str) -> None:
    engine = paged(tiny_model("llama", seed=1))
    before = engine.fingerprint()
    with pytest.raises(ValueError) as error:
        engine.update_weights(change(weights(tiny_model("llama", seed=2))), 9)
    assert str(error.value) == message
    assert engine.fingerprint() == before
    assert engine.version == 0


def test_samples_of_one_prompt_compute_it_once(llama: Model) -> None:
    engine = paged(llama, max_batch_tokens=256)
    prompt = tuple(range(1, 12))
    params = [replace(DRAW, seed=seed) for seed in range(8)]
    requests = engine.add(prompt, params)
    engine.step()
    # All eight drew their first token from the one forward of 11 tokens.
    assert [len(engine.generated(request)[0]) for request in requests] == [1] * 8
    drawn = drain(engine, requests)
    assert same(drawn, ReferenceEngine(llama, decode).generate([prompt] * 8, params))
    assert len({completion.token_ids for completion in drawn}) > 1


def test_a_prefix_that_was_computed_is_found_again(llama: Model) -> None:
    engine = paged(llama)
    prompt = tuple(range(1, 15))
    engine.generate([prompt], [GREEDY])
    before = engine.stats()
    engine.generate([(*prompt, 20, 21)], [GREEDY])
    found = engine.stats().prefix_hits - before.prefix_hits
    assert found == 12  # three full blocks of four
    engine.update_weights(weights(llama), 1)
    engine.generate([(*prompt, 20, 21)], [GREEDY])
    assert engine.stats().prefix_hits == before.prefix_hits + found


def test_an_aborted_request_gives_what_it_drew(llama: Model) -> None:
    engine = paged(llama)
    one, other = engine.add((1, 2, 3), [GREEDY])[0], engine.add((4, 5), [GREEDY], ids=["mine"])[0]
    for _ in range(4):
        engine.step()
    aborted = engine.abort("mine")
    assert aborted is not None
    assert (aborted.finish_reason, len(aborted.token_ids)) == ("abort", 4)
    whole = ReferenceEngine(llama, decode).generate([(1, 2, 3), (4, 5)], [GREEDY, GREEDY])
    assert aborted.token_ids == whole[1].token_ids[:4]
    assert same(drain(engine, [one]), whole[:1])
    assert engine.abort("mine") is None
    assert other.finish_reason == "abort"
    check_engine(engine)


@pytest.mark.parametrize("mode", ["finish", "abort", "keep"])
def test_a_pause_ends_aborts_or_freezes_what_runs(llama: Model, mode: Any) -> None:
    engine = paged(llama, max_requests=1)
    running, waiting = engine.add((1, 2, 3), [GREEDY])[0], engine.add((4, 5), [GREEDY])[0]
    engine.step()
    engine.pause(mode)
    reasons = {"finish": ("length", None), "abort": ("abort", "abort"), "keep": (None, None)}
    assert (running.finish_reason, waiting.finish_reason) == reasons[mode]
    assert not engine.has_work
    assert engine.step() == []
    with pytest.raises(RuntimeError, match=r"the engine is paused; call resume\(\) before generate\(\)"):
        engine.generate([(1,)], [GREEDY])
    engine.resume()
    drawn = drain(engine, [running, waiting])
    if mode != "abort":
        assert same(drawn, ReferenceEngine(llama, decode).generate([(1, 2, 3), (4, 5)], [GREEDY, GREEDY]))


def test_sleep_gives_the_memory_back_and_requests_keep_their_tokens() -> None:
    model = tiny_model("llama", seed=1)
    sent = weights(model)
    engine = paged(model)
    (request,) = engine.add((1, 2, 3), [GREEDY])
    for _ in range(4):
        engine.step()
    engine.sleep(["kv_cache", "weights"])
    assert engine.memory_bytes() == {"weights": 0, "kv_cache": 0}
    with pytest.raises(RuntimeError, match="kv_cache and weights are asleep"):
        engine.step()
    with pytest.raises(RuntimeError, match="the weights are asleep"):
        engine.update_weights(sent, 1)
    engine.wake(["weights"])
    engine.update_weights(sent, 1)
    with pytest.raises(RuntimeError, match="kv_cache are asleep"):
        engine.generate([(1,)], [GREEDY])
    engine.wake(["kv_cache"])
    (completion,) = drain(engine, [request])
    whole = ReferenceEngine(tiny_model("llama", seed=1), decode).generate([(1, 2, 3)], [GREEDY])
    assert same([completion], whole)
    assert completion.versions.tolist() == [0] * 4 + [1] * 8


def test_weights_that_slept_must_be_loaded_before_anything_is_drawn(llama: Model) -> None:
    engine = paged(tiny_model("llama"))
    engine.sleep(["weights"])
    engine.wake(["weights"])
    with pytest.raises(RuntimeError, match=r"no weights since it slept; call update_weights\(\)"):
        engine.generate([(1,)], [GREEDY])
    engine.update_weights(weights(llama), 0)
    assert same(engine.generate([(1,)], [GREEDY]), paged(llama).generate([(1,)], [GREEDY]))


@pytest.mark.parametrize("tags", [[], ["weights", "cache"], ["kv"]])
def test_unknown_tags_are_refused(llama: Model, tags: Any) -> None:
    for verb in (paged(llama).sleep, paged(llama).wake):
        with pytest.raises(ValueError, match="they may be weights, kv_cache or both"):
            verb(tags)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((), GREEDY, "the prompt is empty"),
        ((1, VOCABULARY), GREEDY, "prompt 0 of 1: the prompt holds token 40; the vocabulary has 40"),
        ((1, -1), GREEDY, "prompt 0 of 1: the prompt holds token -1; the vocabulary has 40"),
        ((1,) * 120, GREEDY, "the model allows 128 in all"),
        ((1,) * 60, replace(GREEDY, max_tokens=10), "the whole KV pool holds 64"),
        ((1,), replace(GREEDY, stop_token_ids=(VOCABULARY,)), "40"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    llama: Model, prompt: tuple[int, ...], params: SamplingParams, message: str
) -> None:
    engine = paged(llama, max_cache_tokens=64)
    with pytest.raises(ValueError, match=message):
        engine.generate([prompt], [params])
    assert engine.stats().num_waiting == 0


def test_an_id_is_taken_until_its_completion_is_handed_over(llama: Model) -> None:
    engine = paged(llama)
    (request,) = engine.add((1, 2), [GREEDY], ids=["a"])
    for ids in (["a"], ["b", "b"]):
        with pytest.raises(ValueError, match="choose another"):
            engine.add((1, 2), [GREEDY] * len(ids), ids=ids)
    drain(engine, [request])
    assert engine.add((1, 2), [GREEDY], ids=["a"])[0].id == "a"


def test_a_request_whose_logits_are_not_finite_fails_with_the_layer_named_and_the_engine_lives_on() -> None:
    model = tiny_model("llama", seed=1)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    engine = paged(model)
    prompts = [(1, 2, 3), (4, 7, 5), (8, 9)]
    params = [replace(GREEDY, forbidden_token_ids=(7,))] * 3
    with pytest.raises(RequestFailed, match="prompt 1 of 3 failed: .*first in model.embed_tokens"):
        engine.generate(prompts, params)
    requests = [engine.add(prompt, params[:1])[0] for prompt in prompts]
    drawn = drain(engine, requests)
    assert [completion.finish_reason for completion in drawn] == ["length", "error", "length"]
    expected = ReferenceEngine(tiny_model("llama", seed=1), decode).generate(prompts[::2], params[::2])
    assert same(drawn[::2], expected)
    check_engine(engine)
    assert engine.stats().kv_usage < 1


@pytest.mark.slow
def test_stop_strings_cut_the_text_and_keep_the_tokens(llama: Model) -> None:
    prompts = random_prompts(9, 12)
    plain = ReferenceEngine(llama, decode).generate(prompts, [replace(DRAW, max_tokens=40)] * 12)
    # A stop string that straddles two tokens of the first completion, deep enough to need the window.
    stop = plain[0].text[61:64]
    params = [replace(DRAW, max_tokens=40, stop=(stop, "zz"))] * 12
    theirs = ReferenceEngine(llama, decode).generate(prompts, params)
    ours = paged(llama).generate(prompts, params)
    assert same(ours, theirs)
    assert ours[0].finish_reason == "stop"
    assert stop not in ours[0].text
    assert len(ours[0].token_ids) <= 33


def test_log_probabilities_of_the_prompt(llama: Model) -> None:
    prompts = random_prompts(3, 6, 25)
    prompts[3] = prompts[0]
    params = [replace(DRAW, temperature=0.7, prompt_logprobs=i % 2 == 0) for i in range(6)]
    theirs = ReferenceEngine(llama, decode).generate(prompts, params)
    engine = paged(llama)
    engine.generate(prompts, [GREEDY] * 6)  # a prefix in the cache must not hide what is asked for
    ours = engine.generate(prompts, params)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if index % 2:
            assert one.prompt_logprobs is None
        else:
            assert one.prompt_logprobs is not None
            assert one.prompt_logprobs.shape == (len(prompts[index]) - 1,)
            close_fp32(one.prompt_logprobs, other.prompt_logprobs, atol=1e-5)


def test_the_most_likely_tokens_of_a_prompt_are_the_greedy_ones(llama: Model) -> None:
    (beginning,) = random_prompts(4, 1, 30)
    (greedy,) = paged(llama).generate([beginning], [GREEDY])
    prompt = (*beginning, *greedy.token_ids)
    one = replace(GREEDY, max_tokens=1)
    scored = replace(one, prompt_logprobs=True, prompt_top_tokens=True)
    found, single = paged(llama).generate([prompt, (1,)], [scored, scored])
    steps = paged(llama).generate([prompt[:n] for n in range(1, len(prompt))], [one] * (len(prompt) - 1))
    assert found.prompt_top is not None and found.prompt_logprobs is not None
    assert found.prompt_top.token_ids.tolist() == [step.token_ids[0] for step in steps]
    close_fp32(found.prompt_top.logprobs, [float(step.logprobs[0]) for step in steps], atol=1e-5)
    # Bit for bit, so that a client can compare them; and no token is more likely than the most likely one.
    end = slice(len(beginning) - 1, None)
    assert (found.prompt_top.logprobs[end] == found.prompt_logprobs[end]).all()
    assert (found.prompt_top.logprobs >= found.prompt_logprobs).all()
    assert (found.prompt_top.logprobs > found.prompt_logprobs).any()
    assert single.prompt_top is None and single.prompt_logprobs is None
    warm = replace(scored, temperature=0.5)
    (halved,) = paged(llama).generate([prompt], [warm])
    assert halved.prompt_top is not None
    assert halved.prompt_top.token_ids.tolist() == found.prompt_top.token_ids.tolist()
    assert (halved.prompt_top.logprobs > found.prompt_top.logprobs).all()


def test_the_support_of_truncated_draws_goes_along(llama: Model) -> None:
    prompts, _ = random_requests(2, 10)
    params = [replace(DRAW, top_k=3 if i % 2 else 0) for i in range(10)]
    for index, completion in enumerate(paged(llama).generate(prompts, params)):
        support = completion.support
        if index % 2:
            assert support is not None
            assert support.counts.tolist() == [3] * len(completion.token_ids)
            triples = support.token_ids.reshape(-1, 3)
            assert all(token in triple for token, triple in zip(completion.token_ids, triples, strict=True))
        else:
            assert support is None


@pytest.mark.slow
def test_a_thousand_requests_on_a_pool_for_ten(llama: Model) -> None:
    prompts = random_prompts(4, 1000, 12)
    lengths = [1 + (seed % 7 if seed % 5 else 29) for seed in range(1000)]
    params = [replace(DRAW, max_tokens=length, seed=seed) for seed, length in enumerate(lengths)]
    engine = paged(llama, max_cache_tokens=10 * 40, max_requests=64, max_batch_tokens=256)
    drawn = engine.generate(prompts, params)
    assert [len(completion.token_ids) for completion in drawn] == lengths
    assert engine.stats().num_preemptions > 0
    check_engine(engine)
    assert same(drawn[:50], ReferenceEngine(llama, decode).generate(prompts[:50], params[:50]))


def test_priority_goes_first(llama: Model) -> None:
    engine = paged(llama, max_requests=1)
    late, early = engine.add((1, 2), [GREEDY], priority=1)[0], engine.add((3, 4), [GREEDY], priority=0)[0]
    while early.finish_reason is None:
        engine.step()
    assert late.finish_reason is None
    assert len(engine.generated(late)[0]) == 0


def test_an_interrupted_generate_leaves_nothing_behind(llama: Model, monkeypatch: Any) -> None:
    engine = paged(llama)
    steps = engine.step
    calls = []

    def step() -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return steps()

    monkeypatch.setattr(engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([(1, 2), (3, 4)], [GREEDY, GREEDY])
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    check_engine(engine)
