"""Rows of JSON Lines and Parquet files that stay on disk; of each row an index holds where it is."""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from millrace.data.rows import DataError, Row, data_files, ending_of, json_row, opened

# Rows of a Parquet row group that are decoded at a time.
DECODED = 1024
# Bytes of a compressed file that are skipped at a time.
SKIPPED = 1 << 20
STREAMED = (".jsonl", ".parquet")
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _StoredFile:
    """A file, and for each of its rows the byte it begins at (JSON Lines) and its line, or its row number."""

    path: Path
    source: str
    key_N: Numbers
    line_N: Numbers

    def rows(self, wanted: Numbers) -> Iterator[Row]:
        """Yield the rows with these numbers, which ascend."""
        read = self._parquet_rows if ending_of(self.path) == ".parquet" else self._json_rows
        try:
            yield from read(wanted)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{self.path} cannot be read any more: {error}") from None

    def _json_rows(self, wanted: Numbers) -> Iterator[Row]:
        with opened(self.path) as file:
            place = 0
            for number in wanted.tolist():
                begin = int(self.key_N[number])
                _skip(file, begin - place)
                line = file.readline()
                place = begin + len(line)
                row = json_row(line, int(self.line_N[number]), self.path)
                row.source = self.source
                yield row

    def _parquet_rows(self, wanted: Numbers) -> Iterator[Row]:
        import pyarrow
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self.path) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            for group, (begin, end) in enumerate(pairwise(np.cumsum([0, *sizes]).tolist())):
                left = wanted[np.searchsorted(wanted, begin) : np.searchsorted(wanted, end)]
                if not len(left):
                    continue
                for batch in file.iter_batches(batch_size=DECODED, row_groups=[group]):
                    here = left[: np.searchsorted(left, begin + len(batch))]
                    found = batch.take(pyarrow.array(here - begin)).to_pylist() if len(here) else []
                    for number, columns in zip(here.tolist(), found, strict=True):
                        yield Row(columns, f"{self.path} row {number + 1}", self.source)
                    begin, left = begin + len(batch), left[len(here) :]
                    if not len(left):
                        break


class StoredRows(Sequence[Row]):
    """Rows that are read from disk whenever they are asked for; 24 bytes of each are held."""

    def __init__(self, files: Sequence[_StoredFile], place_N: Numbers | None = None) -> None:
        """Hold the index of files, or of their rows `place_N`, which ascend."""
        self._files = files
        self._begins = np.cumsum([0, *(len(file.key_N) for file in files)])
        self._place_N = np.arange(self._begins[-1]) if place_N is None else place_N

    @classmethod
    def of(cls, path: str, source: str = "") -> StoredRows:
        """Index the files of a path as `rows.read_rows` finds them.

        Raises:
            DataError: a file cannot be read, is of another kind, or there are no rows.
        """
        files = []
        for file in data_files(path):
            if ending_of(file) not in STREAMED:
                raise DataError(
                    f"{file} cannot be read by data.streaming, which reads JSON Lines (.jsonl, also with "
                    ".gz or .zst behind it) and Parquet; convert it, or set data.streaming false"
                )
            index = _parquet_index if ending_of(file) == ".parquet" else _json_index
            files.append(_StoredFile(file, source, *index(file)))
        found = cls(files)
        if not len(found):
            raise DataError(f"{path} holds no rows")
        return found

    @classmethod
    def joined(cls, parts: Iterable[StoredRows]) -> StoredRows:
        """Return the rows of several, one after another."""
        return cls([file for part in parts for file in part._files])

    def __len__(self) -> int:
        return len(self._place_N)

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...
    def __getitem__(self, number: int | slice) -> Row | list[Row]:
        if isinstance(number, slice):
            return list(self.read(np.arange(len(self))[number]))
        return next(self.read(np.arange(len(self))[[number]]))

    def __iter__(self) -> Iterator[Row]:
        return self.read(np.arange(len(self)))

    def read(self, number_N: Numbers) -> Iterator[Row]:
        """Yield the rows with these numbers, which ascend, one at a time."""
        place_N = self._place_N[number_N]
        for file, begin, end in zip(self._files, self._begins, self._begins[1:], strict=False):
            wanted = place_N[np.searchsorted(place_N, begin) : np.searchsorted(place_N, end)]
            if len(wanted):
                yield from file.rows(wanted - begin)

    def only(self, number_N: Numbers) -> StoredRows:
        """Return the rows with these numbers, which ascend."""
        return StoredRows(self._files, self._place_N[number_N])

    def sources(self) -> NDArray[np.str_]:
        """Return the source of each row, [N]."""
        names = np.array([file.source for file in self._files])
        return names[np.searchsorted(self._begins, self._place_N, side="right") - 1]


def _skip(file: BinaryIO, num_bytes: int) -> None:
    """Move forwards; a compressed file that has no `seek` is read."""
    if file.seekable():
        file.seek(num_bytes, os.SEEK_CUR)
        return
    while num_bytes > 0:
        read = len(file.read(min(num_bytes, SKIPPED)))
        if not read:
            raise EOFError("it is shorter than before")
        num_bytes -= read


def _json_index(path: Path) -> tuple[Numbers, Numbers]:
    """The byte at which each line with a row begins, and its number."""
    places, lines, offset = array("q"), array("q"), 0
    try:
        with opened(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    places.append(offset)
                    lines.append(number)
                offset += len(line)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return np.array(places, np.int64), np.array(lines, np.int64)


def _parquet_index(path: Path) -> tuple[Numbers, Numbers]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            numbers = np.arange(file.metadata.num_rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    return numbers, numbers
