"""Rollouts and evaluations as Parquet tables, whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as one Parquet file. It appears under its name only when it is complete.

    Args:
        path: the file; its folder is made if missing, an older file is replaced.
        rows: every row with the same columns; a value may be a number, text, None or a list of numbers.

    Raises:
        ValueError: a row has other columns than the first.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number, row in enumerate(rows):
        if odd := row.keys() ^ rows[0].keys():
            raise ValueError(f"row {number} of {path.name} and row 0 differ in the columns {sorted(odd)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.partial")
    try:
        pq.write_table(pa.Table.from_pylist(rows), aside, compression="zstd")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a Parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise FileNotFoundError(f"table {path} does not exist")
    try:
        rows: list[dict[str, Any]] = pq.read_table(path, partitioning=None).to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from None
    return rows
