"""docs/reference.md says of every setting, of every kind, what the code says."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, PositiveFloat
from pydantic.fields import FieldInfo

from millrace.cli.config import written
from millrace.config.method_sections import DEFAULT_KIND, Share
from millrace.config.recipe import load_recipe
from millrace.config.settings import RunConfig
from tests.house.source import ROOT

TEXT = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text", dict: "mapping"}
BOUNDS = {"gt": "above", "ge": "from", "lt": "below", "le": "to"}


class Row(NamedTuple):
    """What a line of the page says of a setting; `kinds` is empty where there is no choice."""

    key: str
    kinds: str
    values: str
    default: str
    meaning: str


def sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in get_args(annotation) for found in sections(inner)]


def kind_of(section: type[BaseModel]) -> str:
    return str(get_args(section.model_fields["kind"].annotation)[0])


def values(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """What a setting may be, in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values(inner[0], inner[1:])
    if origin is Literal:
        *most, last = [f"`{choice}`" for choice in inner]
        return f"{', '.join(most)} or {last}"
    if origin in (Union, types.UnionType):
        (given,) = (one for one in inner if one is not type(None))
        return f"{values(given, limits)} or null"
    if origin is tuple and inner[-1] is not Ellipsis:
        return "two numbers"
    if origin is tuple:
        return f"list of {values(inner[0]).replace(' or ', ', ').replace('text', 'texts')}"
    flat = [one for limit in limits for one in getattr(limit, "metadata", [limit])]
    found = [(BOUNDS[name], getattr(limit, name, None)) for limit in flat for name in BOUNDS]
    told = [f"{word} {bound:g}" for word, bound in found if bound is not None]
    return f"{WORDS[origin or annotation]} {', '.join(told)}".strip()


def row(key: str, info: FieldInfo, kinds: str = "") -> Row:
    is_set = not info.is_required()
    default = f"`{written(info.get_default(call_default_factory=True))}`" if is_set else "required"
    return Row(key, kinds, values(info.annotation, info.metadata), default, info.description or "")


def rows(model: type[BaseModel], above: str = "") -> Iterator[Row]:
    """Every setting; entries of a list are called N, and kinds that share a setting share its row."""
    for name, info in model.model_fields.items():
        key, below = f"{above}{name}", sections(info.annotation)
        if get_origin(info.annotation) is tuple and below:
            key = f"{key}.N"
        if not below:
            yield row(key, info)
        elif "kind" not in below[0].model_fields:
            yield from rows(below[0], f"{key}.")
        else:
            yield from rows_of_kinds(below, key)


def rows_of_kinds(below: list[type[BaseModel]], key: str) -> Iterator[Row]:
    default = f"`{DEFAULT_KIND[key]}`" if key in DEFAULT_KIND else "required"
    yield Row(f"{key}.kind", "all", "one of those above", default, "which of its kinds")
    shared: dict[Row, list[str]] = {}
    for section in below:
        for name, info in section.model_fields.items():
            if name != "kind":
                shared.setdefault(row(f"{key}.{name}", info), []).append(f"`{kind_of(section)}`")
    for one, kinds in shared.items():
        yield one._replace(kinds="all" if len(kinds) == len(below) else ", ".join(kinds))


def page() -> Iterator[Row]:
    """The rows of the page's tables: four cells, or five where there are kinds."""
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if line.startswith("| `") and len(cells) in (4, 5):
            key, *rest = cells
            yield Row(key.strip("`"), *(rest if len(cells) == 5 else ["", *rest]))


SETTINGS = list(rows(RunConfig))
KEYS = sorted({setting.key for setting in SETTINGS})
UNIONS = {
    name: below
    for name, info in (
        ("rewards", RunConfig.model_fields["rewards"]),
        ("advantage", RunConfig.model_fields["advantage"]),
        ("policy.loss", sections(RunConfig.model_fields["policy"].annotation)[0].model_fields["loss"]),
    )
    if (below := sections(info.annotation))
}


def test_the_page_names_every_setting_and_no_other() -> None:
    assert sorted({found.key for found in page()}) == KEYS


@pytest.mark.parametrize("key", KEYS)
def test_the_page_gives_values_default_meaning_and_kinds(key: str) -> None:
    assert [found for found in page() if found.key == key] == [s for s in SETTINGS if s.key == key]


@pytest.mark.parametrize("union", UNIONS)
def test_the_page_describes_every_kind(union: str) -> None:
    lines = TEXT.splitlines()
    kinds = [f"| `{kind_of(section)}` | {section.__doc__} |" for section in UNIONS[union]]
    first = lines.index(kinds[0])
    assert lines[first : first + len(kinds)] == kinds


def test_the_recipe_on_the_page_loads_and_does_what_the_page_says(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.M | re.S)
    (tmp_path / "mine.yaml").write_text(block, encoding="utf-8")
    config = load_recipe(tmp_path / "mine.yaml")
    assert (config.data.train, config.warmup, config.policy.optimizer.learning_rate) == (
        "sums.jsonl",
        None,
        1e-6,
    )
    assert config.critic is not None and (config.critic.clip, config.critic.warmup_steps) == (None, 5)
    assert config.advantage.model_dump(include={"kind", "lam"}) == {"kind": "gae", "lam": 0.9}


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (Literal["a", "b", "c"], "`a`, `b` or `c`"),
        (tuple[Literal["a", "b"], ...], "list of `a`, `b`"),
        (tuple[str, ...], "list of texts"),
        (tuple[float, float] | None, "two numbers or null"),
        (Share, "number from 0, to 1"),
        (PositiveFloat | None, "number above 0 or null"),
        (dict[str, Any], "mapping"),
        (bool, "true or false"),
    ],
    ids=str,
)
def test_what_a_setting_may_be_is_said_in_words(annotation: Any, expected: str) -> None:
    assert values(annotation) == expected
