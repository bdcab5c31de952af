"""Prefill in one engine and decode in another: the same tokens and bits as one engine, whatever arrives."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.inference import kv_blocks
from millrace.inference.engine import PagedEngine
from millrace.inference.kv_blocks import KvBlock, KvPrefix, checksum
from millrace.inference.prefix_cache import chain
from millrace.models.load import Model, named_weights
from millrace.types import Completion, SamplingParams
from tests.inference.fresh import paged
from tests.inference.invariants import check_engine
from tests.models.tiny import VOCABULARY
from tests.twins.test_deterministic import deterministic_model

# Sliding windows, values narrower than keys, and ALiBi among them.
ARCHITECTURES = ("llama", "qwen3", "gemma3_text", "minicpm3", "mpt")
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"stop": ("1", "23")},
    {"top_k": 5, "top_p": 0.9},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.2},
    {"stop_token_ids": (0, 3, 7), "logit_bias": ((5, 1.5),)},
    {"temperature": 0.0},
)
ROOM: dict[str, Any] = {"max_cache_tokens": 1024, "max_requests": 16}


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts with their samples; weights are updated when each sample has `early` tokens.

    Of the blocks of a prompt the part `arrive` arrives before that. `chunks` are the tokens of a forward of
    the collocated engine and of the two others.
    """

    prompts: list[tuple[tuple[int, ...], list[SamplingParams]]]
    early: int
    arrive: float
    block_size: int
    chunks: tuple[int, int, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    token = st.integers(1, VOCABULARY - 1)
    begin = draw(st.lists(token, max_size=12))
    prompts = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = tuple(begin + draw(st.lists(token, min_size=1, max_size=25)))
        params = [
            replace(
                SamplingParams(max_tokens=draw(st.integers(1, 14)), seed=draw(st.integers(0, 1 << 40))),
                **draw(st.sampled_from(KINDS)),
            )
            for _ in range(draw(st.integers(1, 4)))
        ]
        prompts.append((prompt, params))
    chunk = st.sampled_from([5, 16, 200])
    return Case(
        prompts,
        early=draw(st.integers(1, 5)),
        arrive=draw(st.sampled_from([0.0, 0.5, 1.0, 1.0])),
        block_size=draw(st.sampled_from([2, 4, 8])),
        chunks=(draw(chunk), draw(chunk), draw(chunk)),
    )


Weights = list[tuple[str, torch.Tensor]]


@cache
def models(architecture: str) -> tuple[Model, Weights, Weights]:
    """A deterministic model, its weights, and others."""
    model = deterministic_model(architecture).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    before = [(name, weight.clone()) for name, weight in named_weights(model)]
    after = [(name, weight + 0.1 * torch.randn(weight.shape, generator=generator)) for name, weight in before]
    return copy.deepcopy(model), before, after


def run(
    engine: PagedEngine,
    prompt: tuple[int, ...],
    params: Sequence[SamplingParams],
    known: Sequence[Completion],
    *,
    limit: int,
) -> list[Completion]:
    """Continue samples of a prompt to `limit` tokens each; the state is checked after every step."""
    found = list(known)
    left = [n for n, p in enumerate(params) if not known or _goes_on(known[n], p, limit)]
    if not left:
        return found
    requests = engine.add(
        prompt,
        [replace(params[n], max_tokens=min(limit, params[n].max_tokens)) for n in left],
        partial_outputs=[known[n] for n in left] if known else None,
    )
    check_engine(engine)
    while any(request.finish_reason is None for request in requests):
        engine.step()
        check_engine(engine)
    done = [engine.completion(request) for request in requests]
    if not known:
        return done
    for n, completion in zip(left, done, strict=True):
        found[n] = completion
    return found


def _goes_on(known: Completion, params: SamplingParams, limit: int) -> bool:
    return known.finish_reason == "length" and len(known.token_ids) < min(limit, params.max_tokens)


def engines(architecture: str, case: Case) -> list[PagedEngine]:
    """The collocated engine, and those for prompts and for tokens; all have the first weights."""
    model, before, _ = models(architecture)
    found = []
    for chunk, size in zip(case.chunks, (4, case.block_size, case.block_size), strict=True):
        # The collocated engine has other blocks too.
        found.append(paged(copy.deepcopy(model), max_batch_tokens=chunk, block_size=size, **ROOM))
    return found


def hand_over(
    prefill: PagedEngine, decode: PagedEngine, prompt: tuple[int, ...], arrive: float
) -> tuple[KvPrefix, list[KvBlock]] | None:
    """Send a part of a prompt's blocks; return all of them, None where there is no whole block."""
    lease = prefill.export_prefix(prompt, skip=decode.num_cached_blocks(prompt))
    check_engine(prefill)
    if lease is None:
        return None
    with lease:
        blocks = list(lease.blocks())
    num = int(arrive * len(blocks))
    done = decode.import_prefix(lease.prefix, blocks[:num])
    assert (done.num_expected, done.num_imported, done.num_refused) == (len(blocks), num, 0)
    check_engine(decode)
    return lease.prefix, blocks


def compare(architecture: str, case: Case) -> None:
    """Run a case in one engine and in two; every token, bit, version and text must agree."""
    collocated, prefill, decode = engines(architecture, case)
    _, _, after = models(architecture)
    whole, apart, sent = [], [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the alarm of what did not arrive
        for prompt, params in case.prompts:
            whole.append(run(collocated, prompt, params, (), limit=case.early))
            first = run(prefill, prompt, params, (), limit=1)
            sent.append(hand_over(prefill, decode, prompt, case.arrive))
            apart.append(run(decode, prompt, params, first, limit=case.early))
        for engine in (collocated, prefill, decode):
            engine.update_weights(after, 1)
            check_engine(engine)
        for number, (prompt, params) in enumerate(case.prompts):
            if (late := sent[number]) is not None:
                done = decode.import_prefix(*late)
                assert (done.num_imported, done.reason[:8]) == (0, "version:")
                check_engine(decode)
            whole[number] = run(collocated, prompt, params, whole[number], limit=1 << 30)
            apart[number] = run(decode, prompt, params, apart[number], limit=1 << 30)
    equal(whole, apart)


def equal(whole: list[list[Completion]], apart: list[list[Completion]]) -> None:
    for one, other in zip(sum(whole, []), sum(apart, []), strict=True):
        assert (one.token_ids, one.finish_reason, one.text) == (
            other.token_ids,
            other.finish_reason,
            other.text,
        )
        assert np.array_equal(one.logprobs, other.logprobs)
        assert np.array_equal(one.versions, other.versions)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_engines_are_one(architecture: str) -> None:
    @settings(max_examples=2)
    @given(cases())
    def check(case: Case) -> None:
        compare(architecture, case)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_engines_are_one_in_many_cases(architecture: str) -> None:
    @settings(max_examples=12)
    @given(cases())
    def check(case: Case) -> None:
        compare(architecture, case)

    check()


PLAIN = Case(
    [(tuple(range(1, 31)), [SamplingParams(max_tokens=9, seed=seed) for seed in range(3)])],
    early=3,
    arrive=1.0,
    block_size=4,
    chunks=(200, 5, 16),
)


@pytest.mark.slow
def test_without_the_check_of_the_version_the_comparison_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    compare("qwen3", PLAIN)
    monkeypatch.setattr(kv_blocks, "accepts_version", lambda version, own: True)
    with pytest.raises(AssertionError):
        compare("qwen3", PLAIN)


@pytest.mark.slow
def test_keys_and_values_of_old_weights_under_a_new_version_would_be_seen() -> None:
    collocated, prefill, decode = engines("qwen3", PLAIN)
    ((prompt, params),) = PLAIN.prompts
    run(prefill, prompt, params, (), limit=1)
    sent = hand_over(prefill, paged(copy.deepcopy(models("qwen3")[0]), **ROOM), prompt, 1.0)
    assert sent is not None
    prefix = replace(sent[0], version=1, digests=chain(1, sent[0].token_ids, 4))
    blocks = [replace(b, checksum=checksum(prefix.digests[b.index], b.data)) for b in sent[1]]
    for engine in (collocated, decode):
        engine.update_weights(models("qwen3")[2], 1)
    assert decode.import_prefix(prefix, blocks).num_imported == 7
    whole, wrong = (run(engine, prompt, params, (), limit=9) for engine in (collocated, decode))
    with pytest.raises(AssertionError):
        equal([whole], [wrong])
