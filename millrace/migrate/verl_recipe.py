"""From what a verl script sets to a recipe of millrace, with what became of every key."""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import yaml

from millrace.config.recipe import ConfigError, from_yaml
from millrace.migrate import verl_keys, verl_sft
from millrace.migrate.verl_settings import Conversion, Known, convert_rl, data_files
from millrace.migrate.verl_sft import convert_sft
from millrace.migrate.verl_source import VerlSource, VerlValue

Status = Literal["taken", "converted", "not needed", "no counterpart", "unknown"]
STATUSES: tuple[Status, ...] = ("taken", "converted", "not needed", "no counterpart", "unknown")
WIDTH = 110
PLAIN = re.compile(r"[A-Za-z_~][\w./~-]*")
# Why a setting is not in the recipe, by the section that is not there.
WITHOUT = {
    "critic": "the advantage needs no critic",
    "model.adapter": "lora_rank is 0, so that there is no adapter",
    "policy.kl": "there is no KL penalty",
    "policy.correction": "rollout_is and rollout_rs are null, so that there is no correction",
    "policy.router": "experts are not replayed or balanced",
    "advantage": "the advantage has no such setting",
    "rollout.overlong": "there is no penalty of long answers",
    "rollout.dynamic": "no groups are replaced",
    "mesh": "there is one rank of that kind",
    "engine.colocated": "the trainer's tensors stay on the device",
    "mesh.launcher": "one machine",
}


@dataclass(frozen=True, slots=True)
class KeyReport:
    """What became of a key: the settings for a taken or converted one, and a rule or reason."""

    key: str
    value: Any
    where: str
    status: Status
    settings: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Imported:
    """A recipe, what became of each key, and what must be changed first; there is no recipe then."""

    recipe: str
    outcomes: Sequence[KeyReport]
    problems: Sequence[str]

    @property
    def counts(self) -> dict[str, int]:
        """Keys by status."""
        found = Counter(each.status for each in self.outcomes)
        return {status: found[status] for status in STATUSES}


@dataclass(frozen=True, slots=True)
class Table:
    """The entries of one trainer of verl."""

    taken: Mapping[str, str]
    converted: Mapping[str, tuple[str, str]]
    unneeded: Mapping[str, str]
    absent: Mapping[str, verl_keys.NoCounterpart]

    def names(self) -> list[str]:
        """Every key that has an entry."""
        return [*self.taken, *self.converted, *self.unneeded, *self.absent]


def full(key: str) -> str:
    """A key of the table without its abbreviation."""
    short = verl_keys.ABBREVIATION
    return f"actor_rollout_ref.{key.removeprefix(short)}" if key.startswith(short) else key


@cache
def table(*, is_sft: bool) -> Table:
    """The entries for reinforcement learning, or for supervised fine-tuning."""
    if is_sft:
        taken, converted = verl_sft.SFT_TAKEN, verl_sft.SFT_CONVERTED
        unneeded, absent = verl_sft.SFT_UNNEEDED, verl_sft.SFT_ABSENT
    else:
        taken, converted = verl_keys.TAKEN, verl_keys.CONVERTED
        unneeded, absent = verl_keys.UNNEEDED, verl_keys.ABSENT
    return Table(
        {full(key): setting for key, setting in taken.items()},
        {full(key): rule for key, rule in converted.items()},
        {full(key): reason for reason, keys in unneeded.items() for key in keys.split()},
        {full(key): each for each in absent for key in each.keys.split()},
    )


def import_verl(source: VerlSource, known: Known | None = None) -> Imported:
    """The recipe of a training of verl; never raises for a problem, which is among `problems`."""
    spelled = _canonical(source)
    verl = Conversion(source, known or Known())
    verl.problems += source.problems
    verl.problems += [given.problem for given in source.values.values() if given.problem]
    (convert_sft if source.is_sft else convert_rl)(verl)
    entries = table(is_sft=source.is_sft)
    outcomes = [_outcome(verl, entries, key, spelled[key], given) for key, given in source.values.items()]
    verl.problems += [_unknown(source, entries, each) for each in outcomes if each.status == "unknown"]
    recipe = ""
    if not verl.problems:
        try:
            recipe = _recipe(verl, outcomes)
        except ConfigError as error:
            verl.problems += [
                line.replace("recipe imported:", f"{source.name}:") for line in str(error).splitlines()
            ]
    return Imported(recipe, outcomes, list(dict.fromkeys(verl.problems)))


def train_files(source: VerlSource) -> list[str]:
    """The files of training rows that a script names; none if it does not name them."""
    verl = Conversion(source, Known())
    data_files(verl)
    sources = [str(one["data"]) for one in verl.settings.get("data.sources", [])]
    return [] if verl.problems else sources or [str(verl.settings["data.train"])]


def _canonical(source: VerlSource) -> dict[str, str]:
    """Rename keys of older versions in place; return the spelling of the script for each."""
    moved_keys = {full(key): full(new) for key, new in verl_keys.MOVED_KEYS.items()}
    spelled = {}
    values: dict[str, VerlValue] = {}
    for key, given in source.values.items():
        new = moved_keys.get(key, key)
        for prefix, instead in verl_keys.MOVED.items():
            if key.startswith(prefix):
                new = instead + key.removeprefix(prefix)
        values[new] = given
        spelled[new] = key
    source.values = values
    return spelled


def _entry(entries: Mapping[str, Any], key: str) -> Any:
    """The entry of a key, or the longest of those above it that end in `.*`."""
    if key in entries:
        return entries[key]
    parts = key.split(".")
    names = (".".join([*parts[:size], "*"]) for size in range(len(parts) - 1, 0, -1))
    return next((entries[name] for name in names if name in entries), None)


def _outcome(verl: Conversion, entries: Table, key: str, spelled: str, given: VerlValue) -> KeyReport:
    def outcome(status: Status, note: str, *settings: str) -> KeyReport:
        return KeyReport(spelled, given.value, given.where, status, settings, note)

    if key in verl.absent:
        return outcome("no counterpart", verl.absent[key])
    setting, rule = verl.instead.get(key) or _entry(entries.converted, key) or (entries.taken.get(key), "")
    if setting is not None:
        if key in verl.unneeded:
            return outcome("not needed", verl.unneeded[key])
        made = tuple(name for name in verl.settings if f"{name}.".startswith(f"{setting}."))
        if made:
            return outcome("converted" if rule else "taken", rule, *made)
        reasons = [WITHOUT[section] for section in sorted(WITHOUT, key=len) if setting.startswith(section)]
        return outcome("not needed", reasons[-1] if reasons else f"the default of {setting} is that")
    if key in verl.unneeded:
        return outcome("not needed", verl.unneeded[key])
    entry = _entry({**entries.unneeded, **entries.absent}, key)
    if isinstance(entry, str):
        return outcome("not needed", entry)
    if entry is None:
        is_off = given.where.endswith((".yaml", ".yml")) and given.value in (None, False, {}, [])
        return outcome("not needed", "it is off") if is_off else outcome("unknown", "")
    if any(
        isinstance(given.value, bool) == isinstance(each, bool) and given.value == each
        for each in entry.neutral
    ):
        return outcome("not needed", "this value is what millrace does")
    return outcome("no counterpart", entry.instead)


def _unknown(source: VerlSource, entries: Table, outcome: KeyReport) -> str:
    names = [name.removesuffix(".*") for name in entries.names()]
    above, _, last = outcome.key.rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == above}
    near = [beside[name] for name in difflib.get_close_matches(last, beside, n=1, cutoff=0.7)]
    near += difflib.get_close_matches(outcome.key, names, n=1, cutoff=0.9)
    hint = f"did you mean {near[0]}? Or" if near else "correct it, or"
    place = source.place(VerlValue(outcome.value, outcome.where))
    return (
        f"{place} {outcome.key} is no setting of verl that is known; {hint} leave it out with the argument "
        f"~{outcome.key}"
    )


def _recipe(verl: Conversion, outcomes: Sequence[KeyReport]) -> str:
    """The recipe as YAML, with the rules as comments. ConfigError if the settings do not go together."""
    comments: dict[str, list[str]] = {}
    for each in outcomes:
        if each.status == "converted":
            comments.setdefault(each.settings[0], []).append(f"{each.key}={_shown(each.value)}: {each.note}")
    lines = [f"# Imported from verl's {verl.source.name} by millrace import-config."]
    lost = [
        f"{each.key}={_shown(each.value)}: {each.note}"
        for each in outcomes
        if each.status == "no counterpart"
    ]
    if lost:
        lines += ["#", "# Without a counterpart:", *_folded(lost, "#   ")]
    tree: dict[str, Any] = {}
    for key, value in verl.settings.items():
        *path, name = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    lines += _section(tree, comments)
    text = "\n".join(lines) + "\n"
    from_yaml(text, "imported")
    return text


def _section(
    tree: Mapping[str, Any], comments: Mapping[str, Sequence[str]], above: str = ""
) -> Iterator[str]:
    """The lines of a section: its settings, each below its comments, then the sections in it."""
    indent = "  " * above.count(".")
    for key, value in sorted(tree.items(), key=lambda item: isinstance(item[1], dict)):
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _section(value, comments, f"{above}{key}.")
        else:
            yield from _folded(comments.get(f"{above}{key}", ()), f"{indent}# ")
            yield f"{indent}{key}: {_flow(value)}"


def _folded(texts: Sequence[str], start: str, width: int = WIDTH) -> Iterator[str]:
    for text in texts:
        yield from textwrap.wrap(
            text,
            width,
            initial_indent=start,
            subsequent_indent=f"{start}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def _flow(value: Any) -> str:
    """A value as YAML reads it back: JSON, and plain words without quotes."""
    is_plain = isinstance(value, str) and PLAIN.fullmatch(value) and yaml.safe_load(value) == value
    return str(value) if is_plain else json.dumps(value, ensure_ascii=False)


def report(imported: Imported, *, width: int) -> str:
    """Every key under its status, with the setting it became or the reason, and the counts."""
    lines: list[str] = []
    for status in STATUSES:
        found = [each for each in imported.outcomes if each.status == status]
        if not found:
            continue
        lines.append(f"{status} ({len(found)})")
        for each in found:
            settings = f" -> {', '.join(each.settings)}" if each.settings else ""
            note = f": {each.note}" if each.note else ""
            lines += _folded([f"{each.key}={_shown(each.value)}{settings}{note}"], "  ", width)
    counts = ", ".join(f"{count} {status}" for status, count in imported.counts.items())
    return "\n".join([*lines, f"{len(imported.outcomes)} keys: {counts}"])


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 70 else f"{text[:67]}..."
