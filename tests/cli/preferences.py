"""A language model of a few thousand weights and pairs that a reward model learns from in a second."""

from __future__ import annotations

import json

import torch

from millrace.data.tokenizers import train_tokenizer
from millrace.models.load import fresh_config, fresh_model, save_model
from tests.training.pieces import SHAPE


def language_model(folder: str) -> None:
    """Spells bytes, reads 64 of them."""
    tokenizer = train_tokenizer([], vocab_size=257, across_words=False)
    config = fresh_config("qwen3", SHAPE, vocab_size=257, eos_token_id=tokenizer.eos_token_id)
    save_model(fresh_model(config, seed=0, dtype=torch.float32), folder)
    tokenizer.save_pretrained(folder)


def pair_lines() -> list[str]:
    """Eighty questions; the polite answer is preferred."""
    return [
        json.dumps({"prompt": f"{a}+{b}=", "chosen": f"{a + b}, please", "rejected": f"{a + b}, so what"})
        for a in range(10)
        for b in range(8)
    ]
