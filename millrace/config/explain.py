"""From pydantic's errors to sentences that name the setting and what to change."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millrace.config.other_names import hint
from millrace.config.renamed import leaves
from millrace.config.settings import RunConfig


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that an annotation names, through `| None`, lists and unions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for inner in get_args(annotation) for found in sections(inner)]


def _section(info: FieldInfo) -> type[BaseModel] | None:
    found = sections(info.annotation)
    return found[0] if len(found) == 1 else None


def kinds_of(info: FieldInfo | None) -> dict[str, type[BaseModel]]:
    """The sections that a field, or each entry of it, may be, by kind; empty if there is no choice."""
    found = sections(info.annotation) if info else []
    return {kind_of(section): section for section in found if is_kind(section)}


def is_kind(section: type[BaseModel]) -> bool:
    """Whether a section is one of several that `kind` selects; elsewhere `kind` is a setting as any other."""
    return "kind" in section.model_fields and len(get_args(section.model_fields["kind"].annotation)) == 1


def is_choice(key: str) -> bool:
    """Whether the section, or the list, at a dotted key is of sections that `kind` selects."""
    found: list[type[BaseModel]] = [RunConfig]
    for name in key.split("."):
        if not name.isdigit():
            infos = [one.model_fields[name] for one in found if name in one.model_fields]
            found = [section for info in infos for section in sections(info.annotation)]
    return any(map(is_kind, found))


def kind_of(section: type[BaseModel]) -> str:
    """The value of `kind` that selects a section."""
    return str(get_args(section.model_fields["kind"].annotation)[0])


def meaning_of(key: str) -> str:
    """The description of a setting or a section by its dotted key; of a `kind` its choices."""
    *above, last = key.split(".")
    found: list[type[BaseModel]] = [RunConfig]
    for name in above:
        found = sections(found[0].model_fields[name].annotation)
    return found[0].model_fields[last].description or f"one of {', '.join(map(kind_of, found))}"


def known_keys(model: type[BaseModel] = RunConfig, above: str = "") -> list[str]:
    """Every dotted key of a section and the sections below it, of each kind where there is a choice."""
    keys: dict[str, None] = {}
    for name, info in model.model_fields.items():
        keys[f"{above}{name}"] = None
        if get_origin(info.annotation) is not tuple:
            for section in sections(info.annotation):
                keys |= dict.fromkeys(known_keys(section, f"{above}{name}."))
    return list(keys)


@dataclass(frozen=True, slots=True)
class _Place:
    key: str
    section: type[BaseModel] | None
    info: FieldInfo | None


def _place(location: tuple[int | str, ...]) -> _Place:
    """From pydantic's location, which names the kind where there is a choice, to the key a person wrote."""
    parts: list[str] = []
    kinds: dict[str, type[BaseModel]] = {}
    section: type[BaseModel] | None = None
    below: type[BaseModel] | None = RunConfig
    info: FieldInfo | None = None
    for part in location:
        if part in kinds:
            below, kinds = kinds[str(part)], {}
            continue
        parts.append(str(part))
        if isinstance(part, int):
            kinds = kinds_of(info)
            continue
        section = below
        info = section.model_fields.get(part) if section else None
        below = _section(info) if info else None
        kinds = {} if below else kinds_of(info)
    return _Place(".".join(parts), section, info)


def is_echo(item: dict[str, Any], found: list[dict[str, Any]]) -> bool:
    """Whether a list counts as too short only because pydantic left out its wrong entries."""
    size = len(item["loc"])
    return item["type"] == "too_short" and any(
        len(other["loc"]) > size and other["loc"][:size] == item["loc"] for other in found
    )


def explain(item: dict[str, Any], name: str) -> str:
    """Format one validation error of the recipe called `name` as one sentence with the fix."""
    place = _place(item["loc"])
    key = place.key
    if item["type"] == "extra_forbidden":
        return "\n".join(f"recipe {name}: unknown key {found}" for found in _unknown(place, item["input"]))
    if item["type"] == "string_type" and item["input"] is not None:
        return f"recipe {name}: {key} is {item['input']!r}: {_unquoted(key, item['input'])}"
    if item["type"] == "missing":
        description = place.info.description if place.info else None
        return (
            f"recipe {name}: {key} is missing; {f'its meaning: {description}' if description else 'add it'}"
        )
    if item["type"] in ("union_tag_invalid", "union_tag_not_found") and place.info:
        kinds = ", ".join(kinds_of(place.info))
        given = f"is {item['ctx']['tag']!r}" if "tag" in item["ctx"] else "is missing"
        return f"recipe {name}: {key}.kind {given}; there are: {kinds}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"recipe {name}: {key + ': ' if key else ''}{message}"
    return f"recipe {name}: {key} is {item['input']!r}: {message[0].lower() + message[1:]}"


def _unknown(place: _Place, value: Any) -> Iterator[str]:
    keys = [".".join(map(str, path)) for path, _ in leaves({place.key: value})]
    below = [key for key in keys if hint(key)] if isinstance(value, Mapping) else []
    if below:
        for key in below:
            yield f"{key}; {hint(key)}"
    else:
        yield f"{place.key}{_hint(place)}"


KINDS = {dict: "a mapping", list: "a list", bool: "true or false", int: "a number", float: "a number"}


def _unquoted(key: str, value: Any) -> str:
    made = KINDS.get(type(value), f"a {type(value).__name__}")
    quoted = json.dumps(_as_written(value), ensure_ascii=False)
    return f"YAML made {made} of what should be text; put it in quotes: {quoted}, in a shell '{key}={quoted}'"


def _as_written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "true", False: "false"}[value]
    if isinstance(value, Mapping) and all(inner is None for inner in value.values()):
        return "{" + ", ".join(map(str, value)) + "}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_as_written(inner)}" for name, inner in value.items())
    return str(value)


def _hint(place: _Place) -> str:
    above, dot, last = place.key.rpartition(".")
    siblings = list(place.section.model_fields) if place.section else []
    selected = place.section is not None and is_kind(place.section)
    if not selected and (found := hint(place.key)):
        return f"; {found}"
    near = difflib.get_close_matches(last, siblings, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {above}{dot}{near[0]}?"
    if place.section and selected:
        own = ", ".join(name for name in siblings if name != "kind")
        return f"; kind {kind_of(place.section)} {f'has: {own}' if own else 'has no settings'}"
    by_last = {known.rpartition(".")[2]: known for known in known_keys()}
    near = difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.6)
    return f"; did you mean {by_last[near[0]]}?" if near else ""
