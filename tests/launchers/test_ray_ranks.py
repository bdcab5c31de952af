"""Ray itself, with ranks that fail at once; runs that train are in tests/end_to_end/test_ranks.py."""

from __future__ import annotations

import builtins
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from millrace.config.recipe import load_recipe
from millrace.launchers import ray_ranks
from millrace.launchers.ray_ranks import RayTrainerError

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'millrace-rl[ray]'")
pytestmark = [pytest.mark.timeout(300), pytest.mark.together]
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What a Ray that was started for two ranks did with each of `ray_checks`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.ray_checks"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@needs_ray
def test_all_ports_of_a_ray_started_here_are_on_loopback(told: dict[str, Any]) -> None:
    # The raylet, the control store and workers listen at least.
    assert len(told["sockets"]) >= 3
    assert set(told["sockets"]) <= LOOPBACK


@pytest.mark.slow
@needs_ray
def test_workers_of_a_ray_started_here_have_the_usual_priority(told: dict[str, Any]) -> None:
    assert told["niceness"] == 0


@pytest.mark.slow
@needs_ray
def test_a_cluster_is_reached_by_its_address_and_token_alone(told: dict[str, Any]) -> None:
    assert told["friend"] == "nodes 1\n"
    assert "Authentication token is missing or incorrect" in told["stranger"]
    assert told["environment kept"]


@pytest.mark.slow
@needs_ray
def test_a_mistake_that_all_ranks_find_is_told_as_it_is(told: dict[str, Any]) -> None:
    assert re.match(
        "RanksError: machine .* has no folder /gone, where the command was given; ranks on several machines",
        told["folder"],
    )


@pytest.mark.slow
@needs_ray
def test_a_rank_that_fails_is_named_with_its_traceback(told: dict[str, Any]) -> None:
    lines = told["one"].splitlines()
    assert lines[0] == "RankFailed: rank 1 of 2 failed"
    assert "repr=rank 1" in lines[1]
    assert any(line.endswith("in settle") for line in lines)
    assert lines[-1].startswith("TypeError: ")


@pytest.mark.slow
@needs_ray
def test_ranks_for_which_there_is_no_room_are_refused_with_the_numbers(told: dict[str, Any]) -> None:
    cores = told["cores"]
    few = f"RayTrainerError: {cores + 1} ranks need {cores + 1} CPUs, and the Ray cluster has {cores}; lower"
    assert told["more than cores"].startswith(few)
    assert told["gpus"].startswith("RayTrainerError: 2 ranks need 2 GPUs, and the Ray cluster has 0; lower")
    held = "RayTrainerError: the Ray cluster had no room for 1 ranks within 1 s; it has 0 CPUs free"
    assert told["held"] == held


@pytest.mark.parametrize(
    ("device", "gpus", "each"), [("cuda", 0, 1), ("cpu", 8, 0), ("auto", 1, 0), ("auto", 2, 1)]
)
def test_each_rank_has_a_gpu_where_the_recipe_says_so_or_there_are_enough(
    device: str, gpus: int, each: int
) -> None:
    class Resources:
        @staticmethod
        def cluster_resources() -> dict[str, float]:
            return {"GPU": float(gpus)}

    assert ray_ranks._gpus_of_each(Resources, 2, device) == each


def test_without_ray_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without_ray(name: str, *args: Any, **options: Any) -> Any:
        if name == "ray":
            raise ModuleNotFoundError(name)
        return found(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    before = dict(os.environ)
    with pytest.raises(RayTrainerError, match="pip install 'millrace-rl\\[ray\\]'"):
        ray_ranks.train(load_recipe("quickstart", {"mesh.dp_shard": 2}))
    assert dict(os.environ) == before


class SlowRay:
    """A Ray whose start fails so many times as on a busy machine, or for another reason."""

    def __init__(self, num_slow: int, reason: str = "The current node timed out during startup.") -> None:
        self.num_slow, self.reason, self.calls = num_slow, reason, list[str]()

    def init(self, **options: Any) -> None:
        assert options == {"logging_level": "ERROR", "address": "local"}
        self.calls.append("init")
        if self.calls.count("init") <= self.num_slow:
            raise Exception(self.reason)

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_ray_that_starts_too_slowly_is_started_once_more() -> None:
    ray = SlowRay(1)
    ray_ranks._start(ray, {"address": "local"})
    assert ray.calls == ["init", "shutdown", "init"]


def test_a_ray_that_does_not_start_twice_is_one_sentence() -> None:
    with pytest.raises(RayTrainerError, match="^Ray did not start, twice: The current node timed out"):
        ray_ranks._start(SlowRay(2), {"address": "local"})


def test_any_other_error_of_the_start_is_raised_at_once() -> None:
    ray = SlowRay(1, "no such address")
    with pytest.raises(Exception, match="^no such address$"):
        ray_ranks._start(ray, {"address": "local"})
    assert ray.calls == ["init"]
