"""Ray placement groups for ranks and engines, and plain Ray error messages; `ray` is an argument."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Timeouts for a placement group.
PLACING_S = 60.0
ONE_MORE_S = 2.0
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class RayTrainerError(ValueError):
    """Ray is unavailable or has too few resources; the message names the remedy."""


def reserved(ray: Any, count: int, resources: Mapping[str, int], *, what: str = "ranks") -> Any:
    """Reserve a placement group for all ranks or engines at once, packed onto few machines.

    Args:
        ray: the module.
        count: number of bundles.
        resources: resources per bundle.
        what: kind of process, for the error message.

    Raises:
        RayTrainerError: the cluster has too few resources.
    """
    have = ray.cluster_resources()
    lower = "engine.num_engines" if what == "engines" else "the settings of mesh"
    for resource, each in resources.items():
        if have.get(resource, 0) < count * each:
            raise RayTrainerError(
                f"{count} {what} need {count * each} {resource}s, and the Ray cluster has "
                f"{have.get(resource, 0):g}; lower {lower}, or add machines"
            )
    group = ray.util.placement_group([dict(resources)] * count, strategy="PACK")
    if not group.wait(PLACING_S):
        free = ray.available_resources()
        ray.util.remove_placement_group(group)
        amounts = ", ".join(f"{free.get(resource, 0):g} {resource}s" for resource in resources)
        raise RayTrainerError(
            f"the Ray cluster had no room for {count} {what} within {PLACING_S:.0f} s; it has {amounts} free"
        )
    return group


def one_more(ray: Any, resources: Mapping[str, int]) -> Any:
    """Reserve a placement group for one more engine, with a short timeout because the run is going on.

    Args:
        ray: the module.
        resources: resources of the engine.

    Raises:
        RayTrainerError: the cluster has too few free resources.
    """
    group = ray.util.placement_group([dict(resources)])
    if not group.wait(ONE_MORE_S):
        free = ray.available_resources()
        ray.util.remove_placement_group(group)
        amounts = " and ".join(f"{each} {resource}" for resource, each in resources.items())
        have = " and ".join(f"{free.get(resource, 0):g} {resource}s" for resource in resources)
        raise RayTrainerError(
            f"one engine more needs {amounts}, and the Ray cluster has {have} free; add machines, then ask "
            "again"
        )
    return group


def plain(error: Exception) -> str:
    """Return a Ray error message without ANSI colours and without lines of carets only."""
    lines = COLOUR.sub("", str(error)).splitlines()
    return "\n".join(line for line in lines if line.strip(" ^"))
