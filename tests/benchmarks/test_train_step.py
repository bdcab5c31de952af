"""What the benchmark of a policy update hands out and compares; nothing here looks at a clock."""

from __future__ import annotations

import math
import sys
import time

import pytest
import torch
import train_step
from peers import products, update_task
from peers.workloads import SHAPES
from torch import Tensor

from millrace.models.load import fresh_config, fresh_model, save_model
from tests.close import close_bf16, close_fp32, close_fp64
from tests.house.source import ROOT

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}


def test_the_longest_sample_has_four_times_the_mean():
    samples = update_task.batch()
    lengths = [len(sample.tokens) for sample in samples]
    assert (len(samples), sum(lengths), max(lengths)) == (16, 1042, 256)
    assert 3.8 < max(lengths) * len(lengths) / sum(lengths) < 4.2
    assert [len({tuple(one.prompt) for one in samples[at : at + 8]}) for at in (0, 8)] == [1, 1]
    assert len({tuple(one.prompt) for one in samples}) == 2
    assert all(len(one.drawn) == len(one.logprobs) for one in samples)
    assert max(max(one.tokens) for one in samples) < update_task.VOCAB_SIZE
    assert SHAPES[update_task.SHAPE]["vocab_size"] == update_task.VOCAB_SIZE


@pytest.mark.slow
@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_loops_make_the_same_two_updates_as_ours(layout, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    import update_hugging_face
    import update_ours

    config = fresh_config("qwen3", SMALL, vocab_size=update_task.VOCAB_SIZE, eos_token_id=0)
    save_model(fresh_model(config, seed=0, dtype=torch.float32), tmp_path / "model")
    monkeypatch.setattr(sys, "argv", ["", "", "", "", layout])
    threads = torch.get_num_threads()
    sides = [
        side(str(tmp_path / "model"), "float32", threads)
        for side in (update_ours.Ours, update_hugging_face.Loop)
    ]
    for _ in range(2):
        ours, theirs = (side.step() for side in sides)
        assert ours[1] > 0.1
        close_fp32(torch.tensor(ours), torch.tensor(theirs))


def test_the_floor_is_of_the_tokens_that_have_to_be_computed(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    import update_ours

    config = fresh_config("qwen3", SMALL, vocab_size=update_task.VOCAB_SIZE, eos_token_id=0)
    save_model(fresh_model(config, seed=0, dtype=torch.float32), tmp_path / "model")
    rows: dict[tuple[int, ...], set[int]] = {}
    monkeypatch.setattr(
        update_ours, "_products", lambda w, n: rows.setdefault(tuple(w.shape), set()).add(n) or []
    )
    update_ours.Products(str(tmp_path / "model"), "float32", torch.get_num_threads())
    samples = update_task.batch()
    head = rows.pop((update_task.VOCAB_SIZE, 32))
    assert head == {sum(len(one.drawn) for one in samples)}
    # Of two groups of eight, each prompt is there once but for samples that it is little of.
    begun = {tuple(one.tokens[:at]) for one in samples for at in range(1, len(one.tokens) + 1)}
    (tokens,) = set.union(*rows.values())
    assert len(rows) == 4 and len(begun) <= tokens < 1042 - 6 * sum({len(one.prompt) for one in samples})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whatever_is_quickest_gives_the_product(dtype, monkeypatch):
    x_MD, weight_ND = torch.randn(5, 7).to(dtype), torch.randn(7, 3).to(dtype).T
    tried: list[Tensor] = []

    def all_of(calls):
        tried.extend(call() for call in calls)
        return calls[0]

    monkeypatch.setattr(products, "quickest", all_of)
    products.product(x_MD, weight_ND)
    assert len(tried) == (1 if dtype == torch.bfloat16 and not products.has_bf16() else 2)
    for found in tried:
        close_bf16(found, x_MD.double() @ weight_ND.double().T)


@pytest.mark.world
def test_the_quickest_call_is_taken():
    assert products.quickest([lambda: time.sleep(0.02), print]) is print


def test_sides_that_do_not_agree_are_not_compared():
    ours = {"loss": 0.01, "norm": 2.0}
    told = {"millrace": ours, "products": {"loss": math.nan, "norm": math.nan}}
    train_step.check_agreement(told | {"trl": {"loss": 0.0105, "norm": 2.001}}, "float32")
    for other in ({"loss": 0.02, "norm": 2.0}, {"loss": 0.01, "norm": 2.01}, {"loss": math.nan, "norm": 2.0}):
        with pytest.raises(SystemExit, match="trl has"):
            train_step.check_agreement(told | {"trl": other}, "float32")
    train_step.check_agreement(told | {"trl": {"loss": 0.02, "norm": 2.01}}, "bfloat16")


def test_rates_are_of_the_median_step():
    def turn(ours, products, padded):
        seconds = {"millrace": ours, "products": products, "padded": padded}
        return {name: {"seconds": one, "peak_bytes": 7} for name, one in seconds.items()}

    found = train_step.result([turn(2.0, 1.0, 8.0), turn(9.0, 1.0, 6.0), turn(1.0, 1.0, 1.0)], 100)
    assert found["tokens_per_s"] == {"millrace": 50.0, "products": 100.0, "padded": 100 / 6}
    assert list(found["ratios"]) == ["padded"]
    close_fp64([found["ratios"]["padded"], found["fraction_of_products"]], [3.0, 0.5])
    assert found["runs_s"]["millrace"] == [2.0, 9.0, 1.0]
