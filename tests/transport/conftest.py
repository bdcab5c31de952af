from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.transport.pieces import Pair


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    """A `Pair`, whose folder is given back after the test."""
    with ExitStack() as opened:

        def make(*args: Any, **options: Any) -> Pair:
            pair = Pair(*args, **options)
            opened.enter_context(pair.carrier.carrier)
            return pair

        yield make
