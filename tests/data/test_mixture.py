"""Prompts of several sources: exact proportions, each source in its own order, and exact on resume."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.config.inputs import DataConfig, source_fractions
from millrace.config.recipe import ConfigError, from_settings
from millrace.data.curriculum import Curriculum
from millrace.data.mixture import MixtureStream
from millrace.data.prompts import make_prompts, read_split, settled, with_templates
from millrace.data.rows import DataError
from millrace.data.tokenizers import train_tokenizer
from millrace.types import Prompt

BYTES = train_tokenizer([], vocab_size=257, across_words=False)
PARTS = {"a": Fraction(7, 10), "b": Fraction(2, 10), "c": Fraction(1, 10)}


def mixture(fractions: dict[str, Fraction], seed: int = 3, **more: Any) -> MixtureStream:
    prompts = {
        name: [Prompt(f"{name}:{n}", (1,), "", source=name) for n in range(5 + 4 * place)]
        for place, name in enumerate(fractions)
    }
    return MixtureStream(prompts, fractions, seed=seed, shuffle=True, **more)


@pytest.mark.slow_beyond(5)
@pytest.mark.parametrize("seed", range(20))
def test_every_beginning_is_within_one_prompt_and_every_period_is_exact(seed: int) -> None:
    parts = np.random.default_rng(seed).integers(1, 12, size=1 + seed % 5).tolist()
    fractions = {f"s{n}": Fraction(part, sum(parts)) for n, part in enumerate(parts)}
    period, counts = sum(parts), Counter[str]()
    stream = mixture(fractions, seed)
    names = [prompt.source for prompt in stream.next(3 * period)]
    for place, name in enumerate(names, start=1):
        counts[name] += 1
        assert all(abs(counts[each] - part * place) < 1 for each, part in fractions.items())
    for begin in range(2 * period):
        window = Counter(names[begin : begin + period])
        assert window == Counter({each: int(part * period) for each, part in fractions.items()})


def test_each_source_gives_every_prompt_once_an_epoch_in_an_order_of_its_own() -> None:
    found = [prompt.id for prompt in mixture(PARTS).next(200)]
    of_a = [id for id in found if id.startswith("a")]
    assert all(len(set(of_a[place : place + 5])) == 5 for place in range(0, 140, 5))
    assert len({tuple(of_a[place : place + 5]) for place in range(0, 140, 5)}) > 1
    # Other sources and weights do not change the order of one.
    alone = mixture({"a": Fraction(1, 2), "z": Fraction(1, 2)}).next(280)
    assert [prompt.id for prompt in alone if prompt.source == "a"] == of_a
    assert [prompt.id for prompt in mixture(PARTS, seed=4).next(200)] != found


@pytest.mark.parametrize("done", [0, 1, 7, 10, 53])
def test_a_resumed_mixture_goes_on_exactly(done: int) -> None:
    whole = [prompt.id for prompt in mixture(PARTS).next(done + 40)]
    first, second = mixture(PARTS), mixture(PARTS)
    first.next(done)
    second.load_state(json.loads(json.dumps(first.state())))
    assert [prompt.id for prompt in second.next(40)] == whole[done:]


def test_a_curriculum_skips_prompts_but_keeps_the_proportions_and_resumes() -> None:
    def stream() -> MixtureStream:
        return mixture(PARTS, curriculum=Curriculum(lambda row, reward, tries: 1 - (reward or 0), least=0.1))

    first = stream()
    for prompt in first.next(50):
        first.learn(prompt, [1.0 if prompt.id == "a:1" else 0.0])
    second = stream()
    second.load_state(json.loads(json.dumps(first.state())))
    ahead = first.next(100)
    assert [prompt.id for prompt in second.next(100)] == [prompt.id for prompt in ahead]
    counts = Counter(prompt.source for prompt in ahead)
    assert counts == {"a": 70, "b": 20, "c": 10}
    assert sum(prompt.id == "a:1" for prompt in ahead) < sum(prompt.id == "a:2" for prompt in ahead)


def test_a_state_of_other_data_is_refused() -> None:
    with pytest.raises(DataError, match="made without data.sources"):
        mixture(PARTS).load_state({"epoch": 0, "position": 0, "num_prompts": 5})
    other = mixture({"a": Fraction(1, 2), "z": Fraction(1, 2)}).state()
    with pytest.raises(DataError, match="the sources a, z and the recipe now has a, b, c"):
        mixture(PARTS).load_state(other)
    state = mixture(PARTS).state()
    state["sources"]["b"]["num_prompts"] = 8
    with pytest.raises(DataError, match="source b: the checkpoint was made with 8 prompts"):
        mixture(PARTS).load_state(state)


def written(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def two(folder: Path, **more: Any) -> dict[str, Any]:
    texts = [{"question": f"{n}?", "answer": str(n)} for n in range(30)]
    chats = [{"q": f"{n}!", "gold": f"<{n}>"} for n in range(20)]
    own = {
        "prompt_column": "q",
        "answer_column": "gold",
        "answer_pattern": "<(.*)>",
        "template": "Q: {prompt}",
    }
    return {
        "sources": [
            {"name": "texts", "data": written(folder, "texts", texts), "weight": 0.7},
            {"name": "chats", "data": written(folder, "chats", chats), "weight": 0.3, **own},
        ],
        **more,
    }


def test_each_source_is_read_and_held_out_by_its_own_settings(tmp_path: Path) -> None:
    config = DataConfig(**two(tmp_path, eval_size=10))
    split = read_split(config, seed=1)
    assert Counter(row.source for row in split.eval) == {"texts": 7, "chats": 3}
    assert Counter(row.source for row in split.train) == {"texts": 23, "chats": 17}
    assert split.eval == read_split(config, seed=1).eval != read_split(config, seed=2).eval
    prompts, _ = make_prompts(split.train, config, BYTES, prefix="train", max_prompt_tokens=99)
    for prompt in prompts:
        number = prompt.answer
        assert prompt.text == (f"{number}?" if prompt.source == "texts" else f"Q: {number}!")
    assert settled(config, prompts[-1]).template == "Q: {prompt}"
    final = with_templates(config, prompts)
    assert (final.template, [one.template for one in final.sources]) == (
        "{prompt}",
        ["{prompt}", "Q: {prompt}"],
    )


def test_without_weights_each_prompt_comes_once_an_epoch(tmp_path: Path) -> None:
    config = DataConfig(sources=[{"name": n, "data": f"{n}.jsonl"} for n in "ab"])
    assert source_fractions(config.sources, [30, 10]) == [Fraction(3, 4), Fraction(1, 4)]


def test_weights_are_decimal_numbers_and_thirds_are_thirds() -> None:
    config = DataConfig(sources=[{"name": n, "data": f"{n}.jsonl", "weight": 0.333} for n in "abc"])
    assert source_fractions(config.sources, [1, 2, 3]) == [Fraction(1, 3)] * 3


def test_a_problem_of_two_sources_is_refused_with_both_places(tmp_path: Path) -> None:
    settings = two(tmp_path)
    written(tmp_path, "chats", [{"q": "new", "gold": "<1>"}, {"q": "3?", "gold": "<3>"}])
    with pytest.raises(
        DataError, match="1 rows have a problem of another source, the first: .*chats.jsonl line 2"
    ):
        read_split(DataConfig(**settings), seed=0)


def test_a_source_without_rows_or_with_too_few_is_refused_by_name(tmp_path: Path) -> None:
    settings = two(tmp_path)
    written(tmp_path, "chats", [])
    with pytest.raises(DataError, match=r"source chats: .*chats.jsonl holds no rows"):
        read_split(DataConfig(**settings), seed=0)
    written(tmp_path, "chats", [{"q": "one", "gold": "<1>"}])
    with pytest.raises(DataError, match="1 problems of source chats are held out and it has only 1"):
        read_split(DataConfig(**settings), seed=0)
    held = written(tmp_path, "held", [{"question": "one"}])
    with pytest.raises(DataError, match="every problem of source chats is also in"):
        read_split(DataConfig(**settings, eval=held), seed=0)


SOURCE = {"name": "a", "data": "a.jsonl"}
BAD = {
    "data.sources: the weights 0.7 + 0.4 add up to 1.1; make them add up to 1": [0.7, 0.4],
    "data.sources.1.weight is -0.3: input should be greater than 0": [0.7, -0.3],
    "data.sources.1.weight is 0: input should be greater than 0": [1, 0],
    "data.sources: b has no weight and others have one; give all sources one, or none": [1, None],
}


@pytest.mark.parametrize("message", BAD)
def test_bad_weights_are_one_sentence(message: str) -> None:
    sources = [
        {**SOURCE, "name": name, "weight": weight} for name, weight in zip("ab", BAD[message], strict=True)
    ]
    with pytest.raises(ConfigError) as error:
        from_settings({"data.sources": sources, "rewards": [{"kind": "exact"}]}, "mine")
    assert str(error.value) == f"recipe mine: {message}"


def refusal(sources: list[dict[str, Any]], **more: Any) -> str:
    with pytest.raises(ConfigError) as error:
        from_settings({"data.sources": sources, "rewards": [{"kind": "exact"}], **more}, "mine")
    return str(error.value)


def test_names_and_data_that_contradict_are_one_sentence() -> None:
    assert "two sources are called a; give each a name of its own" in refusal([SOURCE, SOURCE])
    assert "'a/b' is no name of a source" in refusal([{**SOURCE, "name": "a/b"}])
    both = refusal([SOURCE], **{"data.train": "b.jsonl"})
    assert both.endswith("data: train is 'b.jsonl' and sources names other files; remove one of them")


def test_rewards_of_sources_that_cannot_work_are_one_sentence() -> None:
    own = [{**SOURCE, "rewards": [{"kind": "number", "weight": 2}]}, {"name": "b", "data": "b.jsonl"}]
    assert "differ by source (a 2, b 1), so that one would count more" in refusal(own)
    task = [{**SOURCE, "rewards": [{"kind": "task"}]}]
    assert "source a has a reward of kind task" in refusal(task, rewards=[])
    every = [{**SOURCE, "rewards": [{"kind": "number"}]}]
    assert "rewards has no effect where every source has its own" in refusal(every)
