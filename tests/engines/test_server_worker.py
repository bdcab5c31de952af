"""The worker of a server: commands of a trainer become calls of a dialect, which a test answers in-thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from millrace.engines.http_client import RequestRefused, ServerError
from millrace.engines.server_dialect import check_end, remaining
from millrace.engines.server_settings import ServerSettings
from millrace.engines.server_worker import ServerWorker
from millrace.engines.weight_files import raw_file
from millrace.engines.wire import Channel
from millrace.rollout.backend import GenerateRequest
from millrace.transport.canary import Canary
from millrace.types import Completion, SamplingParams, Support
from tests.engines.worker_settings import SETTINGS
from tests.engines.worker_thread import Served, in_thread

CANARY = Canary((1, 2, 3), (-1.0, -2.0), 0.1)
WEIGHT = {"weight": torch.arange(4.0)}


class Metrics:
    """A client whose server makes progress at each look."""

    url = "http://test"

    def __init__(self) -> None:
        self.num = 0

    async def get_text(self, path: str, *, timeout_s: float) -> str:
        self.num += 1
        return f'vllm:generation_tokens_total{{engine="0"}} {self.num}\n'


class FakeDialect:
    """Completes a request when the test sets its event; each token is the id of the prompt."""

    def __init__(self) -> None:
        self.client = Metrics()
        self.loaded, self.reported, self.scores = -1, 0, [-1.0, -2.0]
        self.files: list[bytes] = []
        self.done: dict[int, asyncio.Event] = {}
        self.sent: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.aborted: set[str] = set()
        self.update = asyncio.Event()
        self.update.set()
        self.busy, self.num_updates = 0, 0

    async def probe(self, token_ids: Sequence[int], text: str | None) -> None: ...

    async def generate(self, id: str, prompt: Sequence[int], params: SamplingParams) -> Completion:
        if self.busy:
            self.busy -= 1
            raise RequestRefused("POST /generate", 429, "busy", "queue_full")
        if prompt[0] == 99:
            raise ValueError("there is no token 99")
        self.sent.append((tuple(prompt), params))
        done = self.done.setdefault(prompt[0], asyncio.Event())
        while not done.is_set() and id not in self.aborted:
            await asyncio.sleep(0)
        reason, count = ("abort", 1) if id in self.aborted else ("length", params.max_tokens)
        completion = made([prompt[0]] * count, self.loaded, reason)
        return replace(completion, support=support(completion.token_ids) if params.top_k else None)

    async def abort(self, ids: Sequence[str]) -> None:
        self.aborted.update(ids)

    def weights_at(self, weights: int, manifest: Any, folder: str) -> Any:
        return raw_file(weights, manifest, folder)

    async def update_weights(self, path: str, manifest: Any) -> None:
        self.num_updates += 1
        await self.update.wait()
        with open(path, "rb") as file:
            self.files.append(file.read(manifest["bytes"]))
        self.loaded = manifest["version"]

    async def version(self) -> int:
        return self.loaded + self.reported

    async def verify(self, token_ids: Sequence[int]) -> list[float]:
        return self.scores


def made(tokens: Sequence[int], version: int, reason: str, text: str | None = None) -> Completion:
    count = len(tokens)
    logprobs, versions = np.full(count, -0.5, np.float32), np.full(count, version, np.int32)
    return Completion(tuple(tokens), logprobs, versions, reason, decode(tokens) if text is None else text)


def support(tokens: Sequence[int]) -> Support:
    count = len(tokens)
    return Support(np.array(tokens, np.int32), np.ones(count, np.int32), np.zeros(count, np.float32))


def decode(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token) for token in tokens)


class Server(Served):
    """The worker of a server, and the dialect that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.dialect = FakeDialect()

    def finish(self, token: int) -> None:
        """Let the requests whose prompt begins with a token end."""
        self.call(lambda: self.dialect.done.setdefault(token, asyncio.Event()).set())

    def load(self, version: int) -> None:
        self.trainer.channel.send(
            "update_weights", self.trainer.weights.write(WEIGHT.items(), version, lambda: CANARY)
        )


def serving(*, interrupt: bool = True, settings: ServerSettings = SETTINGS) -> AbstractContextManager[Server]:
    server = Server()

    def make(channel: Channel, weights: int) -> ServerWorker:
        return ServerWorker(server.dialect, channel, weights, settings, decode, interrupt=interrupt)

    return in_thread(server, make, ServerError)


def request(token: int, max_tokens: int = 3) -> GenerateRequest:
    return GenerateRequest(f"r{token}", (token,), SamplingParams(max_tokens=max_tokens))


def test_nothing_is_sent_before_weights_are_verified() -> None:
    with serving() as served:
        served.trainer.submit(request(1))
        served.finish(1)
        assert served.dialect.sent == []
        served.load(0)
        ((id, _, _, completion),) = served.trainer.completed(1)
        assert (id, completion.token_ids, completion.versions.tolist()) == ("r1", (1, 1, 1), [0, 0, 0])
        assert served.dialect.files[0][:16] == WEIGHT["weight"].numpy().tobytes()
        kinds = [frame.kind for frame in served.trainer.frames if frame.kind != "heartbeat"]
        assert kinds == ["ready", "weights_loaded", "completed"]


@pytest.mark.parametrize("interrupt", [True, False])
def test_an_update_interrupts_requests_or_waits_for_them(interrupt: bool) -> None:
    with serving(interrupt=interrupt) as served:
        served.load(0)
        served.trainer.submit(request(1))
        served.trainer.receive("weights_loaded")
        served.call(served.dialect.update.clear)
        served.load(1)
        served.trainer.submit(request(2))
        served.finish(2)
        if interrupt:
            served.wait_until(lambda: served.dialect.num_updates == 2)
        served.finish(1)
        if not interrupt:
            ((id, *_, old),) = served.trainer.completed(1)
            assert (id, old.versions.tolist()) == ("r1", [0] * 3)
        served.call(served.dialect.update.set)
        ended = {id: completion for id, _, _, completion in served.trainer.completed(2)}
        assert set(ended) == {"r1", "r2"}
        assert ended["r2"].versions.tolist() == [1] * 3
        kinds = [frame.kind for frame in served.trainer.frames if frame.kind != "heartbeat"]
        # A result that arrives during the update is not reported before it is verified.
        assert kinds[:3] == ["ready", "weights_loaded", "weights_loaded" if interrupt else "completed"]


def test_aborted_requests_have_their_tokens_so_far() -> None:
    with serving() as served:
        served.load(0)
        # The third has no room, so that it is not sent.
        served.trainer.submit(request(1), request(2), request(3))
        served.wait_until(lambda: len(served.dialect.sent) == 2)
        served.trainer.channel.send("abort", {"ids": ["r1", "r3", "r3", "unknown"]})
        ended = {id: completion for id, _, _, completion in served.trainer.completed(2)}
        assert {id: (one.token_ids, one.finish_reason) for id, one in ended.items()} == {
            "r1": ((1,), "abort"),
            "r3": ((), "abort"),
        }
        served.finish(2)
        assert served.trainer.completed(3)[2][0] == "r2"


def test_a_partial_completion_goes_on() -> None:
    partial = replace(made([5, 6], 0, "abort"), support=support([5, 6]))
    with serving() as served:
        served.load(1)
        wanted = SamplingParams(max_tokens=5, top_k=1)
        served.trainer.submit(GenerateRequest("r1", (1,), wanted, partial))
        served.finish(1)
        ((_, _, _, whole),) = served.trainer.completed(1)
        assert whole.token_ids == (5, 6, 1, 1, 1)
        assert whole.versions.tolist() == [0, 0, 1, 1, 1]
        assert whole.text == decode((5, 6, 1, 1, 1))
        assert whole.support is not None
        assert whole.support.token_ids.tolist() == [5, 6, 1, 1, 1]
        ((prompt, params),) = served.dialect.sent
        assert (prompt, params.max_tokens) == ((1, 5, 6), 3)
        # The same random numbers again would make the new tokens depend on the old ones.
        assert params.seed != 0


def test_a_stop_string_may_begin_in_the_partial_completion() -> None:
    with serving() as served:
        served.load(1)
        wanted = replace(request(1, 5).params, stop=(decode((6, 1, 1)),))
        one = GenerateRequest("r1", (1,), wanted, made([5, 6], 0, "abort"))
        served.trainer.submit(one)
        served.finish(1)
        ((_, _, _, whole),) = served.trainer.completed(1)
        assert (whole.token_ids, whole.text, whole.finish_reason) == ((5, 6, 1, 1), decode((5,)), "stop")


def test_refused_and_busy_requests() -> None:
    with serving() as served:
        served.call(setattr, served.dialect, "busy", 1)
        served.load(0)
        served.trainer.submit(request(99), request(1))
        served.finish(1)
        (refused,) = served.trainer.receive("refused")
        assert refused.metadata["ids"] == ["r99"]
        assert refused.metadata["reason"] == "there is no token 99"
        assert [id for id, *_ in served.trainer.completed(1)] == ["r1"]


def test_an_unverified_update_ends_the_worker() -> None:
    with serving() as served:
        served.call(setattr, served.dialect, "reported", 1)
        served.load(4)
        assert served.fails() == "http://test has version 5 after version 4 was loaded"
    with serving() as served:
        served.call(setattr, served.dialect, "scores", [-1.0, -2.5])
        served.load(4)
        assert "holds version 4 and computes something else" in served.fails()
        assert [frame.kind for frame in served.trainer.frames] == ["ready"]


def test_weights_in_a_shared_folder(tmp_path: Any) -> None:
    with serving(settings=replace(SETTINGS, weights_folder=str(tmp_path))) as served:
        served.load(0)
        served.trainer.receive("weights_loaded")
        assert served.dialect.files[0][:16] == WEIGHT["weight"].numpy().tobytes()
        assert list(tmp_path.iterdir()) == []
    with serving(settings=replace(SETTINGS, weights_folder=str(tmp_path / "none"))) as served:
        served.load(0)
        assert served.fails().startswith("engine.weights_folder: [Errno 2]")


def test_a_replay_is_refused() -> None:
    with serving() as served:
        served.trainer.channel.send("restart_turns", {"recorded": []})
        assert served.fails() == "a server cannot repeat a recorded run: its turns are not known"


@pytest.mark.parametrize(
    ("completion", "params", "message"),
    [
        (made([1], 0, "length"), {}, "for its length after 1 tokens, and 3 were requested"),
        (made([1] * 4, 0, "length"), {}, "sent 4 tokens, and at most 3 were requested"),
        (made([1, 2], 0, "stop"), {"stop_token_ids": (7,)}, "with a stop token that it does not hold"),
    ],
)
def test_an_end_that_its_tokens_contradict(completion: Completion, params: Any, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        check_end(completion, SamplingParams(max_tokens=3, **params), "POST /generate")


def test_penalties_of_a_partial_completion_are_refused() -> None:
    with pytest.raises(ValueError, match="presence_penalty"):
        remaining(SamplingParams(presence_penalty=0.5), 3)
