"""How ranks are laid out: how many each kind of parallelism takes, in plain numbers.

| dimension | ranks along it hold | tokens they see |
|---|---|---|
| pp | other layers | the same |
| dp_replicate | the same parts of the weights | other segments |
| dp_shard | other parts of the weights | other segments |
| cp | other parts of the weights | other tokens of the same segments |
| tp | other rows or columns of each weight | the same |

Neighbouring ranks differ in the last dimension first. Experts are dealt over `ep` ranks that are neighbours
along dp_shard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from millrace.errors import PlanError, did_you_mean

# Outermost first: the dimensions with the most communication are innermost, on adjacent ranks.
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# Up to so many ranks, a table has a line for each.
MAX_LINES = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a decoder a layout divides; `mlp_width` is that of a layer without experts."""

    num_layers: int
    num_heads: int
    num_key_heads: int
    vocabulary: int
    mlp_width: int
    num_experts: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks each kind of parallelism takes; the names are those of a recipe's `mesh`.

    Attributes:
        dp_replicate: groups of ranks that each hold all weights and see other segments.
        dp_shard: ranks that share out the weights (FSDP) and see other segments.
        tp: ranks that share out each layer's matrices; experts stay whole.
        pp: ranks that share out the layers.
        cp: ranks that share out the tokens of a segment, and weights like those along dp_shard.
        ep: ranks that share out the experts; a part of dp_shard, so it adds no ranks.

    Raises:
        PlanError: a number is below 1, ep does not divide dp_shard, or cp and one of ep and pp are above 1.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if size < 1:
                raise PlanError(f"mesh.{name} is {size}; it must be at least 1, which means not split")
        if self.dp_shard % self.ep:
            raise PlanError(
                f"mesh.ep is {self.ep}, which does not divide mesh.dp_shard {self.dp_shard}: experts are "
                f"dealt over a part of it; make dp_shard a multiple of ep"
            )
        if self.ep > 1 and self.cp > 1:
            raise PlanError(f"mesh.ep is {self.ep} and mesh.cp is {self.cp}; set one of them to 1")
        if self.pp > 1 and self.cp > 1:
            raise PlanError(
                f"mesh.pp is {self.pp} and mesh.cp is {self.cp}; the stages of a pipeline compute whole "
                "segments, so set one of them to 1"
            )

    @classmethod
    def of(cls, mesh: Mapping[str, Any]) -> Layout:
        """Build the layout from a recipe's `mesh`; its other settings do not affect the layout."""
        return cls(**{name: mesh[name] for name in _names()})

    @classmethod
    def parse(cls, text: str) -> Layout:
        """`dp_shard=4,tp=2` to a layout, 1 for what is not named; PlanError for another form or dimension."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = (word.strip() for word in part.partition("="))
            if not size.isdecimal():
                raise PlanError(f"the layout has {part.strip()!r}; write it like dp_shard=4,tp=2")
            if name not in _names():
                raise PlanError(f"the layout has {name}; {did_you_mean(name, _names())}")
            if name in sizes:
                raise PlanError(f"the layout has {name} twice; keep one")
            sizes[name] = int(size)
        return cls(**sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes in the order of `DIMENSIONS`."""
        return tuple(getattr(self, name) for name in DIMENSIONS)

    @property
    def num_ranks(self) -> int:
        """Processes it takes."""
        return math.prod(self.shape)

    @property
    def num_data_ranks(self) -> int:
        """Shares into which the segments are dealt."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        return ",".join(f"{k}={n}" for k, n in asdict(self).items() if n > 1) or "dp_shard=1"

    def settings(self) -> dict[str, int]:
        """What sets it in a recipe, by dotted key."""
        return {f"mesh.{name}": size for name, size in asdict(self).items()}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank along each dimension, and in its expert-parallel group (`ep`)."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank is {rank}, but the layout {self} has ranks 0 to {self.num_ranks - 1}")
        place = {}
        left = rank
        for name, size in reversed(list(zip(DIMENSIONS, self.shape, strict=True))):
            left, place[name] = divmod(left, size)
        return {name: place[name] for name in DIMENSIONS} | {"ep": place["dp_shard"] % self.ep}

    def check_ranks(self, num_ranks: int) -> None:
        """Raise PlanError, with both numbers, for a number of processes that is not the layout's."""
        if num_ranks != self.num_ranks:
            raise PlanError(
                f"the layout {self} needs {self.num_ranks} ranks, and there are {num_ranks}; "
                "change one or the other"
            )

    def misfit(self, sizes: Sizes) -> str | None:
        """Why the layout does not divide a model, with the two numbers that do not fit; None where it does.

        How cp shares out heads is checked where it is used, since only one of its kinds needs it.
        """
        if (reason := tensor_misfit(self.tp, sizes, "mesh.tp")) is not None:
            return reason
        if sizes.num_layers < self.pp:
            return (
                f"mesh.pp is {self.pp}, but the model has {sizes.num_layers} layers; "
                f"choose a pp of at most that"
            )
        if self.ep > 1 and not sizes.num_experts:
            return f"mesh.ep is {self.ep}, but the model has no experts; set mesh.ep to 1"
        if sizes.num_experts % self.ep:
            return (
                f"mesh.ep is {self.ep}, which does not divide the model's {sizes.num_experts} experts; "
                f"choose an ep that does"
            )
        return None

    def check(self, sizes: Sizes) -> None:
        """Raise PlanError with the sentence of `misfit` if the layout does not divide a model."""
        reason = self.misfit(sizes)
        if reason is not None:
            raise PlanError(reason)

    def table(self) -> str:
        """Format the coordinates of each rank, one per line; above `MAX_LINES` ranks, the dimension sizes.

        Dimensions of one rank are left out. `apart` is the difference between the numbers of neighbours.
        """
        names = [name for name in (*DIMENSIONS, "ep") if getattr(self, name) > 1]
        if self.num_ranks > MAX_LINES:
            apart = {name: math.prod(self.shape[at + 1 :]) for at, name in enumerate(DIMENSIONS)}
            apart["ep"] = apart["dp_shard"]
            sizes = [(name, str(getattr(self, name)), str(apart[name])) for name in names]
            return _aligned([("dimension", "ranks", "apart"), *sizes])
        places = [self.coordinates(rank) for rank in range(self.num_ranks)]
        lines = [(str(rank), *(str(place[name]) for name in names)) for rank, place in enumerate(places)]
        return _aligned([("rank", *names), *lines])


def tensor_misfit(num_ranks: int, sizes: Sizes, setting: str) -> str | None:
    """Why so many ranks of tensor parallelism, a setting, do not divide a model; None where they do."""
    cut = {
        "attention heads": sizes.num_heads,
        "key heads": sizes.num_key_heads,
        "tokens in the vocabulary": sizes.vocabulary,
        "numbers across an MLP": sizes.mlp_width,
    }
    for what, size in cut.items():
        if size % num_ranks:
            return (
                f"{setting} is {num_ranks}, which does not divide the model's {size} {what}; "
                f"choose a {setting.rpartition('.')[2]} that divides {math.gcd(*cut.values())}"
            )
    return None


def _names() -> tuple[str, ...]:
    return tuple(Layout.__dataclass_fields__)


def _aligned(lines: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )
