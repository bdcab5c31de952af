"""Text while it comes: whole characters, no piece of a stop string, and in the end exactly the whole text."""

from __future__ import annotations

import random

import pytest

from millrace.inference.server.detokenize import HALF, Detokenizer
from tests.inference.server.running import TEXTS, tokenizer

SEEDS = range(150)


def decode(token_ids) -> str:
    return tokenizer().decode(list(token_ids), skip_special_tokens=True)


def pieces(numbers: random.Random, token_ids: list[int]) -> list[list[int]]:
    found, first = [], 0
    while first < len(token_ids):
        count = numbers.randint(1, 4)
        found.append(token_ids[first : first + count])
        first += count
    return found


def some_tokens(numbers: random.Random) -> list[int]:
    """Words of the training text, and here and there any token at all."""
    words = tokenizer()(TEXTS[0])["input_ids"]
    start = numbers.randrange(len(words))
    noise = numbers.choice([0.0, 0.1, 1.0])
    return [
        numbers.randrange(len(tokenizer())) if numbers.random() < noise else word
        for word in (words[start:] + words)[: numbers.randint(1, 60)]
    ]


@pytest.mark.slow_beyond(15)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_pieces_together_are_the_text(seed):
    numbers = random.Random(seed)
    token_ids = some_tokens(numbers)
    writer, text = Detokenizer(decode), ""
    for piece in pieces(numbers, token_ids):
        text += writer.push(piece)
        assert decode(token_ids).startswith(text)
    assert text + writer.finish(decode(token_ids)) == decode(token_ids)


@pytest.mark.slow_beyond(15)
@pytest.mark.parametrize("seed", SEEDS)
def test_with_stop_strings_the_pieces_are_the_text_before_the_first(seed):
    numbers = random.Random(seed)
    token_ids = some_tokens(numbers)
    whole = decode(token_ids)
    stops = tuple(
        part
        for _ in range(numbers.randint(1, 3))
        if (at := numbers.randrange(len(whole) or 1)) < len(whole)
        and (part := whole[at : at + numbers.randint(1, 5)])
    ) or ("zz",)
    # As an engine does: it stops at the first token that completes a stop string.
    used = next(
        (n for n in range(1, len(token_ids) + 1) if any(stop in decode(token_ids[:n]) for stop in stops)),
        len(token_ids),
    )
    cut = decode(token_ids[:used])
    cut = cut[: min([at for at in (cut.find(stop) for stop in stops) if at >= 0] or [len(cut)])]
    writer, text = Detokenizer(decode, stops), ""
    for piece in pieces(numbers, token_ids[:used]):
        text += writer.push(piece)
        assert cut.startswith(text)
    assert text + writer.finish(cut) == cut


def test_text_comes_as_soon_as_it_is_certain():
    token_ids = tokenizer()("the wheel 𝄞 turns")["input_ids"]
    writer = Detokenizer(decode, ("el t", "lx"))
    given = [writer.push([token]) for token in token_ids]
    # The end "el" may become a stop string until the next letter shows; each part of the clef waits.
    assert "".join(given) == "the wheel 𝄞 turns"
    halves = [n for n in range(1, len(token_ids)) if decode(token_ids[:n]).endswith(HALF)]
    assert len(halves) == 3
    assert [given[n - 1] for n in halves] == [""] * 3
    held = next(n for n in range(len(token_ids)) if decode(token_ids[: n + 1]).endswith("wheel"))
    assert "".join(given[: held + 1]) == "the whe"


@pytest.mark.parametrize(
    ("text", "stop", "given"),
    [
        ("abc", "cd", "ab"),
        ("abc", "bcd", "a"),
        ("xaaa", "aaab", "x"),
        ("xaab", "abb", "xa"),
        ("abc", "b", "a"),
    ],
)
def test_the_beginning_of_a_stop_string_is_held_back(text, stop, given):
    def letters(token_ids):
        return "".join(map(chr, token_ids))

    writer = Detokenizer(letters, (stop,))
    assert "".join(writer.push([ord(letter)]) for letter in text) == given


def bytes_of(token_ids) -> str:
    """A decoder whose tokens are pieces of UTF-8."""
    return b"".join(token_ids).decode("utf-8", "replace")


@pytest.mark.slow_beyond(13)
@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_that_are_no_characters_come_too_and_the_pieces_are_the_text(seed):
    numbers = random.Random(seed)
    letters = [bytes([byte]) for byte in "水🛞a".encode()] + [b"\x80", b"\xff", b"\xe6\xb0", "水".encode()]
    likely = numbers.choices([1, 10], k=len(letters))
    token_ids = numbers.choices(letters, likely, k=300)
    writer, text = Detokenizer(bytes_of), ""
    for token in token_ids:
        text += writer.push([token])
        assert bytes_of(token_ids).startswith(text)
    assert text + writer.finish(bytes_of(token_ids)) == bytes_of(token_ids)


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("token", [b"\x80", b"\xb4\xe6\xb0", b""])
def test_tokens_that_never_end_a_character_are_not_decoded_again_and_again(token):
    lengths: list[int] = []

    def counting(token_ids):
        lengths.append(len(token_ids))
        return bytes_of(token_ids)

    writer = Detokenizer(counting)
    text = "".join(writer.push([token]) for _ in range(3000))
    assert max(lengths) < 600
    whole = bytes_of([token] * 3000)
    assert len(text) > len(whole) - 600
    assert len(text + writer.finish(whole)) >= len(whole)


def test_end_tokens_do_not_pile_up():
    end = tokenizer().eos_token_id
    lengths: list[int] = []

    def counting(token_ids):
        lengths.append(len(token_ids))
        return decode(token_ids)

    writer = Detokenizer(counting, special=frozenset(tokenizer().all_special_ids))
    text = "".join(writer.push([end] * 50 + tokenizer()("turns")["input_ids"]) for _ in range(20))
    assert text == "turns" * 20
    assert max(lengths) < 12


def test_a_decoder_that_drops_the_first_space_drops_no_other():
    # As decoders of SentencePiece do: "▁the▁wheel" is "the wheel", and "▁wheel" alone is "wheel".
    words = ["▁the", "▁wheel", "▁", "▁turns", "s"]

    def spaces(token_ids):
        return "".join(words[token] for token in token_ids).replace("▁", " ").removeprefix(" ")

    writer = Detokenizer(spaces)
    given = [writer.push([token]) for token in (0, 1, 2, 3, 4, 2, 2, 1)]
    assert given == ["the", " wheel", " ", " turns", "s", " ", " ", " wheel"]


def test_a_decoder_that_changes_its_mind_keeps_the_number_of_letters():
    # Decoders with byte fallback read a line feed again once half a character follows it.
    def fickle(token_ids):
        return HALF * len(token_ids) if 9 in token_ids else "\n" * len(token_ids)

    writer = Detokenizer(fickle)
    assert writer.push([1]) == "\n"
    assert writer.push([9]) == ""
    assert writer.finish(fickle([1, 9])) == HALF
