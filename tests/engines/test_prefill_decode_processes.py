"""Prefill and decode workers as the processes that they are, behind a port."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from millrace.config.engine_section import EngineConfig
from millrace.data.tokenizers import train_tokenizer
from millrace.engines.build_prefill_decode import build_prefill_decode
from millrace.engines.prefill_decode_engine import PrefillDecodeEngine
from millrace.engines.prefill_decode_handle import Role, RoleProcess
from millrace.engines.prefill_decode_metrics import RoleMetrics
from millrace.engines.prefill_decode_route import RoutePolicy
from millrace.inference.async_engine import AsyncEngine
from millrace.inference.engine import PagedEngine
from millrace.inference.server.service import ModelService
from millrace.models.load import fresh_config, fresh_model
from tests.close import close_fp32
from tests.forked import Forked, forked_engines
from tests.inference.server.running import Running, running, wait_until
from tests.inference.server.test_prometheus import samples
from tests.models.tiny import SIZES

pytestmark = pytest.mark.world
LIMIT_S = 240.0  # a process starts in 2 s on an idle machine
PROMPT = [1 + n % 200 for n in range(70)]
ASK: dict[str, Any] = {"prompt_token_ids": PROMPT, "n": 2, "max_tokens": 40, "seed": 3, "ignore_eos": True}
Answer = list[tuple[list[int], list[float]]]


def served(*, apart: bool) -> ModelService:
    """A small model in two worker processes, or in this one."""
    tokenizer = train_tokenizer(["0 1 2 3"], vocab_size=257, across_words=False)
    shape = {**SIZES, "head_dim": 16, "max_position_embeddings": 256}
    config = fresh_config("qwen3", shape, vocab_size=len(tokenizer), eos_token_id=0)
    model = fresh_model(config, seed=1, dtype=torch.float32)
    common: dict[str, Any] = {
        "tokenizer": tokenizer,
        "name": "mill",
        "max_length": 256,
        "vocab_size": len(tokenizer),
        "dtype": torch.float32,
        "stop_token_ids": (),
    }
    if not apart:
        return ModelService(engine=AsyncEngine(PagedEngine(model, tokenizer.decode)), **common)
    engine = build_prefill_decode(
        model,
        tokenizer,
        EngineConfig(cache_tokens=2048, max_num_seqs=8),
        max_length=256,
        num_workers={"prefill": 1, "decode": 1},
        route=RoutePolicy("apart", 0),
        max_waiting=8,
    )
    return ModelService(engine=engine, more_metrics=(RoleMetrics("mill", engine),), **common)


def one_engine() -> Answer:
    with running(served(apart=False)) as mill:
        completions = mill.post("/generate", ASK).json()["completions"]
    return [(one["token_ids"], one["logprobs"]) for one in completions]


@contextmanager
def with_roles() -> Iterator[Running]:
    """A server over two worker processes."""
    with forked_engines(), running(served(apart=True), limit_s=LIMIT_S) as mill:
        yield mill


def process_of(mill: Running, role: Role) -> Forked:
    """The process of the one worker of a role; both start at once, in any order."""
    engine = mill.service.served.engine
    assert isinstance(engine, PrefillDecodeEngine)
    (handle,) = [one.handle for one in engine._workers if one.role == role]
    assert isinstance(handle, RoleProcess)
    assert isinstance(handle._popen, Forked)
    return handle._popen


def streamed(mill: Running, at: int | None = None, do: Any = None) -> Answer:
    """The samples of a streamed request; `do` is called once the line of number `at` has arrived."""
    found: list[tuple[list[int], list[float]]] = [([], []), ([], [])]
    with mill.client.stream("POST", "/generate", json={**ASK, "stream": True}) as answer:
        for number, text in enumerate(answer.iter_lines()):
            line = json.loads(text)
            assert "error" not in line, line
            if "token_ids" in line:
                found[line["index"]][0].extend(line["token_ids"])
                found[line["index"]][1].extend(line["logprobs"])
            if number == at:
                do()
    return found


def assert_same(found: Answer, wanted: Answer) -> None:
    """Tokens agree, and log-probabilities up to the rounding of other batches."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, one), (_, other) in zip(found, wanted, strict=True):
        close_fp32(one, other)


def numbers(mill: Running) -> dict[str, float]:
    return samples(mill.get("/metrics").text)


@pytest.mark.slow
def test_prompts_computed_apart_give_the_tokens_of_one_engine_whatever_is_killed() -> None:
    wanted = one_engine()
    with with_roles() as mill:
        prefill, decode = process_of(mill, "prefill"), process_of(mill, "decode")
        assert_same(streamed(mill), wanted)
        counts = numbers(mill)
        assert counts["millrace:kv_transfers_total{'imported': 'all'}"] == 1
        assert counts["millrace:prompt_tokens_imported_total"] == 64
        assert (
            counts["millrace:workers{'role': 'prefill'}"] == counts["millrace:workers{'role': 'decode'}"] == 1
        )

        # Stopped before the import: the first tokens, of the prefill worker, arrive.
        decode.send_signal(signal.SIGSTOP)
        assert_same(streamed(mill, 0, decode.kill), wanted)
        wait_until(lambda: numbers(mill)["millrace:workers{'role': 'decode'}"] == 1, LIMIT_S)

        # While its tokens arrive.
        assert_same(streamed(mill, 20, process_of(mill, "decode").kill), wanted)
        wait_until(lambda: numbers(mill)["millrace:workers{'role': 'decode'}"] == 1, LIMIT_S)
        assert mill.get("/health").json() == {"status": "ok"}

        # Killed before it has computed the prompt: no token of the stream waits for it.
        prefill.send_signal(signal.SIGSTOP)
        with mill.client.stream("POST", "/generate", json={**ASK, "stream": True}) as answer:
            os.kill(prefill.pid, signal.SIGKILL)
            lines = [json.loads(text) for text in answer.iter_lines()]
        tokens = [
            [t for line in lines if line["index"] == n for t in line.get("token_ids", ())] for n in (0, 1)
        ]
        assert tokens == [one[0] for one in wanted]
        counts = numbers(mill)
        assert counts["millrace:workers_lost_total{'role': 'decode'}"] == 2
        assert counts["millrace:workers_lost_total{'role': 'prefill'}"] == 1
        assert counts["millrace:kv_transfers_total{'imported': 'none'}"] == 2
