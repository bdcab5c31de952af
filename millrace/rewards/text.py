"""Rewards that compare text in this process: exact match, and GSM8K's number after `####`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from millrace.types import Outcome, Prompt

_MARK = "####"
# A number followed by a fraction, product or power sign is not the final answer, so it does not match.
# Possessive quantifiers do not backtrack, so that the time is linear in the length, not cubic.
_NUMBER = re.compile(
    r"\s*+([-+]?)\s*+\$?\s*+([-+]?)([0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)(?!,?\.?[0-9]|\s*[/*^])"
)


class ExactReward:
    """Score 1 if the completion equals the answer, ignoring surrounding white space, else 0.

    A prompt without an answer is a failure: an empty completion must not get a reward for it.
    """

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        """Return one outcome for each completion, in order; never `invalid`."""
        return [_exact(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


class Gsm8kReward:
    """Score 1 if the number after the completion's last `####` equals the answer's, else 0.

    The answer is a bare number or GSM8K's own text with `####`. Commas, a dollar sign, trailing dots and
    zeros are ignored; numbers are compared as exact decimals. A completion without a number after the last
    `####` is invalid; a prompt without a number in its answer is a failure.
    """

    def score(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Outcome]:
        """Return one outcome for each completion, in order."""
        return [_gsm8k(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


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
    """Return the exact number, or None without a match or with a sign on both sides of the dollar."""
    if match is None or (match[1] and match[2]):
        return None
    return Decimal(f"{match[1] or match[2]}{match[3].replace(',', '')}")
