"""Problems drawn from a reasoning-gym task."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from millrace.config.inputs import TASK_PREFIX
from millrace.data.rows import DataError, Row

# These two have a home elsewhere in the recipe.
ELSEWHERE = {"seed": "seed", "size": "data.task_size"}


def task_rows(name: str, options: Mapping[str, Any], *, size: int, seed: int) -> list[Row]:
    """`size` problems of a task, the same for the same seed. Some may be equal.

    Args:
        name: the task, with or without `reasoning-gym:` before it.
        options: fields of the task's configuration, such as `{"max_terms": 2}`.
        size: problems to draw.
        seed: of the task's generator.

    Returns:
        The task's entries: columns `question`, `answer` and `metadata`.

    Raises:
        DataError: there is no such task or option, or the task refuses a value.
    """
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    name = name.removeprefix(TASK_PREFIX)
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(DATASETS))}"
        raise DataError(f"reasoning-gym has no task {name}; {hint}")
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in ELSEWHERE]
    for option in options:
        if option in ELSEWHERE:
            raise DataError(f"data.task.{option} is not the task's to set; set {ELSEWHERE[option]} instead")
        if option not in known:
            raise DataError(f"task {name} has no option {option}; there are: {', '.join(known) or 'none'}")
    try:
        task = create_dataset(name, **options, seed=seed, size=size)
        entries = [task[index] for index in range(size)]
    except Exception as error:
        # Tasks check their options with whatever comes to hand: asserts, ValueErrors, a TypeError later on.
        given = ", ".join(f"{option}={value!r}" for option, value in options.items()) or "no options"
        raise DataError(
            f"task {name} with {given} cannot be drawn: {str(error) or type(error).__name__}"
        ) from error
    return [Row(entry, f"{TASK_PREFIX}{name} problem {index}") for index, entry in enumerate(entries)]
