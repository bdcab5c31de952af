"""Assignment of segments to ranks: balanced work, and samples of one prompt together.

What samples of a prompt begin with is computed once on each rank that has some of them, so that spreading
them costs that beginning again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# A group goes to one rank whole if that gives the rank at most so much more than the even share.
SLACK = 0.05


def deal(
    work: Sequence[float], saved: Sequence[float], group: Sequence[Hashable], world: int
) -> list[list[int]]:
    """Shard segments over ranks; some ranks may get none.

    Two assignments are computed, and the one with the lower maximum load is used:

    - one by one: the most expensive segment first, each to the rank that then has the least;
    - in groups: the most expensive group first, to the rank with the least; where that gives the rank more
      than (1 + SLACK) of the even share, its segments are dealt one by one after all other groups.

    So the fullest rank never has more than segments dealt one by one would give it.

    Args:
        work: of each segment alone.
        saved: of that, what it does not cost where another of its group is.
        group: of each segment.
        world: ranks.

    Returns:
        The segments of each rank, ascending.
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
    """First what may go whole, members and cost, where that keeps to the limit; then segments one by one.

    Returns:
        The segments of each rank, and the most that a rank has to do.
    """
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
