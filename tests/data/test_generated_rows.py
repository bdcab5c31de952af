"""Rows from a user's function, and how many are trained on."""

from __future__ import annotations

import pytest

from millrace.config.inputs import DataConfig
from millrace.config.recipe import ConfigError
from millrace.data.prompts import read_split
from millrace.data.rows import DataError, read_rows
from tests.run.pieces import recipe

HERE = "tests.plugin_functions"
SUMS = f"{HERE}:sums"


def questions(rows) -> list[str]:
    return [row["question"] for row in rows]


def test_a_function_yields_the_rows_of_a_run():
    rows = read_rows(SUMS)
    assert (len(rows), rows[7]) == (20, {"question": "1+2=", "answer": "3"})
    assert rows[7].where == f"data {SUMS} row 8"
    split = read_split(DataConfig(train=SUMS, eval_size=4, prompt_column="question"), seed=0)
    assert (len(split.train), len(split.eval)) == (16, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", f"data {HERE}:gone: module {HERE} does not have a function gone; correct it"),
        ("no_rows", f"data {HERE}:no_rows returned a int; return a list of rows, or yield them"),
        ("lists", f"data {HERE}:lists row 1 is a list; make each row a dictionary of columns"),
        (
            "breaking",
            f"data {HERE}:breaking raised ValueError: the server is gone (plugin_functions.py line ",
        ),
        (
            "too_few",
            f"data {HERE}:too_few has a parameter reward_N, and inputs are passed by name: no inputs",
        ),
    ],
)
def test_a_function_without_usable_rows_is_named(name, message):
    with pytest.raises(DataError) as caught:
        read_rows(f"{HERE}:{name}")
    assert message in str(caught.value)


def test_rows_of_a_function_are_not_streamed():
    with pytest.raises(ConfigError, match="data.streaming reads files, and data.train is a function"):
        recipe(data={"train": SUMS, "streaming": True})


def split_of(**changes):
    given = {"train": SUMS, "eval_size": 4, "prompt_column": "question", "train_size": 5}
    return read_split(DataConfig(**given | changes), seed=3)


def test_a_part_of_the_rows_is_trained_on():
    all_rows = questions(split_of(train_size=None).train)
    assert questions(split_of(shuffle=False).train) == all_rows[:5]
    sampled = questions(split_of().train)
    # Of all rows by seed, in their order.
    assert sampled == sorted(sampled, key=all_rows.index) and len(set(sampled)) == 5
    assert sampled not in (
        all_rows[:5],
        questions(
            read_split(
                DataConfig(train=SUMS, eval_size=4, prompt_column="question", train_size=5), seed=4
            ).train
        ),
    )
    assert questions(split_of(train_size=99).train) == all_rows
    # What is held out does not depend on it.
    assert questions(split_of().eval) == questions(split_of(train_size=None).eval)
    assert split_of().num_held_out == split_of(train_size=None).num_held_out
