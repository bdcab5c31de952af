"""Preference pairs: of two answers to one prompt, which was preferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from millrace.data.chat import as_text
from millrace.data.rows import DataError, column, read_rows

# One prompt in ten is held out.
_HELD_OUT = 10


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to a prompt, as the policy will see it; `where` is such as `pairs.jsonl line 3`."""

    prompt: str
    chosen: str
    rejected: str
    where: str


def read_pairs(path: str) -> list[Pair]:
    """Pairs from the columns `prompt`, `chosen` and `rejected` of a file that `read_rows` reads.

    Raises DataError if the file cannot be read, a column is missing or not text, or two answers are the same.
    """
    pairs = []
    for row in read_rows(path):
        prompt, chosen, rejected = (
            as_text(column(row, name, row.where), f"column {name}", row.where)
            for name in ("prompt", "chosen", "rejected")
        )
        if chosen == rejected:
            raise DataError(f"{row.where}: chosen and rejected are the same text; remove the pair")
        pairs.append(Pair(prompt, chosen, rejected, row.where))
    return pairs


def hold_out(pairs: Sequence[Pair], *, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Split pairs by prompt, with a tenth of the prompts (at least one) held out, sampled by seed.

    Raises DataError if all pairs have the same prompt.
    """
    prompts = list(dict.fromkeys(pair.prompt for pair in pairs))
    if len(prompts) < 2:
        raise DataError(
            f"the {len(pairs)} pairs have only {len(prompts)} different prompt, so none can be held out; "
            "give pairs of two prompts at least"
        )
    order = np.random.default_rng([seed, 0, 1]).permutation(len(prompts))
    held = {prompts[index] for index in order[: max(1, len(prompts) // _HELD_OUT)]}
    return (
        [pair for pair in pairs if pair.prompt not in held],
        [pair for pair in pairs if pair.prompt in held],
    )
