"""Every recipe shipped loads, says what it does, and stays small enough to read."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, Field

from millrace.config.recipe import ConfigError, load_recipe, settings
from millrace.config.settings import RunConfig
from tests.house.source import PACKAGE, write

# 102 with nothing but steps, data and rewards, 14 of them the mesh's: it has four dimensions beside the data
# ranks. A warm-up and a critic add 3 each, a penalty and an adapter 4, a correction 5, and a reward in
# processes of its own 2.
MAX_SETTINGS = 128
MIN_WORDS = 5


def recipe_faults(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.glob("*.yaml")):
        try:
            config = load_recipe(path)
        except ConfigError as error:
            found.append(f"{path.name} does not load: {str(error).replace(str(path), path.name)}")
            continue
        first = path.read_text(encoding="utf-8").splitlines()[0]
        if not first.startswith("#") or len(first.split()) <= MIN_WORDS:
            found.append(f"{path.name} does not open with a comment that says what it does")
        count = len(list(settings(config)))
        if count > MAX_SETTINGS:
            found.append(f"{path.name} has {count} settings; the limit is {MAX_SETTINGS}")
    return found


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A section and every section below it, through unions, tuples and annotations."""
    yield model
    for info in model.model_fields.values():
        for kind in _models(info.annotation):
            yield from sections(kind)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, Annotated, tuple, list):
        for part in get_args(annotation):
            yield from _models(part)


def silent_fields(model: type[BaseModel]) -> list[str]:
    """Settings without a description; `kind` is the word that picks a section, which describes itself."""
    return [
        f"{section.__name__}.{name}"
        for section in sections(model)
        for name, info in section.model_fields.items()
        if not info.description and name != "kind"
    ]


def test_every_recipe_loads_and_says_what_it_does():
    assert recipe_faults(PACKAGE / "recipes") == []


def test_every_setting_has_a_description():
    assert len(set(sections(RunConfig))) > 10
    assert silent_fields(RunConfig) == []


def test_a_setting_without_a_description_is_found_inside_unions():
    class Inner(BaseModel):
        kind: int
        silent: int

    class Outer(BaseModel):
        many: tuple[Annotated[Inner | None, Field()], ...] = Field(description="some")

    assert silent_fields(Outer) == ["Inner.silent"]


GOOD = "# Trains nothing at all, as a test.\nsteps: 1\ndata: {train: x.jsonl}\nrewards: [{kind: exact}]\n"


def test_a_good_recipe_passes(tmp_path):
    assert recipe_faults(write(tmp_path, {"good.yaml": GOOD})) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("steps:", "stepz:"), "bad.yaml: unknown key stepz"),
        (GOOD.split("\n", 1)[1], "bad.yaml does not open with a comment that says what it does"),
        (GOOD.replace(" nothing at all, as a test", ""), "bad.yaml does not open with a comment"),
        (GOOD.replace("[{", "[" + "{kind: exact}, " * 20 + "{"), f"settings; the limit is {MAX_SETTINGS}"),
    ],
)
def test_a_bad_recipe_is_found(tmp_path, text, message):
    found = recipe_faults(write(tmp_path, {"bad.yaml": text}))
    assert message in "\n".join(found)
