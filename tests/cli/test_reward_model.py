"""A reward model from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from millrace.models.heads import load_scalar_model
from tests.cli.lab import Lab
from tests.cli.preferences import language_model, pair_lines


@pytest.fixture
def pairs(lab: Lab) -> Lab:
    language_model("mine")
    lab.write("pairs.jsonl", pair_lines())
    return lab


@pytest.mark.slow
def test_it_prints_the_held_out_accuracy_before_and_after_and_writes_the_folder(pairs):
    words = ["--steps", "20", "--learning-rate", "1e-2", "--pairs-per-step", "16"]
    result = pairs("reward-model", "pairs.jsonl", "--model", "mine", "--output", "judges/new one", *words)
    first, *steps, accuracy, place = result.out.splitlines()
    assert (result.code, result.err) == (0, "")
    assert first == "72 pairs to train on, 8 held out; 20 steps"
    assert [line.split("  ")[0] for line in steps] == [f"step {number}/20" for number in range(2, 21, 2)]
    found = re.fullmatch(r"held-out accuracy 0\.500 -> (\d\.\d{3}) on 8 pairs, after 20 steps", accuracy)
    assert found and float(found[1]) == 1.0
    assert place == "reward model: 'judges/new one'"
    files = {path.name for path in Path("judges/new one").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    assert load_scalar_model("judges/new one", dtype=torch.float32).config.num_labels == 1


@pytest.mark.slow
def test_the_seed_decides_what_is_held_out_and_the_same_one_repeats_the_weights(pairs):
    written = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        words = ["--seed", seed, "--steps", "1", "--learning-rate", "1e-2"]
        assert pairs("reward-model", "pairs.jsonl", "--model", "mine", "--output", name, *words).code == 0
        written.append(Path(name, "model.safetensors").read_bytes())
    assert written[0] == written[1] != written[2]


def test_without_options_the_pairs_are_gone_through_once_and_cautiously(pairs):
    result = pairs("reward-model", "pairs.jsonl", "--model", "mine", "--output", "made")
    assert result.out.splitlines()[0] == "72 pairs to train on, 8 held out; 3 steps"
    head_1D = load_scalar_model("made", dtype=torch.float32).score.weight.detach()
    # Three steps of AdamW, at 1, 0.7 and 0.4 times 1e-5, move a weight by at most their sum.
    assert 0 < float(head_1D.abs().max()) <= 2.2e-5


def test_a_language_model_is_needed(pairs):
    result = pairs("reward-model", "pairs.jsonl", "--output", "made")
    assert result.code == 2
    assert "Missing option '--model'" in result.err


def test_a_column_may_stand_beside_the_three(pairs):
    pairs.write("pairs.jsonl", [json.dumps(json.loads(line) | {"by": "me"}) for line in pair_lines()])
    result = pairs("reward-model", "pairs.jsonl", "--model", "mine", "--output", "made", "--steps", "1")
    assert result.code == 0
