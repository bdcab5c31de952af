from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from millrace.inference.async_engine import AsyncEngine, EngineClosed, EngineFull, Stream
from millrace.inference.engine import PagedEngine
from millrace.models.load import Model
from millrace.types import SamplingParams
from tests.inference.fresh import decode, paged, random_requests, same
from tests.inference.invariants import check_async_engine
from tests.models.tiny import tiny_model
from tests.twins.reference import ReferenceEngine

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
LONG = replace(GREEDY, max_tokens=100)


@pytest.fixture(scope="module")
def llama() -> Model:
    return tiny_model("llama")


def serve(engine: PagedEngine, use: Callable[[AsyncEngine], Awaitable[Any]], **options: Any) -> Any:
    """Run `use` against a started engine; a hang fails after a minute."""

    async def body() -> Any:
        async with AsyncEngine(engine, **options) as started:
            return await use(started)

    return asyncio.run(asyncio.wait_for(body(), 60))


async def read(stream: Stream) -> tuple[list[int], list[float], list[int]]:
    """All that a stream's pieces hold."""
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    async for piece in stream:
        tokens += piece.token_ids
        logprobs += piece.logprobs.tolist()
        versions += piece.versions.tolist()
    return tokens, logprobs, versions


async def first_piece(stream: Stream) -> None:
    async for _ in stream:
        return


def test_many_callers_get_what_the_reference_engine_draws(llama: Model) -> None:
    prompts, params = random_requests(6, 20)
    expected = ReferenceEngine(llama, decode).generate(prompts, params)

    async def use(engine: AsyncEngine) -> Any:
        streams = [engine.submit(prompt, wanted) for prompt, wanted in zip(prompts, params, strict=True)]
        pieces = await asyncio.gather(*map(read, streams))
        return pieces, [await stream.completion() for stream in streams]

    pieces, drawn = serve(paged(llama), use)
    assert same(drawn, expected)
    for (tokens, logprobs, versions), completion in zip(pieces, drawn, strict=True):
        assert tuple(tokens) == completion.token_ids
        assert logprobs == completion.logprobs.tolist()
        assert versions == completion.versions.tolist()


def test_siblings_are_samples_of_one_prompt(llama: Model) -> None:
    params = [replace(GREEDY, temperature=1.0, seed=seed) for seed in range(5)]
    expected = ReferenceEngine(llama, decode).generate([(3, 4, 5)] * 5, params)

    async def use(engine: AsyncEngine) -> Any:
        streams = engine.submit_siblings((3, 4, 5), params, ids=list("abcde"))
        return [(stream.id, await stream.completion()) for stream in streams]

    drawn = serve(paged(llama), use)
    assert [id for id, _ in drawn] == list("abcde")
    assert same([completion for _, completion in drawn], expected)


def test_an_abort_ends_a_stream_with_what_was_drawn(llama: Model) -> None:
    async def use(engine: AsyncEngine) -> Any:
        stream = engine.submit((1, 2), LONG, id="mine")
        await first_piece(stream)
        aborted = await engine.abort("mine")
        assert await engine.abort("mine") is None
        await read(stream)
        await check_async_engine(engine)
        return aborted, await stream.completion(), engine.stats()

    aborted, completion, stats = serve(paged(llama), use)
    assert aborted is completion
    assert completion.finish_reason == "abort"
    assert 1 <= len(completion.token_ids) < 100
    assert stats.num_running == stats.num_waiting == 0


def test_a_full_queue_refuses(llama: Model) -> None:
    async def use(engine: AsyncEngine) -> Any:
        await engine.pause("keep")
        streams = [engine.submit((1, 2), GREEDY) for _ in range(3)]
        with pytest.raises(EngineFull, match="3 requests wait; the engine queues at most 3"):
            engine.submit((1, 2), GREEDY)
        await engine.resume()
        done = [await stream.completion() for stream in streams]
        return [len(completion.token_ids) for completion in done], await engine.submit(
            (1,), GREEDY
        ).completion()

    lengths, last = serve(paged(llama), use, max_waiting=3)
    assert lengths == [12, 12, 12]
    assert last.finish_reason == "length"


def test_bad_requests_are_refused_at_the_door(llama: Model) -> None:
    async def use(engine: AsyncEngine) -> None:
        with pytest.raises(ValueError, match="the prompt is empty"):
            engine.submit((), GREEDY)
        stream = engine.submit((1,), LONG, id="a")
        with pytest.raises(ValueError, match="request id 'a' is taken"):
            engine.submit((1,), GREEDY, id="a")
        await engine.abort(stream.id)

    serve(paged(llama), use)
    assert paged(llama).stats().num_waiting == 0


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("mode", ["finish", "abort", "keep"])
def test_pauses(llama: Model, mode: Any) -> None:
    async def use(engine: AsyncEngine) -> Any:
        running = engine.submit((1, 2), LONG)
        await first_piece(running)
        waiting = engine.submit((3, 4), LONG)
        await engine.pause(mode)
        stats = engine.stats()
        await engine.resume()
        return stats, await running.completion(), await waiting.completion()

    stats, running, waiting = serve(paged(llama, max_requests=1), use)
    assert stats.num_running == (1 if mode == "keep" else 0)
    assert stats.num_waiting == (0 if mode == "abort" else 1)
    assert running.finish_reason == ("abort" if mode == "abort" else "length")
    assert waiting.finish_reason == ("abort" if mode == "abort" else "length")


def test_a_pause_that_takes_too_long_says_what_it_waited_for(llama: Model) -> None:
    async def use(engine: AsyncEngine) -> Any:
        stream = engine.submit((1, 2), replace(LONG, max_tokens=125))
        await first_piece(stream)
        with pytest.raises(
            TimeoutError, match=r"pause\(finish\) waited 0.001 s for 1 running requests to end"
        ):
            await engine.pause("finish", timeout_s=0.001)
        return await stream.completion()

    assert serve(paged(llama), use).finish_reason == "length"


def test_resuming_ends_a_pause_that_waits(llama: Model) -> None:
    async def use(engine: AsyncEngine) -> Any:
        stream = engine.submit((1, 2), LONG)
        await first_piece(stream)
        pause = asyncio.create_task(engine.pause("finish"))
        await asyncio.sleep(0)  # the pause must be asked for first
        await engine.resume()
        with pytest.raises(RuntimeError, match="resumed before its running requests had ended"):
            await pause
        return await stream.completion()

    assert serve(paged(llama), use).finish_reason == "length"


@pytest.mark.slow
def test_a_pause_nobody_waits_for_any_more_leaves_the_engine_alive(llama: Model) -> None:
    async def use(engine: AsyncEngine) -> Any:
        stream = engine.submit((1, 2), LONG)
        await first_piece(stream)
        pause = asyncio.create_task(engine.pause("finish"))
        await asyncio.sleep(0)
        pause.cancel()
        first = await stream.completion()
        await engine.resume()
        return first, await engine.submit((1, 2), LONG).completion()

    first, second = serve(paged(llama), use)
    assert same([first], [second])


@pytest.mark.slow
def test_weights_change_between_tokens() -> None:
    second = tiny_model("llama", seed=2)
    sent = [(name, parameter.detach()) for name, parameter in second.named_parameters()]

    async def use(engine: AsyncEngine) -> Any:
        stream = engine.submit((1, 2), LONG)
        await first_piece(stream)
        await engine.update_weights(sent, 7)
        prints = await engine.fingerprint()
        with pytest.raises(ValueError, match="weights were not sent"):
            await engine.update_weights(sent[1:], 8)
        return await stream.completion(), engine.version, prints

    completion, version, prints = serve(paged(tiny_model("llama", seed=1)), use)
    versions = completion.versions.tolist()
    assert version == 7
    assert versions == sorted(versions)
    assert set(versions) == {0, 7}
    assert prints == paged(second).fingerprint()


@pytest.mark.slow
def test_sleep_and_wake_between_tokens(llama: Model) -> None:
    async def use(engine: AsyncEngine) -> Any:
        stream = engine.submit((1, 2), LONG)
        await first_piece(stream)
        await engine.sleep(["kv_cache"])
        await engine.wake(["kv_cache"])
        return await stream.completion()

    expected = ReferenceEngine(llama, decode).generate([(1, 2)], [LONG])
    assert same([serve(paged(llama), use)], expected)


def test_closing_aborts_what_runs_and_refuses_what_comes(llama: Model) -> None:
    async def body() -> Any:
        engine = AsyncEngine(paged(llama))
        with pytest.raises(EngineClosed, match="it was not started"):
            engine.submit((1,), GREEDY)
        async with engine:
            stream = engine.submit((1, 2), LONG)
            await first_piece(stream)
        with pytest.raises(EngineClosed, match="it was closed"):
            engine.submit((1,), GREEDY)
        with pytest.raises(EngineClosed, match="it was closed"):
            await engine.resume()
        return await stream.completion()

    completion = asyncio.run(asyncio.wait_for(body(), 60))
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) >= 1


def test_a_failure_of_the_thread_reaches_every_caller(llama: Model, monkeypatch: Any) -> None:
    inner = paged(llama)

    def broken() -> Any:
        raise RuntimeError("the pool caught fire")

    async def body() -> None:
        async with AsyncEngine(inner) as engine:
            await engine.pause("keep")
            stream = engine.submit((1, 2), LONG)
            monkeypatch.setattr(inner, "step", broken)
            await engine.resume()
            with pytest.raises(EngineClosed, match="RuntimeError: the pool caught fire"):
                await stream.completion()
            assert [piece async for piece in stream] == []
            with pytest.raises(EngineClosed, match="the pool caught fire"):
                engine.submit((1,), GREEDY)

    asyncio.run(asyncio.wait_for(body(), 60))
    assert inner.stats().num_waiting == 1
