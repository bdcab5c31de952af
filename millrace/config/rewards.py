"""The rewards a recipe may name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, PositiveFloat, field_validator

from millrace.config.section import Section, compiled, is_function


class ExactReward(Section):
    """1 where the completion is the answer, white space at the ends aside."""

    kind: Literal["exact"]
    weight: FiniteFloat = Field(1.0, description="factor in the sum of rewards")


class Gsm8kReward(Section):
    """1 where the number after the last `####` is the answer's."""

    kind: Literal["gsm8k"]
    weight: FiniteFloat = Field(1.0, description="factor in the sum of rewards")


class NumberReward(Section):
    """1 where math-verify finds the completion's final expression equal to the answer."""

    kind: Literal["number"]
    weight: FiniteFloat = Field(1.0, description="factor in the sum of rewards")
    timeout_s: PositiveFloat = Field(
        10.0, description="one answer may take so long before its judge is killed"
    )


class TaskReward(Section):
    """The score of the reasoning-gym task the prompts come from."""

    kind: Literal["task"]
    weight: FiniteFloat = Field(1.0, description="factor in the sum of rewards")
    timeout_s: PositiveFloat = Field(
        10.0, description="one answer may take so long before its judge is killed"
    )


class FormatReward(Section):
    """1 where a regular expression matches the whole completion."""

    kind: Literal["format"]
    weight: FiniteFloat = Field(1.0, description="factor in the sum of rewards")
    pattern: str = Field(description="regular expression for the whole completion")
    timeout_s: PositiveFloat = Field(
        10.0, description="one answer may take so long before its judge is killed"
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        return compiled(pattern).pattern


class FunctionReward(Section):
    """Your own function: `f(prompt, completion, answer, row) -> float`, or None for an invalid answer."""

    kind: Literal["function"]
    weight: FiniteFloat = Field(1.0, description="factor in the sum of rewards")
    function: str = Field(
        description="module:function; the module is looked up from the folder you start in too"
    )
    timeout_s: PositiveFloat = Field(
        10.0, description="one answer may take so long before its judge is killed"
    )

    @field_validator("function")
    @classmethod
    def _form(cls, function: str) -> str:
        if not is_function(function):
            raise ValueError(f"{function!r} is not of the form module:function")
        return function


class ModelReward(Section):
    """The score of a reward model, such as `millrace reward-model` trains."""

    kind: Literal["model"]
    weight: FiniteFloat = Field(1.0, description="factor in the sum of rewards")
    path: str = Field(description="sequence-classification folder with one label, and its tokenizer")


RewardConfig = Annotated[
    ExactReward | Gsm8kReward | NumberReward | TaskReward | FormatReward | FunctionReward | ModelReward,
    Field(discriminator="kind"),
]
