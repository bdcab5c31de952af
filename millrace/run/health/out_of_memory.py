"""Out-of-memory errors: the phase, the largest allocations, and the settings to lower."""

from __future__ import annotations

import gc
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from millrace.config.engine_section import EngineConfig
from millrace.config.mesh_section import MeshConfig
from millrace.run.components import SleepableEngine
from millrace.run.health.health_checks import RunStopped
from millrace.training.offload import Owner, held_tensors

# Messages of errors without a type of their own: torch's CPU allocator and CUDA's libraries.
REFUSED = re.compile(r"DefaultCPUAllocator|out of memory|CUBLAS_STATUS_ALLOC_FAILED")
WANTED = re.compile(r"allocate (\d[\d.]*) (bytes|[KMGT]iB)")
# Number of tensors listed one by one, and the least bytes worth a mention.
NUM_SHOWN = 3
LEAST_BYTES = 1_000_000


@contextmanager
def explained(
    advise: Callable[[str], str],
    *,
    phase: Callable[[], str | None] = lambda: None,
    owners: Callable[[], Sequence[Owner]] = list,
    engine: SleepableEngine | None = None,
) -> Iterator[None]:
    """Turn a failed allocation within the block into a `RunStopped` with advice.

    Args:
        advise: returns the settings to change after a failure in a phase; see `advice`.
        phase: returns the current phase; None is the set-up.
        owners: returns the owners of named tensors.
        engine: of this rank, where it can report its memory.

    Raises:
        RunStopped: an allocation failed.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        device = "cuda" if re.search("CUDA|CUBLAS", str(error)) else "cpu"
        held = {} if engine is None else engine.memory_bytes()
        failed = phase() or "set-up"
        text = sentence(error, failed, list(_named(owners(), device)), held, advise(failed))
        # The frames hold the step's tensors; summary and report need memory too.
        traceback.clear_frames(error.__traceback__)
        raise RunStopped(text) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and REFUSED.search(str(error)) is not None


def sentence(
    error: BaseException,
    phase: str,
    tensors: Sequence[tuple[str, int]],
    engine: Mapping[str, int],
    to_change: str,
) -> str:
    """Describe the failure: usage by owner, the largest tensors, and the settings to change.

    Args:
        error: of the failed allocation.
        phase: of the step.
        tensors: name (or dtype and shape) and bytes of each.
        engine: bytes by tag.
        to_change: what `advice` returns.
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
        entries = [
            f"{name} {_size(num_bytes)}" + f" ({alike[name, num_bytes]} such)" * (alike[name, num_bytes] > 1)
            for name, num_bytes in pairs
            if num_bytes >= LEAST_BYTES
        ]
        if entries:
            text += f". {what}: {', '.join(entries)}"
    return f"{text}. To go on, {to_change}"


def _named(owners: Sequence[Owner], device: str) -> Iterator[tuple[str, int]]:
    """All live storages on a device type: by name where an owner has one, else by dtype and shape."""
    everything = [named for owner in owners for named in held_tensors(owner)]
    # Tensors saved for backward are missing, since Python does not see them. Tensors offloaded to a file are
    # included, since they keep their addresses.
    others = (each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter))
    strided = [tensor for tensor in others if tensor.layout == torch.strided]
    # Of several views of one storage, the widest is the most informative.
    everything += [("", tensor) for tensor in sorted(strided, key=lambda tensor: -tensor.nbytes)]
    seen = set()
    for name, tensor in everything:
        storage = tensor.untyped_storage()
        if storage.device.type == device and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield name or f"{dtype} {list(tensor.shape)}", storage.nbytes()


def advice(
    phase: str, *, engine: EngineConfig, mesh: MeshConfig, tokens_per_micro_batch: int, max_staleness: int
) -> str:
    """Return the settings to lower, the likeliest first, with their values.

    Args:
        phase: in which an allocation failed.
        engine: section of the recipe.
        mesh: section of the recipe.
        tokens_per_micro_batch: of the recipe.
        max_staleness: of the recipe.
    """
    lower = {}
    if phase == "train":
        lower["policy.tokens_per_micro_batch"] = tokens_per_micro_batch
    if engine.cache_tokens is None:
        ways = ["set engine.cache_tokens"]
    else:
        ways, lower["engine.cache_tokens"] = [], engine.cache_tokens
    if phase in ("sample", "evaluate"):
        lower["engine.max_num_batched_tokens"] = engine.max_num_batched_tokens
        lower["engine.max_num_seqs"] = engine.max_num_seqs
    if lower:
        ways.insert(0, "lower " + ", ".join(f"{key} ({value})" for key, value in lower.items()))
    if not (engine.colocated or engine.num_engines or max_staleness):
        ways.append("set engine.colocated")
    if phase == "train" and mesh.activation_checkpointing != "full":
        ways.append("set mesh.activation_checkpointing: full")
    ways.append(f"raise mesh.dp_shard ({mesh.dp_shard})")
    return f"{'; '.join(ways[:-1])}; or {ways[-1]}"


def _size(num_bytes: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 1e6:.1f} MB"
