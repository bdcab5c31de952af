"""Models for tests, each made and checked once in a process, and copied for every test that asks for it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, ParamSpec

from millrace.models.load import Model

P = ParamSpec("P")


def made_once(make: Callable[P, Model]) -> Callable[P, Model]:
    """Make each model at the first call with its arguments, which are hashable; every call gives a copy."""
    made: dict[Any, Model] = {}

    @functools.wraps(make)
    def copied(*args: P.args, **options: P.kwargs) -> Model:
        key = args, tuple(sorted(options.items()))
        if key not in made:
            made[key] = make(*args, **options)
        return copy.deepcopy(made[key])

    return copied
