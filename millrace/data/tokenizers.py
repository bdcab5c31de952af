"""Tokenizers: loaded from a folder, or trained on the data for a fresh model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from millrace.data.rows import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    # The one name by which other packages call a transformers tokenizer.
    Tokenizer = PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "<|unknown|>"
SMALLEST_VOCABULARY = 257  # every byte, and the end of text
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Nothing is downloaded, and no code from the folder runs.

    Raises DataError if there is no such folder, no tokenizer in it loads, or it has no end-of-text token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"tokenizer folder {folder} does not exist; download the model and give its folder")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise DataError(
            f"folder {folder} holds no tokenizer ({', '.join(TOKENIZER_FILES)}); copy its files there"
        )
    # AutoTokenizer goes by the model type beside the tokenizer and for some types (qwen2) builds another
    # split of words than the one saved.
    kind: Any = PreTrainedTokenizerFast if _is_plain(folder) else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        # Some settings of a wrong type show only here.
        tokenizer("a", verbose=False)
    except Exception as error:
        # The parsers below raise bare Exception among others.
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {reason}"
        ) from error
    # These options describe how it was loaded, and are removed so that saved files do not depend on it.
    for name in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer in {folder} has no end-of-text token, so no completion could end; "
            "set eos_token in its tokenizer_config.json"
        )
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, across_words: bool, alphabet: Literal["bytes", "seen"] = "bytes"
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text comes back unchanged, and every digit is a token of its own.

    The same texts give the same tokenizer, with `<|endoftext|>` as both its end-of-text and its padding
    token, and fewer than `vocab_size` entries where they have fewer pairs that occur twice. `across_words`
    lets an entry span white space (never a digit), so that templated prompts become short. The alphabet
    `bytes` spells any text; `seen` only what occurs in the texts, and has `<|unknown|>` for the rest. Each
    entry that never occurs costs a tiny model: its row must be learned away. DataError if `vocab_size` has no
    room for the alphabet and the end of text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if alphabet == "bytes" and vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"tokenizer.vocab_size is {vocab_size}; the 256 bytes and {END_OF_TEXT} need at least "
            f"{SMALLEST_VOCABULARY}; raise it, or set tokenizer.alphabet: seen"
        )
    unknown = UNKNOWN if alphabet == "seen" else None
    # The stubs of this library leave its constructors untyped.
    backend: Any = Tokenizer(models.BPE(unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not across_words),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT, *([unknown] if unknown else [])],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet == "bytes" else [],
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() > vocab_size:
        raise DataError(
            f"tokenizer.vocab_size is {vocab_size}; the characters of the data alone need "
            f"{backend.get_vocab_size()}"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
    )


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config_eos: int | Sequence[int] | None = None
) -> tuple[int, ...]:
    """The tokens that end a completion: the tokenizer's end of text, then those of the model's config."""
    more = [generation_config_eos] if isinstance(generation_config_eos, int) else generation_config_eos or ()
    return tuple(dict.fromkeys([int(tokenizer.eos_token_id), *more]))


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size_of_model: int) -> None:
    """Raise DataError, with both numbers, for a tokenizer with ids the model has no embedding for."""
    most = max(tokenizer.get_vocab().values())
    if most >= vocab_size_of_model:
        raise DataError(
            f"the tokenizer has ids up to {most}, but the model's vocabulary holds {vocab_size_of_model}; "
            "set tokenizer.path to the tokenizer the model was made with (null takes the one in model.path)"
        )


def _is_plain(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    if not config.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"the tokenizer in {folder} cannot be loaded: {config.name} is not JSON: {error}"
        ) from error
    declared = settings.get("tokenizer_class") if isinstance(settings, dict) else None
    return declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
