"""A policy update by TRL's GRPOTrainer, in trl's environment; with `compile`, compiled.

Its own loss, backward and optimizer, on a batch that is handed to it where it would sample one.
B = samples, P = longest prompt, C = longest completion.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from update import serve
from update_task import BETAS, CLIP, LEARNING_RATE, MAX_GRAD_NORM, SAMPLES, Sample, batch


def inputs(samples: list[Sample]) -> dict[str, Any]:
    """The samples as the trainer's own sampling gives them: prompts filled up on the left, the rest right."""
    prompts, drawn = [one.prompt for one in samples], [one.drawn for one in samples]
    return {
        "prompt_ids": _rectangle(prompts, left=True),
        "prompt_mask": _rectangle([[1] * len(row) for row in prompts], left=True),
        "completion_ids": _rectangle(drawn),
        "completion_mask": _rectangle([[1] * len(row) for row in drawn]),
        "old_per_token_logps": _rectangle([one.logprobs for one in samples]),
        "advantages": torch.tensor([one.advantage for one in samples]),
        "num_items_in_batch": torch.tensor(sum(map(len, drawn))),
    }


def _rectangle(rows: list[list[Any]], left: bool = False) -> Tensor:
    longest = max(map(len, rows))
    filled = [[0] * (longest - len(row)) for row in rows]
    return torch.tensor([f + r if left else r + f for r, f in zip(rows, filled, strict=True)])


def options(folder: str, num_samples: int, compiled: bool) -> GRPOConfig:
    """TRL's defaults without gradient checkpointing, and the numbers of the task."""
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=num_samples,
        num_generations=SAMPLES,
        epsilon=CLIP,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=MAX_GRAD_NORM,
        gradient_checkpointing=False,
        torch_compile=compiled,
        use_cpu=True,
        bf16=False,  # the model itself is in bfloat16 where asked for, as on the other sides
        report_to=[],
        disable_tqdm=True,
    )


class Trl:
    """What the trainer's loop does between sampling and the next batch."""

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        samples = batch()
        words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>"))
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)),
            reward_funcs=lambda completions, **rest: [0.0] * len(completions),
            args=options(tempfile.mkdtemp(), len(samples), "compile" in sys.argv),
            train_dataset=Dataset.from_list([{"prompt": "a"}] * len(samples)),
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=words, eos_token="<pad>", pad_token="<pad>"
            ),
        )
        given = inputs(samples)
        trainer._prepare_inputs = lambda _: given
        trainer.current_gradient_accumulation_steps = 1
        self._model, self._optimizer = trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())
        self._trainer = trainer

    def step(self) -> tuple[float, float]:
        """One step of the optimizer."""
        loss = self._trainer.training_step(self._model, {}, None)
        norm = self._trainer.accelerator.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._model.zero_grad()
        return loss.item(), norm.item()


if __name__ == "__main__":
    serve(Trl, ("trl", "torch", "transformers"))
