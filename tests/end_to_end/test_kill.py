"""A run that dies before any of its durable effects, and is resumed, ends with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.runs import Undisturbed, check_equal, contents, files

# All that a run does, in half a second: it writes four checkpoints and removes two of them.
SETTINGS = {"sft.steps": 2, "steps": 3, "checkpoint.keep": 1, "policy.optimizer_steps_per_batch": 1}
NUM_CHUNKS = 32
# For each of the points of the default selection, spread evenly, where the second process dies; see `die`.
AGAIN = (0, 0, 1, 0, 2, 0)
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    found = Undisturbed.run(tmp_path_factory.mktemp("kill"), SETTINGS)
    assert len(set(contents(found.folder)["prompts"])) > 1
    return found


def check_same(undisturbed: Undisturbed, folder: Path) -> None:
    check_equal(folder, undisturbed.folder)
    assert files(folder) == files(undisturbed.folder)


@pytest.mark.slow
@pytest.mark.world
def test_the_effects_of_a_run_are_those_of_each_of_its_parts(undisturbed: Undisturbed) -> None:
    checkpoints = ["sft-000002", "step-000000", "step-000002", "step-000003"]
    written = [f"rename checkpoints/.aside-{name} to checkpoints/{name}" for name in checkpoints]
    removed = [f"rmdir checkpoints/.aside-removed-{name}" for name in ("sft-000002", "step-000002")]
    numbers = [f"append metrics.jsonl{number}" for number in ("", *(f" ({n})" for n in range(2, 10)))]
    best = ["rename .best.json.aside to best.json"]
    last = ["rename .summary.json.aside to summary.json"]
    expected = {*written, *removed, *numbers, *best, *last, "write rollouts/step-000003.parquet.partial"}
    assert expected <= set(undisturbed.effects)
    assert len(undisturbed.effects) == len(set(undisturbed.effects))
    assert (undisturbed.effects[0], undisturbed.effects[-1]) == ("mkdir .", last[-1])


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("number", range(len(AGAIN)))
def test_a_run_that_dies_before_an_effect_ends_with_the_same_bits(
    number: int, undisturbed: Undisturbed
) -> None:
    place = number * (len(undisturbed.effects) - 1) // (len(AGAIN) - 1)
    undisturbed.die(place, lambda folder: check_same(undisturbed, folder), again=AGAIN[number])


@pytest.mark.slow
@pytest.mark.world
def test_what_is_left_of_a_half_removed_checkpoint_goes_when_the_run_is_resumed(
    undisturbed: Undisturbed,
) -> None:
    place = undisturbed.effects.index("rmdir checkpoints/.aside-removed-step-000002")
    undisturbed.die(place, lambda folder: check_same(undisturbed, folder), again=0)


@pytest.mark.only_whole
@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_a_run_that_dies_before_any_effect_ends_with_the_same_bits(
    chunk: int, undisturbed: Undisturbed
) -> None:
    for place in range(chunk, len(undisturbed.effects), NUM_CHUNKS):
        undisturbed.die(place, lambda folder: check_same(undisturbed, folder), again=place // NUM_CHUNKS % 3)
