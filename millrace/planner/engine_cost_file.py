"""The file of a measured cost model: what was measured, where, and how well the model fits. No torch."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from millrace.errors import PlanError
from millrace.planner.engine_cost import EngineCost, ErrorSummary, StepLoad

FORMAT = 1
# Of a file; the largest that the command writes has some 100 kB.
MAX_BYTES = 10_000_000


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """What a cost model holds for: a file of any other engine is refused.

    `machine` is the processor, or the GPU, by its own name; `num_threads` are those of torch. `pools` has
    heads, key width and value width of each KV pool, `block_bytes` are those of a block of all of them.
    """

    machine: str
    device: str
    num_threads: int
    dtype: str
    model_type: str
    num_parameters: int
    pools: tuple[tuple[int, int, int], ...]
    block_size: int
    block_bytes: int
    max_batch_tokens: int
    deterministic: bool

    def difference(self, own: MeasuredEngine) -> str:
        """Return the first field in which this differs from an `own` engine; empty if none does."""
        for field in fields(self):
            theirs, ours = getattr(self, field.name), getattr(own, field.name)
            if theirs != ours:
                return f"its {field.name} is {_short(theirs)} and not {_short(ours)}"
        return ""


def _short(value: Any) -> str:
    return str(value)[:80]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Median load and seconds of the repeats of one probe, and whether it was left out of the fit."""

    load: StepLoad
    seconds: float
    held_out: bool


@dataclass(frozen=True, slots=True)
class CostMeasurement:
    """A cost model with all that it comes from; errors are those of fitted and of held-out steps."""

    engine: MeasuredEngine
    cost: EngineCost
    fit_error: ErrorSummary
    held_out_error: ErrorSummary
    steps: tuple[MeasuredStep, ...]
    seed: int
    seconds: float
    num_skipped: int


def processor_name() -> str:
    """Return the processor's own name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_cost(measured: CostMeasurement, path: Path) -> None:
    """Write the file as JSON; OSError if that is impossible."""
    found = asdict(measured)
    for step, written in zip(measured.steps, found["steps"], strict=True):
        written["load"] = step.load._asdict()
        written["residual"] = measured.cost.seconds(step.load) / step.seconds - 1
    found |= {
        "fit_error": measured.fit_error._asdict(),
        "held_out_error": measured.held_out_error._asdict(),
    }
    path.write_text(json.dumps({"format": FORMAT, **found}, indent=1) + "\n", encoding="utf-8")


def read_cost(path: Path, own: MeasuredEngine | None = None) -> CostMeasurement:
    """Read a file of `write_cost`, for an `own` engine, or for a simulation on any machine if None.

    Raises:
        PlanError: there is no such file, it is damaged, or it was measured on another engine.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError("it is too long")
        measured = _measurement(json.loads(text))
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}; write it with millrace measure engine") from None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise PlanError(
            f"{path} holds no cost model of this version ({reason}); write it again with millrace measure "
            "engine"
        ) from None
    if own is not None and (difference := measured.engine.difference(own)):
        raise PlanError(f"{path} was measured on another engine: {difference}; measure this one")
    return measured


def _measurement(tree: Any) -> CostMeasurement:
    if tree["format"] != FORMAT:
        raise ValueError(f"its format is {tree['format']} and not {FORMAT}")
    cost = EngineCost(**{name: _number(value) for name, value in tree["cost"].items()})
    if not cost.seconds(StepLoad(1, 1, 1, 1)) > 0:
        raise ValueError("its steps take no time")
    return CostMeasurement(
        engine=_engine(tree["engine"]),
        cost=cost,
        fit_error=_error(tree["fit_error"]),
        held_out_error=_error(tree["held_out_error"]),
        steps=tuple(_steps(tree["steps"])),
        seed=_count(tree["seed"]),
        seconds=_number(tree["seconds"]),
        num_skipped=_count(tree["num_skipped"]),
    )


def _engine(tree: Any) -> MeasuredEngine:
    names = {name: tree[name] for name in ("machine", "device", "dtype", "model_type")}
    sizes = ("num_threads", "num_parameters", "block_size", "block_bytes", "max_batch_tokens")
    counts: dict[str, Any] = {name: _count(tree[name], least=1) for name in sizes}
    pools = tuple((_count(heads), _count(key), _count(value)) for heads, key, value in tree["pools"])
    if set(map(type, names.values())) != {str} or len(tree) != len(fields(MeasuredEngine)):
        raise ValueError(f"its engine is {_short(tree)}")
    return MeasuredEngine(**names, **counts, pools=pools, deterministic=bool(tree["deterministic"]))


def _error(tree: Any) -> ErrorSummary:
    return ErrorSummary(_number(tree["median"]), _number(tree["p90"]), _count(tree["num_steps"]))


def _steps(trees: Sequence[Any]) -> list[MeasuredStep]:
    return [
        MeasuredStep(
            StepLoad(**{name: _number(value) for name, value in tree["load"].items()}),
            _number(tree["seconds"]),
            bool(tree["held_out"]),
        )
        for tree in trees
    ]


def _count(value: Any, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r:.40} is no integer of {least} or more")
    return value


def _number(value: Any) -> float:
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{number} is no duration or count")
    return number
