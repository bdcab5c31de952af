"""What tests ask of Ray, in a process of its own: Ray leaves processes behind that pytest would complain of.

Run as a module it prints one JSON object: what each check found, by its name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from millrace.config.recipe import load_recipe, to_yaml
from millrace.engines import ray_placement
from millrace.launchers import ray_ranks

CONFIG = load_recipe("quickstart", {"mesh.dp_shard": 2, "device": "cpu"})
LISTENS = "0A"


def sockets() -> list[str]:
    """The addresses on which what this process has started listens, as the kernel writes them."""
    inodes = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(os.getpid()) not in ancestors(process):
                continue
            links = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:
            continue  # it has ended meanwhile, or is another user's
        inodes |= {link.removeprefix("socket:[").removesuffix("]") for link in links if "socket" in link}
    found = []
    for table in ("tcp", "tcp6"):
        for channel in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = channel.split()
            if fields[3] == LISTENS and fields[9] in inodes:
                found.append(fields[1].split(":")[0])
    return found


def ancestors(process: Path) -> list[str]:
    """A process and all that it comes from."""
    found = []
    while process.name != "0":
        found.append(process.name)
        status = (process / "stat").read_text()
        process = process.parent / status.rpartition(")")[2].split()[1]
    return found


def knock(ray: Any, token: str) -> str:
    """What another process is told that has some token, and this Ray's address as a user gives it."""
    code = "from millrace.launchers.ray_ranks import _cluster\n"
    code += "with _cluster(2) as ray: print('nodes', len(ray.nodes()))"
    given = {
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "RAY_AUTH_TOKEN": token,
        "RAY_NUM_REDIS_GET_RETRIES": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**{name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}, **given},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.stdout if done.returncode == 0 else done.stderr


def error_of(act: Callable[[], object]) -> str:
    """The name of an error, and what it says."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def each(*begin: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What begins the work of a run, another thing on each rank."""
    number = count()
    return lambda rank: begin[next(number)](rank)


def check(ray: Any) -> dict[str, Any]:
    """Everything that is asked of one Ray with room for two ranks."""

    @contextmanager
    def this_one(num_ranks: int) -> Iterator[Any]:
        yield ray

    def run(begin: Callable[[Any], Any]) -> str:
        return error_of(lambda: ray_ranks._run(CONFIG, begin))

    def reserve(num_ranks: int, **share: int) -> str:
        return error_of(lambda: ray_placement.reserved(ray, num_ranks, share))

    ray_ranks._cluster = this_one  # type: ignore[assignment]
    cores = int(ray.cluster_resources()["CPU"])
    found = {
        "cores": cores,
        "friend": knock(ray, os.environ["RAY_AUTH_TOKEN"]),
        "stranger": knock(ray, "guessed"),
        "one": run(
            each(
                lambda rank: rank.train.remote(to_yaml(CONFIG), "r", True),
                lambda rank: rank.settle.remote(1, {}),
            )
        ),
        "folder": run(lambda rank: rank.settle.remote("/gone", {})),
        "sockets": sockets(),
        "niceness": ray.get(ray.remote(num_cpus=0)(lambda: os.nice(0)).remote()) - os.nice(0),
        "more than cores": reserve(cores + 1, CPU=1),
        "gpus": reserve(2, CPU=1, GPU=1),
    }
    group = ray_placement.reserved(ray, cores, {"CPU": 1})
    # Ray counts a moment later what is free.
    while ray.available_resources().get("CPU"):
        time.sleep(0.05)
    ray_placement.PLACING_S = 1
    found["held"] = reserve(1, CPU=1)
    ray.util.remove_placement_group(group)
    return found


if __name__ == "__main__":
    before = dict(os.environ)
    with ray_ranks._cluster(2) as started:
        told = check(started)
    print(json.dumps({**told, "environment kept": dict(os.environ) == before}))
