from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.data.rows import DataError, Row, column, read_rows
from tests.data.compress import zstd

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
        (
            '[\n{"a": 1}\n]',
            "line 1, column 1: the row is a list, not an object of named columns; name a file that is one "
            "list .json",
        ),
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
        "openai/gsm8k does not exist here; give the path of .jsonl, .json or .csv, also with .gz or .zst "
        "behind it, .parquet, a folder of such files, a pattern such as 'data/*.parquet', or a folder "
        "written by datasets.save_to_disk"
    )


def test_an_unknown_ending_is_refused(tmp_path: Path) -> None:
    names = {"data.tsv": "ends in .tsv", "data": "has no ending", "a.parquet.gz": "ends in .parquet.gz"}
    for name, why in names.items():
        file = written(tmp_path, "a", name)
        assert refusal(file).startswith(f"{file} {why}, which is not read; convert it to .jsonl, .json or")


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
    written(tmp_path, "# Data", "README.md")
    assert refusal(tmp_path).startswith(f"folder {tmp_path} holds no data; give the path of .jsonl, ")


def test_one_list_of_objects_is_read_from_json(tmp_path: Path) -> None:
    file = written(tmp_path, "\ufeff\n" + json.dumps(ROWS, indent=1), "data.json")
    assert read_rows(str(file)) == ROWS
    assert read_rows(str(file))[1].where == f"{file} row 2"
    assert refusal(written(tmp_path, '[{"a": 1}, 2]', "b.json")).endswith(
        "b.json row 2: the row is a number, not an object of named columns"
    )
    assert refusal(written(tmp_path, '[{"a": 1},\n {"a" 2}]', "c.json")).endswith(
        "c.json line 2, column 7: not JSON: Expecting ':' delimiter"
    )


def test_csv_is_read_as_text_by_the_names_of_its_first_line(tmp_path: Path) -> None:
    file = written(tmp_path, '\ufeffquestion,answer\r\n"1,\n""1""",2\r\n\r\nb,007\r\n', "data.csv")
    assert read_rows(str(file)) == [
        {"question": '1,\n"1"', "answer": "2"},
        {"question": "b", "answer": "007"},
    ]
    assert [row.where for row in read_rows(str(file))] == [f"{file} line 3", f"{file} line 5"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n3\n", "line 3: the row has 1 values for 2 columns"),
        ("a,b\n1,2,3\n", "line 2: the row has 3 values for 2 columns"),
        ("a,a\n1,2\n", "line 1: the columns a, a need names that differ"),
        ('a,b\n"1"x,2\n', "line 2: not readable as CSV: ',' expected after '\"'"),
        ('a\n"1', "line 2: not readable as CSV: unexpected end of data"),
        (b"a\n\xff\n", "line 2: not UTF-8; save the file as UTF-8"),
        ("a,b\n", "holds no rows"),
        ("", "holds no rows"),
    ],
)
def test_a_bad_csv_file_is_refused_with_its_line(tmp_path: Path, text: str | bytes, said: str) -> None:
    file = written(tmp_path, text, "data.csv")
    assert refusal(file) == f"{file} {said}"


def test_compressed_files_are_read(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(row) for row in ROWS).encode()
    for ending, compress in (("gz", gzip.compress), ("zst", zstd)):
        packed = compress(lines[:9]) + compress(lines[9:])  # files of several frames are common
        assert read_rows(str(written(tmp_path, packed, f"data.jsonl.{ending}"))) == ROWS
        for name, data in ((f"a.jsonl.{ending}", lines), (f"b.csv.{ending}", compress(lines)[:-9])):
            assert f"{name} cannot be read: " in refusal(written(tmp_path, data, name))


def test_a_pattern_and_a_folder_read_their_files_in_order(tmp_path: Path) -> None:
    shards = tmp_path / "data"
    shards.mkdir()
    for number, row in enumerate(ROWS):
        written(shards, json.dumps(row), f"train-{number}-of-2.jsonl")
    written(shards, json.dumps({"question": "held out"}), "test.jsonl")
    written(tmp_path, "# Data", "README.md")
    assert read_rows(str(shards / "train-*.jsonl")) == ROWS
    assert read_rows(str(shards / "test.json*")) == [{"question": "held out"}]
    assert read_rows(str(tmp_path)) == read_rows(str(shards)) == ROWS
    assert refusal(shards / "dev*.jsonl").startswith(f"no file is named {shards}/dev*.jsonl here; give ")


def test_a_folder_without_splits_is_read_whole_and_one_without_train_is_refused(tmp_path: Path) -> None:
    for number, row in enumerate(ROWS):
        written(tmp_path, json.dumps(row), f"{number}.jsonl")
    assert read_rows(str(tmp_path)) == ROWS
    for name in ("test", "dev"):
        (tmp_path / "sub" / name).mkdir(parents=True)
        written(tmp_path / "sub" / name, "{}", "0.jsonl")
    folder = tmp_path / "sub"
    assert refusal(folder) == (
        f"{folder} has no split train but dev, test; name its files, as in '{folder}/*NAME*'"
    )


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
