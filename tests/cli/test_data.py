"""`millrace data check`: for people and programs, and what it refuses."""

from __future__ import annotations

import json

import pytest

from millrace.data.tokenizers import train_tokenizer


def test_people_see_rows_columns_answers_and_three_prompts(lab):
    done = lab("data", "check", "sums.jsonl", "--reward", "exact")
    assert done.code == 0
    assert done.out.splitlines()[:8] == [
        "rows        40, of which 40 can be used",
        "columns     question: text 40",
        "            answer: text 40",
        "answers     40",
        "duplicates  0 rows have the problem of an earlier row",
        "tokens      not counted; --model FOLDER names a tokenizer",
        "rewards     40 of 40 reference answers earn full marks, mean 1.000",
        "prompt 1, sums.jsonl line 1",
    ]
    assert done.out.splitlines()[-3:] == ["prompt 3, sums.jsonl line 3", "  0+2=", "  answer: 2"]


def test_a_row_that_cannot_be_used_is_named_and_the_command_fails(lab):
    lab.write("mixed.jsonl", [*lab.lines[:2], *['{"text": "\\u001b[2J"}'] * 7])
    done = lab("data", "check", "mixed.jsonl", "data.eval=sums.jsonl")
    assert done.code == 1 and "\x1b" not in done.out
    assert "rows        9, of which 2 can be used\n" in done.out
    assert "held out    2 rows, whose problem is in sums.jsonl\n" in done.out
    assert "rewards     not tried; --reward KIND or --recipe names some" in done.out
    assert "problem     mixed.jsonl line 3: there is no column question" in done.out
    assert "            and 2 rows more\n" in done.out


def test_with_a_tokenizer_people_see_what_sft_trains_on(lab):
    save_model_tokenizer(lab.folder / "tokenizer")
    done = lab("data", "check", "sums.jsonl", "--model", "tokenizer", "--reward", "exact")
    assert done.out.splitlines()[-4:] == [
        "prompt 3, sums.jsonl line 3, 4 tokens",
        "  0+2=",
        "  SFT trains on: 2<|endoftext|>",
        "  answer: 2",
    ]


def save_model_tokenizer(folder) -> None:
    train_tokenizer(["0123456789+="], vocab_size=257, across_words=False).save_pretrained(folder)


def test_programs_see_the_same_numbers(lab):
    done = lab("data", "check", "sums.jsonl", "--recipe", "tiny.yaml", "--json")
    tree = json.loads(done.out)
    assert (tree["num_rows"], tree["num_prompts"], tree["tokens"]) == (40, 40, None)
    assert tree["scores"]["num_right"] == 40 and tree["problems"] == []
    assert tree["examples"][0] == {"prompt": "0+0=", "answer": "0", "tokens": None, "trained": []}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "gone.jsonl"], "error: gone.jsonl does not exist here; give the path of .jsonl"),
        (["check", "sums.jsonl", "--model", "gone"], "error: tokenizer folder gone does not exist"),
        (["check", "sums.jsonl", "data.colum=x"], "unknown key data.colum"),
        (["check", "sums.jsonl", "--reward", "exactly"], "error: --reward exactly is none of exact"),
        (["check", "tiny.yaml", "--recipe", "tiny.yaml"], "tiny.yaml is a recipe itself; leave out --recipe"),
    ],
)
def test_a_mistake_is_one_sentence(lab, words, message):
    done = lab("data", *words)
    assert done.code in (1, 2) and message in done.err
    assert len(done.err.splitlines()) == 1
