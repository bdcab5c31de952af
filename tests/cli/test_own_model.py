"""The recipe of six lines in README.md: a method, a model folder, chats and a graded reward function."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from millrace.config.recipe import load_recipe
from millrace.data.tokenizers import train_tokenizer
from millrace.models.load import fresh_config, fresh_model
from millrace.observability.files import read_json_lines
from tests.end_to_end.tiny import TREE
from tests.house.source import ROOT

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
REWARD = """def graded(prompt, completion, answer, row):
    return sum(letter in "0123456789" for letter in completion) / max(1, len(completion))
"""
SMALL = ["steps=2", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_tokens=8"]
SMALL += ["device=cpu", "threads=1", "loggers=[]"]


def six_lines(model: str, data: str) -> list[str]:
    """The recipe as the README has it, with another model and other data."""
    (text,) = re.findall(r"```yaml\n(base: grpo .*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    lines = text.replace("/models/Qwen2.5-0.5B-Instruct", model).replace("chats.jsonl", data).splitlines()
    assert len(lines) == 6
    return lines


def save_chat_model(folder: Path) -> None:
    """A Qwen3 of some thousand weights with a chat template."""
    tokenizer = train_tokenizer([], vocab_size=257, across_words=False)
    tokenizer.chat_template = TEMPLATE
    shape = TREE["model"]["shape"] | {"max_position_embeddings": 64}
    config = fresh_config("qwen3", shape, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    fresh_model(config, seed=3, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def own(lab):
    save_chat_model(lab.folder / "chat-model")
    chats = [{"prompt": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(8) for b in range(5)]
    lab.write("chats.jsonl", [json.dumps(row) for row in chats])
    lab.write("my_rewards.py", REWARD.splitlines())
    lab.write("mine.yaml", six_lines("chat-model", "chats.jsonl"))
    return lab


@pytest.mark.slow
def test_six_lines_train_report_and_serve_what_they_trained(own):
    result = own("train", "mine.yaml", *SMALL)
    assert (result.code, result.err) == (0, "")
    assert "prompts: 36 to train on, 4 held out" in result.out and "SFT" not in result.out
    run = own.folder / "runs" / "mine-1"
    records = read_json_lines(run / "metrics.jsonl")
    assert {record["stage"] for record in records} == {"reinforcement", "evaluation"}
    assert all(0 < record["reward/mean"] < 1 for record in records if record["stage"] == "reinforcement")
    assert "my_rewards:graded" in (run / "report.html").read_text(encoding="utf-8")
    # A prompt that comes without a row gets the template of the rows.
    assert load_recipe(run / "recipe.yaml").data.template == "chat"
    saved = run / "checkpoints" / "step-000002" / "model"
    before, after = (load_file(folder / "model.safetensors") for folder in (own.folder / "chat-model", saved))
    moved = max(float((before[name] - after[name]).abs().max()) for name in before)
    assert 1e-7 < moved < 1e-5  # two steps at 1e-6

    server = own.start("serve", str(run), "--port", "0", "--token", "asks", "--checkpoint", "last")
    try:
        url = server.stdout.readline().split()[3].removesuffix("/v1")
        ask = {"messages": [{"role": "user", "content": "1+2="}], "temperature": 0, "max_tokens": 8}
        headers = {"Authorization": "Bearer asks"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=ask, headers=headers, timeout=60).json()
        told = own("generate", str(run), "1+2=", "--checkpoint", "last")
        assert answer["choices"][0]["message"]["content"].strip() == told.out.strip() != ""
        assert answer["usage"]["prompt_tokens"] == len("u:1+2=\na:")
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)


@pytest.mark.world
def test_supervised_training_of_the_same_model_needs_data_alone(own):
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(8) for b in range(5)]
    own.write("shown.jsonl", [json.dumps(row) for row in rows])
    own.write("mine.yaml", ["base: supervised", "model: {path: chat-model}", "data: {train: shown.jsonl}"])
    result = own("train", "mine.yaml", "sft.steps=2", "rollout.max_tokens=8", *SMALL[4:])
    assert (result.code, result.err) == (0, "")
    assert "after step 2 of SFT" in result.out


@pytest.mark.world
def test_steps_0_trains_sft_of_a_recipe_alone(own):
    words = ["steps=0", "sft.steps=2", "advantage={kind: gae}", "critic={}"]
    result = own.train(*words, "policy.loss_aggregation=fixed_length", "policy.kl.coefficient=0.1")
    assert (result.code, result.err) == (0, "")
    assert "after step 2 of SFT" in result.out
    records = read_json_lines(own.folder / "runs" / "tiny-1" / "metrics.jsonl")
    assert {record["stage"] for record in records} == {"sft", "evaluation"}
