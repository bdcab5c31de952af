"""Room in a Ray cluster for ranks and for engines, and what Ray says of an error. Ray itself is handed in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# How long Ray may take to find room.
PLACING_S = 60.0
ONE_MORE_S = 2.0
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class RayTrainerError(ValueError):
    """Ray is not there, or has no room for ranks or engines; the message says what to change."""


def reserved(ray: Any, count: int, share: Mapping[str, int], *, what: str = "ranks") -> Any:
    """Room for all ranks or engines at once, `share` for each, on as few machines as have it.

    Raises:
        RayTrainerError: the cluster has none.
    """
    have = ray.cluster_resources()
    lower = "engine.processes" if what == "engines" else "the settings of mesh"
    for kind, each in share.items():
        if have.get(kind, 0) < count * each:
            raise RayTrainerError(
                f"{count} {what} need {count * each} {kind}s, and the Ray cluster has "
                f"{have.get(kind, 0):g}; lower {lower}, or add machines"
            )
    group = ray.util.placement_group([dict(share)] * count, strategy="PACK")
    if not group.wait(PLACING_S):
        free = ray.available_resources()
        ray.util.remove_placement_group(group)
        told = ", ".join(f"{free.get(kind, 0):g} {kind}s" for kind in share)
        raise RayTrainerError(
            f"the Ray cluster had no room for {count} {what} within {PLACING_S:.0f} s; it has {told} free"
        )
    return group


def one_more(ray: Any, share: Mapping[str, int]) -> Any:
    """Room for one engine more, while others draw and must not wait long.

    Raises:
        RayTrainerError: the cluster has none free.
    """
    group = ray.util.placement_group([dict(share)])
    if not group.wait(ONE_MORE_S):
        free = ray.available_resources()
        ray.util.remove_placement_group(group)
        told = " and ".join(f"{each} {kind}" for kind, each in share.items())
        have = " and ".join(f"{free.get(kind, 0):g} {kind}s" for kind in share)
        raise RayTrainerError(
            f"one engine more needs {told}, and the Ray cluster has {have} free; add machines, then ask again"
        )
    return group


def plain(error: Exception) -> str:
    """What Ray says of an error without its colours, and without carets, which it leaves under no line."""
    lines = COLOUR.sub("", str(error)).splitlines()
    return "\n".join(line for line in lines if line.strip(" ^"))
