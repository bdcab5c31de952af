"""Write the tables of docs/reference.md and docs/glossary.md from the code: run it after a setting changed.

    python scripts/reference.py           # rewrite the tables
    python scripts/reference.py --check   # exit code 1 if a table is not what the code has

A comment in the page names the table below it: `<!-- settings rollout -->` lists the settings of a section,
`<!-- settings . -->` those outside of sections, `<!-- kinds advantage -->` the kinds of a section and
`<!-- basic . -->` the settings to know first. In the glossary `<!-- names . -->` lists the names that
other systems give to settings.
"""

from __future__ import annotations

import argparse
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from millrace.cli.config import written
from millrace.config.explain import is_kind, kind_of, meaning_of, sections
from millrace.config.method_sections import DEFAULT_KIND
from millrace.config.other_names import NAMES, NOTES, SETTLED
from millrace.config.settings import BASIC, RunConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
GLOSSARY = PAGE.with_name("glossary.md")
NAMES_MARK = re.compile(r"^<!-- names \. -->\n\n?(?:\|.*\n)*", re.M)
MARK = re.compile(r"^<!-- (settings|kinds|basic) (\S+) -->\n\n?(?:\|.*\n)*", re.M)
WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text", dict: "mapping"}
BOUNDS = {"gt": "above", "ge": "from", "lt": "below", "le": "to"}
Section = type[BaseModel]


def values(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """The values that a setting may have, in words."""
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
    bounds = [f"{word} {bound:g}" for word, bound in found if bound is not None]
    return f"{WORDS[origin or annotation]} {', '.join(bounds)}".strip()


def cells(key: str, info: FieldInfo) -> tuple[str, ...]:
    """A setting's key, values, default and meaning."""
    default = (
        "required" if info.is_required() else f"`{written(info.get_default(call_default_factory=True))}`"
    )
    return f"`{key}`", values(info.annotation, info.metadata), default, info.description or ""


def settings_of(models: Sequence[Section], key: str) -> Iterator[tuple[str, ...]]:
    """The rows of a section without those of sections in it; with kinds, each row names the kinds."""
    if not is_kind(models[0]):
        for name, info in models[0].model_fields.items():
            if not sections(info.annotation):
                yield cells(f"{key}{name}", info)
        return
    default = f"`{DEFAULT_KIND[key[:-1]]}`" if key[:-1] in DEFAULT_KIND else "required"
    yield f"`{key}kind`", "all", "one of those above", default, "which of its kinds"
    shared: dict[tuple[str, ...], list[str]] = {}
    for model in models:
        for name, info in model.model_fields.items():
            if name != "kind" and not sections(info.annotation):
                shared.setdefault(cells(f"{key}{name}", info), []).append(f"`{kind_of(model)}`")
    for (first, *rest), kinds in shared.items():
        yield first, "all" if len(kinds) == len(models) else ", ".join(kinds), *rest


def tables(model: Section = RunConfig, above: str = "") -> Iterator[tuple[str, list[Section]]]:
    """The dotted key of every section, with a final dot, and the sections that it may be."""
    yield above, [model]
    for name, info in model.model_fields.items():
        found = sections(info.annotation)
        if (
            above
            and name in RunConfig.model_fields
            and info.annotation == RunConfig.model_fields[name].annotation
        ):
            continue  # the kinds of a section above, which has the table
        key = f"{above}{name}." if get_origin(info.annotation) is not tuple else f"{above}{name}.N."
        if found and is_kind(found[0]):
            yield key, found
            for one in found:
                yield from list(tables(one, key))[1:]
        elif found:
            yield from tables(found[0], key)


TABLES = dict(tables())


def table(what: str, key: str) -> str:
    """The lines of one table, below the comment that asks for it."""
    models = TABLES["" if key == "." else f"{key}."]
    if what == "basic":
        head: tuple[str, ...] = ("Setting", "Meaning")
        rows: list[tuple[str, ...]] = [(f"`{basic}`", meaning_of(basic)) for basic in BASIC]
    elif what == "kinds":
        head = ("Kind", "What it is")
        # The first paragraph: a line of a table has no other.
        first = [" ".join((model.__doc__ or "").partition("\n\n")[0].split()) for model in models]
        rows = [(f"`{kind_of(model)}`", line) for model, line in zip(models, first, strict=True)]
    else:
        rows = list(settings_of(models, "" if key == "." else f"{key}."))
        several = is_kind(models[0])
        head = ("Setting", *(["Kinds"] if several else []), "Values", "Default", "Meaning")
    lines = [" | ".join(row) for row in [head, *rows]]
    lines.insert(1, "|".join(["---"] * len(head)))
    return "".join(f"|{line}|\n" if line.startswith("---") else f"| {line} |\n" for line in lines)


def page(text: str) -> str:
    """The page with every table as the code has it.

    Raises:
        SystemExit: a section has no table on the page.
    """
    asked = {(what, key) for what, key in MARK.findall(text)}
    needed = {("basic", ".")}
    needed |= {
        ("settings", key[:-1] or ".") for key, models in TABLES.items() if any(settings_of(models, key))
    }
    needed |= {("kinds", key[:-1]) for key, models in TABLES.items() if is_kind(models[0])}
    if asked != needed:
        raise SystemExit(f"{PAGE.name} lacks or has too many of the tables {sorted(asked ^ needed)}")
    return MARK.sub(lambda found: f"<!-- {found[1]} {found[2]} -->\n\n{table(found[1], found[2])}", text)


def names_table() -> str:
    """The lines of the table of other systems' names: one row per setting, then those without a setting."""
    rows = [(names, f"`{key}`" + (f", {NOTES[key]}" if key in NOTES else "")) for key, names in NAMES.items()]
    rows += [(names, f"no setting: {reason}") for reason, names in SETTLED.items()]
    lines = ["| other systems | millrace |", "|---|---|"]
    lines += [f"| {', '.join(f'`{name}`' for name in names.split())} | {ours} |" for names, ours in rows]
    return "".join(f"{line}\n" for line in lines)


def glossary(text: str) -> str:
    """The glossary with the table of names as the code has it.

    Raises:
        SystemExit: the table has no place on the page.
    """
    made, count = NAMES_MARK.subn(lambda _: f"<!-- names . -->\n\n{names_table()}", text)
    if count != 1:
        raise SystemExit(f"{GLOSSARY.name} needs one table of names and has {count}")
    return made


def main() -> None:
    """Rewrite the pages, or check them."""
    parser = argparse.ArgumentParser(description="Write the tables of the reference and the glossary.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 on a difference")
    old = {path: path.read_text(encoding="utf-8") for path in (PAGE, GLOSSARY)}
    new = {PAGE: page(old[PAGE]), GLOSSARY: glossary(old[GLOSSARY])}
    if parser.parse_args().check:
        sys.exit(new != old)
    for path, text in new.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
