"""Bytes between two workers by gloo, and workers whose blocks travel by it."""

from __future__ import annotations

import asyncio
import select
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from millrace.engines.kv_network import KEY_BYTES, KvNetwork, Offer
from millrace.engines.prefill_decode_engine import PrefillDecodeEngine, RoleCounts
from millrace.inference.engine import EngineStats
from millrace.models.load import Model, named_weights
from millrace.types import Completion, SamplingParams
from tests.engines.role_workers import LIMIT_S, Threads, over, within
from tests.inference.fresh import paged
from tests.twins.test_deterministic import deterministic_model

pytestmark = pytest.mark.world
HERE = "127.0.0.1"
NOBODY = (HERE, 9, "00" * KEY_BYTES)
PROMPT = tuple(range(1, 23))
GROUP = [SamplingParams(max_tokens=6, seed=seed) for seed in range(2)]


def ended(network: KvNetwork) -> list[tuple[int, str]]:
    assert select.select([network], [], [], LIMIT_S)[0]
    return network.ended()


def test_each_fetch_brings_the_bytes_of_its_offer() -> None:
    numbers = np.random.default_rng(0)
    with closing(KvNetwork(HERE)) as sender, closing(KvNetwork(HERE)) as receiver:
        wanted = [numbers.integers(0, 256, size, dtype=np.uint8) for size in (1, 70_000)]
        found = [np.zeros_like(data_X) for data_X in wanted]
        addresses = [sender.offer(data_X) for data_X in wanted]
        for slot in (1, 0):
            receiver.fetch(slot, addresses[slot], found[slot])
        done = ended(receiver)
        while len(done) < 2:
            done += ended(receiver)
    assert sorted(done) == [(0, ""), (1, "")]
    assert all((one_X == other_X).all() for one_X, other_X in zip(found, wanted, strict=True))


def test_a_sender_that_is_not_there_is_named() -> None:
    with closing(KvNetwork(HERE, fetch_s=0.2)) as receiver:
        receiver.fetch(7, NOBODY, np.zeros(1234, np.uint8))
        ((slot, problem),) = ended(receiver)
    assert slot == 7
    assert problem.startswith("1,234 bytes did not come from 127.0.0.1:9, with 0.2 s for each step: ")


def test_a_peer_without_the_key_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with closing(KvNetwork(HERE)) as sender, closing(KvNetwork(HERE)) as receiver:
        host, port, key = sender.offer(np.ones(1234, np.uint8))
        receiver.fetch(0, (host, port, key[::-1]), found := np.zeros(1234, np.uint8))
        ((_, problem),) = ended(receiver)
    assert problem.startswith(f"1,234 bytes did not come from {HERE}:{port}, ")
    assert not found.any()
    assert caplog.messages == [f"a peer without the key of a KV transfer asked for it at port {port}"]


# ---- workers


class Held(KvNetwork):
    """A network whose fetches begin when the test says so; `address` takes the place of the sender's."""

    def __init__(self, address: Offer | None = None) -> None:
        super().__init__(HERE, fetch_s=0.2 if address else LIMIT_S)
        self.asked, self.go = threading.Event(), threading.Event()
        self._address = address

    def fetch(self, slot: int, address: Sequence[str | int], into_X: np.ndarray) -> None:
        self.asked.set()

        def later() -> None:
            assert self.go.wait(LIMIT_S)
            super(Held, self).fetch(slot, self._address or address, into_X)

        threading.Thread(target=later).start()


@pytest.fixture(scope="module")
def model() -> Model:
    return deterministic_model("qwen3").requires_grad_(False)


def sampled(
    model: Model,
    do: Callable[[PrefillDecodeEngine, list[str], Held], Coroutine[Any, Any, None]],
    **options: Any,
) -> tuple[list[Completion], RoleCounts, EngineStats]:
    """Sample a group by a network; `do` runs once its blocks are to be fetched."""
    threads, made = Threads(model), list[Held]()

    def network() -> Held:
        made.append(Held(**options))
        return made[-1]

    threads.networks = network

    async def run() -> tuple[list[Completion], RoleCounts, EngineStats]:
        async with over(threads) as engine:
            streams = engine.submit_siblings(PROMPT, GROUP)
            while not any(one.asked.is_set() for one in made):
                await asyncio.sleep(0)
            (held,) = [one for one in made if one.asked.is_set()]
            await do(engine, [stream.id for stream in streams], held)
            found = [await stream.completion() for stream in streams]
            await engine.respond()
            return found, engine.counts, engine.stats()

    found: tuple[list[Completion], RoleCounts, EngineStats] = within(run())
    return found


def check_bits(model: Model, found: Sequence[Completion]) -> None:
    """Compare with one engine, as far as the samples go."""
    for one, twin in zip(found, paged(model).generate([PROMPT] * len(GROUP), GROUP), strict=True):
        size = len(one.token_ids)
        assert one.token_ids == twin.token_ids[:size]
        assert one.logprobs.tobytes() == twin.logprobs[:size].tobytes()


async def release(engine: PrefillDecodeEngine, ids: list[str], held: Held) -> None:
    held.go.set()


def test_blocks_that_travel_by_a_network_give_the_bits_of_one_engine(model: Model) -> None:
    found, counts, stats = sampled(model, release)
    check_bits(model, found)
    assert [one.finish_reason for one in found] == ["length"] * 2
    assert (counts.complete, counts.partial, counts.failed) == (1, 0, 0)
    assert stats.prompt_tokens_imported == 20


def test_blocks_that_do_not_come_are_computed_again(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    found, counts, _ = sampled(model, release, address=NOBODY)
    check_bits(model, found)
    assert (counts.complete, counts.failed) == (0, 1)
    assert "missing: " in caplog.text
    assert "did not come from 127.0.0.1:9" in caplog.text


def test_samples_that_are_aborted_while_their_blocks_travel_end_with_their_first_token(model: Model) -> None:
    async def abort(engine: PrefillDecodeEngine, ids: list[str], held: Held) -> None:
        aborting = [asyncio.ensure_future(engine.abort(id)) for id in ids]
        await engine.respond()  # the worker has the command
        held.go.set()
        await asyncio.gather(*aborting)

    found, _, _ = sampled(model, abort)
    check_bits(model, found)
    assert [(one.finish_reason, len(one.token_ids)) for one in found] == [("abort", 1)] * 2


def test_a_pause_that_aborts_ends_samples_whose_blocks_travel(model: Model) -> None:
    async def pause(engine: PrefillDecodeEngine, ids: list[str], held: Held) -> None:
        await engine.pause("abort")
        held.go.set()

    found, _, _ = sampled(model, pause)
    check_bits(model, found)
    assert [(one.finish_reason, len(one.token_ids)) for one in found] == [("abort", 1)] * 2


def test_new_weights_while_blocks_travel_refuse_them(model: Model) -> None:
    async def update(engine: PrefillDecodeEngine, ids: list[str], held: Held) -> None:
        await engine.update_weights(named_weights(model), 1)
        held.go.set()

    found, _, stats = sampled(model, update)
    check_bits(model, found)
    assert stats.blocks_refused == 5
    assert [one.versions.tolist() for one in found] == [[0] + [1] * 5] * 2
