from __future__ import annotations

import pytest

from millrace.rewards.text import ExactReward, Gsm8kReward
from millrace.types import Outcome, Prompt


def prompt(answer: str) -> Prompt:
    return Prompt("train:17", (1,), "How many?", answer)


def exact(answer: str, completion: str) -> Outcome:
    (outcome,) = ExactReward().score([prompt(answer)], [completion])
    return outcome


def gsm8k(answer: str, completion: str) -> Outcome:
    (outcome,) = Gsm8kReward().score([prompt(answer)], [completion])
    return outcome


@pytest.mark.parametrize(
    ("completion", "value"),
    [("72", 1.0), ("  72\n", 1.0), ("73", 0.0), ("72.0", 0.0), ("", 0.0), ("the answer is 72", 0.0)],
)
def test_exact_compares_text_without_white_space_at_the_ends(completion, value):
    assert exact(" 72 ", completion) == Outcome("score", value)


def test_an_empty_completion_earns_nothing_where_there_is_no_answer():
    outcome = exact(" ", "")
    assert outcome.kind == "failed"
    assert outcome.reason == "prompt train:17 has no answer to compare with; set data.answer_column"


@pytest.mark.parametrize(
    ("answer", "completion", "value"),
    [
        ("72", "48 + 24 = 72\n#### 72", 1.0),
        ("72", "#### 73", 0.0),
        ("Natalia sold 48+24 = 72\n#### 72", "####72", 1.0),
        ("1,234", "#### 1234", 1.0),
        ("1234567", "#### 1,234,567", 1.0),
        ("-5", "#### -5", 1.0),
        ("-5", "#### 5", 0.0),
        ("-5", "#### -$5", 1.0),
        ("-5", "#### $-5", 1.0),
        ("5", "#### +5", 1.0),
        ("18", "#### $18.00 per day", 1.0),
        ("18", "#### 18.", 1.0),
        ("18.", "#### 18", 1.0),
        ("18", "#### 18, I think", 1.0),
        ("0.5", "#### .5", 1.0),
        ("0.1", "#### 0.10", 1.0),
        ("0.1", "#### 0.1000000000000000000000000001", 0.0),
        ("9007199254740993", "#### 9007199254740992", 0.0),
        ("72", "#### 71\nno, wait\n#### 72", 1.0),
        ("72", "#### 72\nno, wait\n#### 71", 0.0),
    ],
)
def test_gsm8k_compares_the_number_after_the_last_mark(answer, completion, value):
    assert gsm8k(answer, completion) == Outcome("score", value)


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("the answer is 72", "the completion has no ####"),
        ("", "the completion has no ####"),
        ("### 72", "the completion has no ####"),
        ("#### seventy-two", "no number follows the completion's last ####"),
        ("#### 72 ####", "no number follows the completion's last ####"),
        ("#### 72/2", "no number follows the completion's last ####"),
        ("#### 72 * 2", "no number follows the completion's last ####"),
        ("#### 7.2.1", "no number follows the completion's last ####"),
        ("#### -$-72", "no number follows the completion's last ####"),
        ("#### ٧٢", "no number follows the completion's last ####"),
    ],
)
def test_gsm8k_calls_a_completion_without_a_number_invalid(completion, reason):
    assert gsm8k("72", completion) == Outcome("invalid", 0.0, reason)


@pytest.mark.parametrize("answer", ["", "many", "72 apples", "so many #### apples"])
def test_gsm8k_fails_where_the_answer_holds_no_number(answer):
    outcome = gsm8k(answer, "#### 72")
    assert outcome.kind == "failed"
    assert outcome.reason == (
        f"the answer {answer!r} of prompt train:17 holds no number; "
        "give a number or text that ends in #### and a number"
    )


@pytest.mark.parametrize("reward", [ExactReward(), Gsm8kReward()])
def test_outcomes_keep_the_order_of_the_completions(reward):
    outcomes = reward.score([prompt("1"), prompt("#### 2"), prompt("3")], ["#### 1", "#### 2", "#### 4"])
    assert [outcome.value for outcome in outcomes] in ([0.0, 1.0, 0.0], [1.0, 1.0, 0.0])
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        reward.score([prompt("1"), prompt("2")], ["1"])
    reward.close()


@pytest.mark.attack("2,000 spaces, and other long completions")
@pytest.mark.parametrize(
    "tail",
    [
        " " * 200_000,
        "$ " * 100_000,
        "+" * 200_000,
        "1" * 200_000 + "/",
        "1," * 100_000,
        "1." * 100_000,
        "\n-" * 100_000,
    ],
    ids=["spaces", "dollars", "signs", "digits", "commas", "dots", "lines"],
)
@pytest.mark.parametrize("reward", [Gsm8kReward(), ExactReward()], ids=["gsm8k", "exact"])
def test_a_long_completion_is_scored_in_time_that_grows_with_its_length(reward, tail):
    """Where it grew with the square, this would hang."""
    for text in (f"####{tail}", f"####{tail}x", tail, f"####{tail}####{tail}"):
        (outcome,) = reward.score([prompt("72")], [text])
        assert outcome.value == 0.0
