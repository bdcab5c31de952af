"""TRL's GRPOTrainer on the benchmark's task, in trl's environment: `trl_grpo.py THREADS [compile]`."""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from grpo_task import PROMPTS, SAMPLES, SHAPE, STEPS, SUMS, TOKENS, WARM, Parts, reward, tell
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def model_and_tokenizer() -> tuple[Any, Any]:
    """A fresh model of the benchmark's shape and a tokenizer of single letters."""
    letters = ["<eos>", "<pad>", *"0123456789+="]
    ids = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(letters), **SHAPE)), fast


def options(folder: str, compiled: bool) -> GRPOConfig:
    """TRL's defaults without gradient checkpointing, which costs time here and saves nothing."""
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        generation_kwargs={"min_new_tokens": TOKENS},
        max_steps=WARM + STEPS,
        learning_rate=1e-4,
        gradient_checkpointing=False,
        torch_compile=compiled,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
    )


def main() -> None:
    """Train and tell the seconds of each step and of its parts."""
    torch.set_num_threads(int(sys.argv[1]))
    parts = Parts()
    steps: list[tuple[float, dict[str, float]]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            parts.take()
            self.start = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            steps.append((time.perf_counter() - self.start, parts.take()))

    def by_letters(completions: list[str], **kwargs: object) -> list[float]:
        return [reward(text) for text in completions]

    model, tokenizer = model_and_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=by_letters,
            args=options(folder, "compile" in sys.argv),
            train_dataset=Dataset.from_list([{"prompt": f"{a}+{b}="} for a, b in SUMS]),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        for name, method in (("sample", "_generate"), ("score", "_generate_and_score_completions")):
            setattr(trainer, method, parts.around(name, getattr(trainer, method)))
        trainer.compute_loss = parts.around("forward", trainer.compute_loss)
        trainer.accelerator.backward = parts.around("backward", trainer.accelerator.backward)
        trainer.train()
    tell(steps[WARM:], ("trl", "torch", "transformers"))


if __name__ == "__main__":
    main()
