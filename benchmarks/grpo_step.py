"""One GRPO step on a tiny model: millrace against TRL's GRPOTrainer, in one run on one machine.

    python benchmarks/grpo_step.py                              # millrace alone
    python benchmarks/grpo_step.py --rival path/to/python       # a Python that has TRL installed, too

Both train the same shape (Qwen3, 0.80 M parameters, 16 prompts `a+b=` x 8 samples, 8 tokens each, float32)
from random weights. A step is sampling, scoring, loss and update. TRL runs without gradient checkpointing,
its faster setting here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
PROMPTS, SAMPLES, TOKENS, WARM, STEPS = 16, 8, 8, 5, 30
SUMS = [(a, b) for a in range(40) for b in range(40)]
REWARD = '"""The same arithmetic as on the other side."""\n\n\n' + (
    "def by_letters(prompt, completion, answer, row):\n    return float(sum(map(ord, completion)) % 7)\n"
)


def millrace_parts(threads: int) -> tuple[Any, Any]:
    """The configuration and parts of a run in the current folder."""
    from millrace.config.recipe import validate
    from millrace.orchestration.build import build

    rows = [json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) for a, b in SUMS]
    Path("sums.jsonl").write_text("\n".join(rows), encoding="utf-8")
    Path("benchmark_reward.py").write_text(REWARD, encoding="utf-8")
    config = validate(
        {
            "steps": WARM + STEPS,
            "threads": threads,
            "data": {"train": "sums.jsonl"},
            "tokenizer": {"alphabet": "seen", "vocab_size": 32},
            "model": {"shape": SHAPE},
            "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "max_tokens": TOKENS},
            "rewards": [{"kind": "function", "function": "benchmark_reward:by_letters"}],
            "policy": {"optimizer": {"learning_rate": 1e-4}},
        },
        "benchmark",
    )
    return config, build(config, None)


def millrace_steps(threads: int) -> Iterator[float]:
    """Seconds of each step."""
    from millrace.data.prompts import PromptStream
    from millrace.observability.metrics import Spans
    from millrace.orchestration.learn import Learner, train_on
    from millrace.orchestration.step import Sampled, sample_and_score, sampling

    config, parts = millrace_parts(threads)
    trainer = parts.reinforcer(0, None, None)
    learner = Learner(trainer, parts.method)
    stream = PromptStream(parts.train_prompts, seed=0, shuffle=True)
    # No stop token: every completion has full length, as on the other side.
    params, spans = sampling(config.rollout, ()), Spans()
    for step in range(WARM + STEPS):
        start = time.perf_counter()
        prompts = stream.next(PROMPTS)
        groups = sample_and_score(parts, prompts, params, num_samples=SAMPLES, seed=(0, step), spans=spans)
        train_on(learner, Sampled(groups), seed=0, step=step)
        parts.transport.send(trainer.named_tensors(), trainer.version)
        yield time.perf_counter() - start
    parts.reward.close()


def trl_model() -> tuple[Any, Any]:
    """A model of the same shape and a tokenizer of single letters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    letters = ["<eos>", "<pad>", *"0123456789+="]
    ids = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(letters), **SHAPE)), fast


def trl_steps(threads: int) -> Iterator[float]:
    """Seconds of each step of TRL's GRPOTrainer. Runs in the rival's Python."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            seconds.append(time.perf_counter() - self.start)

    def by_letters(completions: list[str], **kwargs: object) -> list[float]:
        return [float(sum(map(ord, text)) % 7) for text in completions]

    options = GRPOConfig(
        output_dir="trl",
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        generation_kwargs={"min_new_tokens": TOKENS},
        max_steps=WARM + STEPS,
        learning_rate=1e-4,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
    )
    model, tokenizer = trl_model()
    GRPOTrainer(
        model=model,
        reward_funcs=by_letters,
        args=options,
        train_dataset=Dataset.from_list([{"prompt": f"{a}+{b}="} for a, b in SUMS]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    ).train()
    yield from seconds


def run_side(side: str, python: str, threads: int) -> dict[str, Any]:
    """Measure one side in a process of its own."""
    words = [python, str(Path(__file__).resolve()), "--side", side, "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{side} did not run:\n{done.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return told


def tell(side: str, threads: int) -> None:
    """Measure in this process and print the result for `run_side`."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        seconds = list(millrace_steps(threads) if side == "millrace" else trl_steps(threads))[WARM:]
        os.chdir("/")
    versions = {name: metadata.version(name) for name in ("torch", "transformers", side)}
    print("RESULT " + json.dumps({"seconds": seconds, "versions": versions}))


def processor() -> str:
    """The processor's own name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    """Measure, print, and write results/grpo_step.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rival", help="a Python interpreter that has trl installed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", choices=["millrace", "trl"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        tell(given.side, given.threads)
        return
    sides = {"millrace": sys.executable} | ({"trl": given.rival} if given.rival else {})
    machine = f"{processor()}, {given.threads} of {os.cpu_count()} cores, shared"
    result: dict[str, Any] = {"benchmark": "grpo_step", "date": date.today().isoformat(), "machine": machine}
    medians: dict[str, list[float]] = {side: [] for side in sides}
    # Turn by turn, so that a busy minute of the machine hits both sides.
    for side in list(sides) * 3:
        told = run_side(side, sides[side], given.threads)
        medians[side].append(statistics.median(told["seconds"]))
        result[f"{side}_versions"] = told["versions"]
    for side, seconds in medians.items():
        result[f"{side}_step_s"] = statistics.median(seconds)
        result[f"{side}_runs_s"] = seconds
        runs = ", ".join(f"{one * 1000:.1f}" for one in seconds)
        print(f"{side:10s} {statistics.median(seconds) * 1000:7.1f} ms a step (runs: {runs})")
    if "trl" in medians:
        result["ratio_trl_over_millrace"] = result["trl_step_s"] / result["millrace_step_s"]
        print(f"millrace is {result['ratio_trl_over_millrace']:.1f} times as fast")
    target = Path(__file__).parent / "results" / "grpo_step.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
