"""Bytes that the fullest rank holds while it trains and while it samples.

D = model width, H = query heads, J = key heads, K = head width, F = MLP width, E = experts, k = experts of a
token, V = vocabulary, L = longest segment, c = bytes of a number in the forward. A token of our packed
forward keeps for the backward, in each layer:

    residual stream   the input of each norm, and what attention and MLP read                 (norms + 2) D c
    attention         queries, keys and values at H heads, its result twice, its log-sum-exp  5 H K c + 4 H
    head norms        queries and keys before them                                            (H + J) K c
    MLP               gate, its activation, up, their product                                 4 F c
    experts           the same for each of k, with what goes in and comes out                 k (4 F + 2 D) c

and once its rotary angles, the input of the last norm and the hidden state it is predicted from, 2 (D + K) c.
Where attention is made of plain products (capped scores, segments up to 32 tokens) one of the five is spared,
and the shares of all pairs are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil
from typing import Literal

from millrace.planner.layout import Layout
from millrace.planner.model_shape import ModelShape

Checkpointing = Literal["none", "selective", "full"]

# Logits of one chunk in `kernels.token_logprob`, and the longest segment with stored attention scores in
# `kernels.packed_attention`. This layer cannot import them; a test checks that the values are equal.
CHUNK_ELEMENTS = 7 << 20
SHORT_LENGTH = 32
# Maximum fraction of the free memory that an engine's cache takes by default.
CACHE_SHARE = 0.25
# Bytes of a number of a moment with 8-bit codes: its own, and a float32 scale of 256.
EIGHT_BIT_MOMENT = 1 + 4 / 256


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of the ranks; prompts and completions are the longest ones.

    Attributes:
        num_sequences: completions of a step.
        micro_batch_tokens: tokens in one forward and backward.
        weight_bytes: of one number of the weights that are trained, their gradients and sums over ranks, and
            of the sampler's weights and cache.
        compute_bytes: of one number in the trainer's forward.
        moment_bytes: of one number of each of AdamW's two moments.
        checkpointing: what a layer keeps: everything; its input and its products; its input.
        activation_offload: whether what a layer keeps is in the host's memory.
        fused_norms: whether norms run in one pass, as on the CPU; without, they keep what they are made of.
        sequence: whether tensor parallel shares the residual stream too.
        num_chunks: stages of a pipeline on each rank.
        num_frozen: models of the policy's shape that score its tokens (reference, teacher).
        num_away: number of them that are in the host's memory but while they score.
        frozen_beside: whether one of them computes while the policy does (a penalty over the vocabulary).
        num_scorings: forwards without gradient over each sequence.
        critic: whether a second model of this shape learns values.
        max_requests: completions that one engine generates concurrently.
        cache_tokens: of one engine's cache; None takes what max_requests need, at most a quarter of what is
            free.
        step_tokens: of one forward of an engine.
        colocated: whether what trains and the engine are on the device one after the other.
        engine_ranks: ranks that share one engine by tensor parallelism.
    """

    prompt_tokens: int
    completion_tokens: int
    num_sequences: int
    samples_per_prompt: int
    micro_batch_tokens: int
    weight_bytes: int = 4
    compute_bytes: int = 2
    moment_bytes: float = 4
    checkpointing: Checkpointing = "none"
    activation_offload: bool = False
    fused_norms: bool = False
    reshard_after_forward: bool = True
    sequence: bool = False
    num_chunks: int = 1
    offload: bool = False
    num_frozen: int = 0
    num_away: int = 0
    frozen_beside: bool = False
    num_scorings: int = 0
    critic: bool = False
    max_requests: int = 1024
    cache_tokens: int | None = None
    block_size: int = 16
    step_tokens: int = 8192
    colocated: bool = False
    engine_ranks: int = 1

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.completion_tokens

    def micro_tokens(self, layout: Layout) -> int:
        """Tokens of the fullest micro-batch on one rank: of its data rank's sequences, shared over cp."""
        share = ceil(self.num_sequences / layout.num_data_ranks) * self.longest
        return ceil(min(self.micro_batch_tokens, share) / layout.cp)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the device of the fullest rank, by what they hold, and in its host's memory.

    Attributes:
        critic: weights and moments of a critic.
        frozen: weights of models that only score.
        gradients: of the policy (those of a critic come when the policy's are gone).
        gathered: whole layers, embedding and head, put together from the ranks for a while.
        activations: what forwards keep for their backwards.
        scratch: what the fullest moment of a backward needs besides: chunks of logits, or slopes of a layer.
        cache: keys and values.
        drawing: logits and one forward of the engine.
        host: weights, moments, critic, frozen and gradients where they are in the host's memory, or but for
            gradients wait there.
    """

    weights: int
    moments: int
    critic: int
    frozen: int
    gradients: int
    gathered: int
    activations: int
    scratch: int
    sampler: int
    cache: int
    drawing: int
    host: int
    colocated: bool = False

    @property
    def training(self) -> int:
        """While it trains."""
        engine = 0 if self.colocated else self.sampler + self.cache
        return self._trained + self.gradients + self.gathered + self.activations + self.scratch + engine

    @property
    def sampling(self) -> int:
        """While it samples."""
        return (0 if self.colocated else self._trained) + self.sampler + self.cache + self.drawing

    @property
    def peak(self) -> int:
        """Peak memory: the maximum of training, sampling and the weight update to the engine."""
        return max(self.training, self.sampling, self._trained + self.sampler)

    @property
    def _trained(self) -> int:
        return self.weights + self.moments + self.critic + self.frozen

    def parts(self) -> dict[str, int]:
        """Every part on the device by its name."""
        others = ("host", "colocated")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in others}


def memory_per_rank(shape: ModelShape, layout: Layout, work: Workload, device_bytes: float) -> Memory:
    """What the fullest rank holds; PlanError if the layout does not divide the model.

    Only an engine's cache without a size of its own depends on `device_bytes`, those of one device.
    """
    layout.check(shape)
    held = _held(shape, layout)
    weights = held.sharded * work.weight_bytes
    moments = ceil(2 * held.sharded * work.moment_bytes)
    sampler = _held(shape, Layout(tp=work.engine_ranks)).stage * work.weight_bytes
    away = work.num_away * weights
    frozen = work.num_frozen * weights - away
    critic = work.critic * (weights + moments)
    there = 2 * weights + moments + critic + frozen + away
    here = 0 if work.offload else 1
    waiting = here * (weights + moments + critic + frozen)
    return Memory(
        weights=here * weights,
        moments=here * moments,
        critic=here * critic,
        frozen=here * frozen,
        gradients=here * weights,
        gathered=_gathered(held, layout, work),
        activations=_activations(shape, layout, work),
        scratch=_scratch(shape, layout, work, held),
        sampler=sampler,
        cache=_cache(shape, work, device_bytes - 2 * sampler),
        drawing=_drawing(shape, work),
        host=work.offload * there + work.colocated * waiting + here * away,
        colocated=work.colocated,
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """Numbers of weights on the fullest rank: of a whole layer, embedding and head, its stage, its share."""

    layer: int
    ends: int
    stage: int
    sharded: int


def _held(shape: ModelShape, layout: Layout) -> _Held:
    around = ceil(shape.attention_parameters / layout.tp) + shape.num_norms * shape.width
    dense = around + ceil(shape.mlp_parameters / layout.tp)
    router = around + shape.num_experts * shape.width
    # Tensor parallel leaves experts whole.
    experts = shape.num_experts * shape.expert_parameters
    num_sparse = ceil(shape.num_expert_layers / layout.pp)
    num_dense = ceil(shape.num_layers / layout.pp) - num_sparse
    num_ends = 1 if layout.pp > 1 else 2 - shape.tied
    ends = num_ends * ceil(shape.head_parameters / layout.tp) + shape.width
    plain = num_dense * dense + num_sparse * router + ends
    own = ceil(experts / layout.ep)
    sharded = ceil((plain + num_sparse * experts) / (layout.dp_shard * layout.cp))
    return _Held(router + own if num_sparse else dense, ends, plain + num_sparse * own, sharded)


def _is_gathered(layout: Layout, work: Workload) -> bool:
    dealt = layout.num_data_ranks * layout.cp > 1
    return dealt or work.offload or work.compute_bytes != work.weight_bytes


def _gathered(held: _Held, layout: Layout, work: Workload) -> int:
    """Embedding, head and two layers, since the next is fetched while one computes; or all of them.

    While another model computes beside it, the policy has embedding and head, or all it keeps.
    """
    if not _is_gathered(layout, work):
        return 0
    passing, waiting = min(held.ends + 2 * held.layer, held.stage), held.ends
    if not work.reshard_after_forward:
        passing = waiting = held.stage
    return (passing + work.frozen_beside * waiting) * work.compute_bytes


def _kept(shape: ModelShape, layout: Layout, work: Workload, *, sparse: bool) -> float:
    """Bytes that one token of one layer keeps without checkpointing."""
    c = work.compute_bytes
    query, key = (n * shape.head_width / layout.tp for n in (shape.num_heads, shape.num_key_heads))
    width = shape.width / (layout.tp if work.sequence else 1)
    # A norm of several operations keeps float32 copies of what it is made of, the last one where it is wide.
    steps = 0 if work.fused_norms else 6 if c == 2 and shape.wide_norms else 4
    total = (shape.num_norms + 2) * width * c + shape.num_norms * (width * steps + 4)
    if shape.head_norms != "none":
        rows = (shape.num_heads + shape.num_key_heads) / layout.tp if shape.head_norms == "head" else 2
        total += (query + key) * (c + steps) + 4 * rows
    heads = shape.num_heads / layout.tp
    if _plain_scores(shape, work):
        # The softmax is float32; a narrower copy goes on.
        score = 4 + (c if c == 2 else 0) + (c if shape.capped_scores else 0)
        total += 4 * query * c + heads * work.longest * score
    else:
        total += 5 * query * c + 4 * heads
    if not sparse:
        return total + 4 * shape.mlp_width / layout.tp * c
    chosen = shape.experts_per_token
    # Probabilities of all experts; of those chosen, weights and where their tokens went.
    routing = 4 * shape.num_experts + 40 * chosen
    experts = chosen * (4 * shape.expert_width + 2 * shape.width) * c + routing
    return total + experts / (layout.tp if work.sequence else 1)


def _plain_scores(shape: ModelShape, work: Workload) -> bool:
    """Whether attention is made of plain products, which keep the shares of all pairs."""
    return shape.capped_scores or work.longest <= SHORT_LENGTH


def _products(shape: ModelShape, layout: Layout, work: Workload, *, sparse: bool) -> float:
    """Numbers that the matrix products and the attention of one token and layer give."""
    heads = 2 * (shape.num_heads + shape.num_key_heads) * shape.head_width
    if _plain_scores(shape, work):
        heads += shape.num_heads * work.longest
    attention = heads / layout.tp + shape.width
    # The products of experts are not among those that selective checkpointing keeps.
    return attention + (shape.num_experts if sparse else 2 * shape.mlp_width / layout.tp + shape.width)


def _activations(shape: ModelShape, layout: Layout, work: Workload) -> int:
    c, num_tokens = work.compute_bytes, work.micro_tokens(layout)
    width = shape.width / (layout.tp if work.sequence else 1)
    num_sparse = ceil(shape.num_expert_layers / layout.pp)
    num_dense = ceil(shape.num_layers / layout.pp) - num_sparse
    if work.checkpointing == "none":
        kept = [_kept(shape, layout, work, sparse=sparse) for sparse in (False, True)]
    else:
        kept = [width * c, width * c]
    if work.checkpointing == "selective":
        kept = [kept[sparse] + _products(shape, layout, work, sparse=sparse) * c for sparse in (False, True)]
    layers = num_dense * kept[0] + num_sparse * kept[1]
    # In-flight micro-batches of the first pipeline rank before the first backward.
    in_flight: float = layout.pp
    if work.num_chunks > 1:
        in_flight = (2 * layout.pp - 1 + layout.pp * (work.num_chunks - 1)) / work.num_chunks
    if work.activation_offload:
        # Of the layer that computes.
        layers, in_flight = max(kept), 1
    ends = width * (2 * c + (0 if work.fused_norms else 4)) + 2 * shape.head_width * c
    return ceil(num_tokens * (in_flight * layers + ends))


def _scratch(shape: ModelShape, layout: Layout, work: Workload, held: _Held) -> int:
    """The fuller of two moments: the head's backward, and that of a layer, computed again if need be."""
    c, num_tokens = work.compute_bytes, work.micro_tokens(layout)
    rows = min(num_tokens, rows_per_chunk(ceil(shape.vocabulary / layout.tp), shape.width))
    vocabulary = shape.vocabulary / layout.tp
    chunk, whole, narrow = rows * vocabulary, shape.width * vocabulary, c if c == 2 else 0
    # Two chunks of float32 (a third under a cap) and a narrow one where products are narrower; then the
    # narrow one and its product, which is added to the head's slope in float32.
    chunks = max(chunk * (8 + narrow + 4 * shape.capped_logits), (chunk + whole) * narrow)
    head = chunks + 4 * whole + num_tokens * shape.width * c
    sparse = shape.num_expert_layers > 0
    share = layout.tp if work.sequence else 1
    inner = shape.mlp_width / layout.tp
    if sparse:
        inner = shape.experts_per_token * shape.expert_width / share
    layer = (inner + 2 * shape.width) * c
    if work.checkpointing != "none":
        layer += _kept(shape, layout, work, sparse=sparse)
    if work.checkpointing == "selective":
        layer -= _products(shape, layout, work, sparse=sparse) * c
    slopes = 0.0
    if _is_gathered(layout, work):
        # Of the head and of one layer, whole until they are summed over ranks: in the weights' own dtype.
        slopes = (whole + held.layer) * c + (held.layer * work.weight_bytes if c != work.weight_bytes else 0)
    return ceil(max(head, num_tokens * layer + slopes))


def rows_per_chunk(vocabulary: int, width: int) -> int:
    """Return the number of tokens per chunk of logits, as in `kernels.token_logprob`."""
    return max(1, CHUNK_ELEMENTS // vocabulary, width // 8)


def cache_bytes_per_token(shape: ModelShape, number_bytes: int) -> int:
    """A key and a value for each layer and key head."""
    return 2 * shape.num_layers * shape.num_key_heads * shape.head_width * number_bytes


def _cache(shape: ModelShape, work: Workload, free_bytes: float) -> int:
    each = cache_bytes_per_token(shape, work.weight_bytes) // work.engine_ranks
    if work.cache_tokens is not None:
        return work.cache_tokens * each
    slots = work.longest + work.block_size
    most = int(max(free_bytes, 0) * CACHE_SHARE) // each
    return max(slots, min(work.max_requests * slots, most)) * each


def _drawing(shape: ModelShape, work: Workload) -> int:
    # Gathered logits are there in the ranks' order and in the tokens', beside the rank's own.
    own = 0 if work.engine_ranks == 1 else 4 / work.engine_ranks
    logits = (8 + own) * min(work.max_requests, work.num_sequences) * shape.vocabulary
    inner = max(shape.mlp_width / work.engine_ranks, shape.experts_per_token * shape.expert_width)
    query = (shape.num_heads + 2 * shape.num_key_heads) * shape.head_width / work.engine_ranks
    numbers = work.step_tokens * (3 * inner + query + 3 * shape.width)
    return ceil(logits + numbers * work.weight_bytes)
