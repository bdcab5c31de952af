"""Check that a model with its own weights gives the same results with our modules as with transformers' own.

The architecture is tried on a twin (`models.trial`). Here one layer of each kind is given the same random
hidden states both ways, and the outputs of its token mixer are compared, relative to their own size: in a
fresh model they are far smaller than the residual stream.

T = tokens, D = model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.kernels.packed_attention import Segments
from millrace.models import attention
from millrace.models.attention import Packed
from millrace.models.fused import fuse
from millrace.models.logprobs import hidden_states
from millrace.models.own_attention import plain_implementation
from millrace.models.trial import TrialReadout
from millrace.models.twin import decoder_stack, layer_kinds

LENGTHS = (40, 24)
# Of the largest number that is compared.
MOST = {torch.float64: 1e-3, torch.float32: 1e-3}
MOST_NARROW = 5e-2


class _Enough(Exception):  # noqa: N818 - no error
    """Ends a forward early: its needed outputs are recorded."""


@torch.no_grad()
def compare_layers(model: PreTrainedModel, reading: TrialReadout, *, whole: bool) -> str:
    """Fuse a model with recorded facts, and describe what differs then; empty if nothing does.

    Single layers are compared only if the `whole` model is in this process. Otherwise only the results of
    `reading` are, and all ranks that have parts call this in step.

    Raises:
        ValueError, TypeError, ...: whatever a forward of these modules raises.
    """
    # Parts of a model may have parts of the tokens too: of those only the results are compared.
    mixers, device = _mixers(model) if whole else [], next(model.parameters()).device
    token_T = torch.arange(1, sum(LENGTHS) + 1, device=device) % model.config.get_text_config().vocab_size
    own: list[list[Tensor]] = []
    results: list[Tensor] = []
    try:
        model.set_attn_implementation(plain_implementation(model.config))
        for first, count in ((0, LENGTHS[0]), LENGTHS):
            part_1T = token_T[None, first : first + count]
            with _watched(mixers, first) as made:
                results.append(reading.plain(model, part_1T)[0])
            own.append(made)
    finally:
        model.set_attn_implementation(attention.NAME)
    # From here on with our modules, which are thereby compared too.
    fuse(model)
    position_T = torch.cat([torch.arange(count, device=device) for count in LENGTHS])
    context = Packed(Segments.of(torch.tensor(LENGTHS)).to(device))
    with _watched(mixers, 0) as ours:
        found = reading.packed(model, hidden_states(model, token_T, position_T, context))
    most = MOST.get(model.dtype, MOST_NARROW)
    for mixer, made, *theirs in zip(mixers, ours, *own, strict=True):
        difference = _relative(made, torch.cat(theirs))
        if not difference <= most:
            name = type(mixer).__name__
            return f"its {name} computes something else, by {difference:.2g} of its largest number"
    if not whole:
        difference = _relative(found, torch.cat(results))
        if not difference <= most:
            return f"its packed {reading.what} differ from its own by {difference:.2g}"
    return ""


def _relative(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-30))


def _mixers(model: PreTrainedModel) -> list[nn.Module]:
    stack, kinds = decoder_stack(model), layer_kinds(model)
    firsts = [] if stack is None else [stack[kinds.index(kind)] for kind in sorted(set(kinds))]
    return [m for layer in firsts for m in layer.modules() if hasattr(m, "millrace_layer")]


@contextmanager
def _watched(mixers: Sequence[nn.Module], first: int) -> Iterator[list[Tensor]]:
    """Give mixers the same random hidden states in place of their inputs, and keep their outputs.

    A forward ends where all were called. Row `first` of the random rows is the first of the call's.
    """
    made: dict[nn.Module, Tensor] = {}

    def given(like: Tensor) -> Tensor:
        random_TD = torch.randn(sum(LENGTHS), like.shape[-1], generator=torch.Generator().manual_seed(0))
        return random_TD[None, first : first + like.shape[1]].to(like)

    def give(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if args:
            return (given(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": given(kwargs["hidden_states"])}

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        out = output[0] if isinstance(output, tuple) else output
        made[module] = out.reshape(-1, out.shape[-1])
        if len(made) == len(mixers):
            raise _Enough

    kept: list[Tensor] = []
    handles = [mixer.register_forward_pre_hook(give, with_kwargs=True) for mixer in mixers]
    handles += [mixer.register_forward_hook(keep) for mixer in mixers]
    try:
        yield kept
    except _Enough:
        pass
    finally:
        for handle in handles:
            handle.remove()
        kept += [made[mixer] for mixer in mixers if mixer in made]
