"""A reward model from preference pairs: the Bradley-Terry loss, AdamW, and a count of the held-out pairs.

N = pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.config.recipe import ConfigError
from millrace.data.preference_pairs import Pair, hold_out, read_pairs
from millrace.data.rows import DataError
from millrace.data.tokenizers import load_tokenizer
from millrace.errors import CheckpointError
from millrace.models.heads import load_or_make_scalar_model, row_scores
from millrace.models.load import Model, save_model
from millrace.protocols import StepReport
from millrace.training.checkpoint import write_checkpoint
from millrace.training.optimizer import WeightOptimizer, adamw, optimizer_step
from millrace.training.parallel_model import ParallelModel
from millrace.training.reward_model import RewardModel
from millrace.training.schedule import learning_rate as scheduled

# Tokens of the chosen and of the rejected text.
Rows = tuple[Sequence[int], Sequence[int]]

# Tokens of one forward and backward; a pair that is longer goes alone.
MAX_TOKENS = 16_384
MAX_GRAD_NORM = 1.0
NUM_REPORTS = 10


@dataclass(frozen=True, slots=True)
class PreferenceReport:
    """What training a reward model came to.

    The accuracies are the fraction of held-out pairs, of other prompts, whose chosen text had the higher
    score; a tie counts half.
    """

    num_train: int
    num_held_out: int
    steps: int
    accuracy_before: float
    accuracy_after: float


def bradley_terry(chosen_N: Tensor, rejected_N: Tensor) -> Tensor:
    """-log sigmoid(s_chosen - s_rejected): the negative log-likelihood under Bradley-Terry, [N].

    Source: Bradley and Terry 1952; for reward models, Ouyang et al. 2022.
    """
    return -F.logsigmoid(chosen_N - rejected_N)


def pair_accuracy(model: Model, pairs: Sequence[Rows], *, max_tokens: int) -> float:
    """Share of pairs whose chosen text has the higher score, a tie counts half; ValueError without pairs."""
    with torch.no_grad():
        return sum(float(_won(scores).sum()) for scores in _scored(model, pairs, max_tokens)) / len(pairs)


def preference_step(
    model: Model,
    optimizer: WeightOptimizer,
    pairs: Sequence[Rows],
    *,
    learning_rate: float,
    max_tokens: int,
) -> StepReport:
    """One optimizer step on the mean `bradley_terry` loss, metrics before it; ValueError without pairs."""
    metrics = {"loss": 0.0, "accuracy": 0.0}
    for score_2N in _scored(model, pairs, max_tokens):
        loss = bradley_terry(*score_2N).sum() / len(pairs)
        loss.backward()
        metrics["loss"] += float(loss.detach())
        metrics["accuracy"] += float(_won(score_2N).sum()) / len(pairs)
    return optimizer_step(
        optimizer,
        learning_rate=learning_rate,
        max_grad_norm=MAX_GRAD_NORM,
        metrics=metrics,
        norms=ParallelModel(model).grad_norms,
    )


def train_reward_model(
    pairs: str,
    model: str | Path,
    output: str | Path,
    *,
    steps: int | None,
    learning_rate: float,
    pairs_per_step: int,
    seed: int,
    device: torch.device | str,
    say: Callable[[str], None],
) -> PreferenceReport:
    """Train a reward model on preference pairs and write its folder, tokenizer included.

    The learning rate falls linearly to a tenth, and the weights are float32. The same arguments give the same
    weights. `pairs` is a file with the columns prompt, chosen and rejected, each a text; `model` the folder
    of a causal language model, whose head is then zeros, or of a reward model. Without `steps` each pair is
    used once. The seed is that of what is held out, and of the order.

    Raises:
        ConfigError: a number is not above 0.
        DataError: the pairs cannot be used, or the gradient of a step is not finite.
        ModelError: the model cannot be used.
        CheckpointError: `output` exists or cannot be written.
    """
    for name, value in ("steps", steps), ("learning_rate", learning_rate), ("pairs_per_step", pairs_per_step):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name} is {value}; it must be a number above 0")
    folder = Path(output)
    if folder.exists():
        raise CheckpointError(f"{folder} exists; choose another name")
    train, held_out = hold_out(read_pairs(pairs), seed=seed)
    tokenizer = load_tokenizer(model)
    made = load_or_make_scalar_model(model, dtype=torch.float32).to(device)
    reader = RewardModel(made, tokenizer, max_tokens=MAX_TOKENS)
    train_rows, held_rows = ([_rows(reader, pair) for pair in side] for side in (train, held_out))
    steps = steps or -(-len(train) // pairs_per_step)
    say(f"{len(train)} pairs to train on, {len(held_out)} held out; {steps} steps")
    before = pair_accuracy(made, held_rows, max_tokens=MAX_TOKENS)
    rate = partial(scheduled, peak=learning_rate, shape="linear", warmup_steps=0, total_steps=steps)
    dealt = _dealt(train_rows, seed)
    _fit(made, (list(islice(dealt, pairs_per_step)) for _ in range(steps)), rate=rate, steps=steps, say=say)
    after = pair_accuracy(made, held_rows, max_tokens=MAX_TOKENS)

    def fill(place: Path) -> None:
        save_model(made, place)
        tokenizer.save_pretrained(place)

    write_checkpoint(folder, fill)
    return PreferenceReport(len(train), len(held_out), steps, before, after)


def _fit(
    model: Model,
    batches: Iterable[Sequence[Rows]],
    *,
    rate: Callable[[int], float],
    steps: int,
    say: Callable[[str], None],
) -> None:
    optimizer = adamw(model, betas=(0.9, 0.999), weight_decay=0.0)
    for step, batch in enumerate(batches):
        report = preference_step(model, optimizer, batch, learning_rate=rate(step), max_tokens=MAX_TOKENS)
        if report.skipped:
            raise DataError(f"step {step + 1} has no finite gradient; lower the learning rate")
        if (step + 1) % max(1, steps // NUM_REPORTS) == 0:
            loss, accuracy = report.metrics["loss"], report.metrics["accuracy"]
            say(f"step {step + 1}/{steps}  loss {loss:.3f}  accuracy {accuracy:.3f}")


def _rows(reader: RewardModel, pair: Pair) -> Rows:
    chosen, rejected = (reader.tokens(pair.prompt + answer) for answer in (pair.chosen, pair.rejected))
    if reader.tokenizer.unk_token_id in {*chosen, *rejected}:
        raise DataError(
            f"{pair.where}: the model's tokenizer has no token for some character of the pair; keep to the "
            "characters it was trained on"
        )
    longest = max(len(chosen), len(rejected))
    if longest > reader.max_length:
        raise DataError(
            f"{pair.where}: prompt and answer have {longest} tokens and the model reads at most "
            f"{reader.max_length}; shorten the pair or remove it"
        )
    return chosen, rejected


def _dealt(pairs: Sequence[Rows], seed: int) -> Iterator[Rows]:
    for epoch in count():
        for index in np.random.default_rng([seed, epoch]).permutation(len(pairs)):
            yield pairs[index]


def _scored(model: Model, pairs: Sequence[Rows], max_tokens: int) -> Iterator[Tensor]:
    size = max(1, max_tokens // max(len(chosen) + len(rejected) for chosen, rejected in pairs))
    for first in range(0, len(pairs), size):
        rows = [row for pair in pairs[first : first + size] for row in pair]
        yield row_scores(model, rows).view(-1, 2).T


def _won(score_2N: Tensor) -> Tensor:
    chosen_N, rejected_N = score_2N.detach()
    return torch.sign(chosen_N - rejected_N) / 2 + 0.5
