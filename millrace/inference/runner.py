"""Model runner: one packed forward of the trainer's module over the paged KV pool, from plan to logits.

T = packed tokens of the step, B = rows that compute, N = rows that sample, M = blocks to copy,
V = vocabulary, D = model width, S = slots of a block, L = layers with a router, K = experts of a token.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from millrace.distributed.collectives import FEATURES, Peers
from millrace.inference.graphs import DecodeGraphs, Inputs
from millrace.inference.kv_blocks import KvLayout
from millrace.inference.request import RequestTable
from millrace.inference.scheduler import Plan
from millrace.kernels.paged_attention import PagedRows
from millrace.models.attention import Paged, new_pools
from millrace.models.decoding import Stack
from millrace.models.facts import facts_of
from millrace.models.load import Model
from millrace.models.logprobs import hidden_states, output_head
from millrace.models.routing import Routers


class Runner:
    """The model and its KV pool, in the model's dtype and on its device.

    Decode steps of up to `max_graph_rows` rows and `max_length` tokens each are replayed as CUDA graphs; 0
    turns graphs off. With `record_experts` the pool also stores the experts of each slot's token.

    Raises:
        ValueError: `max_graph_rows` is set for a model that is not on a CUDA device, or `record_experts` for
            a model without experts.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        max_graph_rows: int = 0,
        max_length: int = 0,
        record_experts: bool = False,
    ) -> None:
        like = next(model.parameters())
        if max_graph_rows and like.device.type != "cuda":
            raise ValueError(f"cuda_graphs is on but the model is on {like.device}; turn it off")
        self.model = model
        self.device = like.device
        self._block_size = block_size
        self._facts, self._num_blocks = facts_of(model), num_blocks
        self._dtype = like.dtype
        head = output_head(model)
        self._exact = head.tile is not None
        # The ranks of an engine over several.
        self.group: ProcessGroup | None = head.group
        # The (keys, values) pair of each pool.
        self.pools: list[tuple[Tensor, Tensor]] = []
        self._routers = Routers(model) if record_experts else None
        self._expert_pool: Tensor | None = None
        self._max_graph_rows, self._max_length = max_graph_rows, max_length
        self._graphs: DecodeGraphs | None = None
        self.restore()

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pool; 0 after `release`."""
        return sum(pool.untyped_storage().nbytes() for pair in self.pools for pool in pair)

    def inputs(self, table: RequestTable, plan: Plan) -> Inputs:
        """Build tokens, positions and slots of a plan from the columns of the table."""
        count_B, start_B, row_B = plan.count_B, plan.start_B, plan.row_B
        last_B = np.cumsum(count_B) - 1
        first_B = last_B - count_B + 1
        length_B = start_B + count_B
        if len(count_B) == last_B[-1] + 1:  # every row computes one token, as in steady decode
            row_T, position_T, place_T = row_B, start_B, np.arange(len(row_B))
        else:
            place_T = np.repeat(np.arange(len(row_B)), count_B)
            row_T = row_B[place_T]
            position_T = np.arange(len(place_T)) - (first_B - start_B)[place_T]
        size, max_length = self._block_size, int(length_B.max())
        block_BC = table.block_RC[row_B, : -(-max_length // size)]
        slot_T = block_BC[place_T, position_T // size].astype(np.int64) * size + position_T % size
        rows = PagedRows(
            block_BC=self._tensor(block_BC),
            start_B=self._tensor(start_B),
            first_B=self._tensor(first_B),
            count_B=self._tensor(count_B),
            slot_T=self._tensor(slot_T),
            max_count=int(count_B.max()),
            max_length=max_length,
            exact=self._exact,
        )
        token_T = table.token_RL[row_T, position_T].astype(np.int64)
        return Inputs(self._tensor(token_T), self._tensor(position_T), rows, self._tensor(last_B))

    def hidden(self, inputs: Inputs, *, every: bool = False) -> Tensor:
        """Run the forward, which writes all keys and values of the step to the pool.

        Return the final hidden states of each row's last token, [B, D], or of `every` token, [T, D].
        """
        if self._graphs is not None and self._graphs.fits(inputs):
            return self._graphs(inputs)
        num_rows = len(inputs.last_B)
        wanted_B = None if every or len(inputs.token_T) == num_rows else inputs.last_B
        hidden = self._forward(inputs, wanted_B)
        # Modules of other models return every token.
        return hidden if wanted_B is None or len(hidden) == num_rows else hidden[wanted_B]

    def _forward(self, inputs: Inputs, last_B: Tensor | None = None) -> Tensor:
        context = Paged(self.pools, inputs.rows, last_B)
        stack: Stack | None = getattr(self.model, "millrace_stack", None)
        if stack is not None and self._routers is None and not torch.is_grad_enabled():
            return stack(inputs.token_T, inputs.position_T, context)
        return self._through_modules(inputs, context)

    def _through_modules(self, inputs: Inputs, context: Paged) -> Tensor:
        pool = self._expert_pool

        def keep(layer: int, logit_TE: Tensor, expert_TK: Tensor) -> None:
            if pool is not None:
                pool.flatten(0, 1)[:, layer][inputs.rows.slot_T] = expert_TK.to(pool.dtype)

        with nullcontext() if self._routers is None else self._routers.watch(keep):
            return hidden_states(self.model, inputs.token_T, inputs.position_T, context)

    @property
    def routed(self) -> tuple[int, int] | None:
        """(Layers with a router, experts of a token) if routing is recorded, else None."""
        return None if self._routers is None else (self._routers.num_layers, self._routers.num_choices)

    def experts(self, table: RequestTable, row: int) -> np.ndarray:
        """Return the experts of a row's computed tokens, [tokens, L, K] int16.

        Call it while the row still has its blocks.
        """
        assert self._expert_pool is not None
        place_T = np.arange(table.num_computed_R[row])
        slot_T = table.block_RC[row, place_T // self._block_size].astype(np.int64) * self._block_size
        slot_T += place_T % self._block_size
        found: np.ndarray = self._expert_pool.flatten(0, 1)[self._tensor(slot_T)].cpu().numpy()
        return found

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Compute logits in float32 (float64 stays float64), [N, V]; a sharded head's are all-gathered."""
        logit_NV = output_head(self.model).logits(hidden_ND)
        return logit_NV if self.group is None else Peers(self.group).whole(logit_NV, FEATURES)

    def copy_blocks(self, from_M: np.ndarray, to_M: np.ndarray) -> None:
        """Copy whole blocks of every layer."""
        if not len(from_M):
            return
        # index_select and index_copy_: assignment by index takes ten times as long on a CPU.
        source_M, target_M = self._tensor(from_M), self._tensor(to_M)
        pools = [pool for pair in self.pools for pool in pair]
        for pool in pools if self._expert_pool is None else [*pools, self._expert_pool]:
            pool.index_copy_(0, target_M, pool.index_select(0, source_M))

    @property
    def layout(self) -> KvLayout:
        """What a block of the pool is, for a transfer to another engine."""
        return KvLayout(
            model_type=str(self.model.config.get_text_config().model_type),
            pools=tuple((pool.num_heads, pool.key_width, pool.value_width) for pool in self._facts.pools),
            block_size=self._block_size,
            dtype=str(self._dtype).removeprefix("torch."),
            keys_transposed=self.device.type == "cpu",
            deterministic=self._exact,
            experts=self.routed,
            block_bytes=sum(pool_PD[0].nbytes for pool_PD in self._flat_pools()),
        )

    def read_blocks(self, block_M: np.ndarray, into_MD: np.ndarray) -> None:
        """Copy whole blocks to host memory, uint8 [M, block_bytes]."""
        index_M, into, first = self._tensor(block_M), torch.from_numpy(into_MD), 0
        for pool_PD in self._flat_pools():
            data = pool_PD.index_select(0, index_M).view(torch.uint8)
            into[:, first : first + data.shape[1]] = data
            first += data.shape[1]

    def write_blocks(self, block_M: np.ndarray, data_MD: np.ndarray) -> None:
        """Overwrite whole blocks with what `read_blocks` of an engine with the same layout returned."""
        index_M, data, first = self._tensor(block_M), self._tensor(data_MD), 0
        for pool_PD in self._flat_pools():
            last = first + pool_PD[0].nbytes
            # A copy, because a view of a wider dtype needs contiguous rows.
            pool_PD.index_copy_(0, index_M, data[:, first:last].clone().view(pool_PD.dtype))
            first = last

    def _flat_pools(self) -> list[Tensor]:
        """The pools with a row for each block, in the order of their memory."""
        pools = [pool for key, value in self.pools for pool in (_by_memory(key), value)]
        return [pool.view(len(pool), -1) for pool in (*pools, self._expert_pool) if pool is not None]

    def release(self) -> None:
        """Free the pool and the graphs; no forward is possible until `restore`."""
        self.pools, self._graphs, self._expert_pool = [], None, None

    def restore(self) -> None:
        """Allocate an empty pool."""
        blocks = self._num_blocks, self._block_size
        self.pools = new_pools(self._facts, *blocks, dtype=self._dtype, device=self.device)
        if self.routed is not None:
            # Padding rows of a graph write to slot -1, in an extra block that is never allocated.
            size = (self._num_blocks + 1, self._block_size, *self.routed)
            self._expert_pool = torch.full(size, -1, dtype=torch.int16, device=self.device)
        self.forget_graphs()

    def forget_graphs(self) -> None:
        """Drop the recorded graphs, because weights or pool have new addresses."""
        if self._max_graph_rows:
            self._graphs = DecodeGraphs(
                self._forward,
                max_rows=self._max_graph_rows,
                max_length=self._max_length,
                block_size=self._block_size,
                device=self.device,
            )

    def first_nonfinite(self, inputs: Inputs, b: int) -> str:
        """Recompute the step and return the name of the first module with a non-finite output for row `b`."""
        found: list[str] = []
        row = slice(int(inputs.rows.first_B[b]), int(inputs.last_B[b]) + 1)

        def look(name: str) -> Any:
            def hook(module: nn.Module, arguments: Any, output: Any) -> None:
                tensor = output[0] if isinstance(output, tuple) else output
                shaped = isinstance(tensor, Tensor) and tensor.dim() == 3 and not found
                if shaped and not bool(tensor[0, row].isfinite().all()):
                    found.append(name)

            return hook

        handles = [
            module.register_forward_hook(look(name)) for name, module in self.model.named_modules() if name
        ]
        try:
            self._through_modules(inputs, Paged(self.pools, inputs.rows))
        finally:
            for handle in handles:
                handle.remove()
        return found[0] if found else "the output head"

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def _by_memory(key_PJSK: Tensor) -> Tensor:
    return key_PJSK if key_PJSK.is_contiguous() else key_PJSK.transpose(2, 3)
