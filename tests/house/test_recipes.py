"""Every recipe shipped loads, says what it does, and stays small enough to read."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, Field

from millrace.config.recipe import ConfigError, load_recipe, settings
from millrace.config.settings import RunConfig
from tests.house.source import PACKAGE, write

# 118 with nothing but steps, data, rewards and a model, 15 of them the mesh's: it has four dimensions beside
# the data ranks, and recomputing activations is combined with offloading them. A critic adds 4, SFT and an
# adapter 4, a penalty 6, a correction 5, and a reward in processes of its own 2. Credit over turns is 3 of a
# comparison of groups, 2 of a critic; an environment 15, the data's sources and whether they stay on disk 2.
# Passes over a batch, truncated answers, the kind and floor of the optimizer, group filter and penalty factor
# are 7, callbacks, project, group and rows to train on 4.
MAX_SETTINGS = 160
MIN_WORDS = 5


# What a method may say: how a batch becomes new weights, and of sampling what belongs to the arithmetic.
METHOD = (
    *("advantage.", "critic.", "policy.", "rollout.dynamic_sampling_rounds", "rollout.group_filter"),
    *("rollout.overlong_fraction", "rollout.overlong_penalty"),
)
# Sizes and speeds of a task, a model and a machine.
NO_METHOD = ("policy.optimizer.", "policy.tokens_per_micro_batch", "critic.learning_rate", "advantage.path")
# What suits a method, and what suits the size of a task's rewards and batches.
EITHER = ("policy.entropy_coefficient", "policy.optimizer_steps_per_batch")


def is_method(key: str) -> bool:
    return key.startswith(METHOD) and not key.startswith(NO_METHOD)


def own_settings(path: Path) -> list[str]:
    """What a recipe says itself, its base aside."""
    return [key for key in leaves(yaml.safe_load(path.read_text(encoding="utf-8"))) if key != "base"]


def leaves(tree: dict[str, Any], above: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield from leaves(value, f"{above}{key}.") if isinstance(value, dict) else (f"{above}{key}",)


def recipe_faults(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.glob("*.yaml")):
        is_task = any(key.startswith("data.") for key in own_settings(path))
        for key in own_settings(path):
            if is_method(key) == is_task and not key.startswith(EITHER):
                found.append(f"{path.name} sets {key}, which is for {'methods' if is_task else 'tasks'}")
        try:
            config = load_recipe(path) if is_task else load_recipe("quickstart", over(path))
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


def over(path: Path) -> dict[str, Any]:
    """A method as the quickstart's base, with a teacher where it needs one."""
    needs_teacher = "kind: teacher" in path.read_text(encoding="utf-8")
    return {"base": str(path), **({"advantage.path": "teacher"} if needs_teacher else {})}


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
METHOD_ALONE = "# Trains nothing at all, as a test.\nadvantage: {kind: gpg}\n"


def test_good_recipes_pass(tmp_path):
    assert recipe_faults(write(tmp_path, {"good.yaml": GOOD, "method.yaml": METHOD_ALONE})) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("steps:", "stepz:"), "bad.yaml: unknown key stepz"),
        (GOOD.split("\n", 1)[1], "bad.yaml does not open with a comment that says what it does"),
        (GOOD.replace(" nothing at all, as a test", ""), "bad.yaml does not open with a comment"),
        (GOOD + "critic: {clip: 0.3}\n", "bad.yaml sets critic.clip, which is for methods"),
        (METHOD_ALONE + "steps: 5\n", "bad.yaml sets steps, which is for tasks"),
        (METHOD_ALONE + "critic: {learning_rate: 1.0}\n", "bad.yaml sets critic.learning_rate, which is for"),
        (GOOD.replace("[{", "[" + "{kind: exact}, " * 20 + "{"), f"settings; the limit is {MAX_SETTINGS}"),
    ],
)
def test_a_bad_recipe_is_found(tmp_path, text, message):
    found = recipe_faults(write(tmp_path, {"bad.yaml": text}))
    assert message in "\n".join(found)
