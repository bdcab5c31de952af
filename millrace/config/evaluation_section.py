"""Settings of evaluations during a run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator, model_validator

from millrace.config.inputs import check_template
from millrace.config.reward_sections import RewardConfig
from millrace.config.section import Section

# Beginning of the metrics of sets: eval/NAME/avg@8.
SET_PREFIX = "eval/"
# Folder of the held-out answers beside those of sets.
HELD_OUT = "held_out"


class EvaluationSetConfig(Section):
    """One further set of questions, with its own data, template, rewards and sampling."""

    name: str = Field(description="name in metrics, such as eval/NAME/avg@8, and of the folder of answers")
    data: str = Field(description="file, pattern or folder, as data.train; none is trained on")
    size: PositiveInt | None = Field(None, description="first rows that are used; null is all")
    template: str | None = Field(None, description="text around {prompt}, or `chat`; null is data.template")
    prompt_column: str | None = Field(
        None, description="column that holds the prompt; null is data.prompt_column"
    )
    answer_column: str | None = Field(
        None, description="column that holds the reference answer; null is data.answer_column"
    )
    source_column: str | None = Field(
        None,
        description="column that names the source, for numbers per source; null is source, data_source or "
        "dataset, where a row has it",
    )
    cluster_column: str | None = Field(
        None,
        description="column that dependent questions share, such as a passage, for the standard errors; null "
        "is the question",
    )
    rewards: tuple[RewardConfig, ...] = Field(
        (), description="rewards of the answers; an empty list takes those of the recipe"
    )
    samples: PositiveInt = Field(
        1, le=1000, description="answers to each question, for avg@N, pass@k, pass^k and maj@k"
    )
    temperature: NonNegativeFloat | None = Field(
        None, description="of the samples; null is 0 for one sample, else rollout.temperature"
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="of the samples; null is 1 for one sample, else rollout.top_p"
    )
    greedy: bool = Field(False, description="a greedy answer to each question beside the samples")
    k: tuple[PositiveInt, ...] = Field(
        (), description="k of pass@k, pass^k and maj@k; an empty list is 2, 4, ... up to samples"
    )
    max_tokens: PositiveInt | None = Field(
        None, description="most tokens of an answer; null is rollout.max_tokens"
    )
    every: PositiveInt | None = Field(
        None,
        description="batches between evaluations on this set, a multiple of evaluation.every; null is each; "
        "the first and the last are always made",
    )

    @property
    def metrics(self) -> list[str]:
        """The names of its metrics behind `eval/NAME/`, of which one may be evaluation.measure."""
        ks = sorted(set(self.k)) or [2**i for i in range(self.samples.bit_length())]
        kinds = [f"{kind}{k}" for kind in ("pass@", "pass^", "maj@") for k in ks if k > 1]
        return [f"avg@{self.samples}", *(["greedy"] if self.greedy else []), "reward/mean", *kinds]

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII) or name == HELD_OUT:
            raise ValueError(
                f"{name!r} is no name of a set (letters, digits, dot, dash, underscore, and not {HELD_OUT})"
            )
        return name

    @field_validator("template")
    @classmethod
    def _names_prompt(cls, template: str | None) -> str | None:
        return None if template is None else check_template(template)

    @model_validator(mode="after")
    def _samples_are_sampled(self) -> EvaluationSetConfig:
        for k in self.k:
            if k > self.samples:
                raise ValueError(
                    f"k is {k}, but a question gets {self.samples} answers, which say nothing about {k}; "
                    "lower k, or raise samples"
                )
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"samples is {self.samples} at temperature 0, where all answers to a question are equal; "
                "remove temperature"
            )
        is_greedy = not self.temperature and self.samples == 1
        for name, given in (("greedy", self.greedy), ("top_p", self.top_p is not None)):
            if is_greedy and given:
                raise ValueError(
                    f"{name} has no effect where the one answer is greedy; raise samples, or remove it"
                )
        return self


class EvaluationConfig(Section):
    """Greedy completions of held-out prompts, before, during and after training; and further sets."""

    every: PositiveInt = Field(
        20, description="batches (in supervised fine-tuning: optimizer steps) between evaluations"
    )
    measure: str = Field(
        "reward/mean",
        description="metric that selects the best checkpoint and that is reported: reward/mean; accuracy, "
        "the fraction of completions with full reward; with several rewards the mean of one, such as "
        "reward/format/mean; or a metric of a set that is always evaluated, such as eval/aime/avg@8",
    )
    sets: tuple[EvaluationSetConfig, ...] = Field(
        (), description="further sets of questions, each evaluated and recorded under its name"
    )


def unknown_set_measure(config: EvaluationConfig) -> Iterator[str]:
    """One sentence if `measure`, a metric of a set, is that of no set or is not always there."""
    measure = config.measure
    name, _, metric = measure.removeprefix(SET_PREFIX).partition("/")
    found = next(((number, one) for number, one in enumerate(config.sets) if one.name == name), None)
    if found is None:
        there = ", ".join(one.name for one in config.sets) or "none"
        yield f"evaluation.measure {measure} is of no set in evaluation.sets; there are: {there}"
        return
    number, one = found
    if metric not in one.metrics:
        known = ", ".join(f"{SET_PREFIX}{name}/{each}" for each in one.metrics)
        yield f"evaluation.measure {measure} is not a metric of the set {name}, which has {known}"
    elif one.every not in (None, config.every):
        yield (
            f"evaluation.measure {measure} is needed at each evaluation, and evaluation.sets.{number}.every "
            f"is {one.every}; remove it"
        )


def idle_evaluation(config: EvaluationConfig, *, has_environment: bool) -> Iterator[str]:
    """One sentence for each setting of a set that has no effect, or contradicts another."""
    names = [one.name for one in config.sets]
    for number, one in enumerate(config.sets):
        where = f"evaluation.sets.{number}"
        if one.name in names[:number]:
            yield f"{where}.name {one.name} is that of an earlier set; choose another"
        if one.every is not None and one.every % config.every:
            yield (
                f"{where}.every is {one.every}, which is no multiple of evaluation.every {config.every}; set "
                f"{one.every + -one.every % config.every}"
            )
        if one.rewards and has_environment:
            yield f"{where}.rewards has no effect with an environment, which scores all episodes; remove it"
        if any(reward.kind == "task" for reward in one.rewards):
            yield f"{where}.rewards has the kind task, which scores generated problems alone; choose another"
        for reward in one.rewards:
            if reward.kind == "judge" and reward.relative and one.samples == 1:
                yield (
                    f"{where}.rewards has a relative judge, which compares the samples of a prompt, and "
                    "samples is 1; raise it, or remove relative"
                )
