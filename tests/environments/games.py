"""Environments of tests, good and bad, named in worker processes as `tests.environments.games:NAME`."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading

from millrace.types import ROOT, Reply


class Counting:
    """Three turns; each reply counts the turns and repeats the action."""

    pure = True

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def begin(self, task):
        self.num = 0
        return Reply(state="start")

    def step(self, action):
        self.num += 1
        done = self.num == self.turns
        return Reply(
            f"{self.num}{action.text}", reward=0.5, state=f"turn {self.num}", done=done, score=float(done)
        )


class Impure(Counting):
    """The same, but nothing promises that it replies the same again."""

    pure = False


class Asynchronous(Counting):
    """The same with coroutines."""

    async def begin(self, task):
        await asyncio.sleep(0)
        return super().begin(task)

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)


def counting(task, actions):
    """The same as a function."""
    num = len(actions)
    if not num:
        return Reply(state="start")
    done = num == 3
    return Reply(f"{num}{actions[-1].text}", reward=0.5, state=f"turn {num}", done=done, score=float(done))


class Bad:
    """Fails in the way that the action names."""

    def __init__(self, at_begin: str = "") -> None:
        self.at_begin = at_begin

    def begin(self, task):
        return self.fail(self.at_begin) if self.at_begin else Reply()

    def step(self, action):
        return self.fail(action.text)

    def close(self):
        raise RuntimeError("close fails, too")

    def fail(self, how):
        if how == "raise":
            raise OSError("the tool is down")
        if how == "exit":
            os._exit(3)
        if how == "hang":
            threading.Event().wait()
        if how == "rubbish":
            os.write(1, bytes(range(256)) * 4)
            return Reply("fine")
        return {
            "type": "text",
            "text": Reply(text=3),
            "reward": Reply("", reward=float("nan")),
            "progress": Reply("", progress="half"),
            "state": Reply("", state=None),
            "done": Reply("", done=1),
            "huge": Reply("x" * 10_000_000),
            "surrogate": Reply("\ud800", state="\ud800"),
            "over": Reply("", done=True),
            "fine": Reply("fine"),
        }[how]


class Hanging:
    """A coroutine that never returns."""

    async def begin(self, task):
        return Reply()

    async def step(self, action):
        await asyncio.Event().wait()


class Holding:
    """Pure, and a step `hold` never lets another thread of its process run."""

    pure = True

    def begin(self, task):
        return Reply()

    async def step(self, action):
        if action.text == "hold":
            # The interpreter's lock is held by a call that never returns.
            ctypes.PyDLL(None).pause()
        return Reply(action.text)


class Telling:
    """The state is a variable of its process."""

    def begin(self, task):
        return Reply(state=os.environ.get("MY_API_KEY", ""))

    def step(self, action):
        return Reply(done=True)


class Waiting(Counting):
    """Pure by its word, but it waits."""

    async def step(self, action):
        await asyncio.sleep(0.001)
        return super().step(action)


class NoStep:
    """Not an environment."""

    def begin(self, task):
        return Reply()


def giving_up(task, actions):
    """The episode is invalid after the first completion."""
    return Reply(done=True, invalid="it gave up", calls=0, invalid_calls=1) if actions else Reply()


class Called:
    """Gives a tool; replies with the arguments of the calls, and their number as the state."""

    pure = True

    def begin(self, task):
        self.num = 0
        parameters = {"type": "object", "properties": {"sum": {"type": "string"}}}
        return Reply(tools=({"name": "calc", "parameters": parameters},))

    async def step(self, action):
        calls = action.message.get("tool_calls", [])
        self.num += len(calls)
        found = [{"role": "tool", "content": call["function"]["arguments"]["sum"]} for call in calls]
        return Reply(messages=tuple(found), state=str(self.num), calls=len(calls), done=not calls)


class Branching:
    """Gives the tool `other` to the branch after the first completion; not pure."""

    def begin(self, task):
        return Reply("a", tools=({"name": "calc"},))

    def step(self, action):
        return Reply(action.status, tools=({"name": "other"},), after=ROOT)
