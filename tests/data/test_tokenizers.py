from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from millrace.data.chat import render
from millrace.data.rows import DataError
from millrace.data.tokenizers import check_vocabulary, load_tokenizer, stop_token_ids, train_tokenizer

QUESTIONS = [f"What is {a} + {b}?" for a in range(10, 99, 3) for b in range(10, 99, 7)]
WORDS = train_tokenizer(QUESTIONS, vocab_size=300, across_words=False)
ACROSS = train_tokenizer(QUESTIONS, vocab_size=300, across_words=True)
ODD = " \u00a0What is  12\t+\r\n34? é 😀\u200d\u0301 ½ ² ٣ <|endoftext|> .\x00"


def pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer(text)["input_ids"]]


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        load_tokenizer(folder)
    return str(caught.value)


@given(st.text() | st.text(st.sampled_from("What is 0123456789+?\r\n é😀.,'")))
def test_any_text_comes_back_unchanged(text: str) -> None:
    assert WORDS.decode(WORDS(text)["input_ids"]) == text
    assert ACROSS.decode(ACROSS(text)["input_ids"]) == text


@given(st.text(st.sampled_from("What is 0123456789+?\n"), min_size=1))
def test_every_digit_is_a_token_of_its_own(text: str) -> None:
    for tokenizer in (WORDS, ACROSS):
        assert all(len(piece) == 1 for piece in pieces(tokenizer, text) if any(map(str.isdigit, piece)))


def test_entries_end_with_the_word_unless_told_otherwise() -> None:
    assert pieces(WORDS, "What is 27 + 45?") == ["What", " is", " ", "2", "7", " +", " ", "4", "5", "?"]
    assert pieces(ACROSS, "What is 27 + 45?") == ["What is ", "2", "7", " + ", "4", "5", "?"]


def test_the_end_of_text_is_one_token_and_nothing_is_put_around_a_text() -> None:
    assert WORDS.eos_token_id == WORDS.pad_token_id == 0
    assert WORDS("<|endoftext|>")["input_ids"] == [0]
    assert WORDS("")["input_ids"] == []


def test_no_more_entries_than_asked_for() -> None:
    sizes = [len(train_tokenizer([ODD * 3], vocab_size=n, across_words=True)) for n in (257, 260, 5000)]
    assert sizes[:2] == [257, 260]
    assert 260 < sizes[2] < 400


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        train_tokenizer(["a"], vocab_size=256, across_words=False)
    assert str(caught.value) == (
        "tokenizer.vocab_size is 256; the 256 bytes and <|endoftext|> need at least 257; "
        "raise it, or set tokenizer.alphabet: seen"
    )


@pytest.mark.slow
@pytest.mark.world
def test_the_same_texts_give_the_same_tokenizer_in_another_process() -> None:
    code = (
        "from millrace.data.tokenizers import train_tokenizer as t;"
        "q = [f'What is {a} + {b}?' for a in range(10, 99, 3) for b in range(10, 99, 7)];"
        "print(t(iter(q), vocab_size=300, across_words=True).backend_tokenizer.to_str())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(other.stdout) == json.loads(ACROSS.backend_tokenizer.to_str())


def test_a_saved_tokenizer_loads_again(tmp_path: Path) -> None:
    ACROSS.save_pretrained(tmp_path)
    for loaded in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.backend_tokenizer.to_str() == ACROSS.backend_tokenizer.to_str()
        assert loaded(ODD)["input_ids"] == ACROSS(ODD)["input_ids"]
        assert loaded.decode(loaded(ODD)["input_ids"]) == ODD
        assert loaded.eos_token_id == loaded.pad_token_id == 0


def test_a_loaded_tokenizer_is_saved_as_the_same_files(tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    ACROSS.save_pretrained(first)
    load_tokenizer(first).save_pretrained(again)
    for name in {path.name for path in (*first.iterdir(), *again.iterdir())}:
        assert (again / name).read_bytes() == (first / name).read_bytes(), name


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "gpt2"])
def test_the_model_beside_a_tokenizer_does_not_change_it(tmp_path: Path, model_type: str) -> None:
    ACROSS.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert load_tokenizer(tmp_path)(ODD)["input_ids"] == ACROSS(ODD)["input_ids"]


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == (
        f"tokenizer folder {tmp_path / 'none'} does not exist; download the model and give its folder"
    )
    assert refusal(tmp_path) == (
        f"folder {tmp_path} holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json); "
        "copy its files there"
    )


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    ACROSS.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert refusal(tmp_path).startswith(f"the tokenizer in {tmp_path} cannot be loaded: ")
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert refusal(tmp_path).startswith(
        f"the tokenizer in {tmp_path} cannot be loaded: tokenizer_config.json is not JSON: Expecting property"
    )


def test_a_tokenizer_without_end_is_refused(tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=ACROSS.backend_tokenizer).save_pretrained(tmp_path)
    assert refusal(tmp_path) == (
        f"the tokenizer in {tmp_path} has no end-of-text token, so no completion could end; set eos_token in "
        "its tokenizer_config.json"
    )


def test_code_from_a_folder_never_runs(tmp_path: Path) -> None:
    ACROSS.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    assert refusal(tmp_path).startswith(f"the tokenizer in {tmp_path} cannot be loaded: ValueError: ")


def test_stop_tokens_are_those_of_tokenizer_and_generation_config() -> None:
    assert stop_token_ids(WORDS) == (0,)
    assert stop_token_ids(WORDS, 7) == (0, 7)
    assert stop_token_ids(WORDS, [5, 0, 7]) == (0, 5, 7)


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    check_vocabulary(WORDS, len(WORDS))
    with pytest.raises(DataError) as caught:
        check_vocabulary(WORDS, len(WORDS) - 1)
    assert str(caught.value) == (
        f"the tokenizer has ids up to {len(WORDS) - 1}, but the model's vocabulary holds {len(WORDS) - 1}; "
        "set tokenizer.path to the tokenizer the model was made with (null takes the one in model.path)"
    )


def test_a_seen_alphabet_has_no_unused_bytes_and_names_what_it_cannot_spell() -> None:
    seen = train_tokenizer(QUESTIONS, vocab_size=300, across_words=True, alphabet="seen")
    assert len(seen) < len(ACROSS) - 200
    assert seen.decode(seen("What is 27 + 45?")["input_ids"]) == "What is 27 + 45?"
    with pytest.raises(DataError, match="prompt 1: the tokenizer has no token for some character of 'é'"):
        render(seen, "{prompt}", "é", "prompt 1")


def test_a_seen_alphabet_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match="tokenizer.vocab_size is 2; the characters of the data alone need 5"):
        train_tokenizer(["abc"], vocab_size=2, across_words=True, alphabet="seen")
