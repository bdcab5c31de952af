"""Rollouts and evaluations as Parquet tables, whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from millrace.observability.files import RESTORE, FileError, shown
from millrace.observability.plain import plain_text


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as one Parquet file. It appears under its name only when it is complete.

    Its folder is made if missing, an older file is replaced. Every row has the same columns, or it is a
    ValueError; a value may be a number, text, None or a list of numbers.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number, row in enumerate(rows):
        if odd := row.keys() ^ rows[0].keys():
            raise ValueError(f"row {number} of {path.name} and row 0 differ in the columns {sorted(odd)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.partial")
    try:
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, aside, compression="zstd", write_page_checksum=True)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file; FileNotFoundError without one, FileError if it is not what was written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise FileNotFoundError(f"table {path} does not exist")
    try:
        # One written by an older millrace has no checksums, and is read all the same.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            rows: list[dict[str, Any]] = file.read().to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = plain_text(str(error).partition("\n")[0], 200).rstrip(".")
        raise FileError(f"{shown(path)} is not a Parquet file that is whole: {reason}; {RESTORE}") from None
    return rows
