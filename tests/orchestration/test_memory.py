from __future__ import annotations

import pytest
import torch

from millrace.config.engine import EngineConfig
from millrace.orchestration import memory
from tests.models.tiny import tiny_model

# Two layers, two key heads of width 8, keys and values, float32.
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4


def test_the_cache_holds_what_the_requests_can_need_and_no_more():
    config = EngineConfig(max_requests=10, block_size=4)
    assert memory.cache_tokens(config, tiny_model("llama"), 50) == 10 * 54


@pytest.mark.parametrize(("free", "tokens"), [(TOKEN_BYTES * 4 * 100, 100), (TOKEN_BYTES * 4 * 3, 54)])
def test_where_memory_is_short_it_takes_a_quarter_of_it_but_always_one_sequence(monkeypatch, free, tokens):
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    config = EngineConfig(max_requests=10, block_size=4)
    assert memory.cache_tokens(config, tiny_model("llama"), 50) == tokens


def test_what_the_recipe_says_is_taken_as_it_is():
    assert memory.cache_tokens(EngineConfig(cache_tokens=77), tiny_model("llama"), 50) == 77


def test_some_memory_is_free():
    assert 1 << 20 < memory.free_bytes(torch.device("cpu")) < 1 << 50
