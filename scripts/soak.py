"""Soak the server: many random requests, faults and verbs at once, and at the end nothing may be left over.

    python scripts/soak.py --seconds 600

Clients ask with and without streaming, leave at any moment, abort one another and make mistakes; meanwhile
the server is paused, put to sleep and given new weights. At the end every request must have been answered or
given up, nothing may run or wait, no block may be held, the engine's own invariants must hold, and the memory
must have stopped growing. Exit code 1 says that one of these is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import torch

from millrace.data.tokenizers import train_tokenizer
from millrace.inference.async_engine import AsyncEngine
from millrace.inference.engine import EngineStats, PagedEngine
from millrace.inference.server.address import bind
from millrace.inference.server.limits import Limits
from millrace.inference.server.serve import Server
from millrace.inference.server.service import GenerationService, ModelService
from millrace.models.load import Model, fresh_config, fresh_model, save_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.inference.invariants import check_async_engine

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
TEXTS = ["the wheel turns while the water runs, naïve and käse, 水車 and 🛞"] * 3
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
NUM_CLIENTS = 12
MAX_WAITING = 24
NUM_WEIGHTS = 3
# Answers that a client of this script may get: done, its own mistake, no such request, asleep, too busy, and
# a pause that would not end.
EXPECTED = {200, 400, 404, 409, 429, 504}
# The peak may still rise by this much in the second half: caches of Python and torch fill slowly.
GROWTH_BYTES = 64 << 20
PATIENCE_S = 60.0


class Soak:
    """Clients, a troublemaker, and what they saw."""

    def __init__(self, url: str, seed: int, seconds: float) -> None:
        """A soak of the server at `url` for so many seconds, its choices drawn from `seed`."""
        self.seen: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.peak_bytes: list[int] = []
        self._url = url
        self._seed = seed
        self._start_s = time.monotonic()
        self._seconds = seconds

    async def run(self) -> None:
        """Until the time is over and the last client has its answer."""
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_S) as client:
            tasks = [self._client(client, random.Random(self._seed + n)) for n in range(NUM_CLIENTS)]
            await asyncio.gather(*tasks, self._trouble(client, random.Random(self._seed - 1)))

    @property
    def _left_s(self) -> float:
        return self._start_s + self._seconds - time.monotonic()

    async def _client(self, client: httpx.AsyncClient, numbers: random.Random) -> None:
        while self._left_s > 0:
            ask = numbers.choice([self._whole, self._stream, self._leave, self._abort, self._mistake])
            await ask(client, numbers)

    async def _whole(self, client: httpx.AsyncClient, numbers: random.Random) -> None:
        path, body = request(numbers)
        answer = await client.post(path, json=body)
        self._note("whole", answer.status_code)
        if answer.status_code == 200:
            tree = answer.json()
            samples = tree.get("choices") or tree["completions"]
            assert len(samples) == body["n"], f"{len(samples)} samples instead of {body['n']}"
            assert all(sample["finish_reason"] in ("stop", "length", "abort") for sample in samples)

    async def _stream(self, client: httpx.AsyncClient, numbers: random.Random) -> None:
        path, body = request(numbers)
        async with client.stream("POST", path, json=body | {"stream": True}) as answer:
            self._note("stream", answer.status_code)
            lines = [line async for line in answer.aiter_lines() if line]
        if answer.status_code == 200:
            text = "\n".join(lines)
            ended = sum(text.count(f'"finish_reason":"{reason}"') for reason in ("stop", "length", "abort"))
            assert ended == body["n"], f"{ended} samples ended instead of {body['n']}"

    async def _leave(self, client: httpx.AsyncClient, numbers: random.Random) -> None:
        path, body = request(numbers)
        body |= {"stream": numbers.random() < 0.5}
        try:
            async with asyncio.timeout(numbers.choice([0.0, 0.02, 0.1])):
                answer = await client.post(path, json=body)
            self._note("in time", answer.status_code)
        except TimeoutError:
            self.seen["left"] += 1

    async def _abort(self, client: httpx.AsyncClient, numbers: random.Random) -> None:
        path, body = request(numbers)
        body |= {"request_id": f"abort-{numbers.getrandbits(60)}"}
        asking = asyncio.create_task(client.post(path, json=body))
        await asyncio.sleep(numbers.choice([0.005, 0.05]))
        aborted = await client.post("/abort", json={"id": body["request_id"]})
        self._note("abort", aborted.status_code)
        self._note("aborted", (await asking).status_code)

    async def _mistake(self, client: httpx.AsyncClient, numbers: random.Random) -> None:
        path, body = request(numbers)
        mistakes: list[dict[str, Any]] = [
            {"temperature": -1},
            {"temprature": 1},
            {"max_tokens": 1000},
            {"n": 100},
            {"stop": [""]},
            {"logit_bias": {"5": 1e999}},
        ]
        answer = await client.post(path, content=json.dumps(body | numbers.choice(mistakes)), headers=JSON)
        self._note("mistake", answer.status_code)
        assert answer.status_code in (400, 429), answer.text

    async def _trouble(self, client: httpx.AsyncClient, numbers: random.Random) -> None:
        version = 0
        while self._left_s > 0:
            await asyncio.sleep(numbers.uniform(0.0, 0.5))
            version += 1
            weights = {"path": f"weights-{version % NUM_WEIGHTS}", "version": version}
            weights["kv"] = numbers.choice(["keep", "recompute"])
            kind = numbers.choice(["pause", "weights", "nap", "sleep", "look"])
            if kind == "pause":
                mode = numbers.choice(["finish", "abort", "keep"])
                await self._verb(client, "/pause", {"mode": mode, "timeout_s": 2.0})
                if numbers.random() < 0.5:
                    await self._verb(client, "/update_weights", weights)
                await self._verb(client, "/resume", None)
            elif kind == "weights":
                await self._verb(client, "/update_weights", weights)
            elif kind == "nap":
                await self._verb(client, "/sleep", {"tags": ["kv_cache"]})
                await self._verb(client, "/wake", {"tags": ["kv_cache"]})
            elif kind == "sleep":
                await self._verb(client, "/sleep", {"tags": ["weights", "kv_cache"]})
                await self._verb(client, "/wake", {"tags": ["weights"]})
                await self._verb(client, "/update_weights", weights)
                await self._verb(client, "/wake", {"tags": ["kv_cache"]})
            else:
                for path in ("/metrics", "/health", "/fingerprint"):
                    self._note(path, (await client.get(path)).status_code)
            # From the middle on, so that the first half may fill caches.
            if self._left_s < self._seconds / 2:
                self.peak_bytes.append(peak_bytes())

    async def _verb(self, client: httpx.AsyncClient, path: str, body: dict[str, Any] | None) -> None:
        self._note(path, (await client.post(path, json=body)).status_code)

    def _note(self, what: str, status: int) -> None:
        self.seen[what] += 1
        self.statuses[status] += 1


JSON = {"Content-Type": "application/json"}


def request(numbers: random.Random) -> tuple[str, dict[str, Any]]:
    """A path, and a body that it takes."""
    body: dict[str, Any] = {
        "n": numbers.choice([1, 1, 2, 4]),
        "max_tokens": numbers.randint(1, 40),
        "temperature": numbers.choice([0.0, 0.7, 1.0]),
        "seed": numbers.randrange(1000),
        "ignore_eos": numbers.random() < 0.5,
        "stop": numbers.choice([[], ["a"], ["the", "w"]]),
    }
    body |= numbers.choice([{}, {"top_k": 5}, {"top_p": 0.9, "min_p": 0.01}, {"repetition_penalty": 1.2}])
    words = " ".join(numbers.choices(TEXTS[0].split(), k=numbers.randint(1, 6)))
    path = numbers.choice(["/v1/completions", "/v1/chat/completions", "/generate"])
    if path == "/v1/completions":
        return path, body | {"prompt": words}
    if path == "/generate":
        length = numbers.randint(1, 60)
        return path, body | {"prompt_token_ids": [numbers.randrange(1, 260) for _ in range(length)]}
    return path, body | {"messages": [{"role": "user", "content": words}]}


def peak_bytes() -> int:
    """Most memory this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def build(folder: Path) -> tuple[ModelService, PagedEngine]:
    """A tiny model with a pool too small for its clients, and folders with other weights for it."""
    tokenizer = train_tokenizer(TEXTS, vocab_size=270, across_words=False)
    tokenizer.chat_template = TEMPLATE
    models: list[Model] = []
    for seed in range(NUM_WEIGHTS):
        config = fresh_config("qwen3", SHAPE, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
        models.append(fresh_model(config, seed=seed, dtype=torch.float32).requires_grad_(False))
        save_model(models[-1], folder / f"weights-{seed}")
    engine = PagedEngine(
        models[0],
        lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True)),
        max_cache_tokens=512,
        block_size=4,
        max_batch_tokens=64,
        max_requests=8,
    )
    served = ModelService(
        engine=AsyncEngine(engine, max_waiting=MAX_WAITING),
        tokenizer=train_tokenizer(TEXTS, vocab_size=270, across_words=False),
        name="soak",
        max_length=128,
        vocab_size=len(tokenizer),
        dtype=torch.float32,
        stop_token_ids=(int(tokenizer.eos_token_id),),
        weights_root=folder,
    )
    served.tokenizer.chat_template = TEMPLATE
    return served, engine


def faults(stats: EngineStats, statuses: Counter[int], peaks: list[int], num_left: int) -> list[str]:
    """What must not be, at the end.

    Args:
        stats: of the idle engine.
        statuses: how often each came.
        peaks: of the memory, in bytes, from the middle of the soak to its end.
        num_left: requests that the server still knows.
    """
    found = [
        f"{count} answers had status {status}" for status, count in statuses.items() if status not in EXPECTED
    ]
    if not statuses[200]:
        found.append("no request succeeded")
    if stats.num_running or stats.num_waiting:
        found.append(f"{stats.num_running} requests still run and {stats.num_waiting} wait")
    if stats.kv_usage:
        found.append(f"{stats.kv_usage:.1%} of the blocks are held by nobody's requests")
    if num_left:
        found.append(f"the server still knows {num_left} requests")
    if peaks and peaks[-1] - peaks[0] > GROWTH_BYTES:
        found.append(f"the memory grew by {(peaks[-1] - peaks[0]) >> 20} MiB in the second half")
    return found


def soak(seconds: float, seed: int) -> tuple[Soak, EngineStats, list[str]]:
    """Run a server and soak it; what was seen, the engine's last state, and what is wrong with it."""
    with tempfile.TemporaryDirectory() as folder:
        served, engine = build(Path(folder))
        service = GenerationService(served, max_samples=MAX_WAITING)
        urls: list[str] = []
        server = Server(service, Limits(max_concurrent=64), grace_s=1.0, ready=urls.append)
        thread = threading.Thread(target=server.run, args=([bind("127.0.0.1", 0)],))
        thread.start()
        while not urls and thread.is_alive():
            time.sleep(0.01)
        bath = Soak(urls[0], seed, seconds)
        try:
            asyncio.run(bath.run())
            # Whoever left at the very end is given up a moment later.
            deadline_s = time.monotonic() + PATIENCE_S
            while service.num_requests and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert isinstance(served.engine, AsyncEngine)
            asyncio.run(check_async_engine(served.engine))
            stats = engine.stats()
            found = faults(stats, bath.statuses, bath.peak_bytes, service.num_requests)
        finally:
            server.should_exit = True
            thread.join()
    return bath, stats, found


def main() -> int:
    """Soak, say what was seen, and whether anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bath, stats, found = soak(options.seconds, options.seed)
    seen = ", ".join(f"{what} {count}" for what, count in sorted(bath.seen.items()))
    print(
        f"soak of {options.seconds:g} s: {bath.seen.total()} requests ({seen}); "
        f"{stats.generation_tokens} tokens, {stats.num_preemptions} preemptions, "
        f"statuses {dict(sorted(bath.statuses.items()))}; "
        f"{'; '.join(found) or 'nothing is left over'}"
    )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
