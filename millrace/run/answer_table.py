"""The table of an evaluation's answers: one row for each, with its question, source and prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.config.inputs import DataConfig
from millrace.config.reward_sections import RewardConfig
from millrace.data.prompts import question_id
from millrace.data.rows import Row, column
from millrace.evaluation.answer_scores import (
    QuestionAnswers,
    SetSummary,
    by_question,
    by_source,
    summarise_answers,
)
from millrace.evaluation.predictions import prediction_of
from millrace.run.evaluation import Evaluation, SamplingPlan
from millrace.types import Prompt

# Columns that name the data set of a row; verl's and open-instruct's are the second and third.
SOURCE_COLUMNS = ("source", "data_source", "dataset")
# Rewards that compare the text as it is, or by what a majority of texts does not have.
WHOLE_TEXT = ("exact", "format", "code", "judge", "model")


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredSet:
    """The scored answers of one model to a set of questions.

    Attributes:
        plan: number of answers to a question, and how they were sampled.
        sampled: the evaluation of the sampled answers.
        greedy: of the greedy ones beside them, or None.
        rows: of all answers; those of `Evaluation.rows` and the columns `sample`, `greedy`, `question_id`,
            `source`, `cluster` and `prediction`.
        seed: of samples and resamples.
    """

    plan: SamplingPlan
    sampled: Evaluation
    greedy: Evaluation | None
    rows: list[dict[str, Any]]
    seed: int

    @property
    def questions(self) -> list[QuestionAnswers]:
        """The questions with their sampled answers."""
        return by_question(row for row in self.rows if not row["greedy"])

    @property
    def greedy_questions(self) -> list[QuestionAnswers]:
        """The questions with their greedy answers; empty without."""
        return by_question(row for row in self.rows if row["greedy"])

    def summary(self, ks: Sequence[int] | None = None) -> SetSummary:
        """Metrics of all questions; see `summarise_answers`."""
        summary = self._summarised(self.questions, ks)
        if self.greedy is not None:
            of_one = summarise_answers(self.greedy_questions, num_samples=1, seed=self.seed).estimates
            if "avg@1" in of_one:
                summary.estimates["greedy"] = of_one["avg@1"]
        return summary

    def sources(self, ks: Sequence[int] | None = None) -> dict[str, SetSummary]:
        """Metrics per source; empty if there is one source."""
        return {name: self._summarised(each, ks) for name, each in by_source(self.questions).items()}

    def _summarised(self, questions: Sequence[QuestionAnswers], ks: Sequence[int] | None) -> SetSummary:
        return summarise_answers(questions, num_samples=self.plan.num_samples, ks=ks, seed=self.seed)


@dataclass(frozen=True, slots=True)
class QuestionColumns:
    """What the rows of a set have besides prompts and answers.

    Attributes:
        data: how prompts and identities are read.
        source: column that names the source; None takes the first of `SOURCE_COLUMNS` that a row has.
        cluster: column that dependent questions share; None is the problem itself.
        rewards: kinds of the rewards.
    """

    data: DataConfig
    source: str | None
    cluster: str | None
    rewards: tuple[str, ...]

    @classmethod
    def of(
        cls,
        data: DataConfig,
        rewards: Sequence[RewardConfig],
        *,
        source: str | None = None,
        cluster: str | None = None,
    ) -> QuestionColumns:
        """Take the settings of a recipe."""
        return cls(data, source, cluster, tuple(reward.kind for reward in rewards))

    def rows_of(
        self, prompts: Sequence[Prompt], result: Evaluation, num_samples: int, *, greedy: bool
    ) -> list[dict[str, Any]]:
        """Add the columns of questions to the rows of an evaluation.

        Raises:
            DataError: a named column is missing.
        """
        whole = bool(self.rewards) and all(kind in WHOLE_TEXT for kind in self.rewards)
        shared = [self._of_question(prompt) for prompt in prompts]
        found = []
        for number, row in enumerate(result.rows):
            extras = {key: value for key, value in row.items() if key.startswith("reward/") and value != ""}
            # An answer that the reward cannot read votes for nothing that is right.
            unread = row["outcome"] == "invalid"
            prediction = "" if unread else prediction_of(row["completion"], extras, whole=whole)
            asked = shared[number // num_samples]
            found.append(
                {**row, "sample": number % num_samples, "greedy": greedy, **asked, "prediction": prediction}
            )
        return found

    def _of_question(self, prompt: Prompt) -> dict[str, str]:
        row = prompt.row if isinstance(prompt.row, Row) else Row(prompt.row, prompt.id)
        identity = question_id(row, self.data)
        if self.source is None:
            source = source_of(row)
        else:
            source = str(column(row, self.source, row.where))
        cluster = identity if self.cluster is None else str(column(row, self.cluster, row.where))
        return {"question_id": identity, "source": source, "cluster": cluster}


def source_of(row: Mapping[str, Any]) -> str:
    """Return what the first column of `SOURCE_COLUMNS` that a row has names; empty without one."""
    return next((str(row[name]) for name in SOURCE_COLUMNS if name in row), "")


def answered_set(
    plan: SamplingPlan,
    prompts: Sequence[Prompt],
    results: Sequence[Evaluation],
    columns: QuestionColumns,
    *,
    seed: int,
) -> AnsweredSet:
    """Join the evaluations of a plan's passes, each of `repeated` prompts."""
    rows = columns.rows_of(prompts, results[0], plan.num_samples, greedy=False)
    greedy = results[1] if plan.beside else None
    if greedy is not None:
        rows += columns.rows_of(prompts, greedy, 1, greedy=True)
    return AnsweredSet(plan, results[0], greedy, rows, seed)
