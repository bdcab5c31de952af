"""docs/reference.md says of every setting what the code says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millrace.cli.config import written
from millrace.config.settings import RunConfig
from tests.house.source import ROOT

ROW = re.compile(
    r"^\| `(?P<key>[\w.]+)` \| (?P<values>.+?) \| (?P<default>.+?) \| (?P<meaning>.+?) \|$", re.M
)
TEXT = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
PAGE = {row["key"]: row for row in ROW.finditer(TEXT)}


def sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in get_args(annotation) for found in sections(inner)]


def leaves(model: type[BaseModel], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting with its key; entries of a list are called N."""
    for name, info in model.model_fields.items():
        below = sections(info.annotation)
        if not below:
            yield f"{above}{name}", info
        for section in below:
            yield from leaves(section, f"{above}{name}." + "N." * (get_origin(info.annotation) is tuple))


SETTINGS = dict(leaves(RunConfig))


def choices(annotation: Any) -> set[str]:
    if get_origin(annotation) is Literal:
        return {str(choice) for choice in get_args(annotation)}
    return {choice for inner in get_args(annotation) for choice in choices(inner)}


def test_the_page_names_every_setting_and_no_other():
    assert sorted(PAGE) == sorted(SETTINGS)


@pytest.mark.parametrize("key", SETTINGS)
def test_the_page_gives_default_and_meaning(key):
    row, info = PAGE[key], SETTINGS[key]
    is_set = not info.is_required()
    expected = f"`{written(info.get_default(call_default_factory=True))}`" if is_set else "required"
    assert row["default"] == expected
    assert row["meaning"] == (info.description or "which of its kinds")


CHOICES = {key: found for key, info in SETTINGS.items() if (found := choices(info.annotation))}


@pytest.mark.parametrize("key", sorted(CHOICES.keys() - {"rewards.N.kind"}))
def test_the_page_gives_every_choice(key):
    assert set(re.findall(r"`(\w+)`", PAGE[key]["values"])) == CHOICES[key]


def test_the_page_describes_every_kind_of_reward():
    kinds = {}
    for section in sections(RunConfig.model_fields["rewards"].annotation):
        (kind,) = choices(section.model_fields["kind"].annotation)
        own = [f"`{name}`" for name in section.model_fields if name not in ("kind", "weight")]
        kinds[kind] = f"| `{kind}` | {section.__doc__} | {', '.join(own) or 'none'} |"
    assert [line for line in kinds.values() if line not in TEXT.splitlines()] == []
