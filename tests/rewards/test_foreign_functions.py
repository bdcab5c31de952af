"""Reward functions as verl, TRL, OpenRLHF, slime, verifiers and prime-rl write them."""

from __future__ import annotations

import asyncio
import sys
import types

import numpy as np
import pytest
import torch

from millrace.rewards.foreign_functions import foreign_signature
from millrace.rewards.reward_errors import RewardError
from millrace.rewards.verifiers import function_scoring, is_async, verdict, verdict_async

ROW = {
    "data_source": "openai/gsm8k",
    "reward_model": {"ground_truth": "4"},
    "extra_info": {"index": 3},
    "level": "easy",
    "metadata": {"unit": "m"},
    "prompt": [{"role": "user", "content": "2+2?"}],
}
GIVEN = "<user>2+2?<assistant>", "so 4", "4", ROW


@pytest.fixture
def judge(monkeypatch, request):
    """Score with a function, which a module has under the name f."""

    def score(function, given=GIVEN):
        name = f"foreign_{abs(hash(request.node.name))}"
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(f=function))
        scoring = function_scoring(f"{name}:f")
        if is_async(scoring):
            return asyncio.run(verdict_async(scoring, *given))
        return verdict(scoring, *given)

    return score


def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("openai/gsm8k", {"index": 3})
    return {"score": float(ground_truth in solution_str), "acc": True, "pred": None}


def verl_short(solution_str, ground_truth, **kwargs):
    return float(solution_str == "so " + ground_truth)


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [float(a in b) for a, b in zip(ground_truths, solution_strs, strict=True)]


def trl(prompts, completions, level, **kwargs):
    assert (prompts, level, kwargs["data_source"]) == ([ROW["prompt"]], ["easy"], ["openai/gsm8k"])
    return [float(one[0]["content"].endswith("4")) for one in completions]


def openrlhf(queries, prompts, labels):
    assert queries == [prompts[0] + "so 4"]
    scores = torch.tensor([float(label in query) for query, label in zip(queries, labels, strict=True)])
    return {"rewards": scores, "scores": scores, "extra_logs": {"accuracy": scores}}


async def slime(args, sample, **kwargs):
    assert (sample.prompt, sample.metadata) == (GIVEN[0], {"unit": "m"})
    return float(sample.label in sample.response)


def verifiers(completion, answer, state, info):
    assert state["prompt"] == ROW["prompt"] and info == {}
    return float(answer in completion[-1]["content"])


async def prime_rl(completion, state, **kwargs):
    return np.float32(completion[0]["content"].endswith(state["answer"]))


@pytest.mark.parametrize(
    ("function", "trainer", "extras"),
    [
        (verl, "verl", {"acc": 1.0}),
        (verl_short, "verl", {}),
        (verl_batch, "verl, in batches", {}),
        (trl, "TRL", {}),
        (openrlhf, "OpenRLHF", {}),
        (slime, "slime", {}),
        (verifiers, "verifiers and prime-rl", {}),
        (prime_rl, "verifiers and prime-rl", {}),
    ],
)
def test_functions_of_other_trainers_score_as_there(judge, function, trainer, extras):
    assert foreign_signature(function).trainer == trainer
    assert judge(function) == ("score", 1.0, "", extras)
    assert judge(function, (GIVEN[0], "so 5", "4", ROW))[1] == 0.0


def test_a_prompt_of_text_gives_texts_to_trl(judge):
    def seen(completions, **kwargs):
        return [float(completions == ["4"] and kwargs["prompts"] == ["2+2="])]

    assert judge(seen, ("2+2=", "4", "4", {"question": "2+2="}))[1] == 1.0
    assert judge(lambda completions, **kwargs: [None])[0] == "invalid"


def test_a_function_with_our_parameters_stays_ours():
    def own(prompt, completion, answer, **kwargs):
        return 1.0

    assert foreign_signature(own) is None


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda completions, **kwargs: [1.0, 0.0], "it returned 2 scores for one completion"),
        (lambda completions, completion_ids: [1.0], "missing a required argument: 'completion_ids'"),
        (lambda queries, prompts, labels: {"reward": 1.0}, "a mapping without a score"),
        (lambda solution_str, ground_truth: "yes", "returned 'yes' (str), which is not a number"),
        (lambda args, sample: args.rm_type, "has no attribute 'rm_type'"),
    ],
)
def test_what_cannot_be_scored_is_a_failure_with_its_reason(judge, function, reason):
    kind, _, found, _ = judge(function)
    assert kind == "failed" and reason in found


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda solution_str, ground_truth, tokenizer: 1.0,
            "the signature of verl, and missing .* 'tokenizer'",
        ),
        (lambda parser, completion: 1.0, "the signature of verifiers and prime-rl, and missing .* 'parser'"),
        (lambda text, gold: 1.0, "give it these four parameters, or those of verl, TRL, OpenRLHF, slime or"),
    ],
)
def test_a_parameter_that_nobody_gives_is_a_mistake(judge, function, message):
    with pytest.raises(RewardError, match=message):
        judge(function)
