"""Settings that have a new name: the old one is accepted in this version, with a warning."""

from __future__ import annotations

import functools
import operator
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


Path = tuple[Any, ...]


def renamed(tree: Mapping[str, Any], name: str, *, quiet: bool = False) -> dict[str, Any]:
    """Return a recipe's tree with every old name replaced by the new one, with one warning for each.

    A setting that is given under both names keeps both, so that the old one is refused as unknown. `quiet` is
    for files that millrace wrote itself.
    """
    by_path = dict(leaves(tree))
    found: dict[str, Any] = {}
    used: dict[str, None] = {}
    # Current names first, since they have their places.
    for path in sorted(by_path, key=lambda path: _old_name(path) is not None):
        old = _old_name(path)
        new = path if old is None else (*RENAMED[old].split("."), *path[old.count(".") + 1 :])
        if _put(found, new, by_path[path]):
            used |= {} if old is None else {old: None}
        else:
            _put(found, path, by_path[path])
    for old in used if not quiet else ():
        warnings.warn(
            f"{name}: {old} is now called {RENAMED[old]}; the old name will be refused in the next version",
            RenamedSettingWarning,
            stacklevel=2,
        )
    return found


def renamed_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """As `renamed`, of dotted overrides such as `{"flow.staleness": 1}` or `{"flow": {"staleness": 1}}`."""
    found: dict[str, Any] = {}
    for key, value in overrides.items():
        tree: dict[str, Any] = {}
        _put(tree, tuple(key.split(".")), value)
        moved = renamed(tree, "an override")
        if moved == tree:
            found[key] = value
        elif key in RENAMED:  # a section moves as a whole, and replaces that of the recipe
            found[RENAMED[key]] = functools.reduce(operator.getitem, RENAMED[key].split("."), moved)
        else:
            found |= {".".join(path): leaf for path, leaf in leaves(moved)}
    return found


def _old_name(path: Path) -> str | None:
    """The longest old name that the path begins with."""
    names = (".".join(map(str, path[:size])) for size in range(len(path), 0, -1))
    return next((name for name in names if name in RENAMED), None)


def leaves(tree: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what is in a tree of settings, an empty section too, with the keys that lead to it."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _put(tree: dict[str, Any], path: Path, value: Any) -> bool:
    """Return whether the place was free."""
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            return False
    if path[-1] in tree:
        return False
    tree[path[-1]] = value
    return True
