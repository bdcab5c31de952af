"""Build an engine over a model, in this process or in a worker process.

A worker process loads a folder that `save_engine` wrote and receives its weights later.

Apart from `build`, only this file names engine classes.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from millrace.config.engine_section import EngineConfig
from millrace.data.tokenizers import load_tokenizer
from millrace.errors import SetupError
from millrace.inference.engine import PagedEngine
from millrace.inference.engine_trial import check_engine
from millrace.kernels.device_record import is_checked
from millrace.models.decoding import prepare
from millrace.models.facts import facts_of
from millrace.models.fused import set_deterministic
from millrace.models.load import Model
from millrace.models.logprobs import output_head
from millrace.models.routing import has_routers
from millrace.models.saving import load_shell, save_shell

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer

SETTINGS = "engine.json"
# Fraction of the free memory at build time; the trainer's gradients and activations need the rest.
SHARE = 0.25


def engine_over(
    options: EngineConfig,
    model: Model,
    tokenizer: Tokenizer,
    *,
    longest: int,
    record_experts: bool = False,
) -> PagedEngine:
    """Build an engine over a model from `models.load`; the engine owns the model from then on.

    Of a model sharded by tensor parallelism every rank of its group calls this, and builds its part.

    Args:
        options: the recipe's engine settings.
        model: the policy that generates.
        tokenizer: decodes completions to text.
        longest: length of the longest sequence (prompt and completion), in tokens.
        record_experts: whether completions record which experts their tokens were routed to.

    Raises:
        SetupError: an option is not supported on the model's device.
        ModelError: for this architecture, the paged engine's outputs differ from those of transformers.
    """
    model.requires_grad_(False)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    if options.cuda_graphs and model.device.type != "cuda":
        raise SetupError(
            f"engine.cuda_graphs needs a CUDA device, and the model is on {model.device}; remove it"
        )
    exact = output_head(model).tile is not None
    needs = "deterministic" if exact else "engine.cuda_graphs" if options.cuda_graphs else ""
    if needs and model.device.type == "cuda" and not is_checked("paged_attention", model.device):
        raise SetupError(
            f"{needs} needs millrace's attention kernel, which has not been checked on this GPU; run "
            "millrace doctor --gpu"
        )
    prepare(model)
    tokens = cache_tokens(options, model, longest)
    check_engine(model)
    return PagedEngine(
        model,
        decode,
        max_cache_tokens=tokens,
        block_size=options.block_size,
        max_batch_tokens=options.max_num_batched_tokens,
        max_requests=options.max_num_seqs,
        cuda_graphs=_uses_graphs(options, model),
        record_experts=record_experts,
    )


def _uses_graphs(options: EngineConfig, model: Model) -> bool:
    """Whether decode steps are replayed as CUDA graphs; by default for models tried on a GPU."""
    if options.cuda_graphs is not None:
        return options.cuda_graphs
    is_plain = facts_of(model).uniform is not None and not has_routers(model)
    return (
        model.device.type == "cuda"
        and output_head(model).tile is None
        and output_head(model).group is None
        and is_plain
        and is_checked("paged_attention", model.device)
    )


def save_engine(
    options: EngineConfig,
    model: Model,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    longest: int,
    deterministic: bool = False,
    record_experts: bool = False,
) -> None:
    """Save everything except the weights that another process needs to build the engine of a policy.

    Args:
        options: the recipe's engine settings.
        model: the policy, unsharded on this rank; the engine uses its dtype and device.
        tokenizer: the policy's tokenizer.
        folder: an existing folder.
        longest: length of the longest sequence (prompt and completion), in tokens.
        deterministic: whether results must be batch invariant, bit for bit.
        record_experts: see `engine_over`.
    """
    settings = {
        "options": options.model_dump(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "longest": longest,
        "deterministic": deterministic,
        "record_experts": record_experts,
    }
    (folder / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
    save_shell(model, folder)
    tokenizer.save_pretrained(folder)


def open_engine(folder: Path) -> PagedEngine:
    """Build the engine from a folder that `save_engine` wrote; its weights are random until the first load.

    Raises:
        ModelError, DataError, SetupError: the saved settings build no engine on this machine.
    """
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    model = load_shell(folder, dtype=getattr(torch, settings["dtype"])).to(settings["device"])
    if settings["deterministic"]:
        set_deterministic(model)
    options = EngineConfig(**settings["options"])
    return engine_over(
        options,
        model,
        load_tokenizer(folder),
        longest=settings["longest"],
        record_experts=settings["record_experts"],
    )


def cache_tokens(config: EngineConfig, model: Model, longest: int) -> int:
    """Compute the capacity of the KV cache in tokens.

    Args:
        config: the recipe's engine settings; a `cache_tokens` that is set there is returned unchanged.
        model: gives the bytes of keys and values per token, of a sharded model those on this rank.
        longest: length of the longest sequence (prompt and completion), in tokens.
    """
    if config.cache_tokens is not None:
        return config.cache_tokens
    token_bytes = facts_of(model).token_numbers * model.dtype.itemsize
    # The last block of a sequence may be almost empty.
    wanted = config.max_num_seqs * (longest + config.block_size)
    free_tokens = torch.tensor(int(SHARE * free_bytes(model.device)) // token_bytes, device=model.device)
    group = output_head(model).group
    if group is not None:
        # The ranks of one engine have equal caches, or their schedulers would plan different steps.
        dist.all_reduce(free_tokens, op=dist.ReduceOp.MIN, group=group)
    return max(longest + config.block_size, min(wanted, int(free_tokens)))


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    # Not every system reports free memory. A quarter of the total is a conservative estimate.
    names = os.sysconf_names
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in names else "SC_PHYS_PAGES"
    fraction = 1.0 if pages == "SC_AVPHYS_PAGES" else 0.25
    return int(fraction * os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE"))
