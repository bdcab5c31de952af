"""The games: their rules, and that optimal play wins."""

from __future__ import annotations

import pytest

from millrace.environments.calculator import Calculator
from millrace.environments.guess import DIGITS, Guess
from millrace.types import Action, Task


def task(answer, prompt=""):
    return Task(prompt, answer, {}, 0, 0, 8)


def act(text):
    return Action(text, (1,), "stop")


@pytest.mark.parametrize("number", range(1, 16))
def test_a_binary_search_always_wins(number):
    game, low, high = Guess(), 1, 15
    game.begin(task(DIGITS[number]))
    for _ in range(4):
        middle = (low + high) // 2
        reply = game.step(act(DIGITS[middle]))
        if reply.done:
            break
        low, high = (middle + 1, high) if reply.text == ">" else (low, middle - 1)
        assert reply.state.startswith(f"{low}-{high} ")
    assert (reply.done, reply.score) == (True, 1.0)


def test_a_game_ends_after_its_guesses():
    game = Guess()
    assert game.begin(task("7")).state == "1-15 4"
    assert [game.step(act(text)).text for text in ("x", "", "f1")] == ["?", "?", "?"]
    last = game.step(act("1"))
    assert (last.done, last.score) == (True, 0.0)


def test_every_number_is_as_frequent_as_the_others():
    rows = list(Guess.rows(150, seed=3))
    assert sorted(row["answer"] for row in rows) == sorted(DIGITS[1:] * 10)
    assert len({row["problem"] for row in rows}) == 150
    # The prompt contains every reply, for a tokenizer that is trained on prompts and answers.
    assert all(set("<>?") <= set(row["prompt"]) for row in rows)


def test_the_calculator_runs_calls_and_scores_answers():
    game = Calculator()
    assert game.begin(task("1692")).text is None
    reply = game.step(act("calc(47*36)"))
    assert (reply.text, reply.done, reply.state) == ("=1692;", False, "tool")
    reply = game.step(act("1692"))
    assert (reply.done, reply.score) == (True, 1.0)


@pytest.mark.parametrize("text", ["1693", "", "01692", "__import__('os')", "calc(47*36", "9" * 10_000])
def test_anything_else_is_a_wrong_answer(text):
    game = Calculator()
    game.begin(task("1692"))
    assert game.step(act(text)).score == 0.0


def test_one_demonstration_in_five_calls_the_tool():
    rows = list(Calculator.rows(2000, seed=1))
    called = [row for row in rows if len(row["demonstration"]) == 3]
    assert 0.17 < len(called) / len(rows) < 0.23
    for row in called[:50]:
        call, reply, answer = row["demonstration"]
        game = Calculator()
        game.begin(task(row["answer"]))
        assert game.step(act(call)).text == reply
        assert game.step(act(answer)).score == 1.0
