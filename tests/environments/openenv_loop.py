"""Episodes of the client of OpenEnv on a server of OpenEnv, which prints them. Run with the package's Python.

python openenv_loop.py PORT SEED TEXT...
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
import time

import uvicorn
from openenv.core import GenericEnvClient
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str
    strict: bool = False


class Heard(Observation):
    text: str
    left: int


class Secret(Environment):
    """Guess one of the letters of a word, which the seed chooses."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, words=("cat", "dog"), **more):
        self.word, self.left = random.Random(seed).choice(words), 3
        return Heard(text=f"A word of {len(self.word)} letters.", left=3)

    def step(self, action, timeout_s=None, **more):
        self.left -= 1
        found = sum(letter in self.word for letter in action.message)
        done = action.message == self.word or self.left == 0
        return Heard(text=f"{found} of its letters", left=self.left, reward=found / 4, done=done)

    @property
    def state(self):
        return State(step_count=3 - self.left)


async def episode(url, seed, texts):
    """Texts, rewards and ends."""
    async with GenericEnvClient(base_url=url) as client:
        found = [await client.reset(seed=seed)]
        for text in texts:
            found.append(await client.step({"message": text, "strict": True}))
            if found[-1].done:
                break
    return [(one.observation["text"], one.reward, one.done) for one in found]


def main(port, seed, *texts):
    app = create_fastapi_app(Secret, Guess, Heard, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, port=int(port), log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{port}"
    print(json.dumps([asyncio.run(episode(url, int(seed) + one, texts)) for one in range(4)]), flush=True)
    sys.stdin.read()


main(*sys.argv[1:])
