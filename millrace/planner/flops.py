"""Operations of a forward and a backward, counted from the shape; what MFU and the plan are made of.

D = model width, H = query heads, J = key heads, K = head width, F = MLP width, E = experts, k = experts of a
token, V = vocabulary. A product of [m, n] and [n, p] is 2 m n p operations. For each token and layer:

    projections  2 D (H + 2 J) K + 2 H K D
    MLP          6 D F, with experts 6 k D F + 2 D E
    scores       4 H K for each token it sees, itself included: (L + 1) / 2 on average in a segment of L

and 2 D V for each token that is predicted. Norms, activations and softmax are left out: an order of magnitude
less. A backward is two products for each one of the forward: twice the operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.planner.model_shape import ModelShape

# A forward, and a backward of twice as many operations.
TRAINING = 3


@dataclass(frozen=True, slots=True)
class Operations:
    """Operations of one forward, by where they are done; those of routers are among the experts'."""

    projections: int
    scores: int
    mlp: int
    experts: int
    head: int

    @property
    def layers(self) -> int:
        """Without the head."""
        return self.projections + self.scores + self.mlp + self.experts

    @property
    def total(self) -> int:
        """All of them."""
        return self.layers + self.head


def forward_operations(shape: ModelShape, length_B: Sequence[int], num_predicted: int) -> Operations:
    """Operations of one forward over packed segments of which `num_predicted` tokens are predicted.

    Only what is seen counts: half of the square of a segment, less where a layer looks back a window. A
    negative number is a ValueError.

    Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", appendix
    (which counts the whole square).
    """
    if min(length_B, default=0) < 0 or num_predicted < 0:
        raise ValueError(f"length_B {list(length_B[:8])} and num_predicted {num_predicted} must be 0 or more")
    num_tokens = sum(length_B)
    query, key = shape.num_heads * shape.head_width, shape.num_key_heads * shape.head_width
    num_full = shape.num_layers - shape.num_windowed_layers
    num_dense = shape.num_layers - shape.num_expert_layers
    seen = num_full * _seen(length_B, None) + shape.num_windowed_layers * _seen(length_B, shape.window)
    expert = 6 * shape.experts_per_token * shape.expert_width + 2 * shape.num_experts
    return Operations(
        projections=shape.num_layers * num_tokens * 4 * shape.width * (query + key),
        scores=4 * query * seen,
        mlp=num_tokens * num_dense * 6 * shape.width * shape.mlp_width,
        experts=num_tokens * shape.num_expert_layers * shape.width * expert,
        head=2 * shape.head_parameters * num_predicted,
    )


def training_operations(shape: ModelShape, length_B: Sequence[int], num_predicted: int) -> int:
    """Operations of a forward and a backward; what is computed again to save memory does not count."""
    return TRAINING * forward_operations(shape, length_B, num_predicted).total


def utilization(num_operations: float, *, seconds: float, peak_flops: float) -> float:
    """MFU: operations on all ranks / (wall time * operations per second of all devices together).

    Time and peak must be above 0, or it is a ValueError.

    Source: Chowdhery et al. 2022, "PaLM: Scaling language modeling with pathways", appendix B.
    """
    if not (seconds > 0 and peak_flops > 0):
        raise ValueError(f"seconds {seconds} and peak_flops {peak_flops} must be above 0")
    return num_operations / (seconds * peak_flops)


def _seen(length_B: Sequence[int], window: int | None) -> int:
    """Pairs of a token and one that it sees, over all segments."""
    total = 0
    for length in length_B:
        reach = min(length, window or length)
        total += reach * (reach + 1) // 2 + (length - reach) * reach
    return total
