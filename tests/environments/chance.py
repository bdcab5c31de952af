"""An environment with chance, named in worker processes as `tests.environments.chance:Chance`."""

from __future__ import annotations

import random
from pathlib import Path

from millrace.environments.guess import Guess
from millrace.types import Reply


class Chance:
    """Three turns. All samples but the first of a group, which evaluations play, get random replies."""

    rows = Guess.rows

    def begin(self, task):
        self.random, self.num = task.sample > 0, 0
        return Reply()

    async def step(self, action):
        self.num += 1
        reply = random.choice("<>") if self.random else "<"
        done = self.num == 3
        score = float(action.text in "123") if done else 0.0
        return Reply(reply, state=f"turn {self.num}", done=done, score=score)


class Broken(Chance):
    """Fails for ever: in the begin of the third sample of a group, and in the second turn of the fourth."""

    async def step(self, action):
        if self.random and self.num == 1 and self.sample == 3:
            raise OSError("the tool is down")
        return await super().step(action)

    def begin(self, task):
        self.sample = task.sample
        if self.sample == 2:
            raise OSError("there is no room")
        return super().begin(task)


class Writing(Chance):
    """Writes into the folder of the run: files of its own, and rubbish at the end of the run's files."""

    def __init__(self, run: str, rubbish: tuple[str, ...] = ()) -> None:
        self.run, self.rubbish = Path(run), rubbish

    def begin(self, task):
        if (self.run / "checkpoints").is_dir():
            for name in ("notes.bin", "checkpoints/step-000000.txt", "rollouts/notes.txt"):
                (self.run / name).parent.mkdir(exist_ok=True)
                (self.run / name).write_bytes(bytes(range(256)))
            for name in self.rubbish:
                with (self.run / name).open("ab") as file:
                    file.write(bytes(range(256)))
        return super().begin(task)
