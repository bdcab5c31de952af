"""Preference pairs: read with their place, and held out by prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.data.preference_pairs import Pair, hold_out, read_pairs
from millrace.data.rows import DataError


def written(folder: Path, *lines: object) -> str:
    path = folder / "pairs.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return str(path)


def row(**changes: object) -> dict[str, object]:
    made = {"prompt": "Say ö: ", "chosen": "ö", "rejected": "o"} | changes
    return {key: value for key, value in made.items() if value != "absent"}


def test_each_pair_keeps_its_texts_and_its_line(tmp_path):
    path = written(tmp_path, row(), "", row(prompt="", chosen="", rejected=" ", extra=1))
    assert read_pairs(path) == [
        Pair("Say ö: ", "ö", "o", f"{path} line 1"),
        Pair("", "", " ", f"{path} line 3"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (row(chosen="absent"), "line 2: there is no column chosen; there are: prompt, rejected"),
        (row(rejected=3), "line 2: column rejected is a number, not text"),
        (
            row(chosen=[{"role": "user", "content": "hi"}]),
            "line 2: column chosen is a list, not text",
        ),
        (row(prompt=None), "line 2: column prompt is null, not text"),
        (row(rejected="ö"), "line 2: chosen and rejected are the same text; remove the pair"),
        ('{"prompt": oops}', "line 2, column 12: not JSON: Expecting value"),
    ],
)
def test_a_line_that_is_no_pair_says_why(tmp_path, line, message):
    path = written(tmp_path, row(), line)
    with pytest.raises(DataError) as error:
        read_pairs(path)
    assert str(error.value) == f"{path} {message}"


def test_a_file_without_pairs_and_one_that_is_not_there_say_so(tmp_path):
    path = written(tmp_path)
    with pytest.raises(DataError, match="holds no rows$"):
        read_pairs(path)
    with pytest.raises(DataError, match="gone.jsonl does not exist here; give the path of"):
        read_pairs(str(tmp_path / "gone.jsonl"))


def pairs_of(num_prompts: int, each: int = 1) -> list[Pair]:
    return [
        Pair(f"p{prompt}", "a", f"b{number}", f"row {prompt}.{number}")
        for number in range(each)
        for prompt in range(num_prompts)
    ]


@pytest.mark.parametrize(("num_prompts", "num_held"), [(2, 1), (9, 1), (20, 2), (39, 3), (40, 4)])
def test_one_prompt_in_ten_is_held_out_with_all_its_pairs(num_prompts, num_held):
    pairs = pairs_of(num_prompts, each=3)
    train, held = hold_out(pairs, seed=1)
    assert len(held) == 3 * num_held
    assert not {pair.prompt for pair in train} & {pair.prompt for pair in held}
    order = {pair: number for number, pair in enumerate(pairs)}
    assert [sorted(side, key=order.get) for side in (train, held)] == [train, held]
    assert len(train) + len(held) == len(pairs)


def test_what_is_held_out_depends_on_the_seed_alone():
    draws = [frozenset(pair.prompt for pair in hold_out(pairs_of(50), seed=s)[1]) for s in (0, 0, 1, 2)]
    assert draws[0] == draws[1]
    assert len(set(draws)) == 3


def test_pairs_of_one_prompt_cannot_be_held_out():
    with pytest.raises(DataError) as error:
        hold_out(pairs_of(1, each=4), seed=0)
    assert str(error.value) == (
        "the 4 pairs have only 1 different prompt, so none can be held out; give pairs of two prompts at "
        "least"
    )
