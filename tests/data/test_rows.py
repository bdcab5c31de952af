from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.data.rows import DataError, Row, column, read_rows

ROWS = [{"question": "1+1", "answer": "2"}, {"question": "a\u2028b { é", "answer": "#### 3"}]


def refusal(path: Path | str) -> str:
    with pytest.raises(DataError) as caught:
        read_rows(str(path))
    return str(caught.value)


def written(folder: Path, text: str | bytes, name: str = "data.jsonl") -> Path:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_json_lines_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    file = written(tmp_path, "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), name)
    rows = read_rows(str(file))
    assert rows == ROWS
    assert [row.where for row in rows] == [f"{file} line 1", f"{file} line 3"]
    assert list(rows[0]) == ["question", "answer"]


def test_a_byte_order_mark_is_not_part_of_the_first_row(tmp_path: Path) -> None:
    assert read_rows(str(written(tmp_path, b'\xef\xbb\xbf{"a": 1}\r\n'))) == [{"a": 1}]


def test_parquet_comes_back_as_it_was(tmp_path: Path) -> None:
    rows = [{"question": "1+1", "meta": {"n": 1}}, {"question": "2+2", "meta": {"n": 2}}]
    file = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    assert read_rows(str(file)) == rows
    assert read_rows(str(file))[1].where == f"{file} row 2"


def test_a_dataset_folder_comes_back_as_it_was(tmp_path: Path) -> None:
    import datasets

    one, two = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:1])
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": two}).save_to_disk(tmp_path / "both")
    datasets.DatasetDict({"test": two, "dev": two}).save_to_disk(tmp_path / "rest")
    assert read_rows(str(tmp_path / "one")) == ROWS
    assert read_rows(str(tmp_path / "both")) == ROWS
    assert read_rows(str(tmp_path / "both" / "test")) == ROWS[:1]
    assert read_rows(str(tmp_path / "rest" / "dev"))[0].where == f"{tmp_path / 'rest' / 'dev'} row 1"
    folder = tmp_path / "rest"
    assert refusal(folder) == (
        f"{folder} has no split train; name one of its splits (dev, test) as {folder}/SPLIT"
    )


def test_a_broken_dataset_folder_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "{", "state.json")
    assert refusal(tmp_path).startswith(f"{tmp_path} cannot be read as a Hugging Face dataset: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}\n\n{"a": 2, "b" 3}\n', "line 3, column 14: not JSON: Expecting ':' delimiter"),
        ('{"a": 1}\n[2]\n', "line 2, column 1: the row is a list, not an object of named columns"),
        ('"text"', "line 1, column 1: the row is text, not an object of named columns"),
        ("null", "line 1, column 1: the row is null, not an object of named columns"),
        ('[\n{"a": 1}\n]', "line 1, column 1: the file is a JSON array; write one object per line instead"),
        (b'{"a": 1}\n{"a": "\xff"}', "line 2, column 8: not UTF-8; save the file as UTF-8"),
    ],
)
def test_a_bad_line_is_named_with_its_column(tmp_path: Path, text: str | bytes, said: str) -> None:
    file = written(tmp_path, text)
    assert refusal(file) == f"{file} {said}"


@pytest.mark.parametrize("text", ['{"a": ' + "9" * 5000 + "}", '{"a": ' + "[" * 200_000])
def test_a_line_beyond_the_parser_is_refused(tmp_path: Path, text: str) -> None:
    file = written(tmp_path, text)
    assert refusal(file).startswith(f"{file} line 1, column 1: not readable as JSON: ")


def test_a_missing_file_is_refused() -> None:
    assert refusal("openai/gsm8k") == (
        "openai/gsm8k does not exist here; give the path of .jsonl or .json (one object per line), .parquet, "
        "or a folder written by datasets.save_to_disk"
    )


def test_an_unknown_ending_is_refused(tmp_path: Path) -> None:
    csv, bare = written(tmp_path, "a,b", "data.csv"), written(tmp_path, "a", "data")
    assert refusal(csv).startswith(f"{csv} ends in .csv, which is not read; convert it to .jsonl or")
    assert refusal(bare).startswith(f"{bare} has no ending, which is not read; convert it to .jsonl or")


def test_data_without_rows_is_refused(tmp_path: Path) -> None:
    empty = written(tmp_path, "\n \n")
    parquet = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), parquet)
    assert refusal(empty) == f"{empty} holds no rows"
    assert refusal(parquet) == f"{parquet} holds no rows"


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "hello", "data.parquet")
    assert refusal(file).startswith(f"{file} cannot be read as Parquet: ")


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"folder {tmp_path} was not written by datasets.save_to_disk; give ")


def test_a_column_is_found_by_its_dotted_name() -> None:
    row = Row({"metadata": {"source": {"id": 7}}, "a.b": 1, "a": {"b": 2}, "none": None}, "x row 1")
    assert column(row, "metadata.source.id", row.where) == 7
    assert column(row, "a.b", row.where) == 1
    assert column(row, "none", row.where) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("anwser", "there is no column anwser; there are: question, metadata"),
        ("metadata.c", "there is no column metadata.c; there are: metadata.a, metadata.b"),
        ("question.x", "there is no column question.x, because question is not an object"),
        ("metadata.a.x", "there is no column metadata.a.x, because metadata.a is not an object"),
    ],
)
def test_a_missing_column_is_named_with_those_there_are(name: str, said: str) -> None:
    row = Row({"question": "q", "metadata": {"a": 1, "b": None}}, "data.jsonl line 3")
    with pytest.raises(DataError) as caught:
        column(row, name, row.where)
    assert str(caught.value) == f"data.jsonl line 3: {said}"
