"""Prompts whose rows stay on disk: read in the order of an epoch, some ahead, and tokenized when needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

import numpy as np

from millrace.data.rows import Row
from millrace.data.stored_rows import Numbers, StoredRows
from millrace.types import Prompt

# Rows that are read ahead of the order, sorted by their place on disk.
AHEAD = 1024


class StreamedPrompts(Sequence[Prompt]):
    """Prompts of rows on disk, equal to those that `make_prompts` makes of rows in memory.

    At most `AHEAD` rows are held besides those of prompts in use.
    """

    def __init__(self, rows: StoredRows, number_N: Numbers, make: Callable[[Row, int], Prompt]) -> None:
        """Hold what makes the prompts.

        Args:
            rows: one for each prompt.
            number_N: the number of each prompt in its id.
            make: makes a prompt of a row and its number.
        """
        self._rows, self._number_N, self._make = rows, number_N, make
        self._held: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        place = range(len(self))[place]
        row = self._held.get(place)
        return self._make(self._rows[place] if row is None else row, int(self._number_N[place]))

    def __iter__(self) -> Iterator[Prompt]:
        for row, number in zip(self._rows, self._number_N, strict=True):
            yield self._make(row, int(number))

    def read_ahead(self, place_N: Numbers, position: int) -> None:
        """Hold the next rows of an order in which prompts will be asked for, unless they are held.

        Args:
            place_N: the order.
            position: of the next prompt in it.
        """
        if int(place_N[position]) not in self._held:
            self._held = {}
            wanted = np.sort(place_N[position : position + AHEAD])
            self._held = dict(zip(wanted.tolist(), self._rows.read(wanted), strict=True))

    def of_source(self, name: str) -> StreamedPrompts:
        """Return the prompts of one source."""
        return self.only(np.flatnonzero(self._rows.sources() == name))

    def only(self, place_N: Numbers) -> StreamedPrompts:
        """Return the prompts at these places, which ascend."""
        return StreamedPrompts(self._rows.only(place_N), self._number_N[place_N], self._make)

    def with_id(self, id: str) -> Prompt:
        """Return the prompt `train:17`; KeyError if there is none."""
        number = int(id.rpartition(":")[2])
        place = int(np.searchsorted(self._number_N, number))
        if place == len(self) or self._number_N[place] != number:
            raise KeyError(id)
        return self[place]


class _ById(Mapping[str, Prompt]):
    def __init__(self, prompts: StreamedPrompts) -> None:
        self._prompts = prompts

    def __getitem__(self, id: str) -> Prompt:
        return self._prompts.with_id(id)

    def __iter__(self) -> Iterator[str]:
        return (prompt.id for prompt in self._prompts)

    def __len__(self) -> int:
        return len(self._prompts)


def by_id(prompts: Sequence[Prompt]) -> Mapping[str, Prompt]:
    """Return prompts by id."""
    if isinstance(prompts, StreamedPrompts):
        return _ById(prompts)
    return {prompt.id: prompt for prompt in prompts}


def of_source(prompts: Sequence[Prompt], name: str) -> Sequence[Prompt]:
    """Return the prompts of one source, in order."""
    if isinstance(prompts, StreamedPrompts):
        return prompts.of_source(name)
    return [prompt for prompt in prompts if prompt.source == name]
