"""Assignment of segments to ranks: balanced work, and samples of one prompt together.

The shared prompt of samples is computed once on each rank that holds some of them, so spreading samples of
one prompt over ranks repeats the computation of the prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# A group is assigned to one rank as a whole if the rank's load exceeds the mean by at most this fraction.
SLACK = 0.05


def deal(
    work: Sequence[float], saved: Sequence[float], group: Sequence[Hashable], world: int
) -> list[list[int]]:
    """Shard segments over ranks; some ranks may get none, and each gets its segments in ascending order.

    Two assignments are computed, and the one with the lower maximum load is used:

    - one by one: the most expensive segment first, each to the rank with the lowest resulting load;
    - in groups: the most expensive group first, to the rank with the lowest load; if the load would exceed
      (1 + SLACK) times the mean, its segments are assigned one by one after all other groups.

    So the maximum load is never above that of the one-by-one assignment. `work` is the cost of each segment
    alone, `saved` the part of it that is saved if another segment of its group is on the rank.
    """
    members: dict[Hashable, list[int]] = {}
    for b, name in enumerate(group):
        members.setdefault(name, []).append(b)
    cost = {
        name: sum(work[b] for b in each) - sum(saved[b] for b in each[1:]) for name, each in members.items()
    }
    limit = (1 + SLACK) * sum(cost.values()) / world
    largest = sorted(members, key=lambda name: (-cost[name], members[name]))
    whole = [(members[name], cost[name]) for name in largest]
    apart, fullest = _deal(work, saved, group, world, whole=[], limit=limit)
    together, most = _deal(work, saved, group, world, whole=whole, limit=limit)
    return [sorted(segments) for segments in (together if most < fullest else apart)]


def _deal(
    work: Sequence[float],
    saved: Sequence[float],
    group: Sequence[Hashable],
    world: int,
    *,
    whole: Sequence[tuple[list[int], float]],
    limit: float,
) -> tuple[list[list[int]], float]:
    """Assign whole groups (members, cost) up to a load of `limit`, then segments; also the maximum load."""
    held: list[list[int]] = [[] for _ in range(world)]
    groups: list[set[Hashable]] = [set() for _ in range(world)]
    load = [0.0] * world
    left = set(range(len(work)))
    for members, cost in whole:
        to = min(range(world), key=load.__getitem__)
        if load[to] + cost <= limit:
            held[to] += members
            load[to] += cost
            left.difference_update(members)
    for b in sorted(left, key=lambda b: (-work[b], b)):
        after = [
            at + work[b] - (saved[b] if group[b] in there else 0.0)
            for at, there in zip(load, groups, strict=True)
        ]
        to = min(range(world), key=after.__getitem__)
        held[to].append(b)
        groups[to].add(group[b])
        load[to] = after[to]
    return held, max(load)
