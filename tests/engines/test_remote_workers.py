"""Workers behind ports, as on other machines, in threads of the test."""

from __future__ import annotations

import asyncio
import copy
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch

from millrace.config.engine_section import EngineConfig
from millrace.data.tokenizers import train_tokenizer
from millrace.engines.build_engine import save_engine
from millrace.engines.handle import read_files
from millrace.engines.prefill_decode_engine import PrefillDecodeEngine, WorkerFailed
from millrace.engines.prefill_decode_handle import Role
from millrace.engines.prefill_decode_route import RoutePolicy
from millrace.engines.remote_workers import RemoteWorkers, serve_workers
from millrace.inference.engine import PagedEngine
from millrace.models.load import named_weights
from millrace.processes.worker import KEY_BYTES
from millrace.types import SamplingParams
from tests.engines.role_workers import BLOCK, LIMIT_S, within
from tests.twins.test_deterministic import deterministic_model

pytestmark = pytest.mark.world
HERE, TOKEN = "127.0.0.1", "mill"
PROMPT = tuple(range(1, 23))
GROUP = [SamplingParams(max_tokens=6, seed=seed) for seed in range(2)]


class Host:
    """A worker that listens; `told` is what it tells, and `connections` are those that it has accepted."""

    def __init__(self) -> None:
        self.listening, self.told = socket.create_server((HERE, 0)), list[str]()
        self.address: tuple[str, int] = self.listening.getsockname()
        threads = torch.get_num_threads()

        def serve() -> None:
            with suppress(OSError):  # the test is over
                serve_workers(self.listening, TOKEN, threads=threads, tell=self.told.append)

        self._thread = threading.Thread(target=serve)
        self._thread.start()

    def refuse(self) -> None:
        """Take no further connection."""
        with suppress(OSError):  # it did already
            self.listening.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.refuse()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        self.listening.close()


class Lab:
    """A model, the engine over workers at ports, and one engine to compare with."""

    def __init__(self, folder: Path) -> None:
        self.model = deterministic_model("qwen3").requires_grad_(False)
        tokenizer = train_tokenizer(["0 1 2 3"], vocab_size=257, across_words=False)
        options = EngineConfig(cache_tokens=512, max_num_seqs=8, block_size=BLOCK)
        save_engine(options, self.model, tokenizer, folder, longest=64, deterministic=True)
        self._files, self._decode = read_files(folder), tokenizer.decode
        self.alone = PagedEngine(copy.deepcopy(self.model), tokenizer.decode, block_size=BLOCK)

    def engine(
        self, hosts: Sequence[Host], token: str = TOKEN, connect_s: float = LIMIT_S
    ) -> PrefillDecodeEngine:
        remote = RemoteWorkers([host.address for host in hosts], token, self._files, connect_s=connect_s)
        num_workers: dict[Role, int] = {"prefill": 1, "decode": 1}
        return PrefillDecodeEngine(
            remote,
            named_weights(self.model),
            self.alone.check_request,
            self._decode,
            block_size=BLOCK,
            num_workers=num_workers,
            route=RoutePolicy("apart", 0),
            max_samples=64,
            closing=remote.close,
        )

    async def check_group(self, engine: PrefillDecodeEngine, version: int = 0) -> None:
        """Sample a group; fail unless each bit is that of one engine."""
        streams = engine.submit_siblings(PROMPT, GROUP)
        found = [await stream.completion() for stream in streams]
        for one, twin in zip(found, self.alone.generate([PROMPT] * len(GROUP), GROUP), strict=True):
            assert (one.token_ids, one.finish_reason) == (twin.token_ids, twin.finish_reason)
            assert one.logprobs.tobytes() == twin.logprobs.tobytes()
            assert set(one.versions.tolist()) == {version}
        await engine.respond()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("engine"))


@contextmanager
def started(num: int) -> Iterator[list[Host]]:
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        hosts = [Host() for _ in range(num)]
        for host in hosts:
            stack.callback(host.close)
        yield hosts


def test_workers_at_ports_give_the_bits_of_one_engine_with_new_weights_too(lab: Lab) -> None:
    async def run(engine: PrefillDecodeEngine) -> None:
        async with engine:
            await lab.check_group(engine)
            await engine.update_weights(named_weights(lab.model), 3)
            await lab.check_group(engine, version=3)
            assert engine.counts.complete == 2
            assert engine.stats().prompt_tokens_imported == 2 * 20

    with started(2) as hosts:
        within(run(lab.engine(hosts)))
        told = [text.split(" of ")[0] for host in hosts for text in host.told]
    assert sorted(told)[-2:] == ["decode-1", "prefill-0"]


def test_a_worker_that_is_lost_is_replaced_by_one_at_another_address(lab: Lab) -> None:
    async def run(engine: PrefillDecodeEngine) -> None:
        async with engine:
            await lab.check_group(engine)
            (decode,) = [one for one in engine._workers if one.role == "decode"]
            streams = engine.submit_siblings(PROMPT, GROUP)
            engine._lose(decode, "the test ends it")
            found = [await stream.completion() for stream in streams]
            twins = lab.alone.generate([PROMPT] * len(GROUP), GROUP)
            assert [one.logprobs.tobytes() for one in found] == [one.logprobs.tobytes() for one in twins]
            while not engine.num_ready("decode"):
                await asyncio.sleep(0)
            await lab.check_group(engine)
            assert engine.counts.lost == {"prefill": 0, "decode": 1}

    with started(3) as hosts:
        within(run(lab.engine(hosts)))
        spare = hosts[2].told
    assert spare[0].startswith("decode-2 of ")


def test_an_engine_closes_while_it_waits_for_a_worker(lab: Lab) -> None:
    async def run(engine: PrefillDecodeEngine, hosts: list[Host]) -> None:
        async with engine:
            for host in hosts:
                host.refuse()
            (decode,) = [one for one in engine._workers if one.role == "decode"]
            engine._lose(decode, "the test ends it")
            while decode in engine._workers:
                await asyncio.sleep(0)
            # The prefill worker goes on alone.
            await lab.check_group(engine)

    with started(2) as hosts:
        within(run(lab.engine(hosts, connect_s=1e6), hosts))


def test_a_worker_refuses_another_token(lab: Lab) -> None:
    with started(2) as hosts:
        with pytest.raises(WorkerFailed, match="closed the connection, which it does if the worker's token"):
            within(lab.engine(hosts, token="mall").start())
        told = [text.partition(": ")[2] for host in hosts for text in host.told]
    assert "the peer has another token (MILLRACE_WORKER_TOKEN)" in told


def test_a_worker_that_is_not_there_is_named(lab: Lab) -> None:
    with started(1) as hosts:
        gone = Host()
        gone.close()
        with pytest.raises(WorkerFailed, match=r"waited 0 s for a `millrace serve-worker` for .*: .*refused"):
            within(lab.engine([gone, gone, *hosts][:2], connect_s=0).start())


def test_a_peer_that_sends_no_settings_leaves_the_worker_to_others(lab: Lab) -> None:
    async def run(engine: PrefillDecodeEngine) -> None:
        async with engine:
            await lab.check_group(engine)

    with started(2) as hosts:
        for host in hosts:
            with socket.create_connection(host.address) as idle:
                assert len(idle.recv(KEY_BYTES, socket.MSG_WAITALL)) == KEY_BYTES
        within(run(lab.engine(hosts)))
        told = [text for host in hosts for text in host.told]
    assert sum("the worker's settings" in text for text in told) == 2
