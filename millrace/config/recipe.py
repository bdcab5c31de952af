"""From a recipe (YAML) and overrides to a RunConfig, and back to something a person can read.

A recipe is laid over its `base`, overrides over both. An unknown key stops with the nearest known one. Every
resolved setting knows where it came from.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from operator import methodcaller
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from millrace.config.explain import explain, is_choice, is_echo, kinds_of, meaning_of
from millrace.config.inputs import FRESH_MODEL, MIXTURE, TASK_PREFIX, TRAINED_TOKENIZER
from millrace.config.method_sections import DEFAULT_KIND
from millrace.config.renamed import renamed, renamed_overrides
from millrace.config.settings import BASIC, RunConfig
from millrace.errors import did_you_mean


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 3e-4 as text; here it is the number everybody means."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("+-.0123456789")
    )


# As the base of a recipe: the one that it names itself.
OWN_BASE = "its own"


class ConfigError(ValueError):
    """A recipe or an override is invalid; the message names the fix."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One resolved setting: dotted key, value, meaning, and whether default, recipe or override set it."""

    key: str
    value: Any
    meaning: str
    source: str

    @property
    def basic(self) -> bool:
        """Whether it is one of the settings to know first."""
        return any(f"{self.key}.".startswith(f"{basic}.") for basic in BASIC)


def recipe_names() -> list[str]:
    """The recipes shipped with millrace."""
    folder = resources.files("millrace") / "recipes"
    return sorted(
        entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")
    )


def is_method(name: str) -> bool:
    """Whether a recipe holds a method alone, without data and rewards to train on."""
    return "data" not in _with_base(name)


def recipe_text(name: str | Path) -> str:
    """The YAML of a shipped recipe, or of a file of the user's own; ConfigError if there is none."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ConfigError(f"recipe file {path} does not exist")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"recipe file {path} is not UTF-8 text") from None
    if str(name) not in recipe_names():
        hint = did_you_mean(str(name), recipe_names())
        raise ConfigError(f"there is no recipe {name}; {hint} (a file of your own ends in .yaml)")
    return (resources.files("millrace") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


def load_recipe(name: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A RunConfig from a recipe (a shipped name, or a path in .yaml) and dotted overrides, or ConfigError.

    The override `base` names another recipe than the recipe's own base to lay it over.
    """
    return resolve(name, overrides)[0]


def resolve(name: str | Path, overrides: Mapping[str, Any] | None = None) -> tuple[RunConfig, list[Setting]]:
    """As `load_recipe`, and every setting with its meaning and source."""
    given = renamed_overrides(overrides or {})
    tree = _with_base(name, base=given.pop("base")) if "base" in given else _with_base(name)
    tree = _without_replaced(tree, _inputs(given))
    _assign_all(tree, given)
    if "data" not in tree and str(name) in recipe_names():
        raise ConfigError(
            f"recipe {name} is a method without a task: data and rewards are missing. Write a recipe of your "
            f"own over it (base: {name}, and model.path, data.train, rewards), or try it on the quickstart's "
            f"task: millrace train quickstart base={name}"
        )
    in_recipe = set(_leaves(tree))
    config = validate(tree, str(name))
    overridden = set(given)

    def source(key: str) -> str:
        if any(_touches(given, key) for given in overridden):
            return "override"
        return "recipe" if any(_touches(given, key) for given in in_recipe) else "default"

    return config, [Setting(key, value, meaning, source(key)) for key, value, meaning in settings(config)]


def _with_base(
    name: str | Path, above: tuple[str, ...] = (), *, base: str | Path | None = OWN_BASE
) -> dict[str, Any]:
    if str(name) in above:
        raise ConfigError(f"recipe {name} is its own base: {' -> '.join((*above, str(name)))}")
    tree = renamed(parse_tree(recipe_text(name), str(name)), f"recipe {name}")
    own = tree.pop("base", None)
    below = own if base == OWN_BASE else base
    if below is None:
        return tree
    if not isinstance(below, str):
        raise ConfigError(f"recipe {name}: base is {below!r}; it names a recipe, such as grpo")
    if base == OWN_BASE and below.endswith((".yaml", ".yml")):
        below = os.path.normpath(Path(name).parent / below)  # beside the recipe that names it
    return _overlay(_with_base(below, (*above, str(name))), tree)


def _overlay(below: dict[str, Any], above: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Sections are laid over one another key by key; an empty one, or one of another kind, replaces."""
    merged = dict(below) if path else _without_replaced(below, above)
    for key, value in above.items():
        under, place = merged.get(key), f"{path}{key}"
        if isinstance(under, dict) and isinstance(value, Mapping) and value:
            kept = {} if _changes_kind(under, value.get("kind"), place) else under
            value = _overlay(kept, value, f"{place}.")
        merged[key] = value
    return merged


def _without_replaced(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Other data than a reasoning-gym task replaces the section `data`, as another kind would.

    `data.train` and `data.sources` replace each other.

    A model folder replaces architecture, sizes and tokenizer of a fresh model.
    """
    kept = dict(below)
    task, train = _at(below, "data", "train"), _at(above, "data", "train")
    sources = _at(above, "data", "sources")
    replaced = bool(isinstance(sources, list) and sources)
    if isinstance(task, str) and task.startswith(TASK_PREFIX) and (replaced or train not in (None, task)):
        del kept["data"]
    elif isinstance(kept.get("data"), Mapping) and (replaced or train not in (None, MIXTURE)):
        other = "train" if replaced else "sources"
        kept["data"] = {name: value for name, value in kept["data"].items() if name != other}
    folder = _at(above, "model", "path")
    idle = {
        "model": FRESH_MODEL if folder else (),
        "tokenizer": TRAINED_TOKENIZER if folder or _at(above, "tokenizer", "path") else (),
    }
    for section, names in idle.items():
        if isinstance(kept.get(section), Mapping):
            kept[section] = {name: value for name, value in kept[section].items() if name not in names}
    return kept


def _at(tree: Mapping[str, Any], section: str, name: str) -> Any:
    inner = tree.get(section)
    return inner.get(name) if isinstance(inner, Mapping) else None


def _inputs(overrides: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key in sorted(overrides, key=lambda key: key.count(".")):
        if key.partition(".")[0] in ("data", "model", "tokenizer"):
            _assign(tree, key, overrides[key])
    return tree


def _changes_kind(section: Any, kind: Any, place: str) -> bool:
    return (
        kind is not None
        and is_choice(place)
        and isinstance(section, Mapping)
        and section.get("kind", DEFAULT_KIND.get(place)) != kind
    )


def _touches(given: str, key: str) -> bool:
    return f"{given}.".startswith(f"{key}.") or f"{key}.".startswith(f"{given}.")


def validate(tree: Mapping[str, Any], name: str) -> RunConfig:
    """A RunConfig from a plain tree; ConfigError as `load_recipe`."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        found = [dict(item) for item in error.errors()]
        raise ConfigError(
            "\n".join(explain(item, name) for item in found if not is_echo(item, found))
        ) from None


def from_settings(given: Mapping[str, Any], name: str) -> RunConfig:
    """A RunConfig without a recipe, from dotted overrides; errors as `load_recipe`, with this name."""
    tree: dict[str, Any] = {}
    _assign_all(tree, renamed_overrides(given))
    return validate(tree, name)


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`["steps=50", "data.eval=null"]` to dotted keys and YAML values; ConfigError for a word without `=`."""
    found = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} is not of the form key=value, such as steps=50")
        found[key.strip()] = _yaml_value(text, word)
    return found


def settings(
    section: BaseModel, above: str = "", kinds: Sequence[str] = ()
) -> Iterator[tuple[str, Any, str]]:
    """Every leaf setting of a RunConfig, or of a section below a key: dotted key, value, meaning."""
    for name, info in type(section).model_fields.items():
        item, key = getattr(section, name), f"{above}{name}"
        if isinstance(item, BaseModel):
            yield from settings(item, f"{key}.", list(kinds_of(info)))
        elif isinstance(item, tuple) and item and isinstance(item[0], BaseModel):
            for index, entry in enumerate(item):
                yield from settings(entry, f"{key}.{index}.", list(kinds_of(info)))
        else:
            yield key, item, info.description or (f"one of {', '.join(kinds)}" if name == "kind" else "")


def derivation(config: RunConfig) -> list[str]:
    """How the sizes of a step follow from the settings, one line each."""
    lines = []
    if config.sft:
        sft = config.sft
        until = f" or held-out accuracy in {list(sft.stop_accuracy)}" if sft.stop_accuracy else ""
        lines.append(
            f"SFT: {sft.sequences_per_step} sequences per optimizer step, until {sft.steps} steps{until}"
        )
    if config.steps:
        prompts, samples = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
        parts, epochs = config.policy.optimizer_steps_per_batch, config.policy.epochs_per_batch
        passes = f" x {epochs} passes" if epochs > 1 else ""
        lines += [
            f"batch: {prompts} prompts x {samples} samples per prompt = {prompts * samples} sequences",
            f"optimizer: {prompts * samples} sequences / {parts} optimizer steps per batch "
            f"= {prompts * samples // parts} sequences per optimizer step",
            f"run: {config.steps} batches x {parts}{passes} = {config.steps * parts * epochs} optimizer "
            f"steps, "
            f"{config.steps * prompts * samples} sequences in all",
            f"memory: at most {config.policy.tokens_per_micro_batch} tokens per micro-batch; gradients add "
            "up over micro-batches and do not depend on how many there are",
        ]
    return lines


def template() -> str:
    """The YAML of a recipe over grpo to fill in: every basic setting with its meaning and value."""
    inputs = {"model": {"path": "FOLDER"}, "data": {"train": "FILE.jsonl"}, "rewards": [{"kind": "exact"}]}
    config = validate(_with_base("grpo") | inputs, "template")
    order = list(RunConfig.model_fields)
    lines = [
        "# Put in your model, data and reward; `millrace config FILE.yaml --all` lists all settings.",
        "base: grpo",
    ]
    given = methodcaller("model_dump", mode="json", exclude_unset=True)
    above: list[str] = []
    for key in sorted(BASIC, key=lambda key: order.index(key.partition(".")[0])):
        *path, name = key.split(".")
        for depth, part in enumerate(path):
            if path[: depth + 1] != above[: depth + 1]:
                lines.append(f"{'  ' * depth}{part}:")
        above, indent = path, "  " * len(path)
        comment = f"{indent}# "
        lines += textwrap.wrap(meaning_of(key), 100, initial_indent=comment, subsequent_indent=comment)
        value = functools.reduce(getattr, [*path, name], config)
        lines.append(f"{indent}{name}: {json.dumps(value, default=given)}")
    return "\n".join(lines) + "\n"


def json_schema() -> str:
    """The JSON schema of a recipe, for editors; with a base nothing is required."""
    schema = RunConfig.model_json_schema()
    meaning = "recipe this one is laid over: a name, or a file beside this one"
    schema["properties"] = {"base": {"description": meaning, "type": "string"}} | schema["properties"]
    schema["anyOf"] = [{"required": ["base"]}, {"required": schema.pop("required")}]
    return json.dumps(schema, indent=2)


def to_yaml(config: RunConfig) -> str:
    """Every setting of a run as a recipe that repeats it."""
    tree = config.model_dump(mode="json")
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def from_yaml(text: str, name: str) -> RunConfig:
    """A RunConfig from what `to_yaml` wrote; ConfigError as `load_recipe`."""
    return validate(renamed(parse_tree(text, name), name, quiet=True), name)


def _read(text: str) -> Any:
    return copy.deepcopy(_parsed(text))


# One command reads a shipped recipe several times, as the base of others too.
@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def parse_tree(text: str, name: str) -> dict[str, Any]:
    """Read YAML that is a mapping; ConfigError, which names the place, for anything else."""
    try:
        tree = _read(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"recipe {name}{where}: {problem}") from None
    except (ValueError, RecursionError) as error:
        # A date that is none, a number of thousands of digits, or brackets within brackets.
        raise ConfigError(f"recipe {name} is not YAML that can be read: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"recipe {name} is not a mapping of settings")
    return tree


def _yaml_value(text: str, word: str) -> Any:
    try:
        return _read(text)
    except yaml.YAMLError:
        key, quoted = word.partition("=")[0], json.dumps(text, ensure_ascii=False)
        raise ConfigError(f"the value of {word!r} is not YAML; quote it: '{key}={quoted}'") from None


def _assign_all(tree: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    # Sections before their settings, and a kind before its settings: each replaces the earlier value.
    for key in sorted(overrides, key=lambda key: (key.count("."), not key.endswith(".kind"))):
        _assign(tree, key, overrides[key])


def _assign(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set one dotted key; `rewards.0.weight` reaches into a list."""
    *path, last = key.split(".")
    node: Any = tree
    for part in path:
        if isinstance(node, list):
            node = _item(node, part, key)
            if not isinstance(node, dict | list):
                raise ConfigError(f"{key}: entry {part} is {node!r} and has no settings of its own")
            continue
        if not isinstance(node.get(part), dict | list):
            node[part] = {}
        node = node[part]
    value = copy.deepcopy(value)  # later keys may reach into it, and it is the caller's
    if isinstance(node, list):
        _item(node, last, key)
        node[int(last)] = value
        return
    if last == "kind" and _changes_kind(node, value, ".".join(path)):
        node.clear()
    node[last] = value


def _item(node: list[Any], part: str, key: str) -> Any:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(f"{key}: {part} is not one of the {len(node)} entries, counted from 0")
    return node[int(part)]


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"
