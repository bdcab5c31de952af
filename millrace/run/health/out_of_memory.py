"""What to say where memory could not be had: in which phase, who held it, and what to lower."""

from __future__ import annotations

import gc
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from millrace.config.settings import RunConfig
from millrace.run.components import Sleeper
from millrace.run.health.checks import RunStopped
from millrace.training.offload import Owner, held_tensors

# What the errors say that are not of a kind of their own: torch's allocator on a CPU, and CUDA's libraries.
REFUSED = re.compile(r"DefaultCPUAllocator|out of memory|CUBLAS_STATUS_ALLOC_FAILED")
WANTED = re.compile(r"allocate (\d[\d.]*) (bytes|[KMGT]iB)")
# Tensors that are shown by themselves, and the bytes below which nothing is worth a word.
NUM_SHOWN = 3
LEAST_BYTES = 1_000_000


@contextmanager
def explained(
    config: RunConfig,
    *,
    phase: Callable[[], str | None] = lambda: None,
    owners: Callable[[], Sequence[Owner]] = list,
    engine: Sleeper | None = None,
) -> Iterator[None]:
    """Within the block, an allocation that fails ends the run with a sentence that helps.

    Args:
        config: of the run.
        phase: asked for the one that failed; None is the set-up.
        owners: asked for those whose tensors have names.
        engine: this rank's, where it knows what it holds.

    Raises:
        RunStopped: memory could not be had.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        device = "cuda" if re.search("CUDA|CUBLAS", str(error)) else "cpu"
        held = {} if engine is None else engine.memory_bytes()
        text = sentence(error, phase() or "set-up", list(_named(owners(), device)), held, config)
        # What the step held is given back, since summary and report need memory too.
        traceback.clear_frames(error.__traceback__)
        raise RunStopped(text) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and REFUSED.search(str(error)) is not None


def sentence(
    error: BaseException,
    phase: str,
    tensors: Sequence[tuple[str, int]],
    engine: Mapping[str, int],
    config: RunConfig,
) -> str:
    """What happened, who holds how much, the largest tensors, and what to change.

    Args:
        error: that memory could not be had.
        phase: of the step.
        tensors: a name, or for others dtype and shape, and the bytes of each.
        engine: bytes by tag.
        config: of the run.
    """
    text = f"out of memory in phase {phase}"
    wanted = WANTED.search(str(error))
    if wanted:
        number, unit = wanted.groups()
        text += f", where {_size(int(number)) if unit == 'bytes' else f'{number} {unit}'} were asked for"
    held = Counter({f"the engine's {tag}": num_bytes for tag, num_bytes in engine.items()})
    for name, num_bytes in tensors:
        if name.startswith("the "):
            held[name.rpartition(" ")[0]] += num_bytes
    alike = Counter(tensors)
    largest = sorted(alike, key=lambda each: (-each[1], each[0]))[:NUM_SHOWN]
    for what, pairs in (("Held then", held.most_common()), ("Largest tensors", largest)):
        told = [
            f"{name} {_size(num_bytes)}" + f" ({alike[name, num_bytes]} such)" * (alike[name, num_bytes] > 1)
            for name, num_bytes in pairs
            if num_bytes >= LEAST_BYTES
        ]
        if told:
            text += f". {what}: {', '.join(told)}"
    return f"{text}. To go on, {_advice(phase, config)}"


def _named(owners: Sequence[Owner], device: str) -> Iterator[tuple[str, int]]:
    """Every storage on a kind of device that is alive: by name where somebody knows it, else by its shape."""
    everything = [named for owner in owners for named in held_tensors(owner)]
    # What a forward keeps for its backward is not among them: Python does not see it. What waits in a file
    # is, since its addresses are taken.
    others = (each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter))
    strided = [tensor for tensor in others if tensor.layout == torch.strided]
    # Of several views of one storage the widest says most.
    everything += [("", tensor) for tensor in sorted(strided, key=lambda tensor: -tensor.nbytes)]
    seen = set()
    for name, tensor in everything:
        storage = tensor.untyped_storage()
        if storage.device.type == device and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield name or f"{dtype} {list(tensor.shape)}", storage.nbytes()


def _advice(phase: str, config: RunConfig) -> str:
    """What to change, the likeliest first, with what it is now."""
    engine, mesh = config.engine, config.mesh
    lower = {}
    if phase == "train":
        lower["policy.tokens_per_micro_batch"] = config.policy.tokens_per_micro_batch
    if engine.cache_tokens is None:
        ways = ["set engine.cache_tokens"]
    else:
        ways, lower["engine.cache_tokens"] = [], engine.cache_tokens
    if phase in ("sample", "evaluate"):
        lower["engine.tokens_per_step"] = engine.tokens_per_step
        lower["engine.max_requests"] = engine.max_requests
    if lower:
        ways.insert(0, "lower " + ", ".join(f"{key} ({value})" for key, value in lower.items()))
    if not (engine.take_turns or engine.processes or config.flow.staleness):
        ways.append("set engine.take_turns")
    if phase == "train" and mesh.num_ranks > 1 and mesh.checkpointing != "full":
        ways.append("set mesh.checkpointing: full")
    ways.append(f"raise mesh.dp_shard ({mesh.dp_shard})")
    return f"{'; '.join(ways[:-1])}; or {ways[-1]}"


def _size(num_bytes: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 1e6:.1f} MB"
