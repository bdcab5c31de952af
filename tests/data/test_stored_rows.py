"""Rows that stay on disk give the prompts of rows in memory, and few of them are held."""

from __future__ import annotations

import gc
import gzip
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from millrace.config.inputs import DataConfig
from millrace.config.recipe import ConfigError, from_settings
from millrace.data import stored_rows, streamed_prompts
from millrace.data.mixture import MixtureStream, PromptFeed
from millrace.data.prompts import PromptStream, make_prompts, read_split
from millrace.data.rows import DataError, Row, read_rows
from millrace.data.stored_rows import StoredRows
from millrace.data.streamed_prompts import StreamedPrompts, by_id, of_source
from millrace.data.tokenizers import train_tokenizer
from tests.data.compress import zstd

BYTES = train_tokenizer([], vocab_size=257, across_words=False)
ROWS = [{"question": f"{n} ü?", "answer": str(n), "more": {"n": [n, None]}} for n in range(300)]


COMPRESS = {".gz": gzip.compress, ".zst": zstd}


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    # Empty lines are no rows, and a last line may have no end.
    data = "\n".join("\n" * (n % 7 == 0) + json.dumps(row, ensure_ascii=False) for n, row in enumerate(rows))
    file.write_bytes(COMPRESS.get(file.suffix, bytes)(data.encode()))


def written(folder: Path, kind: str, rows: list[dict[str, Any]] = ROWS) -> str:
    """Two files with these rows."""
    for number, part in enumerate((rows[: len(rows) // 3], rows[len(rows) // 3 :])):
        file = folder / f"train-{number}.{kind}"
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), file, row_group_size=37)
        else:
            write_lines(file, part)
    return str(folder / f"train-*.{kind}")


KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"]


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("kind", KINDS)
def test_any_rows_in_any_order_are_those_in_memory(tmp_path: Path, kind: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(stored_rows, "DECODED", 10)
    path = written(tmp_path, kind)
    expected, found = read_rows(path), StoredRows.of(path)
    assert list(found) == expected and len(found) == 300
    assert [row.where for row in found] == [row.where for row in expected]
    random = np.random.default_rng(0)
    for _ in range(20):
        numbers = np.sort(random.permutation(300)[: random.integers(1, 40)])
        assert list(found.read(numbers)) == [expected[number] for number in numbers]
        part = found.only(numbers)
        assert list(part.only(np.arange(0, len(part), 2))) == [expected[number] for number in numbers[::2]]
    assert found[-1] == expected[-1] and found[5:8] == expected[5:8]


def stream_of(config: DataConfig, seed: int = 5) -> tuple[PromptFeed, Any, list[Row]]:
    split = read_split(config, seed=seed)
    # Too short for "100 ü?", of seven bytes.
    prompts, _ = make_prompts(split.train, config, BYTES, prefix="train", max_prompt_tokens=6)
    return PromptStream(prompts, seed=seed, shuffle=config.shuffle), prompts, split.eval


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_streamed_prompts_are_those_in_memory_and_go_on_exactly(
    tmp_path: Path, kind: str, shuffle: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(streamed_prompts, "AHEAD", 16)
    path = written(tmp_path, kind)
    plain, _, held = stream_of(DataConfig(train=path, shuffle=shuffle))
    streamed, prompts, also_held = stream_of(DataConfig(train=path, shuffle=shuffle, streaming=True))
    assert isinstance(prompts, StreamedPrompts) and len(prompts) < 100 and held == also_held
    names = ("id", "token_ids", "text", "answer", "row", "demonstration")
    for count in (1, 7, 150, 200):
        expected, found = plain.next(count), streamed.next(count)
        for name in names:
            assert [getattr(one, name) for one in found] == [getattr(one, name) for one in expected]
        assert streamed.state() == plain.state()
    resumed, again, _ = stream_of(DataConfig(train=path, shuffle=shuffle, streaming=True))
    resumed.load_state(json.loads(json.dumps(streamed.state())))
    found = streamed.next(40)
    assert [one.id for one in resumed.next(40)] == [one.id for one in found]
    assert by_id(again)[found[0].id].text == found[0].text
    with pytest.raises(KeyError):
        by_id(again)["train:5000"]


def num_rows_held() -> int:
    gc.collect()
    # Not isinstance, which asks each object of torch for its class.
    return sum(type(one) is Row for one in gc.get_objects())


@pytest.mark.slow
def test_few_rows_are_held_however_many_there_are(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(streamed_prompts, "AHEAD", 16)
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(1500)]
    path = written(tmp_path, "jsonl", rows)
    before = num_rows_held()
    stream, prompts, held_out = stream_of(DataConfig(train=path, streaming=True, eval_size=9))
    most = num_rows_held()
    for _ in range(6):
        batch = stream.next(250)
        most = max(most, num_rows_held() - len(batch))
    assert len(prompts) > 900 and len(held_out) == 9
    assert most - before <= 16 + 9


def test_sources_on_disk_mix_as_those_in_memory(tmp_path: Path) -> None:
    sources = [{"name": "a", "data": written(tmp_path, "parquet"), "weight": 0.75}]
    more = tmp_path / "more"
    more.mkdir()
    other = [{"question": f"{n}!", "answer": str(n)} for n in range(50)]
    sources.append({"name": "b", "data": written(more, "jsonl.gz", other), "weight": 0.25})
    found = []
    for streaming in (False, True):
        _, prompts, _ = stream_of(DataConfig(sources=sources, streaming=streaming))
        parts = {name: of_source(prompts, name) for name in "ab"}
        fractions = {"a": Fraction(3, 4), "b": Fraction(1, 4)}
        found.append([one.id for one in MixtureStream(parts, fractions, seed=1, shuffle=True).next(400)])
    assert found[0] == found[1]
    written(more, "jsonl.gz", [{"question": "7 ü?", "answer": "7"}])
    with pytest.raises(DataError, match=r"train-0.parquet row 8 of a"):
        read_split(DataConfig(sources=sources, streaming=True), seed=0)


def test_what_cannot_be_streamed_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\n1,2\n")
    with pytest.raises(DataError, match="rows.csv cannot be read by data.streaming, which reads JSON Lines"):
        StoredRows.of(str(tmp_path / "rows.csv"))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="empty.jsonl holds no rows"):
        StoredRows.of(str(tmp_path / "empty.jsonl"))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"question": "1"}\n' * 99)[:-9])
    with pytest.raises(DataError, match=r"cut.jsonl.gz cannot be read: Compressed file ended"):
        StoredRows.of(str(tmp_path / "cut.jsonl.gz"))
    (tmp_path / "cut.jsonl.zst").write_bytes(zstd(b'{"question": "1"}\n' * 99)[:-9])
    with pytest.raises(DataError, match=r"cut.jsonl.zst cannot be read: Truncated compressed stream"):
        StoredRows.of(str(tmp_path / "cut.jsonl.zst"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="bad.parquet cannot be read as Parquet"):
        StoredRows.of(str(tmp_path / "bad.parquet"))
    (tmp_path / "bad.jsonl").write_text('{"question": "1"}\n\n[1]\n')
    with pytest.raises(DataError, match="bad.jsonl line 3, column 1: the row is a list"):
        read_split(DataConfig(train=str(tmp_path / "bad.jsonl"), streaming=True), seed=0)
    with pytest.raises(ConfigError, match="data.streaming has no effect because data.train is generated"):
        given = {"data.train": "reasoning-gym:chain_sum", "data.streaming": True, "steps": 1}
        from_settings(given | {"rewards": [{"kind": "task"}]}, "mine")
