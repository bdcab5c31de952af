"""Classes of tests as GRPOTrainer of TRL takes them, named as `tests.environments.trl_classes:NAME`."""

from __future__ import annotations

import asyncio
import threading

MADE = []
RELEASED = threading.Event()


class Secret:
    """Higher or lower, as a user of TRL writes it."""

    def __init__(self):
        MADE.append(self)
        self.number = None

    def reset(self, number=None, hint=True, **kwargs):
        self.number, self.left, self.found = number, 3, False
        return f" It is below {number * 2}." if hint else None

    def guess(self, number: int, why: str | None = None) -> str:
        """Guess the number.

        Args:
            number: A whole number.
            why: The reason, for the record.

        Returns:
            Whether it is higher or lower.
        """
        if self.left == 0:
            raise ValueError("Game over.")
        self.left -= 1
        self.found = number == self.number
        return "right" if self.found else "higher" if number < self.number else "lower"

    def give_up(self) -> dict[str, int]:
        """Give up, which reveals the number."""
        self.left = 0
        return {"number": self.number}

    def get_reward(self) -> float:
        return float(self.found) + self.left / 8

    def _private(self):
        raise AssertionError


class Waiting(Secret):
    """The same with coroutines."""

    async def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: A whole number.
        """
        await asyncio.sleep(0)
        return super().guess(number)

    async def give_up(self) -> dict[str, int]:
        """Give up, which reveals the number."""
        return super().give_up()

    async def get_reward(self):
        await asyncio.sleep(0)
        return super().get_reward()


class Unscored:
    """Counts; its reward is that of functions."""

    def reset(self, how="", **kwargs):
        self.count = 0
        if how == "raise":
            raise OSError("the server is gone")
        return ["an image"] if how == "list" else None

    def add(self, how: str) -> int:
        """Add one.

        Args:
            how: What else to do.
        """
        if how == "hang":
            RELEASED.wait()
        self.count += 1
        return self.count


def made():
    return Secret()


def count_reward(completions, environments, scale, **kwargs):
    return [factor * environment.count for environment, factor in zip(environments, scale, strict=True)]


async def length_reward(prompts, completions, completion_ids, **kwargs):
    assert prompts[0][-1]["role"] == "user"
    return [len(messages) + len(ids) / 128 for messages, ids in zip(completions, completion_ids, strict=True)]


def no_reward(**kwargs):
    return [None]


def text_reward(**kwargs):
    return ["1.0"]


def bare_reward(**kwargs):
    return 1.0


def of_the_trainer(completions, trainer_state, **kwargs):
    return [trainer_state.global_step]


class NoReset:
    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: A whole number.
        """
        return str(number)


class NoTypes(Secret):
    def guess(self, number) -> str:
        """Guess.

        Args:
            number: A whole number.
        """
        return str(number)


class Broken:
    def __init__(self):
        raise ConnectionError("nothing listens at the port")


def length_own(prompts, completions, number, **kwargs):
    return [len(messages) / 128 + given for messages, given in zip(completions, number, strict=True)]


class Halves:
    """Halves digits in the few characters that the tiny model of `guess` reads."""

    def reset(self, prompt, problem, **kwargs):
        self.sum = 0

    def half(self, number: str) -> str:
        """Halve a number.

        Args:
            number: A digit.
        """
        self.sum += int(number) // 2
        return "<" * (int(number) // 2) or ">"

    def get_reward(self) -> float:
        return float(self.sum > 1)
