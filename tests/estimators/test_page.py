"""The comparison page shows what the code computes, and its claims are true of those numbers."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.house.scripts import load_script

EXACT = {
    "return (no baseline)",
    "group_centred (Dr. GRPO)",
    "leave_one_out (RLOO)",
    "leave_one_out_normalised",
    "baseline_centred (ReMax)",
    "gae, exact values, lambda 0",
    "gae, exact values, lambda 0.5",
    "gae, exact values, lambda 1",
    "gae, wrong values, lambda 1",
    "sequence_sum",
    "token_sum",
    "fixed_length, 3",
    "reinforce x sequence weights",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("estimators_picture")


@pytest.fixture(scope="module")
def found(script: ModuleType) -> Iterator[dict[str, dict[str, Any]]]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the batches are tiny
    yield script.judged()
    torch.set_num_threads(num_threads)


@pytest.mark.slow
def test_the_page_and_its_picture_are_what_the_code_computes(script: ModuleType, found: Any) -> None:
    page = (script.FOLDER / "comparison.md").read_text(encoding="utf-8")
    assert script.page_with(page, found) == page, "run python scripts/estimators_picture.py"
    assert (script.FOLDER / "estimators.svg").read_text(encoding="utf-8") == script.picture(found)


@pytest.mark.slow
def test_only_the_unbiased_have_no_angle(found: Any) -> None:
    angles = {name: numbers[0] for part in found.values() for name, numbers in part.items()}
    assert {name for name, angle_deg in angles.items() if angle_deg < 1e-3} == EXACT
    assert all(angle_deg > 0.5 for name, angle_deg in angles.items() if name not in EXACT)


@pytest.mark.slow
def test_the_whitened_and_the_two_forms_of_gspo_agree_as_the_page_says(found: Any) -> None:
    fresh, _, stale = found.values()
    assert abs(fresh["reinforce_plus_plus"] - fresh["reinforce_plus_plus_baseline"]).max() < 1e-6
    assert abs(fresh["reinforce_plus_plus"] - fresh["group_decoupled (GDPO), whitened"]).max() < 1
    assert abs(stale["gspo"] - stale["gspo_token"]).max() < 1e-9


def test_a_page_without_a_place_for_the_tables_is_refused(script: ModuleType) -> None:
    with pytest.raises(
        ValueError, match=r"^the page has no <!-- table: begin --> \.\.\. <!-- table: end -->$"
    ):
        script.page_with("# A page\n", {})
