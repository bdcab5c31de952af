"""What an engine's process does with its mail: in a thread of the test."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millrace.engines import engine_worker
from millrace.engines.engine_worker import EngineWorker
from millrace.engines.wire import COMMANDS, REPORTS, Channel, Frame
from millrace.inference.canary_logprobs import sampler_logprobs
from millrace.inference.engine import KvPolicy, PagedEngine
from millrace.models.load import Model
from millrace.processes.worker import KEY_BYTES
from millrace.rollout.backend import GenerateRequest
from millrace.rollout.serialization import pack_requests, unpack_results
from millrace.transport.canary import Canary
from millrace.transport.shared_memory import SharedWeights
from millrace.types import Completion, SamplingParams
from tests.inference.fresh import paged, random_requests
from tests.models.tiny import tiny_model

LIMIT_S = 60.0
KEY = bytes(KEY_BYTES)
Ended = tuple[str, int, int, Completion]


class Trainer:
    """The other end of the line, and models whose weights it sends as versions 0, 1, ..."""

    def __init__(self, channel: Channel, weights: SharedWeights, models: Sequence[Model]) -> None:
        self.channel, self.weights, self.models = channel, weights, models
        self.frames: list[Frame] = []

    def load(self, version: int) -> None:
        self.channel.send(
            "update_weights", self.weights.write(self.models[version].named_parameters(), version)
        )

    def submit(self, *requests: GenerateRequest) -> None:
        self.channel.send("submit", *pack_requests(requests))

    def receive(self, kind: str, num: int = 1) -> list[Frame]:
        """Everything heard so far of this kind, at least so many frames."""
        while sum(frame.kind == kind for frame in self.frames) < num:
            assert not self.channel.ended
            readable, _, _ = select.select([self.channel], [], [], LIMIT_S)
            assert readable, f"no report for {LIMIT_S:g} s"
            self.frames += self.channel.receive()
        return [frame for frame in self.frames if frame.kind == kind]

    def completed(self, num: int) -> list[Ended]:
        """At least so many that have ended, in order."""
        frames: list[Frame] = []
        while sum(len(frame.metadata["requests"]) for frame in frames) < num:
            frames = self.receive("completed", len(frames) + 1)
        return [one for frame in frames for one in frame.unpack(unpack_results)]


class Steps:
    """Lets an engine take so many steps and no more, until it is let go."""

    def __init__(self, engine: PagedEngine) -> None:
        self._step, self._allowed, self._free = engine.step, threading.Semaphore(0), False
        self._done, self._changed = 0, threading.Condition()
        self.num_begun = 0
        engine.step = self._take  # type: ignore[method-assign]

    def _take(self) -> Any:
        self.num_begun += 1
        if not self._free:
            assert self._allowed.acquire(timeout=LIMIT_S)
        result = self._step()
        with self._changed:
            self._done += 1
            self._changed.notify_all()
        return result

    def allow(self, num: int) -> None:
        """Wait until it has taken so many more."""
        goal = self._done + num
        for _ in range(num):
            self._allowed.release()
        with self._changed:
            assert self._changed.wait_for(lambda: self._done >= goal, LIMIT_S)

    def let_go(self) -> None:
        """From here on it takes as many as it likes."""
        self._free = True
        self._allowed.release()


@contextmanager
def serving(engine: PagedEngine, kv: KvPolicy = "recompute", *, interrupt: bool = True) -> Iterator[Trainer]:
    ours, theirs = socket.socketpair()
    weights = SharedWeights()
    box = EngineWorker(engine, Channel(theirs, KEY, COMMANDS), weights.handle, kv=kv, interrupt=interrupt)
    thread = threading.Thread(target=box.serve)
    channel = Channel(ours, KEY, REPORTS)
    thread.start()
    try:
        yield Trainer(channel, weights, [tiny_model("qwen3", seed=seed) for seed in (1, 2)])
    finally:
        channel.close()
        thread.join(LIMIT_S)
        theirs.close()
        weights.close()
    assert not thread.is_alive()


def engine(**sizes: Any) -> PagedEngine:
    return paged(tiny_model("qwen3"), **sizes)


def long_draws(num: int, *, seed: int = 0, max_tokens: int = 90) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            f"{seed}-{i}", (5, 6, 7 + seed), SamplingParams(max_tokens=max_tokens, seed=100 * seed + i)
        )
        for i in range(num)
    ]


def same_bits(one: Completion, other: Completion) -> bool:
    return one.token_ids == other.token_ids and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("logprobs", "versions")
    )


@pytest.mark.slow
def test_nothing_is_drawn_before_weights_are_proved() -> None:
    stepped = engine()
    steps = Steps(stepped)
    with serving(stepped) as trainer:
        trainer.submit(*long_draws(1))
        trainer.receive("ready")
        metadata = trainer.weights.write(trainer.models[0].named_parameters(), 0)
        name = min(metadata["fingerprint"])
        trainer.channel.send(
            "update_weights", {**metadata, "fingerprint": metadata["fingerprint"] | {name: "0" * 32}}
        )
        (loaded,) = trainer.receive("weights_loaded")
        assert loaded.metadata["error"].endswith(f"the first being {name}")
        # It answers this a turn later: in between it would have drawn.
        trainer.submit(GenerateRequest("bad", (99,), SamplingParams(max_tokens=2)))
        trainer.receive("refused")
        assert steps.num_begun == 0
        steps.let_go()
        trainer.channel.send("update_weights", metadata)
        again = trainer.receive("weights_loaded", 2)[1]
        assert (again.metadata["version"], again.metadata["at"], again.metadata["error"]) == (0, 0, "")
        ((id, began, ended, completion),) = trainer.completed(1)
        assert (id, began, ended, len(completion.token_ids)) == ("0-0", 0, 90, 90)


@pytest.mark.slow
def test_nothing_is_drawn_with_weights_that_compute_something_else() -> None:
    tokens = (3, 5, 7, 9)
    with serving(engine()) as trainer:
        trainer.submit(*long_draws(1))
        model = trainer.models[0]
        right = Canary(tokens, tuple(sampler_logprobs(model, tokens)), 1e-4)
        wrong = replace(right, logprobs=(0.0, *right.logprobs[1:]))
        for number, canary in enumerate((wrong, right)):
            metadata = trainer.weights.write(model.named_parameters(), 0, lambda canary=canary: canary)
            trainer.channel.send("update_weights", metadata)
            loaded = trainer.receive("weights_loaded", number + 1)[number]
            assert ("computes something else" in loaded.metadata["error"]) == (canary is wrong)
        assert [began for _, began, _, _ in trainer.completed(1)] == [0]


@pytest.mark.slow
def test_it_draws_what_the_engine_draws() -> None:
    prompts, params = random_requests(3, 12)
    with serving(engine()) as trainer:
        trainer.load(0)
        trainer.submit(
            *[
                GenerateRequest(f"{i}", prompt, one)
                for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
            ]
        )
        ours = {id: completion for id, _, _, completion in trainer.completed(12)}
    twin = paged(tiny_model("qwen3", seed=1))
    for i, completion in enumerate(twin.generate(prompts, params)):
        assert ours[f"{i}"].token_ids == completion.token_ids
        assert (ours[f"{i}"].text, ours[f"{i}"].finish_reason) == (completion.text, completion.finish_reason)


@pytest.mark.slow
def test_what_was_aborted_goes_on_in_another_engine() -> None:
    requests = long_draws(3)
    whole = {}
    with serving(engine()) as trainer:
        trainer.load(0)
        trainer.submit(*requests)
        whole = {id: completion for id, _, _, completion in trainer.completed(3)}
    stepped = engine()
    steps = Steps(stepped)
    with serving(stepped) as trainer:
        trainer.load(0)
        trainer.submit(*requests)
        steps.allow(7)
        trainer.channel.send("abort", {"ids": [request.id for request in requests]})
        steps.let_go()
        begun = {id: completion for id, _, _, completion in trainer.completed(3)}
    assert all(completed.finish_reason == "abort" for completed in begun.values())
    with serving(engine()) as trainer:
        trainer.load(1)
        trainer.submit(*[replace(request, partial_output=begun[request.id]) for request in requests])
        for id, _, _, completion in trainer.completed(3):
            num_begun = len(begun[id].token_ids)
            assert completion.token_ids[:num_begun] == begun[id].token_ids == whole[id].token_ids[:num_begun]
            assert completion.versions.tolist() == [0] * num_begun + [1] * (90 - num_begun)


def test_what_cannot_be_served_is_refused_and_the_rest_goes_on() -> None:
    with serving(engine()) as trainer:
        trainer.load(0)
        bad = GenerateRequest("bad", (99,), SamplingParams(max_tokens=2))
        trainer.submit(bad, *long_draws(1, max_tokens=2))
        (refused,) = trainer.receive("refused")
        assert refused.metadata["ids"] == ["bad"]
        assert refused.metadata["reason"] == "the prompt holds token 99; the vocabulary has 40"
        assert [id for id, *_ in trainer.completed(1)] == ["0-0"]


@pytest.mark.slow
def test_it_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_worker, "HEARTBEAT_S", 0.01)
    with serving(engine()) as trainer:
        trainer.load(0)
        trainer.submit(*long_draws(2))
        trainer.completed(2)
        assert trainer.receive("heartbeat", 3)


def replayed(
    twin: PagedEngine,
    models: Sequence[Model],
    loads: Sequence[tuple[int, int]],
    requests: Sequence[GenerateRequest],
    told: dict[str, Ended],
    kv: KvPolicy,
) -> dict[str, Completion]:
    """What an engine draws that does everything before the steps it is told."""
    found: dict[str, Completion] = {}
    step = 0
    while len(found) < len(requests):
        for version, at in loads:
            if at == step:
                twin.update_weights(models[version].named_parameters(), version, kv=kv)
        for request in requests:
            if told[request.id][1] == step:
                twin.add(request.prompt, [request.params], ids=[request.id])
        for id, _, ended, completion in told.values():
            if ended == step and completion.finish_reason == "abort":
                aborted = twin.abort(id)
                assert aborted is not None
                found[id] = aborted
        for request in twin.step():
            if request.finish_reason is not None:
                found[request.id] = twin.completion(request)
        step += 1
    return found


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("interrupt", [True, False])
@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_the_step_numbers_are_enough_to_repeat_everything(kv: KvPolicy, interrupt: bool) -> None:
    """Weights in flight, an abort, and draws that come while others are drawn."""
    first, second = long_draws(6), long_draws(4, seed=1)
    stepped = engine()
    steps = Steps(stepped)
    with serving(stepped, kv, interrupt=interrupt) as trainer:
        trainer.load(0)
        trainer.submit(*first)
        trainer.receive("weights_loaded")
        steps.allow(9)
        trainer.load(1)
        trainer.channel.send("abort", {"ids": ["0-1", "nobody"]})
        trainer.submit(*second)
        trainer.channel.send("abort", {"ids": ["1-0"]})
        steps.let_go()
        told = {one[0]: one for one in trainer.completed(10)}
        loads = [
            (frame.metadata["version"], frame.metadata["at"])
            for frame in trainer.receive("weights_loaded", 2)
        ]
    assert loads[0] == (0, 0)
    for id, began, ended, completion in told.values():
        # What began before the last load and ended after it was drawn by both.
        expected = {version for version, at in ((0, 0), (1, loads[1][1])) if at < ended}
        expected -= {0} if began >= loads[1][1] else set()
        assert set(completion.versions.tolist()) == (expected if completion.token_ids else set()), id
    spans = [set(completion.versions.tolist()) for *_, completion in told.values()]
    assert ({0, 1} in spans) == interrupt
    if not interrupt:
        assert all(told[request.id][1] == loads[1][1] for request in second)
    assert told["0-1"][3].finish_reason == told["1-0"][3].finish_reason == "abort"
    models = [tiny_model("qwen3", seed=seed) for seed in (1, 2)]
    again = replayed(engine(), models, loads, [*first, *second], told, kv)
    for id, *_, completion in told.values():
        assert same_bits(again[id], completion), id


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("interrupt", [True, False])
@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_orders_taken_up_before_the_same_turns_draw_the_same(
    kv: KvPolicy, interrupt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However early they come: a script says what was taken up when."""
    models = [tiny_model("qwen3", seed=seed) for seed in (1, 2, 3)]
    first, second, third = long_draws(6), long_draws(4, seed=1), long_draws(2, seed=2)
    stepped = engine()
    steps = Steps(stepped)
    with serving(stepped, kv, interrupt=interrupt) as trainer:
        trainer.models = models
        # An engine may have drawn before; it counts from where it is told to.
        trainer.load(0)
        trainer.submit(*long_draws(2, seed=3, max_tokens=5))
        steps.allow(5)
        trainer.completed(2)
        trainer.channel.send("restart_turns", {"recorded": None})
        trainer.frames.clear()
        trainer.load(1)
        trainer.submit(*first)
        trainer.receive("weights_loaded")
        steps.allow(4)
        trainer.submit(*second)
        trainer.channel.send("abort", {"ids": ["0-1", "nobody"]})
        steps.allow(4)
        trainer.load(2)
        trainer.submit(*third)
        steps.let_go()
        told = {one[0]: one for one in trainer.completed(12)}
        started = [one for frame in trainer.frames for one in frame.metadata["commands_started"]]
    kinds = [kind for _, kinds in started for kind in kinds]
    assert kinds == ["update_weights", "submit", "submit", "abort", "update_weights", "submit"]
    assert started == sorted(started) and started[-1][0] > started[0][0] == 0
    with serving(engine(), kv, interrupt=interrupt) as trainer:
        trainer.models = models
        trainer.channel.send("restart_turns", {"recorded": started})
        trainer.load(1)
        trainer.submit(*first)
        trainer.submit(*second)
        trainer.channel.send("abort", {"ids": ["0-1", "nobody"]})
        # There is one copy of the weights, which changes once they are loaded.
        trainer.receive("weights_loaded")
        trainer.load(2)
        # It has to wait for the last order.
        monkeypatch.setattr(engine_worker, "HEARTBEAT_S", 0.01)
        trainer.receive("heartbeat", len(trainer.receive("heartbeat", 0)) + 5)
        trainer.submit(*third)
        again = {one[0]: one for one in trainer.completed(12)}
    for id, began, ended, completion in told.values():
        assert (again[id][1], again[id][2]) == (began, ended), id
        assert same_bits(again[id][3], completion), id


def test_an_engine_that_waits_for_an_order_of_its_script_is_heard_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_worker, "HEARTBEAT_S", 0.01)
    with serving(engine()) as trainer:
        trainer.channel.send(
            "restart_turns", {"recorded": [(0, ["update_weights"]), (0, ["submit", "submit"])]}
        )
        trainer.load(0)
        trainer.submit(*long_draws(1, max_tokens=2))
        assert trainer.receive("heartbeat", 3)
        assert not [frame for frame in trainer.frames if frame.kind == "completed"]
        trainer.submit(*long_draws(1, seed=1, max_tokens=2))
        assert [began for _, began, _, _ in trainer.completed(2)] == [0, 0]


def test_an_engine_with_nothing_to_do_before_its_next_order_is_not_the_run() -> None:
    ours, theirs = socket.socketpair()
    weights = SharedWeights()
    channel = Channel(ours, KEY, REPORTS)
    box = EngineWorker(engine(), Channel(theirs, KEY, COMMANDS), weights.handle, kv="keep", interrupt=True)
    channel.send("restart_turns", {"recorded": [(5, ["update_weights"])]})
    with pytest.raises(RuntimeError, match="turn 0 has nothing to do, .* order came before turn 5$"):
        box.serve()
    channel.close()
    theirs.close()
    weights.close()


def test_commands_of_two_threads_start_in_the_recorded_order() -> None:
    recorded = [(0, ["update_weights", "submit", "blocking_submit"]), (1, ["submit"])]
    requests = [pack_requests(long_draws(1, seed=seed, max_tokens=3)) for seed in range(5)]
    with serving(engine()) as trainer:
        trainer.channel.send("restart_turns", {"recorded": recorded})
        trainer.channel.send("blocking_submit", *requests[0])
        trainer.load(0)
        trainer.channel.send("submit", *requests[1])
        trainer.channel.send("submit", *requests[2])
        began = {id: began for id, began, _, _ in trainer.completed(3)}
        assert began == {"0-0": 0, "1-0": 0, "2-0": 1}
        started = [one for frame in trainer.frames for one in frame.metadata["commands_started"]]
        assert started == [list(one) for one in recorded]
        # No recorded report depends on later commands; but a caller waits for this one.
        trainer.channel.send("submit", *requests[3])
        trainer.channel.send("blocking_submit", *requests[4])
        assert trainer.completed(4)[-1][0] == "4-0"


def test_another_command_than_the_recorded_one_is_refused() -> None:
    ours, theirs = socket.socketpair()
    channel, weights = Channel(ours, KEY, REPORTS), SharedWeights()
    worker = EngineWorker(engine(), Channel(theirs, KEY, COMMANDS), weights.handle, kv="keep", interrupt=True)
    channel.send("restart_turns", {"recorded": [(0, ["blocking_submit", "update_weights"])]})
    channel.send("submit", *pack_requests(long_draws(1)))
    channel.send("blocking_submit", *pack_requests(long_draws(1)))
    with pytest.raises(
        RuntimeError, match="^the replay is not the run: it gets submit and started update_weights$"
    ):
        worker.serve()
    channel.close()
    theirs.close()
    weights.close()
