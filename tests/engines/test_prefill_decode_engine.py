"""Prefill and decode workers behind one engine: workers in threads, every bit of their results compared."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.engines import prefill_decode_engine
from millrace.engines.prefill_decode_engine import PrefillDecodeEngine, RoleCounts, WorkerFailed
from millrace.engines.prefill_decode_route import RoutePolicy
from millrace.engines.wire import Frame
from millrace.inference.async_engine import EngineClosed, EngineFull, Stream
from millrace.inference.engine_sizes import EngineSizes
from millrace.models.load import Model, named_weights
from millrace.planner.engine_cost import EngineCost
from millrace.planner.length_model import LengthKey
from millrace.planner.placement import Here, Link, Objective, Place, ServingModel
from millrace.planner.request_tracker import RequestTracker
from millrace.simulation.arrivals import ServingRequest
from millrace.simulation.serving import ServingSimulation
from millrace.simulation.step_engines import ModelledEngine
from millrace.types import Completion, SamplingParams
from tests.engines.role_workers import Hold, Loop, Threads, over, within
from tests.inference.fresh import paged
from tests.twins.test_deterministic import deterministic_model

PROMPT = tuple(range(1, 23))
GROUP = [SamplingParams(max_tokens=6, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def model() -> Model:
    return deterministic_model("qwen3").requires_grad_(False)


def expected(model: Model, prompt: Sequence[int], params: Sequence[SamplingParams]) -> list[Completion]:
    return paged(copy.deepcopy(model)).generate([prompt] * len(params), params)


def equal(found: Sequence[Completion], wanted: Sequence[Completion]) -> bool:
    """Whether tokens, ends, texts and the bits of log-probabilities and supports agree."""

    def bits(one: Completion) -> tuple[Any, ...]:
        support = one.support and (one.support.token_ids.tolist(), one.support.logprobs.tobytes())
        return one.token_ids, one.finish_reason, one.text, one.logprobs.tobytes(), support

    return [bits(one) for one in found] == [bits(one) for one in wanted]


async def completions(streams: Sequence[Stream]) -> list[Completion]:
    """What the streams end with, which is also what they streamed."""
    found = []
    for stream in streams:
        tokens: list[int] = []
        async for piece in stream:
            tokens += piece.token_ids
        found.append(await stream.completion())
        assert found[-1].token_ids == tuple(tokens)
    return found


KINDS: list[dict[str, Any]] = [
    {},
    {"stop": ("1", "23")},
    {"top_k": 5, "top_p": 0.9, "min_tokens": 4},
    {"repetition_penalty": 1.3, "stop_token_ids": (0, 3, 7)},
    {"temperature": 0.0, "max_tokens": 1},
    {"prompt_logprobs": True},
]


@pytest.mark.slow
def test_samples_of_every_kind_are_those_of_one_engine(model: Model) -> None:
    threads = Threads(model)
    cases = [(PROMPT[n:], [replace(params, **kind) for params in GROUP]) for n, kind in enumerate(KINDS)]

    async def run() -> PrefillDecodeEngine:
        async with over(threads) as engine:
            for some in (cases[:4], cases[4:]):  # four transfers at a time
                streams = [engine.submit_siblings(prompt, params) for prompt, params in some]
                for (prompt, params), group in zip(some, streams, strict=True):
                    assert equal(await completions(group), expected(model, prompt, params))
            assert engine.stats().imported_fraction == 1.0
            return engine

    engine = within(run())
    # Prompt log-probabilities are computed with the prompt; samples of one token need no transfer.
    assert replace(engine.counts, lost={}) == RoleCounts(complete=4, apart=5, collocated=1, lost={})
    (prefill,), (decode,) = threads.named("prefill"), threads.named("decode")
    # One transfer for the samples of a prompt; each one that goes on computes what is behind the last block.
    apart = [prompt for prompt, params in cases[:4]]
    tails = 3 * 2 + 1 * 1 + 3 * 4 + 3 * 3
    assert decode.engine.stats().prompt_tokens_computed == tails + 3 * len(cases[5][0])
    assert decode.engine.stats().prompt_tokens_imported == sum((len(p) - 1) // 4 * 4 for p in apart)
    assert prefill.engine.stats().leased_blocks == 0


@pytest.mark.slow
def test_an_update_between_two_tokens_reaches_every_worker(model: Model) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.25)
    long = [replace(params, max_tokens=12) for params in GROUP[:2]]

    threads = Threads(model)

    async def run() -> list[Completion]:
        async with over(threads) as engine:
            hold = Hold(threads.named("decode")[0], 4)
            streams = engine.submit_siblings(PROMPT, long)
            update = engine.update_weights(list(named_weights(other)), 1)
            await hold.release_after(update, "update_weights")
            assert await engine.fingerprint() == paged(copy.deepcopy(other)).fingerprint()
            with pytest.raises(ValueError, match="version 1 is not above 1"):
                await engine.update_weights(named_weights(other), 1)
            with pytest.raises(ValueError, match="weights were not sent"):
                await engine.update_weights(list(named_weights(other))[1:], 2)
            assert engine.version == 1
            return [await stream.completion() for stream in streams]

    for params, found in zip(long, within(run()), strict=True):
        # One engine that gets the weights after the same number of tokens.
        early = int((found.versions == 0).sum())
        twin = paged(copy.deepcopy(model))
        (request,) = twin.add(PROMPT, [params])
        while len(twin.generated(request)[0]) < early:
            twin.step()
        twin.update_weights(named_weights(other), 1)
        while request.finish_reason is None:
            twin.step()
        assert early == 5  # one of the prefill worker, four of the other
        assert equal([found], [twin.completion(request)])
        assert np.array_equal(found.versions, request.versions)


class DiesAt:
    """The first worker of a role dies before a report: the first of a kind, or the one of a number.

    The kind of a report in which a sample ends is `end`.
    """

    def __init__(self, role: str, kind: str = "", *, number: int = -1) -> None:
        self._role, self._kind, self._number = role, kind, number
        self.num_reports = 0

    def __call__(self, name: str, frame: Frame) -> Frame | None:
        if not name.startswith(self._role) or frame.kind in ("ready", "weights_loaded"):
            return frame
        self.num_reports += 1
        kind = "end" if frame.metadata.get("num_ended") else frame.kind
        dies = (kind == self._kind, self.num_reports == self._number)
        self._kind = "" if dies[0] else self._kind
        return None if any(dies) else frame


def two_prompts(
    model: Model, receives: DiesAt, **options: Any
) -> tuple[list[Completion], PrefillDecodeEngine]:
    async def run() -> tuple[list[Completion], PrefillDecodeEngine]:
        async with over(Threads(model, receives), **options) as engine:
            streams = [s for n in (0, 2) for s in engine.submit_siblings(PROMPT[n:], GROUP)]
            return await completions(streams), engine

    found: tuple[list[Completion], PrefillDecodeEngine] = within(run())
    return found


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("role", "kind"),
    [
        ("prefill", "pieces"),
        ("prefill", "prefilled"),
        ("decode", "imported"),
        ("decode", "pieces"),
        ("decode", "end"),
    ],
)
def test_a_worker_that_dies_at_a_point_of_a_transfer_costs_no_token(
    model: Model, role: str, kind: str
) -> None:
    wanted = expected(model, PROMPT, GROUP) + expected(model, PROMPT[2:], GROUP)
    found, engine = two_prompts(model, DiesAt(role, kind))
    assert equal(found, wanted)
    assert engine.counts.lost == {"prefill": 0, "decode": 0} | {role: 1}


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_dies_before_each_report_costs_no_token(model: Model, role: str) -> None:
    wanted = expected(model, PROMPT, GROUP) + expected(model, PROMPT[2:], GROUP)
    whole = DiesAt(role)
    two_prompts(model, whole, num_prefill=2, num_decode=2)
    for number in range(1, whole.num_reports + 1):
        found, _ = two_prompts(model, DiesAt(role, number=number), num_prefill=2, num_decode=2)
        assert equal(found, wanted), f"death before report {number}"


def test_blocks_that_do_not_prove_are_computed_again_and_the_log_says_so(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(name: str, frame: Frame) -> Frame:
        if frame.kind != "prefilled":
            return frame
        manifest = dict(frame.metadata["manifest"])
        manifest["checksums"] = ["00" * 16, *manifest["checksums"][1:]]
        return replace(frame, metadata={**frame.metadata, "manifest": manifest})

    async def run() -> PrefillDecodeEngine:
        async with over(Threads(model, spoil)) as engine:
            streams = engine.submit_siblings(PROMPT, GROUP)
            assert equal(await completions(streams), expected(model, PROMPT, GROUP))
            assert (engine.stats().blocks_refused, engine.stats().imported_fraction) == (5, 0.0)
            return engine

    assert within(run()).counts.failed == 1
    assert "brought 0.0% of the expected blocks" in caplog.text
    assert "checksum: the bytes of block 0" in caplog.text


def test_a_route_says_which_prompts_are_computed_apart() -> None:
    lengths = (4, 5, 12, 13)  # in blocks of 4; one without a whole block and a token has nothing to send
    for kind, apart in (
        ("apart", [False, True, True, True]),
        ("collocated", [False] * 4),
        ("adaptive", [False, False, False, True]),
    ):
        route = RoutePolicy(kind, 12)
        assert [route.is_apart(length, 4) for length in lengths] == apart


def test_prompts_stay_with_the_decode_worker_when_all_slots_are_taken(model: Model) -> None:
    prompts = [PROMPT[n:] for n in range(6)]

    async def run() -> RoleCounts:
        async with over(Threads(model)) as engine:
            streams = [s for prompt in prompts for s in engine.submit_siblings(prompt, GROUP[:1])]
            wanted = paged(copy.deepcopy(model)).generate(prompts, GROUP[:1] * 6)
            assert equal(await completions(streams), wanted)
            return engine.counts

    counts = within(run())
    assert (counts.apart, counts.collocated) == (4, 2)


def test_without_workers_requests_end_with_a_reason_and_new_ones_are_refused(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefill_decode_engine, "MAX_RESTARTS", 0)

    async def run() -> None:
        async with over(Threads(model, lambda name, frame: frame if starts(frame) else None)) as engine:
            (stream,) = engine.submit_siblings(PROMPT, GROUP[:1])
            with pytest.raises(EngineClosed, match=r"no worker is left to compute: .* was lost: its thread"):
                await stream.completion()
            for refused in (engine.respond(), engine.pause("keep"), engine.fingerprint()):
                with pytest.raises(EngineClosed, match="no worker is left"):
                    await refused
            with pytest.raises(EngineClosed, match="no worker is left"):
                engine.submit_siblings(PROMPT, GROUP)
            assert await engine.abort("unknown") is None
            while "none is started any more" not in caplog.text:
                await asyncio.sleep(0)

    def starts(frame: Frame) -> bool:
        return frame.kind in ("ready", "weights_loaded")

    within(run())


@pytest.mark.slow
def test_a_prefill_worker_that_has_computed_a_prompt_is_replaced(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_decode_engine, "MAX_RESTARTS", 0)
    reports: list[str] = []

    def dies_at_the_second_prompt(name: str, frame: Frame) -> Frame | None:
        if not name.startswith("prefill") or frame.kind != "pieces":
            return frame
        reports.append(name)
        return None if len(reports) == 2 else frame

    async def run() -> None:
        async with over(Threads(model, dies_at_the_second_prompt)) as engine:
            for prompt in (PROMPT, PROMPT[2:]):
                streams = engine.submit_siblings(prompt, GROUP[:1])
                assert equal(await completions(streams), expected(model, prompt, GROUP[:1]))
            assert engine.counts.lost == {"prefill": 1, "decode": 0}
            while not engine.num_ready("prefill"):
                await asyncio.sleep(0)

    within(run())


def test_a_worker_that_is_silent_with_requests_is_lost(model: Model) -> None:
    time_s = [0.0]
    dead = []

    def silent(name: str, frame: Frame) -> Frame:
        if name == "decode-1" and frame.kind == "pieces":
            dead.append(name)
            return replace(frame, kind="heartbeat")  # its tokens never arrive
        return frame

    async def run() -> None:
        async with over(Threads(model, silent), clock=lambda: time_s[0]) as engine:
            streams = engine.submit_siblings(PROMPT, GROUP)
            while not dead:
                await asyncio.sleep(0)
            time_s[0] = 301.0
            engine.check_deadlines()
            assert engine.counts.lost == {"prefill": 0, "decode": 1}
            assert equal(await completions(streams), expected(model, PROMPT, GROUP))

    within(run())


@pytest.mark.slow
def test_others_go_on_while_the_process_of_a_lost_worker_ends(model: Model) -> None:
    threads = Threads(model, DiesAt("decode", "imported"))

    async def run() -> None:
        async with over(threads, num_decode=2) as engine:
            threads.may_end.clear()
            waiting = engine.submit_siblings(PROMPT, GROUP)
            while not engine.counts.lost["decode"]:
                await asyncio.sleep(0)
            others = engine.submit_siblings(PROMPT[2:], GROUP)
            assert equal(await completions(others), expected(model, PROMPT[2:], GROUP))
            threads.may_end.set()
            assert equal(await completions(waiting), expected(model, PROMPT, GROUP))

    within(run())


@pytest.mark.slow
def test_a_worker_that_cannot_be_killed_keeps_its_memory_and_no_request(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    threads = Threads(model, DiesAt("decode", "imported"))
    threads.unkillable = True

    async def run() -> RoleCounts:
        async with over(threads, num_decode=2) as engine:
            assert equal(
                await completions(engine.submit_siblings(PROMPT, GROUP)), expected(model, PROMPT, GROUP)
            )
            for number in range(2, 6):
                engine.submit_siblings(PROMPT[number:], GROUP)
            return engine.counts

    counts = within(run())
    # Three of four slots are left; the prompt of the worker was placed twice.
    assert (counts.apart, counts.collocated) == (1 + 3, 1 + 1)
    assert "was lost: Command 'the worker' timed out" in caplog.text


def test_a_worker_that_does_not_start_is_an_error_that_names_it(model: Model) -> None:
    async def run() -> None:
        async with over(Threads(model, lambda name, frame: None)):
            pass

    with pytest.raises(WorkerFailed, match=r"(prefill-0|decode-1) was lost: its thread was ended"):
        within(run())


def test_abort_pause_and_limits_are_those_of_an_engine(model: Model) -> None:
    long = SamplingParams(max_tokens=90)

    threads = Threads(model)

    async def overdue(engine: PrefillDecodeEngine) -> None:
        pause = asyncio.ensure_future(engine.pause("finish", timeout_s=10.0))
        await threads.named("decode")[0].commanded("pause", 1)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        loop.forward_s = 10.0
        await pause

    async def run() -> None:
        async with over(threads, max_samples=3) as engine:
            hold = Hold(threads.named("decode")[0], 3, 6, 9)
            streams = engine.submit_siblings(PROMPT, [long] * 3, ids=["a", "b", "c"])
            with pytest.raises(EngineFull, match="3 samples are unfinished"):
                engine.submit_siblings(PROMPT, [long])
            with pytest.raises(ValueError, match="the prompt is empty"):
                engine.submit_siblings((), [long])
            aborted = await hold.release_after(engine.abort("a"), "abort")
            assert (aborted.finish_reason, len(aborted.token_ids)) == ("abort", 4)
            assert aborted.text == paged(copy.deepcopy(model))._decode(aborted.token_ids)
            with pytest.raises(TimeoutError, match="waited 10 s for 2 running requests to end; they go on"):
                await hold.release_after(overdue(engine), "resume")
            await hold.release_after(engine.pause("keep"), "pause")
            num_known = [sample.num_known for sample in engine._live.values()]
            await engine.respond()
            assert num_known == [sample.num_known for sample in engine._live.values()] == [10, 10]
            await engine.pause("abort")
            ended = [await stream.completion() for stream in streams[1:]]
            assert [(one.finish_reason, len(one.token_ids)) for one in ended] == [("abort", 10)] * 2
            await engine.resume()
            found = await completions(engine.submit_siblings(PROMPT, GROUP))
            assert equal(found, expected(model, PROMPT, GROUP))
            for tags in (engine.sleep(["weights"]), engine.wake(["weights"])):
                with pytest.raises(RuntimeError, match="does not sleep"):
                    await tags

    within(run())


class RecordedTracker(RequestTracker):
    """Records where requests were placed, by the numbers of the workers."""

    decisions: list[tuple[int, ...]]

    def place(self, *arguments: Any, **options: Any) -> Place:
        found = super().place(*arguments, **options)
        names = [worker.name for worker in arguments[3]]
        one = (found.engine,) if isinstance(found, Here) else (found.prefill, found.decode)
        self.decisions.append(tuple(names.index(name) for name in one))
        return found


def by_cost() -> RecordedTracker:
    cost = EngineCost(step_s=1e-2, token_s=5e-3, pair_s=0.0, row_s=0.0, context_s=0.0)
    found = RecordedTracker(ServingModel(cost, 512, 4, 100, Link(), Objective(ttft_s=2.0, tpot_s=0.03)))
    found.decisions, found.num_prefill = [], 1
    return found


def test_the_cost_model_places_as_in_the_simulation(model: Model) -> None:
    """Four prompts that arrive before a token is there: the same workers, by their numbers."""
    prompts = [tuple((7 * place + length) % 40 for place in range(length)) for length in (60, 40, 50, 22)]
    workers = [ModelledEngine(EngineSizes(32, 4, 512, 16, 128, 100), lambda plan: 60.0) for _ in range(3)]
    simulated = by_cost()
    requests = [ServingRequest(n, 0.1 * n, prompt, 2) for n, prompt in enumerate(prompts)]
    ServingSimulation([("both", one) for one in workers], link=Link(), tracker=simulated).run(requests)
    tracker, now_s = by_cost(), [0.0]

    async def run() -> list[Completion]:
        async with over(
            Threads(model), num_decode=2, tracker=tracker, capacity=128, clock=lambda: now_s[0]
        ) as engine:
            streams = []
            for number, prompt in enumerate(prompts):
                now_s[0] = 0.1 * number
                params = SamplingParams(max_tokens=128 - len(prompt), stop_token_ids=tuple(range(20)))
                streams += engine.submit_siblings(prompt, [params], ids=[str(number)])
            assert tracker.decisions == simulated.decisions
            assert {len(one) for one in tracker.decisions} == {1, 2}
            return await completions(streams)

    found = within(run())
    params = [SamplingParams(max_tokens=128 - len(p), stop_token_ids=tuple(range(20))) for p in prompts]
    for prompt, wanted, one in zip(prompts, params, found, strict=True):
        assert equal([one], expected(model, prompt, [wanted]))
    assert not tracker.requests and tracker.lengths.forecast(LengthKey(60), max_tokens=60).level == "bucket"
