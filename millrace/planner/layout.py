"""How ranks share a model, by plain numbers; the planner's own twin of what the trainer is given."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, fields

from millrace.planner.errors import PlanError
from millrace.planner.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Split:
    """How many ranks each kind of parallelism takes.

    Attributes:
        dp_replicate: copies of the sharded weights.
        dp_shard: ranks that share weights, gradients and optimizer (FSDP).
        tp: ranks that share each product (tensor parallel).
        pp: stages of layers (pipeline).
        cp: ranks that share each sequence (context parallel); they share weights like those of dp_shard.
        ep: ranks that share the experts, a part of dp_shard.

    Raises:
        PlanError: a number is below 1, ep does not divide dp_shard, or ep and cp are both above 1.
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
                raise PlanError(f"{name} is {size} in the layout; it must be at least 1")
        if self.dp_shard % self.ep:
            raise PlanError(f"ep {self.ep} does not divide dp_shard {self.dp_shard}, a part of which it is")
        if self.ep > 1 and self.cp > 1:
            raise PlanError(f"ep is {self.ep} and cp is {self.cp} in the layout; set one of them to 1")

    @classmethod
    def parse(cls, text: str) -> Split:
        """`dp_shard=4,tp=2` to a split; what is not named is 1.

        Raises:
            PlanError: a part is not of that form, or there is no such kind of parallelism.
        """
        names = [field.name for field in fields(cls)]
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = (word.strip() for word in part.partition("="))
            if not size.isdecimal():
                raise PlanError(f"--layout has {part.strip()!r}; write it like dp_shard=4,tp=2")
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
                raise PlanError(f"--layout has {name}; {hint}")
            if name in sizes:
                raise PlanError(f"--layout has {name} twice; keep one")
            sizes[name] = int(size)
        return cls(**sizes)

    @property
    def num_ranks(self) -> int:
        """All of them; ep lies within dp_shard."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cp

    @property
    def num_data_ranks(self) -> int:
        """Shares that the segments are dealt into."""
        return self.dp_replicate * self.dp_shard

    def check(self, shape: ModelShape) -> None:
        """Refuse a model that does not divide so.

        Raises:
            PlanError: a size does not divide, or there are more stages than layers.
        """
        sizes = {
            "query heads": shape.num_heads,
            "key heads": shape.num_key_heads,
            "MLP width": shape.mlp_width,
            "expert width": shape.expert_width,
            "vocabulary": shape.vocabulary,
        }
        for name, size in sizes.items():
            if size % self.tp:
                raise PlanError(f"tp {self.tp} does not divide the model's {name}, {size}")
        if self.pp > shape.num_layers:
            raise PlanError(f"pp {self.pp} is more than the model's {shape.num_layers} layers")
        if self.ep > 1 and not shape.num_experts:
            raise PlanError(f"ep is {self.ep}, but the model has no experts; leave it at 1")
        if shape.num_experts % self.ep:
            raise PlanError(f"ep {self.ep} does not divide the model's {shape.num_experts} experts")

    def __str__(self) -> str:
        shown = [f"{name}={size}" for name, size in asdict(self).items() if size > 1]
        return ",".join(shown) or "dp_shard=1"
