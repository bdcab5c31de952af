from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from millrace.data.packing import pack
from millrace.models.load import Model, save_model
from millrace.models.logprobs import chosen_logprobs
from millrace.types import Completion, Outcome, SamplingParams, Trajectory, Turn
from tests.close import close_fp32
from tests.models.tiny import SHAPES, VOCABULARY, tiny_model
from tests.twins.reference import ReferenceEngine


def decode(tokens: Sequence[int]) -> str:
    """Two digits a token; token 0 is special and leaves no text."""
    return "".join(f"{token:02d}" for token in tokens if token)


def random_prompts(seed: int, num: int) -> list[tuple[int, ...]]:
    numbers = np.random.default_rng(seed)
    return [tuple(numbers.integers(1, VOCABULARY, numbers.integers(1, 15)).tolist()) for _ in range(num)]


@pytest.fixture(scope="module")
def llama() -> Model:
    return tiny_model("llama")


@pytest.fixture
def engine(llama: Model) -> ReferenceEngine:
    return ReferenceEngine(llama, decode)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", SHAPES)
def test_greedy_equals_generate_of_transformers(tmp_path: Path, architecture: str) -> None:
    model = tiny_model(architecture)
    save_model(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    prompts = random_prompts(1, 6)
    params = SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=(0,))
    ours = ReferenceEngine(model, decode).generate(prompts, [params] * 6)
    assert len({completion.token_ids for completion in ours}) > 3
    for prompt, completion in zip(prompts, ours, strict=True):
        token_1T = torch.tensor([prompt])
        whole = theirs.generate(
            token_1T,
            attention_mask=torch.ones_like(token_1T),
            do_sample=False,
            max_new_tokens=20,
            pad_token_id=0,
        )
        assert completion.token_ids == tuple(whole[0, len(prompt) :].tolist())


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("architecture", SHAPES)
def test_logprobs_equal_those_the_trainer_computes(architecture: str) -> None:
    model = tiny_model(architecture)
    prompts = random_prompts(2, 5)
    lengths = [3, 20, 1, 12, 20]  # so that rows leave the batch while others go on
    params = [SamplingParams(max_tokens=n, temperature=0.7, seed=n, top_p=0.9) for n in lengths]
    drawn = ReferenceEngine(model, decode).generate(prompts, params)
    pairs = zip(prompts, drawn, strict=True)
    trajectories = [Trajectory((Turn(prompt, answer),), Outcome("score", 1.0)) for prompt, answer in pairs]
    batch = pack(trajectories)
    with torch.no_grad():
        logprob_N, _ = chosen_logprobs(model, batch, temperature=0.7)
    close_fp32(batch.sampler_logprob_T[batch.action_mask_T], logprob_N, atol=1e-5)
    assert int(batch.action_mask_T.sum()) == sum(lengths)


def mixed_requests() -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
    prompts = random_prompts(3, 10)
    prompts[4] = prompts[7] = prompts[0]
    params = [
        SamplingParams(max_tokens=4 + 3 * i, temperature=0.5 * (i % 3), seed=100 + i, top_k=8 * (i % 2))
        for i in range(10)
    ]
    return prompts, params


def same(ours: list[Completion], theirs: list[Completion]) -> bool:
    pairs = list(zip(ours, theirs, strict=True))
    for one, other in pairs:
        close_fp32(one.logprobs, other.logprobs, atol=1e-5)
    return [one.token_ids for one, _ in pairs] == [other.token_ids for _, other in pairs]


@pytest.mark.slow
def test_a_token_depends_on_its_seed_and_position_alone(llama: Model, engine: ReferenceEngine) -> None:
    prompts, params = mixed_requests()
    together = engine.generate(prompts, params)
    assert together[0].token_ids != together[4].token_ids[:4]  # equal prompts, different seeds
    alone = [engine.generate([prompt], [wanted])[0] for prompt, wanted in zip(prompts, params, strict=True)]
    assert same(alone, together)
    assert same(engine.generate(prompts[::-1], params[::-1])[::-1], together)
    strangers = [*random_prompts(9, 3), *prompts[5:]]
    assert same(engine.generate(strangers, [*params[:3], *params[5:]])[3:], together[5:])
    for sizes in ({"max_cache_tokens": 90}, {"max_cache_tokens": 1}, {"max_prefill_tokens": 20}):
        assert same(ReferenceEngine(llama, decode, **sizes).generate(prompts, params), together)


def test_the_seed_decides(engine: ReferenceEngine) -> None:
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in (1, 2, 1)]
    first, second, third = engine.generate([(5, 6, 7)] * 3, params)
    assert first.token_ids == third.token_ids != second.token_ids


def test_sampled_tokens_are_as_frequent_as_the_model_says(engine: ReferenceEngine) -> None:
    params = [SamplingParams(max_tokens=1, top_k=4, seed=seed) for seed in range(4000)]
    drawn = engine.generate([(5, 6, 7)] * 4000, params)
    shares = {answer.token_ids[0]: float(np.exp(answer.logprobs[0])) for answer in drawn}
    assert len(shares) == 4
    statistic = 0.0
    for token, share in shares.items():
        expected = 4000 * share / sum(shares.values())
        statistic += (sum(answer.token_ids[0] == token for answer in drawn) - expected) ** 2 / expected
    assert statistic < 16.27  # exceeded once in a thousand samplings


def test_every_sampling_parameter_reaches_the_sampler(engine: ReferenceEngine) -> None:
    whole = greedy(engine, max_tokens=8).token_ids
    biased = greedy(engine, max_tokens=3, logit_bias=((9, 1e4),))
    assert biased.token_ids == (9, 9, 9) != whole[:3]
    # What was drawn counts, what the prompt holds does not.
    once = greedy(engine, max_tokens=3, logit_bias=((5, 1e4), (9, 5e3)), frequency_penalty=7e3)
    assert once.token_ids == (5, 9, 5)
    never = greedy(engine, max_tokens=8, forbidden_token_ids=(whole[0],))
    assert whole[0] not in never.token_ids
    later = greedy(engine, max_tokens=8, min_tokens=5, stop_token_ids=(9,), logit_bias=((9, 1e4),))
    assert (later.token_ids.index(9), len(later.token_ids), later.finish_reason) == (5, 6, "stop")
    among = greedy(engine, max_tokens=4, allowed_token_ids=(3, 8))
    assert set(among.token_ids) <= {3, 8} and among.support is not None
    assert among.support.token_ids.tolist() == [3, 8] * 4 and among.support.counts.tolist() == [2] * 4
    assert among.support.token_ids.dtype == among.support.counts.dtype == np.int32
    assert (among.support.logprobs > among.logprobs).all() and (among.support.logprobs <= 0).all()


def test_a_stop_string_is_not_looked_for_before_min_tokens(engine: ReferenceEngine) -> None:
    whole = greedy(engine, max_tokens=12)
    stop = whole.text[2:4]
    early = greedy(engine, max_tokens=12, stop=(stop,))
    late = greedy(engine, max_tokens=12, stop=(stop,), min_tokens=7)
    assert len(early.token_ids) == 2 and len(late.token_ids) == 7
    assert early.text == late.text == whole.text[: whole.text.index(stop)]


@pytest.mark.parametrize(
    ("params", "temperature"),
    [
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.7, "logprobs": "raw"}, 1.0),
        ({"temperature": 0.0}, 1.0),
    ],
)
def test_prompts_are_scored_where_asked(
    engine: ReferenceEngine, llama: Model, params: dict[str, Any], temperature: float
) -> None:
    prompts = random_prompts(5, 3) + [(4,)]
    wanted = SamplingParams(max_tokens=3, prompt_logprobs=True, **params)
    answers = engine.generate(prompts, [wanted, replace(wanted, prompt_logprobs=False), wanted, wanted])
    assert answers[1].prompt_logprobs is None
    for prompt, answer in ((prompts[n], answers[n]) for n in (0, 2, 3)):
        trajectory = Trajectory(
            (
                Turn(
                    prompt[:1],
                    Completion(prompt[1:], np.zeros(len(prompt) - 1), np.zeros(len(prompt) - 1), "stop", ""),
                ),
            ),
            Outcome("score", 1.0),
        )
        assert answer.prompt_logprobs is not None and answer.prompt_logprobs.dtype == np.float32
        assert len(answer.prompt_logprobs) == len(prompt) - 1
        if len(prompt) > 1:
            with torch.no_grad():
                logprob_N, _ = chosen_logprobs(llama, pack([trajectory]), temperature=temperature)
            close_fp32(answer.prompt_logprobs, logprob_N, atol=1e-5)


def test_logits_that_are_not_finite_fail_the_call() -> None:
    model = tiny_model("llama", seed=3)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    engine = ReferenceEngine(model, decode)
    with pytest.raises(RuntimeError, match="^prompt 1 of 2 failed: its logits are not finite$"):
        engine.generate([(1, 2), (3, 7)], [SamplingParams(max_tokens=3, forbidden_token_ids=(7,))] * 2)
    wanted = SamplingParams(max_tokens=3, forbidden_token_ids=(7,))
    assert len(engine.generate([(1, 2)], [wanted])[0].token_ids) == 3


def greedy(engine: ReferenceEngine, **params: Any) -> Completion:
    return engine.generate([(5, 6, 7)], [SamplingParams(temperature=0.0, **params)])[0]


def test_a_completion_ends_at_max_tokens(engine: ReferenceEngine) -> None:
    answer = greedy(engine, max_tokens=5)
    assert (len(answer.token_ids), answer.finish_reason) == (5, "length")
    assert answer.text == decode(answer.token_ids)
    assert answer.token_ids == greedy(engine, max_tokens=9).token_ids[:5]


def test_a_stop_token_is_kept_and_ends_the_completion(engine: ReferenceEngine) -> None:
    whole = greedy(engine, max_tokens=12).token_ids
    last = whole[4]
    end = whole.index(last) + 1
    answer = greedy(engine, max_tokens=12, stop_token_ids=(VOCABULARY - 1, last))
    assert (answer.token_ids, answer.finish_reason) == (whole[:end], "stop")
    at_the_limit = greedy(engine, max_tokens=end, stop_token_ids=(last,))
    assert (at_the_limit.token_ids, at_the_limit.finish_reason) == (whole[:end], "stop")


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("start", [4, 5, 7])  # odd: the text begins within a token and ends in the next
def test_a_stop_string_ends_the_completion_and_is_cut_from_its_text(
    engine: ReferenceEngine, start: int
) -> None:
    whole = greedy(engine, max_tokens=12)
    stop = whole.text[start : start + 2]
    at = whole.text.index(stop)
    num_tokens = next(n for n in range(1, 13) if stop in decode(whole.token_ids[:n]))
    answer = greedy(engine, max_tokens=12, stop=("never", stop))
    assert answer.token_ids == whole.token_ids[:num_tokens]
    assert (answer.text, answer.finish_reason) == (whole.text[:at], "stop")


def test_of_two_stop_strings_the_text_is_cut_at_the_first(engine: ReferenceEngine) -> None:
    whole = greedy(engine, max_tokens=12)
    later, earlier = whole.text[3:4], whole.text[2:4]
    answer = greedy(engine, max_tokens=12, stop=(later, earlier))
    assert answer.text == whole.text[: min(whole.text.index(later), whole.text.index(earlier))]


def test_text_leaves_special_tokens_out(llama: Model) -> None:
    special = greedy(ReferenceEngine(llama, decode), max_tokens=6).token_ids[2]
    engine = ReferenceEngine(llama, lambda tokens: decode([token for token in tokens if token != special]))
    answer = greedy(engine, max_tokens=6)
    assert special in answer.token_ids
    assert answer.text == decode([token for token in answer.token_ids if token != special])


class Watched:
    """Shapes of every forward of a model: tokens, and the rows of each decode step."""

    def __init__(self, model: Model) -> None:
        self.num_tokens: list[int] = []
        self._handle = model.get_input_embeddings().register_forward_hook(self._note)

    def _note(self, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.num_tokens.append(inputs[0].shape[1])

    def __enter__(self) -> list[int]:
        return self.num_tokens

    def __exit__(self, *error: object) -> None:
        self._handle.remove()


def test_equal_prompts_are_prefilled_once_and_finished_rows_leave(llama: Model) -> None:
    params = [SamplingParams(max_tokens=n, seed=n) for n in (1, 2, 6, 6)]
    prompts = [(1, 2, 3), (1, 2, 3), (4, 5), (1, 2, 3)]
    with Watched(llama) as forwards:
        ReferenceEngine(llama, decode).generate(prompts, params)
    # One prefill of 3 + 2 tokens; then one row of four is done and stays, then two and both leave.
    assert forwards == [5, 4, 2, 2, 2, 2]


def test_waves_fit_the_cache_and_prefills_their_limit(llama: Model) -> None:
    params = [SamplingParams(max_tokens=2, temperature=0.0)] * 5
    prompts = [(1, 2, 3), (4, 5, 6), (7, 8), (9,) * 8, (10,)]  # with their answers 5, 5, 4, 10 and 3 slots
    with Watched(llama) as forwards:
        ReferenceEngine(llama, decode, max_cache_tokens=15, max_prefill_tokens=5).generate(prompts, params)
    # Three rows of at most 5 slots fill the cache: prefilled 3 and 3 + 2, decoded together; then one row of
    # 10 slots, which leaves no place for the last.
    assert forwards == [3, 5, 3, 8, 1, 1, 1]


def test_tokens_carry_the_version_of_the_weights_that_drew_them(llama: Model) -> None:
    engine, other = ReferenceEngine(tiny_model("llama", seed=1), decode), tiny_model("llama", seed=2)
    before = greedy(engine, max_tokens=4)
    assert before.versions.tolist() == [0] * 4 and before.versions.dtype == np.int32
    engine.update_weights(other.named_parameters(), 7)
    after = greedy(engine, max_tokens=4)
    assert engine.version == 7 and after.versions.tolist() == [7] * 4
    assert (
        before.token_ids != after.token_ids == greedy(ReferenceEngine(other, decode), max_tokens=4).token_ids
    )
    assert engine.fingerprint() == ReferenceEngine(other, decode).fingerprint()
    assert after.logprobs.dtype == np.float32


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({NORM: None, "lm_head.weight": None}, "2 weights were not sent, the first being lm_head.weight"),
        ({"extra": torch.zeros(1)}, "weight extra is not one of the engine's"),
        (
            {NORM: torch.zeros(31)},
            f"weight {NORM} was sent as (31,) torch.float32; the engine holds (32,) torch.float32",
        ),
        (
            {NORM: torch.zeros(32, dtype=torch.float64)},
            f"weight {NORM} was sent as (32,) torch.float64; the engine holds (32,) torch.float32",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    engine: ReferenceEngine, llama: Model, changed: dict[str, Tensor | None], message: str
) -> None:
    sent = {name: weight.detach().clone() for name, weight in llama.named_parameters()} | changed
    with pytest.raises(ValueError) as error:
        engine.update_weights([(name, weight) for name, weight in sent.items() if weight is not None], 1)
    assert str(error.value) == message
    assert engine.version == 0


def test_a_weight_that_is_sent_twice_is_refused(engine: ReferenceEngine, llama: Model) -> None:
    sent = [*llama.named_parameters(), (NORM, torch.zeros(32))]
    with pytest.raises(ValueError, match=f"^weight {NORM} was sent twice$"):
        engine.update_weights(sent, 1)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([(1,), ()], "prompt 1 is empty; a completion needs at least one token to follow"),
        (
            [(1,), (2,) * 120],
            "prompt 1 has 120 tokens and asks for 9 more; the model allows 128 in all",
        ),
        ([(1,)], "1 prompts were given with 2 sampling parameters"),
        (
            [(1,), (3, -1)],
            f"prompt 1 holds the token -1; the vocabulary has {VOCABULARY}, from 0 to {VOCABULARY - 1}",
        ),
        (
            [(1,), (3, VOCABULARY)],
            f"prompt 1 holds the token {VOCABULARY}; "
            f"the vocabulary has {VOCABULARY}, from 0 to {VOCABULARY - 1}",
        ),
    ],
)
def test_a_request_that_cannot_be_met_says_why(
    engine: ReferenceEngine, prompts: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        engine.generate(prompts, [SamplingParams(max_tokens=9)] * 2)
    assert str(error.value) == message


def test_a_parameter_outside_the_vocabulary_is_refused(engine: ReferenceEngine) -> None:
    message = f"^allowed_token_ids holds the token {VOCABULARY}; the vocabulary has {VOCABULARY}, "
    with pytest.raises(ValueError, match=message):
        greedy(engine, max_tokens=5, allowed_token_ids=(VOCABULARY,))


def test_a_prompt_may_fill_the_model_to_the_last_position(engine: ReferenceEngine) -> None:
    (answer,) = engine.generate([(2,) * 119], [SamplingParams(max_tokens=9)])
    assert len(answer.token_ids) == 9
    assert engine.generate([], []) == []


def test_a_refused_hand_over_changes_no_weight() -> None:
    model = tiny_model("qwen3")
    engine = ReferenceEngine(model, lambda tokens: "")
    before = engine.fingerprint()
    named = [(name, parameter.detach() + 1) for name, parameter in model.named_parameters()]
    with pytest.raises(ValueError, match="^1 weights were not sent, the first being "):
        engine.update_weights(named[:-1], 7)
    assert (engine.fingerprint(), engine.version) == (before, 0)
