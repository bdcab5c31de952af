"""Settings that have a new name: the old one is accepted in this version, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

# Old dotted key to new one; a section moves with all its settings.
RENAMED = {
    "trackers": "loggers",
    "warmup": "sft",
    "warmup.token_weights": "sft.loss_aggregation",
    "warmup.gate": "sft.stop_accuracy",
    "flow.staleness": "rollout.max_staleness",
    "flow.order": "rollout.batch_order",
    "flow.stale": "rollout.stale_policy",
    "flow.spare_groups": "rollout.oversample_groups",
    "flow.kv": "rollout.kv_on_update",
    "flow.interrupt": "rollout.partial_rollout",
    "rollout.refill_rounds": "rollout.dynamic_sampling_rounds",
    "engine.processes": "engine.num_engines",
    "engine.take_turns": "engine.colocated",
    "engine.max_requests": "engine.max_num_seqs",
    "engine.tokens_per_step": "engine.max_num_batched_tokens",
    "engine.delta": "engine.delta_updates",
    "policy.token_weights": "policy.loss_aggregation",
    "policy.loss.low": "policy.loss.clip_low",
    "policy.loss.high": "policy.loss.clip_high",
    "policy.loss.dual": "policy.loss.dual_clip",
    "policy.loss.share": "policy.loss.fraction",
    "policy.optimizer.ramp_steps": "policy.optimizer.warmup_steps",
    "policy.optimizer.max_gradient_norm": "policy.optimizer.max_grad_norm",
    "mesh.compute": "mesh.compute_dtype",
    "mesh.checkpointing": "mesh.activation_checkpointing",
    "limits.effective_share": "limits.ess",
    "limits.bounded_share": "limits.correction_clip_fraction",
    "limits.phase_s": "timeouts.phase_s",
    "limits.run_s": "timeouts.walltime_s",
}


class RenamedSettingWarning(FutureWarning):
    """A recipe or an override uses an old name of a setting."""


def renamed(tree: Mapping[str, Any], name: str, *, quiet: bool = False) -> dict[str, Any]:
    """Return a recipe's tree with every old name replaced by the new one.

    A setting that is given under both names keeps both, so that the old one is refused as unknown. `quiet` is
    for files that millrace wrote itself.

    Warns:
        RenamedSettingWarning: once for each old name, with the recipe's name.
    """
    found = _copy(tree)
    # Settings before their sections, since a section that moves takes along what is left in it.
    for old in sorted(RENAMED, key=lambda key: -key.count(".")):
        if _move(found, old.split("."), RENAMED[old].split(".")) and not quiet:
            _warn(name, old)
    return found


def renamed_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """As `renamed`, of dotted overrides such as `{"flow.staleness": 1}` or `{"flow": {"staleness": 1}}`."""
    found: dict[str, Any] = {}
    for key, value in overrides.items():
        tree: dict[str, Any] = {}
        inner = tree
        *path, last = key.split(".")
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
        moved = renamed(tree, "override")
        depth = len(path) + 1 if moved == tree or key in RENAMED else None
        found |= dict(_flat(moved, depth))
    return found


def _warn(name: str, old: str) -> None:
    where = "an override" if name == "override" else f"recipe {name}"
    warnings.warn(
        f"{where}: {old} is now called {RENAMED[old]}; the old name will be refused in the next version",
        RenamedSettingWarning,
        stacklevel=2,
    )


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def _move(tree: dict[str, Any], old: list[str], new: list[str]) -> bool:
    """Move a value in the tree; False if there is none to move or the new place is taken."""
    *path, last = old
    above: list[dict[str, Any]] = [tree]
    for part in path:
        inner = above[-1].get(part)
        if not isinstance(inner, dict):
            return False
        above.append(inner)
    if last not in above[-1]:
        return False
    *target_path, target = new
    place: Any = tree
    for part in target_path:
        place = place.get(part, {}) if isinstance(place, dict) else None
    if not isinstance(place, dict):
        return False
    value = above[-1][last]
    if target in place and not _disjoint(value, place[target]):
        return False
    del above[-1][last]
    for part, outer in zip(reversed(path), reversed(above[:-1]), strict=True):
        if not outer[part]:
            del outer[part]  # a section whose last setting moved
    place = tree
    for part in target_path:
        place = place.setdefault(part, {})
    place[target] = {**place[target], **value} if target in place else value
    return True


def _disjoint(value: Any, other: Any) -> bool:
    return isinstance(value, dict) and isinstance(other, dict) and not value.keys() & other.keys()


def _flat(tree: Mapping[str, Any], depth: int | None, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of a tree; mappings from `depth` levels on are values."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and depth != 1:
            yield from _flat(value, None if depth is None else depth - 1, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
