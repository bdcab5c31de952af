"""See the package."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import asynccontextmanager
from types import SimpleNamespace
from urllib.request import Request, urlopen

EvalClientConfig = ModelContext = SamplingConfig = SimpleNamespace
DATA = {name: SimpleNamespace(exclude=False) for name in ("prompt", "answer", "does")}


class Data(SimpleNamespace):
    model_fields = DATA
    name = None

    @classmethod
    def model_validate(cls, given):
        return cls(**given)

    def model_dump(self, **_):
        return {name: getattr(self, name) for name in DATA}

    @property
    def prompt_text(self):
        return self.prompt


class Task:
    def __init__(self, data, config):
        self.data = data

    @classmethod
    def data_type(cls):
        return Data


class Taskset:
    task_type = staticmethod(lambda: Task)

    def __iter__(self):
        print("loading")  # to stdout, which is not the program's
        number = 0
        while True:
            yield Task(Data(prompt=f"Guess {number}.", answer=str(number), does=""), None)
            number += 1


def resolve_env_config(given):
    return given


def load_environment(config):
    if config["taskset"]["id"] == "gone":
        raise ModuleNotFoundError("taskset 'gone' not found")
    return Env(config)


class Env:
    def __init__(self, config):
        self.taskset = Taskset()
        self.config = SimpleNamespace(taskset=SimpleNamespace(task=None))

    @asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, context):
        does = task.data.does
        if does == "raise":
            raise RuntimeError("the taskset is broken")
        if does == "error at length":
            raise RuntimeError("x" * 100_000)
        if does == "exit":
            os._exit(3)
        ok, errors = True, []
        text = "" if does == "silent" else await asyncio.to_thread(ask, task, context)
        if does == "error":
            ok, errors = False, [SimpleNamespace(type="TaskError", message="no reward")]
        reward = {"nan": float("nan")}.get(does, float(text == task.data.answer))
        agents = (
            [("agent", True)] + [("judge", False)] * (does == "judge") + [("other", True)] * (does == "two")
        )
        traces = [
            SimpleNamespace(
                reward=reward,
                errors=[],
                calls=[text],
                agent=SimpleNamespace(
                    name=name, trainable=trained, config=SimpleNamespace(client=context.client)
                ),
            )
            for name, trained in agents
        ]
        return SimpleNamespace(ok=ok, errors=errors, traces=traces)


def ask(task, context):
    headers = {"Authorization": f"Bearer {os.environ[context.client.api_key_var]}"}
    body = {"model": context.model, "messages": [{"role": "user", "content": task.data.prompt}]}
    request = Request(f"{context.client.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())["choices"][0]["message"]["content"]
