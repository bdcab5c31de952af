"""Answers to prompts of one's own."""

from __future__ import annotations

import json

import pytest

from millrace.cli.generate import visible


@pytest.fixture
def trained(lab):
    lab.train("steps=1", "--quiet")
    return lab


def answers(lab, *words: str) -> list[list[str]]:
    tree = json.loads(lab("generate", "runs/tiny-1", *words, "--json").out)
    return [[completion["text"] for completion in entry["completions"]] for entry in tree]


def test_each_prompt_is_answered_by_as_many_samples_as_asked(trained):
    found = answers(trained, "1+1=", "2+2=", "--temperature", "1", "--samples", "3")
    assert [len(samples) for samples in found] == [3, 3]
    assert len(set(found[0])) > 1


@pytest.mark.slow
def test_a_seed_repeats_its_samples_and_the_next_seed_does_not(trained):
    first = answers(trained, "1+1=", "--temperature", "1", "--samples", "2", "--seed", "5")
    assert answers(trained, "1+1=", "--temperature", "1", "--samples", "2", "--seed", "5") == first
    assert answers(trained, "1+1=", "--temperature", "1", "--seed", "6") == [[first[0][1]]]
    assert first[0][0] != first[0][1]


@pytest.mark.slow
def test_one_answer_is_printed_alone_and_several_under_their_prompts(trained):
    (text,) = answers(trained, "1+1=")[0]
    assert trained("generate", "runs/tiny-1", "1+1=").out == f"{visible(text)}\n"
    assert trained("generate", "runs/tiny-1", "1+1=", "2+2=").out.startswith(f"> 1+1=\n{visible(text)}\n> 2")


def test_control_characters_are_written_out():
    assert visible("a\x1b[2J\tb\né\x9b") == "a\\x1b[2J\tb\né\\x9b"


@pytest.mark.parametrize("option", ["--samples", "--seed"])
def test_an_option_without_effect_is_refused(lab, option):
    result = lab("generate", "runs/tiny-1", "1+1=", option, "2")
    assert result.code == 2
    assert result.err == f"error: {option} has no effect at temperature 0; add --temperature 1\n"


def test_a_prompt_that_is_empty_is_refused(trained):
    result = trained("generate", "runs/tiny-1", "")
    assert (result.code, result.err) == (1, "error: prompt 1: the prompt is empty\n")
