"""Check that the stages of a pipeline in sequence compute the model that they were cut from.

No rank holds the complete model for a comparison. So every rank runs the forward of the complete model, and
the owner of each module computes it and broadcasts the result. Whatever a model computes outside of these
modules (a second use of the embedding, an unusual loop over layers) runs on every rank here, but in no stage.

Before each broadcast, the ranks all-gather what they are about to send. So a failure on one rank is detected,
and all ranks raise the same error.

T = tokens of a short row, D = model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.distributed.pipeline_stages import MicroBatchRow, replaced, stage_states
from millrace.kernels.packed_attention import Segments
from millrace.models.attention import Packed
from millrace.models.facts import record_facts
from millrace.models.layer_check import compare_layers
from millrace.models.load import ModelError, ModelKind, states_of
from millrace.models.logprobs import hidden_states

# Calls a function of one stage's model within the required context (FSDP).
Runner = Callable[[Callable[[PreTrainedModel], tuple[Tensor, ...]]], tuple[Tensor, ...]]
# Errors of an unsupported model's forward.
FAULTS = (ValueError, TypeError, AttributeError, RuntimeError)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Sent instead of a module number: the rank has finished, or has failed.
DONE, FAILED = [-1, 0, 0, 0, 0], [-2, 0, 0, 0, 0]
ELSEWHERE = "another rank of the pipeline failed, or computes other pieces"
MOST_BYTES = 1000


@torch.no_grad()
def check_stages(
    model: PreTrainedModel,
    stage_of: Mapping[str, int],
    runners: Mapping[int, Runner],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    kind: ModelKind | None = None,
) -> None:
    """Refuse an architecture if its stages do not compute the complete model; all ranks call it in step.

    `model` has placeholders for modules of other ranks. Stage s is on rank s modulo the number of ranks. With
    `kind`, its packed forward is compared with its plain one too.

    Raises:
        ModelError: on a short row, stages and complete model differ or cannot run, or the other comparison
            fails; the message is the same on every rank.
    """
    together = _Together(group, device)
    whole = _whole_model(model, stage_of, together, device)
    token_T = torch.arange(1, 8, device=device) % model.config.get_text_config().vocab_size
    row = MicroBatchRow(
        token_T, torch.arange(7, device=device), Packed(Segments.of(torch.tensor([7])).to(device))
    )
    problem = f"model type {model.config.model_type} cannot be cut into stages; set mesh.pp to 1"

    def compare() -> None:
        try:
            if _inside(runners.values(), lambda: record_facts(whole, in_step=True)).needs_view:
                raise ValueError("its layers need a cache besides hidden states, which stages do not have")
            whole_TD = _inside(
                runners.values(), lambda: hidden_states(whole, token_T, row.position_T, row.context)
            )
            stages_TD = _one_by_one(row, max(stage_of.values()) + 1, runners, together)
        except FAULTS as error:
            raise ModelError(f"{problem}: {error}") from error
        if kind is not None:
            # Before the comparison, because this check reports non-finite weights.
            _inside(runners.values(), partial(_try_packed, kind, whole, has_head=group.rank() == last))
        if stages_TD.shape != whole_TD.shape:
            raise ModelError(f"{problem}: they give {tuple(stages_TD.shape)}, not {tuple(whole_TD.shape)}")
        difference = float((stages_TD - whole_TD).abs().max() / whole_TD.abs().max())
        # The same products in the same order: only a device with another order of sums may differ at all.
        if not difference < 0.01:
            raise ModelError(f"{problem}: their result differs by {difference:.2g} from the whole model's")

    last = max(stage_of.values()) % group.size()
    together.do(compare)


def _whole_model(
    model: PreTrainedModel, stage_of: Mapping[str, int], together: _Together, device: torch.device
) -> PreTrainedModel:
    """Build the complete model with relays for its modules; the head is present only on its rank."""
    backbone = f"{model.base_model_prefix}."
    held = {name: model.get_submodule(name) for name in stage_of if name.startswith(backbone)}
    relays = {
        piece: _Relay(together, number, stage_of[name], piece)
        for number, (name, piece) in enumerate(held.items())
    }
    made: PreTrainedModel = replaced(model, relays)
    # transformers takes the device of the first weight as compute device, which is wrong for offloaded
    # weights.
    here = nn.Parameter(torch.empty(0, dtype=model.dtype, device=device), requires_grad=False)
    made._parameters = {"here": here}
    return made


def _inside(runners: Iterable[Runner], compute: Callable[[], Any]) -> Any:
    runner, *others = runners
    results: list[Any] = []

    def run(_: PreTrainedModel) -> tuple[Tensor, ...]:
        results.append(_inside(others, compute) if others else compute())
        return ()

    runner(run)
    return results[0]


def _one_by_one(
    row: MicroBatchRow, num_stages: int, runners: Mapping[int, Runner], together: _Together
) -> Tensor:
    received_1TD: Tensor | None = None

    def states(stage: int, received_1TD: Tensor | None) -> Tensor:
        return runners[stage](lambda model: (stage_states(model, row, received_1TD),))[0]

    for stage in range(num_stages):
        received_1TD = together.computed(stage, stage, partial(states, stage, received_1TD))
    assert received_1TD is not None
    return received_1TD[0]


def _try_packed(kind: ModelKind, whole: PreTrainedModel, *, has_head: bool) -> None:
    """Run the self-check of an ordinary load; ranks without the head compare its inputs instead."""
    if has_head:
        kind.tried(whole, whole=False)
        return
    record_facts(whole)  # a collective: the check on the other ranks runs it too
    problem = compare_layers(whole, states_of(kind.auto), whole=False)
    if problem:
        raise ModelError(f"model type {whole.config.model_type} cannot be trained by millrace: {problem}")


class _Relay(nn.Module):
    def __init__(self, together: _Together, number: int, stage: int, piece: nn.Module) -> None:
        super().__init__()
        self.together, self.number, self.stage, self.piece = together, number, stage, piece

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.together.computed(self.number, self.stage, lambda: self.piece(*args, **kwargs))


class _Together:
    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._apart = False

    def computed(self, number: int, stage: int, compute: Callable[[], Tensor]) -> Tensor:
        """Compute a 3-dimensional tensor on the rank of a stage, and broadcast it.

        Raises RuntimeError if another rank computes a tensor of another number, or has failed.
        """
        holder, made, told = stage % self._group.size(), None, [number, 0, 0, 0, 0]
        if self._group.rank() == holder:
            made = compute().contiguous()
            one, num_tokens, width = made.shape
            told = [number, DTYPES.index(made.dtype), one, num_tokens, width]
        rows = self._tell(told)
        if len({row[0] for row in rows}) > 1:
            self._apart = True
            raise RuntimeError(ELSEWHERE)
        _, dtype, *shape = rows[holder]
        if made is None:
            made = torch.empty(shape, dtype=DTYPES[dtype], device=self._device)
        dist.broadcast(made, group_src=holder, group=self._group)
        return made

    def do(self, work: Callable[[], None]) -> None:
        """Run a function on all ranks in step; raise ModelError with the message of the last failed rank."""
        problem, cause = "", None
        try:
            work()
        except FAULTS as error:
            problem, cause = ELSEWHERE if self._apart else str(error), error
        if not self._apart:
            rows = self._tell(FAILED if problem else DONE)
            if not problem and rows != [DONE] * len(rows):
                problem = ELSEWHERE
        told = [each for each in self._sentences(problem) if each]
        if told:
            raise ModelError(next((each for each in told if each != ELSEWHERE), ELSEWHERE)) from cause

    def _tell(self, row: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(row, device=self._device)
        rows = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(rows, mine, group=self._group)
        return [each.tolist() for each in rows]

    def _sentences(self, sentence: str) -> list[str]:
        """Return the messages of all ranks, the last rank first."""
        data = sentence.encode()[:MOST_BYTES].ljust(MOST_BYTES, b"\0")
        rows = [bytes(row) for row in self._tell(list(data))]
        return [row.rstrip(b"\0").decode(errors="ignore") for row in reversed(rows)]
