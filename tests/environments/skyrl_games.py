"""Environments of SkyRL-gym for tests, named as `tests.environments.skyrl_games:NAME`."""

from __future__ import annotations

from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.sql.env import SQLEnv


class Product(BaseTextEnv):
    """A product, with as many attempts as there are turns, as the examples of SkyRL have it."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.truth, self.how = extras["reward_spec"]["ground_truth"], extras.get("how")
        self.max_turns, self.hint = extras["max_turns"], env_config.get("hint", "Again")

    def init(self, prompt):
        if self.how == "init":
            return prompt
        return [{"role": "system", "content": "Multiply."}, *prompt], {}

    def step(self, action):
        if self.how == "changed":
            return {"observations": [], "reward": 0, "done": True, "postprocessed_action": action.strip()}
        if self.how in ("reward", "silent", "nothing"):
            reward = "1" if self.how == "reward" else 1
            return None if self.how == "nothing" else {"observations": [], "reward": reward, "done": False}
        self.turns += 1
        found = self.truth in action
        done = found or self.turns >= self.max_turns
        messages = (
            [] if done else [{"role": "user", "content": f"{self.hint}, {self.max_turns - self.turns} left."}]
        )
        return {"observations": messages, "reward": 1 if found else -0.1, "done": done, "metadata": {}}


class NoStep(BaseTextEnv):
    """Not finished."""


class OwnSql(SQLEnv):
    """A user's own one that runs SQL of the policy."""


def product():
    return Product()
