"""Text of others on its way to a terminal."""

from __future__ import annotations

import random

import pytest

from millrace.observability.plain import plain_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("grün, 数学, 2 + 2 = 4", "grün, 数学, 2 + 2 = 4"),
        ("a\x1b[31mred\x07", r"a\x1b[31mred\x07"),
        ("one\ntwo\r\tthree", r"one\ntwo\r\tthree"),
        ("\x00\x7f\x80\x9b0m", r"\x00\x7f\x80\x9b0m"),
        ("\u202egpj.exe\u2066\u200f\u061c", r"\u202egpj.exe\u2066\u200f\u061c"),
        ("a\u2028b\u2029c", r"a\u2028b\u2029c"),
        ("half \ud83d of a pair", r"half \ud83d of a pair"),
        ("", ""),
    ],
)
def test_what_acts_on_a_terminal_is_escaped_and_the_rest_stays(text, shown):
    assert plain_text(text) == shown


def test_a_long_text_is_cut_and_says_how_much_is_missing():
    assert plain_text("a" * 500) == "a" * 500
    assert plain_text("a" * 503) == "a" * 500 + "… (3 more characters)"
    assert plain_text("\x1bbc", limit=1) == r"\x1b… (2 more characters)"


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="limit is -1"):
        plain_text("a", limit=-1)


def test_any_text_becomes_one_line_that_utf8_can_hold():
    generator = random.Random(0)
    for _ in range(200):
        text = "".join(chr(generator.choice([generator.randrange(0x3000), 0xD800])) for _ in range(50))
        shown = plain_text(text)
        shown.encode("utf-8")
        assert shown.splitlines() == [shown]
