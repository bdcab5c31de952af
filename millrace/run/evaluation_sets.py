"""Further sets of questions that a run evaluates: what is sampled, how it is scored, and its metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from millrace.config.evaluation_section import EvaluationSetConfig
from millrace.config.inputs import DataConfig
from millrace.data.prompts import make_prompts, question_id
from millrace.data.rows import DataError, Row, read_rows
from millrace.protocols import EpisodeReward
from millrace.rollout.episodes import EpisodeView
from millrace.run.answer_table import AnsweredSet, QuestionColumns
from millrace.run.evaluation import SamplingPlan
from millrace.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from millrace.data.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class SetQuestions:
    """The questions of a set, and how many were left out because they are too long."""

    data: DataConfig
    prompts: Sequence[Prompt]
    num_left_out: int


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationSet:
    """One set of a run.

    Attributes:
        name: in metrics and folders.
        every: batches between its evaluations; None is each evaluation of the run.
        prompts: its questions.
        plan: number of answers to each, and how they are sampled.
        limit: of tokens in an answer; None is that of the recipe.
        ks: of pass@k and maj@k; None takes the powers of two.
        columns: of its table of answers.
        reward: scores the answers.
        full_marks: the reward of a right answer.
        view_episode: see `evaluation.evaluate`.
        seed: of samples.
    """

    name: str
    every: int | None
    prompts: Sequence[Prompt]
    plan: SamplingPlan
    limit: int | None
    ks: tuple[int, ...] | None
    columns: QuestionColumns
    reward: EpisodeReward
    full_marks: float
    view_episode: EpisodeView | None
    seed: int

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether it is evaluated at this step; at the first and the last it always is."""
        return self.every is None or last or step % self.every == 0

    def passes(self, params: SamplingParams) -> list[tuple[int, SamplingParams]]:
        """Return the number of answers and the sampling parameters of each pass, with this set's limit."""
        max_tokens = self.limit or params.max_tokens
        return self.plan.passes(replace(params, seed=self.seed, max_tokens=max_tokens))


def read_set(
    config: EvaluationSetConfig,
    data: DataConfig,
    tokenizer: Tokenizer,
    trained: Sequence[Row],
    *,
    max_prompt_tokens: int,
) -> SetQuestions:
    """Read the questions of a set.

    Args:
        config: of the set.
        data: of the recipe, for what the set does not say.
        tokenizer: of the policy.
        trained: the rows that are trained on.
        max_prompt_tokens: longest prompt; longer ones are left out, or refused.

    Raises:
        DataError: the set cannot be read, is empty, or has prompts that are trained on; the message has its
            name.
    """
    own = {
        "train": config.data,
        "eval": None,
        "demonstration_column": None,
        "identity_column": None,
        "template": config.template or data.template,
        "prompt_column": config.prompt_column or data.prompt_column,
        "answer_column": config.answer_column or data.answer_column,
    }
    mine = data.model_copy(update=own)
    theirs = data.model_copy(update={"identity_column": None})
    try:
        rows = read_rows(config.data)[: config.size]
        asked = {question_id(row, mine) for row in rows}
        seen = {id for row in trained if (id := question_id(row, theirs)) in asked}
        twice = [row for row in rows if question_id(row, mine) in seen]
        if twice:
            raise DataError(
                f"{len(twice)} of its {len(rows)} questions are also trained on, the first: "
                f"{twice[0].where}; remove them from the set, or from data.train"
            )
        prompts, left_out = make_prompts(
            rows, mine, tokenizer, prefix=config.name, max_prompt_tokens=max_prompt_tokens
        )
    except DataError as error:
        raise DataError(f"evaluation set {config.name}: {error}") from None
    return SetQuestions(mine, prompts, left_out)


def set_metrics(name: str, answered: AnsweredSet, ks: Sequence[int] | None) -> dict[str, float]:
    """Return the metrics of a set for the run's record: `eval/NAME/avg@8`, its standard error, and more.

    A metric that no question has is left out; so is the error of a single question.
    """
    summary, first = answered.summary(ks), f"avg@{answered.plan.num_samples}"
    found = {f"eval/{name}/{metric}": one.value for metric, one in summary.estimates.items()}
    if first in summary.estimates:
        found[f"eval/{name}/{first}/std_error"] = summary.estimates[first].std_error
    for source, each in answered.sources(ks).items():
        plain = re.sub(r"[^\w.-]+", "-", source) or "none"
        if first in each.estimates:
            found[f"eval/{name}/source/{plain}/{first}"] = each.estimates[first].value
    found[f"eval/{name}/failed_fraction"] = answered.sampled.failed
    found[f"eval/{name}/length/mean"] = answered.sampled.length
    found[f"eval/{name}/length/truncated_fraction"] = answered.sampled.truncated
    return {key: value for key, value in found.items() if not math.isnan(value)}
