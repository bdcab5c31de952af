"""The numbers of `verl.json`, packed as millrace packs; README.md says what they are.

T = tokens up to the last one the policy chose in each row, B = rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("verl.json").read_text(encoding="utf-8"))[
    "cases"
]


@dataclass(frozen=True, eq=False)
class Rows:
    """The inputs of one case.

    Attributes:
        seed: of the case.
        width: of the padded rows.
        mask_T: tokens the policy chose; in seeds divisible by 3 some in the middle of a row are not.
        segment_T: the row of each token.
        group_B: the group of each row, from 0.
    """

    seed: int
    width: int
    mask_T: Tensor
    segment_T: Tensor
    group_B: Tensor
    _case: dict[str, Any]
    _place: tuple[Tensor, Tensor]

    @property
    def num_groups(self) -> int:
        return int(self.group_B.max()) + 1

    def pack(self, padded_BT: list[list[float]] | Tensor) -> Tensor:
        """A padded array as float64 [T]."""
        return torch.as_tensor(padded_BT, dtype=torch.float64)[self._place]

    def pad(self, packed_T: Tensor) -> Tensor:
        """A packed row as [B, width], 0 where nothing was packed."""
        return packed_T.new_zeros(len(self.group_B), self.width).index_put(self._place, packed_T)

    def input(self, name: str) -> Tensor:
        """One of the case's inputs: [T] where it has a number for each token, [B] where one for each row."""
        value = torch.tensor(self._case["inputs"][name], dtype=torch.float64)
        return value[self._place] if value.ndim == 2 else value


def rows(case: dict[str, Any]) -> Rows:
    """The inputs of a case, packed."""
    mask_BT = torch.tensor(case["inputs"]["mask"]) > 0
    width = mask_BT.shape[1]
    length_B = (mask_BT * torch.arange(1, width + 1)).amax(1)
    place = (torch.arange(width) < length_B[:, None]).nonzero(as_tuple=True)
    names = list(dict.fromkeys(case["inputs"]["index"]))
    group_B = torch.tensor([names.index(name) for name in case["inputs"]["index"]])
    return Rows(case["seed"], width, mask_BT[place], place[0], group_B, case, place)
