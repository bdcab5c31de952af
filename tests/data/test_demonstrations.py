"""Demonstrations of rows on disk have the tokens of those in memory, and none of them is held."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from millrace.config.inputs import DataConfig
from millrace.data import streamed_prompts
from millrace.data.demonstrations import Demonstrations
from millrace.data.prompts import PromptStream, make_prompts, read_split
from millrace.data.rows import DataError
from millrace.data.tokenizers import train_tokenizer
from millrace.types import Prompt

BYTES = train_tokenizer([], vocab_size=257, across_words=False)
# The demonstrations of 300 rows have 1 to 30 letters; those of every seventh are episodes with a reply.
ROWS = [
    {"question": f"{n}?", "shown": ["ab", " 3 ", "c"] if n % 7 == 0 else "ü" * (1 + n % 15)}
    for n in range(300)
]


def demonstrations(
    folder: Path, *, streaming: bool, max_tokens: int = 20, rows: Any = ROWS, **more: Any
) -> Demonstrations:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(
        train=str(path), answer_column=None, demonstration_column="shown", streaming=streaming, **more
    )
    split = read_split(config, seed=5)
    prompts, _ = make_prompts(split.train, config, BYTES, prefix="train", max_prompt_tokens=9)
    return Demonstrations(prompts, config, BYTES, max_tokens=max_tokens)


@pytest.mark.slow
def test_those_on_disk_have_the_tokens_of_those_in_memory(tmp_path: Path) -> None:
    plain, streamed = (demonstrations(tmp_path, streaming=streaming) for streaming in (False, True))
    assert plain.num_long == streamed.num_long > 100
    assert len(plain.prompts) == len(streamed.prompts) > 100
    feeds = [PromptStream(one.prompts, seed=1, shuffle=True) for one in (plain, streamed)]
    for expected, found in zip(feeds[0].next(400), feeds[1].next(400), strict=True):
        assert found.id == expected.id
        spans = streamed.tokens(found)
        assert spans == plain.tokens(expected)
        text = expected.demonstration
        if isinstance(text, tuple):
            assert [BYTES.decode(ids) for ids in spans] == [
                "ab" + BYTES.eos_token,
                " 3 ",
                "c" + BYTES.eos_token,
            ]
        else:
            assert BYTES.decode(*spans) == f"{text}{BYTES.eos_token}"
        assert len(found.token_ids) + sum(map(len, spans)) <= 20


@pytest.mark.slow
def test_few_are_held_however_many_there_are(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(streamed_prompts, "AHEAD", 16)
    gc.collect()
    before = sum(type(one) is Prompt for one in gc.get_objects())
    found = demonstrations(
        tmp_path, streaming=True, rows=[*ROWS, *ROWS], identity_column="shown", eval_size=1
    )
    batch = PromptStream(found.prompts, seed=0, shuffle=True).next(50)
    gc.collect()
    assert len(found.prompts) > 200
    assert sum(type(one) is Prompt for one in gc.get_objects()) - before == len(batch)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_cannot_be_imitated_is_refused_in_one_sentence(tmp_path: Path, streaming: bool) -> None:
    with pytest.raises(
        DataError, match=r"prompt train:\d+ and its demonstration have \d+ tokens and at most 20"
    ):
        demonstrations(tmp_path, streaming=streaming, too_long="refuse")
    with pytest.raises(DataError, match="no demonstration fits into 3 tokens together with its prompt"):
        demonstrations(tmp_path, streaming=streaming, max_tokens=3)
    with pytest.raises(
        DataError, match=r"prompt train:\d has no demonstration to imitate in SFT; set data.demo"
    ):
        demonstrations(
            tmp_path, streaming=streaming, rows=[{"question": f"{n}", "shown": ""} for n in range(9)]
        )
