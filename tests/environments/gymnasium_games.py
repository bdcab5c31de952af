"""Environments of gymnasium for tests, registered by importing this module."""

from __future__ import annotations

import random
import string

import gymnasium
import numpy as np
from gymnasium import spaces

TEXT = spaces.Text(200, charset=string.printable)


class Word(gymnasium.Env):
    """Name the letters of a word in turn; every right one earns a share, and three errors end the game."""

    observation_space = TEXT
    action_space = spaces.Text(1, charset=string.ascii_lowercase)

    def __init__(self, length=3, observe="text", how=""):
        self.length, self.observe, self.how = length, observe, how
        if observe == "field":
            self.observation_space = spaces.Dict({"text": TEXT, "left": spaces.Discrete(100)})

    def _observation(self):
        if self.how == "global":
            return str(random.getrandbits(64))
        text = f"{self.word[: self.place]}{'_' * (self.length - self.place)}"
        if self.observe == "field":
            return {"text": text, "left": np.int64(self.length - self.place)}
        return text

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.how == "reset":
            raise OSError("the dictionary is gone")
        self.word = "".join(self.np_random.choice(list(string.ascii_lowercase), self.length))
        self.place = self.num_errors = 0
        return self._observation(), {}

    def step(self, action):
        if self.how == "step":
            raise OSError("the dictionary is gone")
        right = action == self.word[self.place]
        self.place += right
        self.num_errors += not right
        reward = np.float32(right / self.length)
        return self._observation(), reward, self.place == self.length, self.num_errors == 3, {}


gymnasium.register("Word-v0", Word)
gymnasium.register("WordInTime-v0", Word, max_episode_steps=2)
