"""An engine over a model: in this process, or in another one that is given a folder and, later, weights.

Beside `build`, the only file that names classes of engines.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from millrace.config.engine import EngineConfig
from millrace.data.tokenizers import load_tokenizer
from millrace.errors import SetupError
from millrace.inference.engine import PagedEngine
from millrace.inference.trial import check_engine
from millrace.models.decoding import prepare
from millrace.models.facts import facts_of
from millrace.models.fused import set_deterministic
from millrace.models.load import Model
from millrace.models.shells import load_shell, save_shell

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer

SETTINGS = "engine.json"
# Of the memory that is free when the engine is built; the trainer's gradients and activations need the rest.
SHARE = 0.25


def engine_over(
    options: EngineConfig,
    model: Model,
    tokenizer: Tokenizer,
    *,
    longest: int,
    record_experts: bool = False,
) -> PagedEngine:
    """A sampler over a model from `models.load`, which it owns from now on.

    Args:
        options: of the recipe.
        model: holds the weights that draw.
        tokenizer: turns tokens into text.
        longest: tokens of the longest sequence.
        record_experts: whether completions tell which experts their tokens went to.

    Raises:
        SetupError: an option does not go with the model's device.
        ModelError: the paged engine does not compute what transformers does with such a model.
    """
    model.requires_grad_(False)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    if options.cuda_graphs and model.device.type != "cuda":
        raise SetupError(
            f"engine.cuda_graphs needs a CUDA device, and the model is on {model.device}; remove it"
        )
    prepare(model)
    tokens = cache_tokens(options, model, longest)
    check_engine(model)
    return PagedEngine(
        model,
        decode,
        max_cache_tokens=tokens,
        block_size=options.block_size,
        max_batch_tokens=options.tokens_per_step,
        max_requests=options.max_requests,
        cuda_graphs=options.cuda_graphs,
        record_experts=record_experts,
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
    """Write what another process needs to make the engine of a policy, all but weights.

    Args:
        options: of the recipe.
        model: the policy, whole on this rank; the engine gets its dtype and device.
        tokenizer: of its tokens.
        folder: there already.
        longest: tokens of the longest sequence.
        deterministic: whether a row's bits must not depend on its batch.
        record_experts: as `engine_over` takes it.
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
    """The engine of a folder that `save_engine` wrote; its weights are random until it loads some.

    Raises:
        ModelError, DataError, SetupError: what was saved makes no engine on this machine.
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
    """Tokens whose keys and values are kept.

    Args:
        config: the recipe's engine; its `cache_tokens` is taken as it is.
        model: whose keys and values they are.
        longest: tokens of the longest sequence.
    """
    if config.cache_tokens is not None:
        return config.cache_tokens
    token_bytes = facts_of(model).token_numbers * model.dtype.itemsize
    # A sequence's last block may be almost empty.
    wanted = config.max_requests * (longest + config.block_size)
    return max(longest + config.block_size, min(wanted, int(SHARE * free_bytes(model.device)) // token_bytes))


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    # Not every system says what is free; a quarter of what there is, is a careful guess.
    names = os.sysconf_names
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in names else "SC_PHYS_PAGES"
    share = 1.0 if pages == "SC_AVPHYS_PAGES" else 0.25
    return int(share * os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE"))
