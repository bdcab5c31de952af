"""How often prompts are dealt, by what they earned."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from millrace.config.inputs import CurriculumConfig
from millrace.data.curriculum import Curriculum, hard
from millrace.data.plugin import PluginError
from millrace.data.prompts import PromptStream
from millrace.errors import SetupError
from millrace.types import Prompt

FOUR = [Prompt(f"train:{n}", (n,), str(n), row={"level": n}) for n in range(4)]
CHANCES = """
def by_level(row, reward, tries):
    return row["level"] / 4 if tries < 2 else 0


def once(reward):
    return 1.0 if reward is None else 0.0


def text(row, reward, tries):
    return "often"


def above(row, reward, tries):
    return 1.5


def fails(row):
    return row["price"]


number = 3
"""


def stream(curriculum: Curriculum | None, seed: int = 0) -> PromptStream:
    return PromptStream(FOUR, seed=seed, shuffle=True, curriculum=curriculum)


@pytest.fixture
def chances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chances_of_a_test.py").write_text(CHANCES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def of(name: str, least: float = 0.01) -> Curriculum:
    return Curriculum.of(CurriculumConfig(chance=f"chances_of_a_test:{name}", least=least))


def test_what_was_never_tried_is_always_dealt() -> None:
    assert stream(Curriculum(hard, least=0.1)).next(40) == stream(None).next(40)


def test_a_prompt_is_dealt_the_more_rarely_the_more_it_earned() -> None:
    dealing = stream(Curriculum(hard, least=0.1))
    for prompt, reward in zip(FOUR, (0.0, 0.5, 1.0, 7.0), strict=True):
        dealing.learn(prompt, [reward, reward])
    count = Counter(prompt.id for prompt in dealing.next(1700))
    # About a thousand epochs; three standard deviations of the counts are 47 and 28.
    epochs = count["train:0"]
    assert abs(epochs - 1000) < 60
    assert abs(count["train:1"] - 0.5 * epochs) < 48
    # At least a tenth, and rewards above 1 count as 1.
    assert all(abs(count[f"train:{n}"] - 0.1 * epochs) < 29 for n in (2, 3))


def test_the_last_group_alone_counts_and_failed_rewards_do_not() -> None:
    curriculum = Curriculum(hard, least=0.1)
    dealing = stream(curriculum)
    dealing.learn(FOUR[0], [1.0, 1.0])
    dealing.learn(FOUR[0], [0.0, 0.5])
    dealing.learn(FOUR[0], [])
    assert curriculum.chance(FOUR[0]) == 0.75
    assert curriculum.state() == {"train:0": (0.25, 2)}


@pytest.mark.parametrize("position", range(0, 20, 3))
def test_a_resumed_stream_passes_over_what_the_first_would_have(position: int) -> None:
    first = stream(Curriculum(hard, least=0.1), seed=4)
    for prompt in first.next(position):
        first.learn(prompt, [0.6])
    state = json.loads(json.dumps(first.state()))
    resumed = stream(Curriculum(hard, least=0.1), seed=4)
    resumed.load_state(state)
    assert json.loads(json.dumps(resumed.state())) == state
    expected = first.next(30)
    assert resumed.next(30) == expected
    assert position < 6 or expected != stream(None, seed=4).next(position + 30)[position:]


@pytest.mark.usefixtures("chances")
def test_a_function_of_ones_own_sees_row_reward_and_tries() -> None:
    curriculum = of("by_level")
    assert [curriculum.chance(prompt) for prompt in FOUR] == [0.01, 0.25, 0.5, 0.75]
    curriculum.learn(FOUR[3], 0.2)
    assert curriculum.chance(FOUR[3]) == 0.75
    curriculum.learn(FOUR[3], 0.2)
    assert curriculum.chance(FOUR[3]) == 0.01
    curriculum = of("once", least=0.5)
    curriculum.learn(FOUR[0], 0.0)
    assert [curriculum.chance(prompt) for prompt in FOUR[:2]] == [0.5, 1.0]


@pytest.mark.usefixtures("chances")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("text", "returned 'often'; return a number from 0 to 1"),
        ("above", "returned 1.5; return a number from 0 to 1"),
        ("fails", "raised KeyError: 'price' (chances_of_a_test.py line 19); correct it"),
    ],
)
def test_a_function_that_gives_no_chance_is_named(name: str, said: str) -> None:
    with pytest.raises(PluginError) as caught:
        of(name).chance(FOUR[1])
    assert str(caught.value) == f"data.curriculum.chance chances_of_a_test:{name} {said}"


@pytest.mark.usefixtures("chances")
@pytest.mark.parametrize(("name", "what"), [("gone", "does not have"), ("number", "cannot call")])
def test_a_function_that_is_not_there_is_named(name: str, what: str) -> None:
    with pytest.raises(SetupError) as caught:
        of(name)
    said = f"chances_of_a_test:{name}: module chances_of_a_test {what} a function {name}; correct it"
    assert str(caught.value) == f"data.curriculum.chance {said}"
