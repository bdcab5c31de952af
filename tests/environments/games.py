"""Environments of tests, good and bad, named in worker processes as `tests.environments.games:NAME`."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
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


class Saving(Impure):
    """The same, but it can be saved, except after a step `refuse`; other names of steps are faults."""

    def step(self, action):
        self.last = action.text
        return super().step(action)

    def save(self):
        last = getattr(self, "last", "")
        faults = {"refuse": None, "wrong": {"bytes": b""}, "large": "x" * 40_000, "raise": 0}
        if last == "raise":
            raise OSError("the disk is full")
        return faults.get(last, {"num": self.num, "note": "\ud800"})

    def load(self, task, saved):
        if task.row["number"] != 3 or saved["note"] != "?":
            raise ValueError("this is another task")
        self.num = saved["num"]


class OnlySaves(Counting):
    """Not an environment that can go on from what it saves."""

    def save(self):
        return 1


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
        if at_begin == "leave at once":
            sys.exit(3)

    def begin(self, task):
        return self.fail(self.at_begin) if self.at_begin else Reply()

    def step(self, action):
        return self.fail(action.text)

    def close(self):
        raise RuntimeError("close fails, too")

    def fail(self, how):
        if how == "raise":
            raise OSError("the tool is down")
        if how == "leave":
            sys.exit(3)
        if how == "exit":
            os._exit(3)
        if how == "daemon":
            # Its own session, so that no signal to a group of processes reaches it.
            daemon = subprocess.Popen(["sleep", "86399"], start_new_session=True)
            return Reply(state=str(daemon.pid))
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


class FullLater:
    """There is room for two: one that is made as a test, and that of one episode."""

    pure = True
    num_made = 0

    def __init__(self):
        FullLater.num_made += 1
        if FullLater.num_made > 2:
            raise OSError("there is no room")

    def begin(self, task):
        return Reply()

    def step(self, action):
        return Reply()


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
