"""The GRPO loop on public classes learns, and repeats itself."""

from __future__ import annotations

import importlib.util

from tests.house.source import ROOT


def test_the_loop_of_the_example_learns_and_is_repeatable() -> None:
    spec = importlib.util.spec_from_file_location("grpo_loop", ROOT / "examples" / "grpo_loop" / "loop.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rewards = example.train(8)
    assert rewards[-1] > rewards[0] + 0.2 and 0.4 < rewards[0] < 0.6
    assert example.train(2) == rewards[:2]
