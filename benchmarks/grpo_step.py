"""One GRPO step on a tiny model: millrace against TRL's GRPOTrainer, in one run on one machine.

    python benchmarks/grpo_step.py                              # millrace alone
    python benchmarks/grpo_step.py --rival path/to/python       # a Python that has TRL installed, too

Both train the same shape (Qwen3, 0.80 M parameters, 16 prompts `a+b=` x 8 samples, at most 8 tokens, float32,
one thread, completions of full length) from random weights. The step is sampling, scoring, loss and update.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from importlib import metadata
from pathlib import Path

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


def measure_millrace(threads: int) -> list[float]:
    """Seconds of each step."""
    import tempfile

    from millrace.config.recipe import validate
    from millrace.data.prompts import PromptStream
    from millrace.observability.metrics import Spans
    from millrace.orchestration.build import build
    from millrace.orchestration.step import sample_and_score, sampling, train_on

    with tempfile.TemporaryDirectory() as folder:
        rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(40) for b in range(40)]
        data = Path(folder) / "sums.jsonl"
        data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        config = validate(
            {
                "steps": WARM + STEPS,
                "threads": threads,
                "data": {"train": str(data)},
                "model": {"shape": SHAPE},
                "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "max_tokens": TOKENS},
                "rewards": [{"kind": "function", "function": "grpo_step_reward:by_length"}],
                "policy": {"optimizer": {"learning_rate": 1e-4}},
            },
            "benchmark",
        )
        (Path(folder) / "grpo_step_reward.py").write_text(
            "def by_length(prompt, completion, answer, row):\n    return float(sum(map(ord, completion)) % 7)\n",
            encoding="utf-8",
        )
        os.chdir(folder)
        parts = build(config, None)
        trainer = parts.reinforcer(0)
        stream = PromptStream(parts.train_prompts, seed=0, shuffle=True)
        # No stop token: every completion has full length, as on the other side.
        params, seconds = sampling(config.rollout, ()), []
        for step in range(WARM + STEPS):
            start = time.perf_counter()
            groups = sample_and_score(
                parts, stream.next(PROMPTS), params, num_samples=SAMPLES, seed=(0, step), spans=Spans()
            )
            train_on(trainer, parts, None, groups, divide_by_std=True, num_parts=1, step=step)
            parts.transport.send(trainer.named_tensors(), trainer.version)
            seconds.append(time.perf_counter() - start)
        parts.reward.close()
    return seconds[WARM:]


def measure_trl(threads: int) -> list[float]:
    """Seconds of each step of TRL's GRPOTrainer, gradient checkpointing off. Runs in the rival's Python."""
    import tempfile

    import torch
    from datasets import Dataset
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    letters = [
        "<eos>",
        "<pad>",
        *"0123456789+=",
        *(chr(97 + i) for i in range(26)),
        *(chr(65 + i) for i in range(16)),
    ]
    tokenizer = Tokenizer(
        models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(letters), **SHAPE))
    rows = Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(40) for b in range(40)])
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            seconds.append(time.perf_counter() - self.start)

    def reward(completions: list[str], **kwargs: object) -> list[float]:
        return [float(sum(map(ord, text)) % 7) for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        options = GRPOConfig(
            output_dir=folder,
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
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=options,
            train_dataset=rows,
            processing_class=fast,
            callbacks=[Clock()],
        )
        trainer.train()
    return seconds[WARM:]


def main() -> None:
    """Measure, print, and write results/grpo_step.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rival", help="a Python interpreter that has trl installed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", choices=["millrace", "trl"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        seconds = measure_millrace(given.threads) if given.side == "millrace" else measure_trl(given.threads)
        versions = {name: metadata.version(name) for name in ("torch", "transformers", given.side)}
        print("RESULT " + json.dumps({"seconds": seconds, "versions": versions}))
        return
    sides = {"millrace": sys.executable} | ({"trl": given.rival} if given.rival else {})
    result: dict[str, object] = {
        "benchmark": "grpo_step",
        "date": date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {given.threads} thread(s)",
        "python": platform.python_version(),
    }
    medians = {}
    # Turn by turn, so that a busy minute of the machine hits both sides.
    for side in list(sides) * 3:
        words = [sides[side], str(Path(__file__).resolve()), "--side", side, "--threads", str(given.threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(given.threads), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=600)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise SystemExit(f"{side} did not run:\n{done.stderr[-2000:]}")
        told = json.loads(lines[0].removeprefix("RESULT "))
        medians.setdefault(side, []).append(statistics.median(told["seconds"]))
        result[f"{side}_versions"] = told["versions"]
    for side, seconds in medians.items():
        result[f"{side}_step_s"] = statistics.median(seconds)
        result[f"{side}_runs_s"] = seconds
        print(f"{side:10s} {statistics.median(seconds) * 1000:7.1f} ms a step (runs: {seconds})")
    if "trl" in medians:
        ratio = statistics.median(medians["trl"]) / statistics.median(medians["millrace"])
        result["ratio_trl_over_millrace"] = ratio
        print(f"millrace is {ratio:.1f} times as fast")
    target = Path(__file__).parent / "results" / "grpo_step.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
