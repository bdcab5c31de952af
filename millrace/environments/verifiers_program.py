"""Plays tasks of an environment of verifiers, in the Python that has verifiers: a program of its own.

It imports the standard library and verifiers only. `verifiers_environment` starts it with one of these:

- `check`: print where this Python is installed, once the environment could be made.
- `rows COUNT`: print the first tasks as rows.
- `play`: play the tasks on stdin, one to a line, each with the address and key of its episode; print the
  reward of each, or why there is none.

All that it prints is JSON, one object to a line. A line `{"id": n}` on stdin ends episode n.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_MAX_LINE_BYTES = 64 << 20
# The reader of what is printed takes lines of up to 64 KiB.
_MAX_REASON = 2000
_KEY = "MILLRACE_API_KEY_"


def make(id: str, options: dict[str, Any]) -> Any:
    """Make the environment of a taskset with the options of its table `env`."""
    import verifiers.v1 as vf

    options["taskset"] = {**options.get("taskset", {}), "id": id}
    env = vf.load_environment(vf.resolve_env_config(options))
    fields = type(env.taskset).task_type().data_type().model_fields
    left_out = [name for name, field in fields.items() if field.exclude]
    if left_out:
        raise ValueError(f"the field {left_out[0]} of its tasks is excluded from what is written of them")
    return env


def rows(env: Any, count: int) -> Iterator[dict[str, Any]]:
    """Yield rows of the first tasks; the column `task` is what an episode is played from."""
    for number, task in enumerate(itertools.islice(env.taskset, count)):
        prompt = task.data.prompt_text or task.data.name or f"task {number}"
        data = task.data.model_dump(mode="json", exclude_none=True)
        yield {"prompt": prompt, "answer": "", "problem": number, "task": data}


async def play(env: Any, output: TextIO) -> None:
    """Play until stdin ends, all episodes at once."""
    running: dict[int, asyncio.Task[None]] = {}
    lines = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    loop, protocol = asyncio.get_running_loop(), asyncio.StreamReaderProtocol(lines)
    await loop.connect_read_pipe(lambda: protocol, sys.stdin)

    async def answer(id: int, given: dict[str, Any]) -> None:
        try:
            found = await outcome(env, id, given)
            if "failure" in found:
                found["failure"] = found["failure"][:_MAX_REASON]
            print(json.dumps({"id": id, **found}), file=output)
        finally:
            del running[id]

    async with env.serving():
        async for line in lines:
            given = json.loads(line)
            id = given.pop("id")
            if given:
                running[id] = asyncio.create_task(answer(id, given))
            elif id in running:
                running[id].cancel()


async def outcome(env: Any, id: int, given: dict[str, Any]) -> dict[str, Any]:
    """Play a task once, without the retries of its environment; return the reward or the failure."""
    import verifiers.v1 as vf

    name = f"{_KEY}{id}"
    os.environ[name] = given["key"]
    try:
        kind = type(env.taskset).task_type()
        task = kind(kind.data_type().model_validate(given["task"]), env.config.taskset.task)
        client = vf.EvalClientConfig(base_url=given["url"], api_key_var=name)
        context = vf.ModelContext(client=client, model=given["model"], sampling=vf.SamplingConfig())
        return reward(await env.run_episode(task, context), given["url"])
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}
    finally:
        del os.environ[name]


def reward(episode: Any, url: str) -> dict[str, Any]:
    """Return the reward of the one trace that is trained, or why there is none."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        return {"failure": f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode is not ok"}
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        return {"failure": f"the episode has {len(trained)} traces that are trained; one is needed"}
    for trace in episode.traces:
        if not trace.agent.trainable and trace.calls and trace.agent.config.client.base_url == url:
            agent = trace.agent.name
            return {
                "failure": f"the agent {agent} is not trained and has no client; set options.{agent}.client"
            }
    found = float(trained[0].reward)
    return {"reward": found} if math.isfinite(found) else {"failure": f"its reward is {found}"}


def main(how: str, settings: str, count: str = "0") -> None:
    """Do one of what is at the top of this file; `settings` is JSON with `id` and `options`."""
    output = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what a taskset prints is no line of ours
    sys.path.insert(0, os.getcwd())
    try:
        env = make(**json.loads(settings))
        if how == "play":
            asyncio.run(play(env, output))
            return
        here = {"python": sys.executable, "installed": [sys.prefix, sys.base_prefix]}
        for row in rows(env, int(count)) if how == "rows" else [here]:
            print(json.dumps(row), file=output)
    except (Exception, SystemExit) as error:
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))


if __name__ == "__main__":
    main(*sys.argv[1:])
