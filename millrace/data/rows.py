"""Rows of a data set, from files of several formats or folders of them; each knows where it came from."""

from __future__ import annotations

import codecs
import csv
import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from millrace.config.section import is_function
from millrace.data.functions import explain
from millrace.data.hub_folder import HubFolderError, hub_files
from millrace.data.plugin import Plugin, PluginError
from millrace.errors import SetupError

ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
READABLE = (
    ".jsonl, .json or .csv, also with .gz or .zst behind it, .parquet, a folder of such files, a pattern "
    "such as 'data/*.parquet', or a folder written by datasets.save_to_disk"
)
PACKED = (".gz", ".zst")
# Characters of one field of a CSV file.
MAX_FIELD = 1 << 27
# A split in the name of a file or folder: train-00000-of-00007.parquet, test.jsonl, validation/0.parquet.
_SPLIT = re.compile(r"(?:^|[-_./])(train|test|validation|valid|val|dev)(?:[-_./]|$)")


class DataError(ValueError):
    """The data cannot be used for training; the message names the location and the fix."""


class Row(dict[str, Any]):
    """The columns of one row.

    `where` is its place (`data.jsonl line 3`) and `source` the name of its entry in `data.sources`, empty
    without; neither is a column.
    """

    __slots__ = ("source", "where")

    def __init__(self, columns: Mapping[str, Any], where: str, source: str = "") -> None:
        super().__init__(columns)
        self.where, self.source = where, source


def read_rows(path: str, source: str = "") -> list[Row]:
    """Every row of a data set, in order; DataError if it cannot be read or there is none.

    `source` is the name that the rows get. The path is one of

    - a .jsonl file with one object per line (empty lines are skipped), or a .json file with such lines or one
      list of objects; a .csv file, whose first line names the columns and whose values are text; these also
      compressed, with .gz or .zst behind the ending; a .parquet file,
    - a pattern with `*`, `?` or `[...]`, whose files are read in the order of their names,
    - a folder of such files, also in folders below, or one written by `datasets.save_to_disk`. If they name
      splits, as `train-00000-of-00007.parquet` or `test/rows.jsonl` do, `train` is read,
    - a folder of the Hugging Face Hub whose README.md has `configs`, or `FOLDER/CONFIG`, `FOLDER/SPLIT` or
      `FOLDER/CONFIG/SPLIT` of one,
    - a user's own `module:function`, which is called without arguments and returns the rows.
    """
    if is_generator(path):
        rows = _from_function(path)
    else:
        files = data_files(path)
        rows = [row for each in files for row in (_from_saved(each) if each.is_dir() else _from_file(each))]
    if not rows:
        raise DataError(f"{path} holds no rows")
    for row in rows:
        row.source = source
    return rows


def is_generator(path: str) -> bool:
    """Whether a path names a user's own function of rows, and no file."""
    return is_function(path) and not Path(path).exists()


def _from_function(reference: str) -> list[Row]:
    try:
        plugin = Plugin.load("data", reference, ())
        found = plugin()
        rows = list(found) if isinstance(found, Iterable) else None
    except (SetupError, PluginError) as error:
        raise DataError(str(error)) from error
    except Exception as error:  # a generator runs as it is read
        raise DataError(f"data {reference} raised {explain(error)}; correct it") from error
    if rows is None:
        raise DataError(
            f"data {reference} returned a {type(found).__name__}; return a list of rows, or yield them"
        )
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise DataError(
                f"data {reference} row {number} is a {type(row).__name__}; make each row a dictionary of "
                f"columns"
            )
    return _numbered(rows, f"data {reference}")


def data_files(path: str) -> list[Path]:
    """Return the files of a path in the order they are read, and the folders of the datasets package.

    DataError if there is none.
    """
    file = Path(path)
    try:
        named = hub_files(file)
    except HubFolderError as error:
        raise DataError(str(error)) from error
    if named:
        return named
    if not file.exists() and glob.has_magic(path):
        files = [Path(name) for name in sorted(glob.glob(path, recursive=True)) if Path(name).is_file()]
        if not files:
            raise DataError(f"no file is named {path} here; give the path of {READABLE}")
        return files
    if not file.exists():
        raise DataError(f"{path} does not exist here; give the path of {READABLE}")
    return _of_folder(file) if file.is_dir() else [file]


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


def ending_of(file: Path) -> str:
    """Return the ending that says how a file is read, without `.gz` or `.zst`; empty if it is not read."""
    packed = file.suffix in PACKED
    ending = file.with_suffix("").suffix if packed else file.suffix
    return ending if ending in ENDINGS and not (packed and ending == ".parquet") else ""


def opened(file: Path) -> BinaryIO:
    """Open a file to read its bytes, those of a .gz or .zst file decompressed, which is read forwards only.

    Reading it raises OSError, EOFError or zlib.error if it is damaged.
    """
    # Typed by what is used of them.
    if file.suffix == ".gz":
        return cast("BinaryIO", gzip.open(file, "rb"))
    if file.suffix == ".zst":
        import pyarrow

        return cast("BinaryIO", io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd")))
    return file.open("rb")


def _from_file(file: Path) -> list[Row]:
    ending = ending_of(file)
    if not ending:
        given = f"ends in {''.join(file.suffixes[-2:])}" if file.suffix else "has no ending"
        raise DataError(f"{file} {given}, which is not read; convert it to {READABLE}")
    if ending == ".parquet":
        return _from_parquet(file)
    try:
        with opened(file) as stream:
            data = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read: {error}") from None
    return _from_csv(data, file) if ending == ".csv" else _from_json(data, file, ending)


def _from_json(data: bytes, file: Path, ending: str) -> list[Row]:
    text = data.removeprefix(codecs.BOM_UTF8).lstrip()
    if text.startswith(b"["):
        if ending == ".json":
            return _from_json_list(data, file)
        line = data[: len(data) - len(text)].count(b"\n") + 1
        raise DataError(
            f"{file} line {line}, column 1: the row is a list, not an object of named columns; name a file "
            "that is one list .json"
        )
    lines = enumerate(data.split(b"\n"), start=1)
    return [json_row(line, number, file) for number, line in lines if line.strip()]


def _from_json_list(data: bytes, file: Path) -> list[Row]:
    rows = _parsed(data, "utf-8-sig", f"{file} ")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(
                f"{file} row {number}: the row is {json_kind(row)}, not an object of named columns"
            )
    return _numbered(rows, str(file))


def json_row(line: bytes, number: int, file: Path) -> Row:
    """Read one line of a file, counted from 1; DataError with the place if it is no object."""
    where = f"{file} line {number}"
    value = _parsed(line, "utf-8-sig" if number == 1 else "utf-8", f"{where}, ")
    if not isinstance(value, dict):
        raise DataError(f"{where}, column 1: the row is {json_kind(value)}, not an object of named columns")
    return Row(value, where)


def _from_csv(data: bytes, file: Path) -> list[Row]:
    csv.field_size_limit(MAX_FIELD)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{file} line {line}: not UTF-8; save the file as UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[Row] = []
    try:
        names = next(reader, [])
        if len(set(names)) < len(names) or not all(names):
            raise DataError(f"{file} line 1: the columns {', '.join(names)} need names that differ")
        for values in reader:
            where = f"{file} line {reader.line_num}"
            if values and len(values) != len(names):
                raise DataError(f"{where}: the row has {len(values)} values for {len(names)} columns")
            if values:
                rows.append(Row(dict(zip(names, values, strict=True)), where))
    except csv.Error as error:
        raise DataError(f"{file} line {reader.line_num}: not readable as CSV: {error}") from None
    return rows


def _from_parquet(file: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from error
    return _numbered(table.to_pylist(), str(file))


def _of_folder(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        if "train" not in splits:
            there = ", ".join(splits)
            raise DataError(
                f"{folder} has no split train; name one of its splits ({there}) as {folder}/SPLIT"
            )
        folder = folder / "train"
    if (folder / "state.json").is_file():
        return [folder]
    files = sorted(path for path in folder.rglob("*") if ending_of(path) and path.is_file())
    if not files:
        raise DataError(f"folder {folder} holds no data; give the path of {READABLE}")
    return _train_split(folder, files)


def _train_split(folder: Path, files: Sequence[Path]) -> list[Path]:
    """Those files that the split train has; all, if no name has a split."""
    found = {file: _SPLIT.search(str(file.relative_to(folder).with_suffix(""))) for file in files}
    if not any(found.values()):
        return list(files)
    train = [file for file, match in found.items() if match is not None and match[1] == "train"]
    if not train:
        there = ", ".join(sorted({match[1] for match in found.values() if match is not None}))
        raise DataError(f"{folder} has no split train but {there}; name its files, as in '{folder}/*NAME*'")
    return train


def _from_saved(folder: Path) -> list[Row]:
    import datasets

    try:
        rows = datasets.Dataset.load_from_disk(str(folder)).to_list()
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise DataError(f"{folder} cannot be read as a Hugging Face dataset: {error}") from error
    return _numbered(rows, str(folder))


def _parsed(data: bytes, encoding: str, place: str) -> Any:
    """The value of JSON; `place` begins the message of a DataError."""
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}column {error.start + 1}: not UTF-8; save the file as UTF-8") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 or not place.endswith(", ") else ""
        raise DataError(f"{place}{line}column {error.colno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}column 1: not readable as JSON: {error}") from None


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
