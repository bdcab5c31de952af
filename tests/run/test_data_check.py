"""What is known of a data set before a run: columns, what cannot be used, and what its answers earn."""

from __future__ import annotations

import copy
import sys
import types
from collections import Counter
from typing import Any

import pytest

from millrace.config.recipe import from_settings
from millrace.config.settings import RunConfig
from millrace.data.rows import Row
from millrace.data.tokenizers import train_tokenizer
from millrace.rewards.reward_errors import RewardError
from millrace.run.data_check import MAX_SCORED, check_data, quantiles
from tests.data.chat_templates import CHATML, tokenizer_with

VERL = {"data_source": "gsm8k", "prompt": [{"role": "user", "content": "1+1?"}]}


def config(rewards: list[dict[str, Any]] | None = None, **data: Any) -> RunConfig:
    sections = {"data": {"train": "x.jsonl", **data}, "rewards": rewards or [{"kind": "exact"}], "steps": 1}
    return from_settings(sections, "of the test")


def rows(*columns: dict[str, Any]) -> list[Row]:
    return [Row(one, f"x.jsonl line {number}") for number, one in enumerate(columns, start=1)]


def test_rows_of_verl_are_read_as_they_are_and_those_that_cannot_be_are_named():
    found = check_data(
        rows(
            {**VERL, "reward_model": {"ground_truth": "2"}},
            {**VERL, "reward_model": {"ground_truth": 3}},
            {"data_source": "other", "prompt": "", "reward_model": None},
            {"text": "1+1?"},
        ),
        config([{"kind": "gsm8k"}]),
        None,
    )
    assert found.num_rows == 4
    assert found.columns["reward_model"] == Counter({"an object": 2, "null": 1, "missing": 1})
    assert [name for name, _ in found.formats] == ["verl"]
    assert [prompt.answer for _, prompt in found.prompts] == ["2", "3"]
    assert (found.num_answers, found.num_duplicates, found.sources) == (2, 1, Counter(gsm8k=2))
    assert found.problems[0] == "x.jsonl line 3: the prompt is empty"
    assert found.problems[1].startswith("x.jsonl line 4: there is no column question, prompt, messages")
    assert found.lengths == [] and found.num_held_out is None
    assert found.scores is not None
    assert (found.scores.num_scored, found.scores.num_right, found.scores.mean) == (2, 2, 1.0)


def test_with_a_tokenizer_lengths_are_those_of_a_run():
    tokenizer = train_tokenizer(["0123456789+="], vocab_size=257, across_words=False)
    sums = rows(*({"question": "1" * n + "=", "answer": "1"} for n in range(1, 21)))
    found = check_data(sums, config(max_prompt_tokens=15), tokenizer)
    assert list(found.lengths) == list(range(2, 22)) and found.num_too_long == 6
    assert quantiles(found.lengths) == {"min": 2, "median": 11, "p95": 21, "max": 21}
    held = check_data(sums, config(), tokenizer, held_out=sums[3:5])
    assert held.num_held_out == 2


def test_the_first_answer_that_a_reward_refuses_is_shown():
    given = rows(
        *({"question": "x", "answer": str(n), "text": str(max(9, n))} for n in range(3 * MAX_SCORED))
    )
    tokenizer = train_tokenizer(["0123456789x"], vocab_size=257, across_words=False)
    read = config()
    read = read.model_copy(update={"data": read.data.model_copy(update={"demonstration_column": "text"})})
    found = check_data(given, read, tokenizer).scores
    assert found is not None
    assert (found.num_scored, found.num_right, found.num_failed) == (MAX_SCORED, MAX_SCORED - 3, 0)
    assert found.first_wrong.startswith("x.jsonl line 1, answer '9': reward 0 of 1")


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"chosen": "a", "rejected": "b"}, "preference pairs"),
        ({"conversations": []}, "ShareGPT conversations"),
        ({"prompt": "a", "completion": "b"}, "prompts and completions of TRL"),
        ({"input": "a", "label": "b"}, "OpenRLHF or slime"),
        ({"question": "a", "answer": "b"}, ""),
    ],
)
def test_formats_of_other_trainers_are_recognised(columns: dict[str, Any], name: str):
    found = check_data(rows(columns), config(), None)
    assert [one for one, _ in found.formats] == ([name] if name else [])


@pytest.mark.parametrize(
    ("columns", "answer"),
    [
        ({"answer": "1", "ground_truth": "2"}, "1"),
        ({"reward_model": {"ground_truth": 7}, "ground_truth": "2"}, "7"),
        ({"reward_model": {"ground_truth": ["a"]}, "solution": "4"}, "4"),
        ({"ground_truth": None}, ""),
        ({"label": "1"}, ""),
    ],
)
def test_the_column_of_the_answer_is_found(columns: dict[str, Any], answer: str):
    ((_, prompt),) = check_data(rows({"problem": "x", **columns}), config(), None).prompts
    assert prompt.answer == answer


def test_without_rewards_or_answers_nothing_is_scored():
    given = rows({"question": "x", "answer": "1"})
    without = config().model_copy(update={"rewards": ()})
    assert check_data(given, without, None).scores is None
    assert check_data(rows({"question": "x"}), config(), None).scores is None


def test_sources_are_counted_scored_by_their_rewards_and_compared():
    sources = [
        {"name": "a", "data": "a.jsonl", "weight": 0.5},
        {"name": "b", "data": "b.jsonl", "weight": 0.5, "prompt_column": "q", "rewards": [{"kind": "gsm8k"}]},
    ]
    given = {"data.sources": sources, "rewards": [{"kind": "exact"}], "steps": 1}
    recipe = from_settings(given, "of the test")
    read = [Row({"question": "1?", "answer": "#### 1"}, "a.jsonl line 1", "a")]
    read += [Row({"q": f"{n}?", "answer": f"so #### {n}"}, f"b.jsonl line {n}", "b") for n in (1, 2)]
    found = check_data(read, recipe, None)
    assert (len(found.prompts), found.sources) == (3, Counter(a=1, b=2))
    assert found.scores is not None and found.scores.num_right == 3
    assert found.problems == [
        "1 rows have a problem of another source, the first: b.jsonl line 1 of b and a.jsonl line 1 of a; "
        "remove them from one of the two"
    ]


def test_the_trained_span_is_the_demonstration_with_its_end():
    tokenizer = train_tokenizer(["0123456789+="], vocab_size=257, across_words=False)
    given = rows(
        {"question": "1+1=", "answer": "2", "turns": ["a", "reply", "b"]}, {"question": "1", "answer": "1"}
    )
    end = tokenizer.eos_token
    assert check_data(given, config(), tokenizer).trained == [[(True, f"2{end}")], [(True, f"1{end}")]]
    recipe = config()
    turns = recipe.data.model_copy(update={"demonstration_column": "turns"})
    found = check_data(given[:1], recipe.model_copy(update={"data": turns}), tokenizer)
    assert found.trained == [[(True, f"a{end}"), (False, "reply"), (True, f"b{end}")]]
    assert check_data(given, config(), None).trained == []


CHAT = {"messages": [{"role": "user", "content": "1+1?"}], "answer": "2"}
TURNS = [
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c?"},
]


@pytest.mark.parametrize(
    ("template", "eos", "problem"),
    [
        (CHATML, "<|im_end|>", ""),
        (
            CHATML,
            "<|eot_id|>",
            "ends an answer with '<|im_end|>', and demonstrations and samples end",
        ),
        (
            CHATML.replace("{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", ""),
            "<|im_end|>",
            "has no generation prompt: before an answer it writes '<|im_start|>assistant\\n', and",
        ),
        (
            CHATML.replace("<|im_end|>", ""),
            "<|im_end|>",
            "writes no stop token behind an answer; demonstrations end with '<|im_end|>', so",
        ),
        ("{{ messages[0].content }}", "<|im_end|>", "leaves out what the assistant says; name another one"),
        ("{{ raise_exception('no') }}", "<|im_end|>", "no"),
    ],
)
def test_what_a_chat_template_does_not_write_is_a_sentence(template, eos, problem):
    tokenizer = copy.deepcopy(tokenizer_with("chatml"))
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    found = check_data(rows(CHAT), config(), tokenizer)
    assert len(found.template or found.problems) == bool(problem)
    assert all(problem in one for one in (*found.template, *found.problems))


def test_a_template_that_writes_turns_anew_is_noted_where_prompts_have_turns():
    tokenizer = copy.deepcopy(tokenizer_with("thinking"))
    tokenizer.eos_token = "<|im_end|>"
    assert check_data(rows(CHAT), config(), tokenizer).template == []
    (note,) = check_data(rows({**CHAT, "messages": TURNS}), config(), tokenizer).template
    assert note.startswith("the chat template writes earlier turns anew")


def test_messages_beside_text_are_noted_and_null_is_a_problem():
    text = {"messages": "1+2?", "answer": "3"}
    found = check_data(rows(CHAT, text, {"messages": None, "answer": "1"}), config(), None)
    assert found.template == [
        "1 prompts are messages, which the chat template writes, and 1 are text without it; set "
        "data.template=chat to write all as chats"
    ]
    assert found.problems == ["x.jsonl line 3: the prompt is null, not text"]
    assert check_data(rows(CHAT, text), config(template="chat"), None).template == []


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ({"prompt": "1", "label": "1"}, ["slime"]),
        ({"prompt": "1", "completion": "1", "label": True}, ["prompts and completions of TRL"]),
        ({"prompt": "1", "answer": "1", "info": {}, "task": "sums"}, ["verifiers or prime-rl"]),
    ],
)
def test_rows_of_further_trainers_are_recognised(columns, names):
    assert [name for name, _ in check_data(rows(columns), config(), None).formats] == names


def test_a_reward_function_of_another_trainer_is_named(monkeypatch):
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str == ground_truth)

    monkeypatch.setitem(sys.modules, "verl_rewards", types.SimpleNamespace(compute_score=compute_score))
    monkeypatch.setattr("millrace.run.data_check._scores", lambda *_: None)
    given = config([{"kind": "function", "function": "verl_rewards:compute_score"}])
    assert check_data(rows(CHAT), given, None).functions == [("verl_rewards:compute_score", "verl")]
    missing = config([{"kind": "function", "function": "verl_rewards:score"}])
    with pytest.raises(RewardError, match="does not have a function score; correct it"):
        check_data(rows(CHAT), missing, None)
