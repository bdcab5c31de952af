"""Rows of a data set, from JSONL, Parquet or a Hugging Face dataset folder; each knows where it came from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

READABLE = ".jsonl or .json (one object per line), .parquet, or a folder written by datasets.save_to_disk"


class DataError(ValueError):
    """The data cannot be used for training; the message names the location and the fix."""


class Row(dict[str, Any]):
    """The columns of one row. `where` is its place (`data.jsonl line 3`) and is not a column."""

    __slots__ = ("where",)

    def __init__(self, columns: Mapping[str, Any], where: str) -> None:
        super().__init__(columns)
        self.where = where


def read_rows(path: str) -> list[Row]:
    """Every row of a data set, in order; DataError if it cannot be read or there is none.

    The path is a .jsonl or .json file with one object per line (empty lines are skipped), a .parquet file, or
    a folder written by `datasets.save_to_disk`. Of a folder with several splits, `train` is read; name
    another as a subfolder.
    """
    file = Path(path)
    if not file.exists():
        raise DataError(f"{path} does not exist here; give the path of {READABLE}")
    if file.is_dir():
        rows = _from_folder(file)
    elif file.suffix in (".jsonl", ".json"):
        rows = _from_json_lines(file)
    elif file.suffix == ".parquet":
        rows = _from_parquet(file)
    else:
        ending = f"ends in {file.suffix}" if file.suffix else "has no ending"
        raise DataError(f"{path} {ending}, which is not read; convert it to {READABLE}")
    if not rows:
        raise DataError(f"{path} holds no rows")
    return rows


def column(row: Mapping[str, Any], name: str, where: str) -> Any:
    """The value of a column; a dotted name reaches into objects (`metadata.expression`).

    Raises DataError, which names the row's place and the columns there are, if it is not among them.
    """
    if name in row:
        return row[name]
    value: Any = row
    above = ""
    for part in name.split("."):
        if part not in value:
            there = ", ".join(f"{above}{key}" for key in value) or "none"
            raise DataError(f"{where}: there is no column {name}; there are: {there}")
        value, above = value[part], f"{above}{part}."
        if not isinstance(value, Mapping) and above != f"{name}.":
            raise DataError(f"{where}: there is no column {name}, because {above[:-1]} is not an object")
    return value


def _from_json_lines(file: Path) -> list[Row]:
    with file.open("rb") as lines:
        return [_json_row(line, number, file) for number, line in enumerate(lines, start=1) if line.strip()]


def _json_row(line: bytes, number: int, file: Path) -> Row:
    where = f"{file} line {number}"
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}, column {error.start + 1}: not UTF-8; save the file as UTF-8") from None
    if number == 1 and text.lstrip().startswith("["):
        raise DataError(f"{where}, column 1: the file is a JSON array; write one object per line instead")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}, column {error.colno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}, column 1: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}, column 1: the row is {json_kind(value)}, not an object of named columns")
    return Row(value, where)


def _from_parquet(file: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error
    return _numbered(table.to_pylist(), str(file))


def _from_folder(folder: Path) -> list[Row]:
    splits = []
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        if "train" not in splits:
            there = ", ".join(splits)
            raise DataError(
                f"{folder} has no split train; name one of its splits ({there}) as {folder}/SPLIT"
            )
        folder = folder / "train"
    if not (folder / "state.json").is_file():
        raise DataError(
            f"folder {folder} was not written by datasets.save_to_disk; give the path of {READABLE}"
        )
    import datasets

    try:
        rows = datasets.Dataset.load_from_disk(str(folder)).to_list()
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise DataError(f"{folder} cannot be read as a Hugging Face dataset: {error}") from error
    return _numbered(rows, str(folder))


def _numbered(rows: Iterable[Mapping[str, Any]], source: str) -> list[Row]:
    return [Row(row, f"{source} row {number}") for number, row in enumerate(rows, start=1)]


def json_kind(value: Any) -> str:
    """What a value read from data is, in the words of JSON: `null`, `a number`, `a list`, ..."""
    if value is None:
        return "null"
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), f"of type {type(value).__name__}")
