"""Whether the stages of a pipeline, one after the other, are the model that they were cut from.

Nobody holds the whole model to compare them with. So every rank goes through the whole model's own forward,
and each of its pieces is computed by the rank that has it, which hands the others what it made. Whatever a
model does besides its pieces (a second use of the embedding, a loop over layers unlike that of others), each
rank does, and no stage.

Before a tensor is handed on, the ranks tell each other what they are about to share. So one that fails is
heard of, and all end with the same sentence.

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

from millrace.distributed.pipeline_stages import Row, replaced, stage_states
from millrace.kernels.packed_attention import Segments
from millrace.models.attention import Packed
from millrace.models.facts import record_facts
from millrace.models.layer_check import compare_layers
from millrace.models.load import ModelError, ModelKind, states_of
from millrace.models.logprobs import hidden_states

# Calls a function of one stage's model, with whatever must stand around it.
Runner = Callable[[Callable[[PreTrainedModel], tuple[Tensor, ...]]], tuple[Tensor, ...]]
# What a model's forward raises where it does not go with ours.
FAULTS = (ValueError, TypeError, AttributeError, RuntimeError)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# In the place of a piece's number: a rank is through, or has failed.
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
    """Refuse an architecture whose stages are not the whole model; all ranks of the group call it in step.

    Args:
        model: what a rank keeps of it; others stand where its other pieces were.
        stage_of: the stage of each piece, by the piece's name.
        runners: run the stages of this rank; stage s is on rank s modulo their number.
        group: the ranks of the pipeline.
        device: that computes.
        kind: as what the model was loaded, if its packed forward is to be tried against its own plain one.

    Raises:
        ModelError: on a short row stages and whole differ or cannot be run, or the other trial fails; every
            rank has the same sentence.
    """
    together = _Together(group, device)
    whole = _whole_model(model, stage_of, together, device)
    token_T = torch.arange(1, 8, device=device) % model.config.get_text_config().vocab_size
    row = Row(token_T, torch.arange(7, device=device), Packed(Segments.of(torch.tensor([7])).to(device)))
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
            # Before the difference is judged: weights that are not numbers are for this trial to tell of.
            _inside(runners.values(), partial(_try_packed, kind, whole, has_head=group.rank() == last))
        if stages_TD.shape != whole_TD.shape:
            raise ModelError(f"{problem}: they give {tuple(stages_TD.shape)}, not {tuple(whole_TD.shape)}")
        difference = float((stages_TD - whole_TD).abs().max() / whole_TD.abs().max())
        # The same products in the same order: only a device that sums in another order may differ at all.
        if not difference < 0.01:
            raise ModelError(f"{problem}: their result differs by {difference:.2g} from the whole model's")

    last = max(stage_of.values()) % group.size()
    together.do(compare)


def _whole_model(
    model: PreTrainedModel, stage_of: Mapping[str, int], together: _Together, device: torch.device
) -> PreTrainedModel:
    """The model with all its pieces, here or elsewhere; but for its head, which a rank has or lacks."""
    backbone = f"{model.base_model_prefix}."
    held = {name: model.get_submodule(name) for name in stage_of if name.startswith(backbone)}
    relays = {
        piece: _Relay(together, number, stage_of[name], piece)
        for number, (name, piece) in enumerate(held.items())
    }
    made: PreTrainedModel = replaced(model, relays)
    # Where a model's first weight lies is taken for where it computes, and an offloaded one lies elsewhere.
    here = nn.Parameter(torch.empty(0, dtype=model.dtype, device=device), requires_grad=False)
    made._parameters = {"here": here}
    return made


def _inside(runners: Iterable[Runner], compute: Callable[[], Any]) -> Any:
    """What a function gives within the forwards of all stages of this rank, where their weights are whole."""
    runner, *others = runners
    results: list[Any] = []

    def run(_: PreTrainedModel) -> tuple[Tensor, ...]:
        results.append(_inside(others, compute) if others else compute())
        return ()

    runner(run)
    return results[0]


def _one_by_one(row: Row, num_stages: int, runners: Mapping[int, Runner], together: _Together) -> Tensor:
    """What the stages make of a row, each of what the one before made, [T, D]."""
    received_1TD: Tensor | None = None

    def states(stage: int, received_1TD: Tensor | None) -> Tensor:
        return runners[stage](lambda model: (stage_states(model, row, received_1TD),))[0]

    for stage in range(num_stages):
        received_1TD = together.computed(stage, stage, partial(states, stage, received_1TD))
    assert received_1TD is not None
    return received_1TD[0]


def _try_packed(kind: ModelKind, whole: PreTrainedModel, *, has_head: bool) -> None:
    """Try the whole model as an ordinary load does; ranks without the head compare what it would read."""
    if has_head:
        kind.tried(whole, whole=False)
        return
    record_facts(whole)  # in step with the other ranks, whose trial does
    problem = compare_layers(whole, states_of(kind.auto), whole=False)
    if problem:
        raise ModelError(f"model type {whole.config.model_type} cannot be trained by millrace: {problem}")


class _Relay(nn.Module):
    """A piece that one rank has, for all of them."""

    def __init__(self, together: _Together, number: int, stage: int, piece: nn.Module) -> None:
        super().__init__()
        self.together, self.number, self.stage, self.piece = together, number, stage, piece

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.together.computed(self.number, self.stage, lambda: self.piece(*args, **kwargs))


class _Together:
    """What the ranks of a pipeline share in a trial."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._apart = False

    def computed(self, number: int, stage: int, compute: Callable[[], Tensor]) -> Tensor:
        """A tensor of three dimensions that the rank of a stage computes, on all ranks.

        Args:
            number: by which ranks see that they mean the same one.
            stage: whose it is.
            compute: called on that rank alone.

        Raises:
            RuntimeError: another rank means another one, or has failed.
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
        """Work that all ranks do in step.

        Raises:
            ModelError: it failed on one of them; the sentence is that of the last of these.
        """
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
        """What each rank says in five numbers."""
        mine = torch.tensor(row, device=self._device)
        rows = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(rows, mine, group=self._group)
        return [each.tolist() for each in rows]

    def _sentences(self, sentence: str) -> list[str]:
        """What each rank says, the last one first."""
        data = sentence.encode()[:MOST_BYTES].ljust(MOST_BYTES, b"\0")
        rows = [bytes(row) for row in self._tell(list(data))]
        return [row.rstrip(b"\0").decode(errors="ignore") for row in reversed(rows)]
