"""Trial of the paged engine against transformers, on the same twin models as the trial of the packed forward.

The engine runs its real code paths: prompts in chunks that end within a block, several samples of one prompt,
decoding beyond every attention window, a prefix-cache hit, preemption, and a weight update in flight. The
log-probability of each sampled token is compared with transformers' plain, uncached forward of the whole
sequence.

T = tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from millrace.inference.engine import PagedEngine
from millrace.models.decoding import prepare
from millrace.models.facts import facts_of
from millrace.models.load import LANGUAGE, Model, ModelError, named_weights
from millrace.models.trial import (
    POWER,
    SEEDS,
    TrialReadout,
    allowed_difference,
    answer,
    bold_model,
    distance,
    nudged,
    our_model,
    plain_numbers,
    sequences,
    try_seeds,
)
from millrace.models.twin import first_line
from millrace.types import Completion, SamplingParams

BLOCK_SIZE = 4
# A chunk of the longest prompt ends within a block.
CHUNK = 18
# More than twice any window of a twin.
NUM_TOKENS = 14
NUM_SAMPLES = 3
# Small enough that a request is preempted.
CACHE_TOKENS = 128
HOT = 4.0
# Generated tokens of a request at the weight update or the fault injection.
HALFWAY = 5

Generated = tuple[Sequence[int], Completion]


def check_engine(model: Model) -> None:
    """Raise a ModelError if the paged engine differs from transformers, or if the trial has no power.

    It takes about a second for any model size, and no time if the result is cached. Only the config is read.
    """
    reading = LANGUAGE.reading.of(model)
    problem = answer("engine", model.config, reading, partial(try_engine, reading=reading))
    if problem:
        raise ModelError(f"model type {model.config.model_type} cannot be sampled by millrace: {problem}")


def try_engine(small: Any, reading: TrialReadout) -> str:
    """Run the trial on the twin models of a config; return the problem, empty if there is none."""
    return try_seeds(small, reading, _try_seed, first_line)


def _try_seed(small: Any, reading: TrialReadout, seed: int) -> str:
    before, after = (bold_model(small, reading, number) for number in (seed, seed + len(SEEDS)))
    engine = _engine(before, reading)
    completions, num_preemptions = _serve(engine, after)
    if not (engine.stats().prefix_hits and num_preemptions):
        return "the trial has no power: no prompt's beginning was known, or no request was preempted"
    problem = _compare(completions, [before, after], reading)
    return problem or _no_power(before, reading)


def _engine(plain: Model, reading: TrialReadout) -> PagedEngine:
    model = our_model(plain, reading)
    model.requires_grad_(False)
    prepare(model)
    return PagedEngine(
        model,
        lambda tokens: "",
        max_cache_tokens=CACHE_TOKENS,
        block_size=BLOCK_SIZE,
        max_batch_tokens=CHUNK,
        max_requests=8,
    )


def _params(seed: int) -> SamplingParams:
    """A high temperature samples unlikely tokens too: likely ones have little power as a test."""
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=HOT, logprobs="raw", seed=seed)


def _serve(engine: PagedEngine, after: Model) -> tuple[list[Generated], int]:
    """Run requests through every code path of the engine, with a weight update halfway.

    Return (prompt, completion) pairs, and the number of preemptions for lack of blocks.
    """
    short, long, shortest = sequences()
    requests = engine.add(long, [_params(seed) for seed in range(NUM_SAMPLES)])
    requests += engine.add(short, [_params(10)]) + engine.add(shortest, [_params(11)])
    num_updated = 0
    while any(request.finish_reason is None for request in requests):
        engine.step()
        if engine.version == 0 and len(engine.generated(requests[0])[0]) >= HALFWAY:
            before = engine.stats().num_preemptions
            engine.update_weights(named_weights(after), 1)
            num_updated = engine.stats().num_preemptions - before
    again = engine.add(long, [_params(12)])
    while again[0].finish_reason is None:
        engine.step()
    prompts = [long] * NUM_SAMPLES + [short, shortest, long]
    completions = [engine.completion(request) for request in requests + again]
    return list(zip(prompts, completions, strict=True)), engine.stats().num_preemptions - num_updated


def _compare(completions: Sequence[Generated], plains: Sequence[Model], reading: TrialReadout) -> str:
    others = [nudged(plain) for plain in plains]
    for prompt, completion in completions:
        found_T = torch.from_numpy(completion.logprobs).float()
        expected_T, other_T = (_expected(prompt, completion, models, reading) for models in (plains, others))
        allowed, apart = allowed_difference(expected_T, other_T), (found_T - expected_T).abs()
        if not float(apart.max()) <= allowed:
            first = int((~(apart <= allowed)).nonzero()[0])
            return (
                f"the paged engine's log-probabilities differ by {float(apart.max()):.2g} from transformers' "
                f"own, from sampled token {first} on, where rounding makes {allowed:.1g}"
            )
    return ""


def _expected(
    prompt: Sequence[int], completion: Completion, models: Sequence[Model], reading: TrialReadout
) -> Tensor:
    """Log-probability of each sampled token under the model of its policy version, [T]."""
    tokens = [*prompt, *completion.token_ids]
    picked = torch.arange(len(prompt), len(tokens))
    where = picked - 1, torch.tensor(tokens)[picked]
    by_version = torch.stack([plain_numbers(model, reading, [tokens])[where] for model in models])
    return by_version[torch.from_numpy(completion.versions).long(), torch.arange(len(picked))]


def _no_power(plain: Model, reading: TrialReadout) -> str:
    """The injected fault that the trial would miss; empty if it catches all."""
    prompt = sequences()[2]

    def completions(fault: Callable[[PagedEngine], None]) -> tuple[Tensor, Tensor, Tensor]:
        engine = _engine(plain, reading)
        (request,) = engine.add(prompt, [_params(13)])
        while request.finish_reason is None:
            if len(engine.generated(request)[0]) == HALFWAY:
                fault(engine)
            engine.step()
        completion = engine.completion(request)
        found_T = torch.from_numpy(completion.logprobs).float()
        expected_T = _expected(prompt, completion, [plain], reading)
        return found_T, expected_T, _expected(prompt, completion, [nudged(plain)], reading)

    facts = facts_of(our_model(plain, reading))
    # One of each kind of layer that attends to its own keys.
    kinds = {
        (layer.window, layer.chunk, facts.pools[n]): n for layer in facts.layers for n in layer.pools[:1]
    }
    faults: list[tuple[str, Callable[[PagedEngine], None]]]
    faults = [(f"the keys of pool {n} are lost", partial(_lose, n)) for n in kinds.values()]
    faults += [("two layers' keys are confused", _swap)] * (facts.pools[1:2] == facts.pools[:1])
    for name, fault in faults:
        found_T, expected_T, other_T = completions(fault)
        if not distance(found_T, expected_T) >= POWER * allowed_difference(expected_T, other_T):
            return f"the trial of the engine has no power: it does not see where {name}"
    return ""


def _lose(n: int, engine: PagedEngine) -> None:
    for pool in engine.pools[n]:
        pool.zero_()


def _swap(engine: PagedEngine) -> None:
    for one, other in zip(*engine.pools[:2], strict=True):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
