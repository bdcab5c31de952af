"""Rewards that compare text in this process: the exact answer, and GSM8K's number after `####`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from millrace.types import Outcome, Prompt

_MARK = "####"
# A number that goes on as a fraction, a product or a power is not the one that was meant.
# White space is taken once and not given back, so that the time grows with the length and not with its cube.
_NUMBER = re.compile(
    r"\s*+([-+]?)\s*+\$?\s*+([-+]?)([0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)(?!,?\.?[0-9]|\s*[/*^])"
)


class ExactReward:
    """1 where the completion is the answer, white space at both ends aside, else 0.

    A prompt without an answer is a failure: an empty completion must not earn anything for it.
    """

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        """One outcome for each completion, in order; never `invalid`."""
        return [_exact(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]

    def close(self) -> None:
        """Nothing is held."""


class Gsm8kReward:
    """1 where the number after the completion's last `####` equals the answer's, else 0.

    The answer is a bare number or GSM8K's own text with `####`. Commas, a dollar sign, trailing dots and
    zeros do not matter; numbers are compared as exact decimals. No number after the last `####` is an invalid
    answer; a prompt whose answer holds no number is a failure.
    """

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        """One outcome for each completion, in order."""
        return [_gsm8k(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]

    def close(self) -> None:
        """Nothing is held."""


def _exact(prompt: Prompt, completion: str) -> Outcome:
    answer = prompt.answer.strip()
    if not answer:
        return Outcome.failure(f"prompt {prompt.id} has no answer to compare with; set data.answer_column")
    return Outcome("score", float(completion.strip() == answer))


def _gsm8k(prompt: Prompt, completion: str) -> Outcome:
    answer = _number_after_mark(prompt.answer) if _MARK in prompt.answer else _bare_number(prompt.answer)
    if answer is None:
        return Outcome.failure(
            f"the answer {prompt.answer!r} of prompt {prompt.id} holds no number; "
            f"give a number or text that ends in {_MARK} and a number"
        )
    if _MARK not in completion:
        return Outcome("invalid", 0.0, f"the completion has no {_MARK}")
    number = _number_after_mark(completion)
    if number is None:
        return Outcome("invalid", 0.0, f"no number follows the completion's last {_MARK}")
    return Outcome("score", float(number == answer))


def _number_after_mark(text: str) -> Decimal | None:
    return _decimal(_NUMBER.match(text.rpartition(_MARK)[2]))


def _bare_number(text: str) -> Decimal | None:
    return _decimal(_NUMBER.fullmatch(text.strip()))


def _decimal(match: re.Match[str] | None) -> Decimal | None:
    """The exact number; None without a match or with a sign on both sides of the dollar."""
    if match is None or (match[1] and match[2]):
        return None
    return Decimal(f"{match[1] or match[2]}{match[3].replace(',', '')}")
