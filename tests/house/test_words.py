"""The code speaks the language of the field: few private words, and each name for one thing."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import PACKAGE, Source, python_files, scan, write

# Private words of docstrings and comments, with the field's words, and how many of 1,000 words may be such.
FAMILIES = {
    "a person (the engine, the caller)": ("who whom whoever nobody somebody anybody", 1.2),
    "to say (report, return, log, raise)": ("says told tells hears heard", 0.6),
    "to draw (sample, generate)": ("draw draws drawn drew", 0.6),
    "to judge (score)": ("judge judges judged", 0.6),
    "to stand or lie (is in, is at)": ("stands lies", 0.6),
    "to hand over (send, update)": ("handed hands", 0.6),
}
# Words that classes and files were named after, with the field's term.
GONE = {
    "fleet": "engine pool",
    "pump": "background rollouts",
    "mailbox": "engine worker",
    "parcel": "weight update",
    "onlooker": "gather only",
    "holdings": "KV allocator",
    "orchestration": "run, rollout, engines",
    "tabular": "foundations",
    "newest": "policy weights",
    "follower": "remote batch source",
    "obituary": "exit reason",
    "judge": "score, verifier, reward worker",
    "drawn": "generated, sampled",
    "birth": "step",
}
# Identifiers that were given up; functions, arguments, attributes and variables are not called that again.
GONE_IDENTIFIERS = {
    "births": "steps, oldest steps",
    "num_published": "num_updates",
    "wait_until_published": "wait_for_weights",
    "unheard": "discard_event",
    "handed_over": "is_idle",
    "obituary": "exit_reason",
    "last_words": "log_tail",
    "num_barren": "num_failed_restarts",
    "draw_row_N": "sample_row_N",
    "learner": "train_step",
}
GONE_IDENTIFIER = re.compile(rf"\b({'|'.join(GONE_IDENTIFIERS)})\b")
# Commands are named after what a user types.
COMMANDS = "cli"


@scan
def _words(source: Source) -> Iterator[tuple[str, int]]:
    """How often every docstring and comment has each word."""
    owners = source.nodes(ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in owners] + source.comments()
    yield from Counter(re.findall(r"[a-z]+", "\n".join(texts).lower())).items()


def private_words(folder: Path) -> list[str]:
    count: Counter[str] = Counter()
    for path in python_files(folder):
        count.update(dict(_words(path)))
    found = []
    for family, (words, most) in FAMILIES.items():
        rate = 1000 * sum(count[word] for word in words.split()) / max(1, count.total())
        if rate > most:
            found.append(f"{family}: {rate:.2f} of 1,000 words of docstrings and comments; at most {most:g}")
    return found


@scan
def _classes(source: Source) -> list[str]:
    return [node.name for node in source.nodes(ast.ClassDef) if not node.name.startswith("_")]


def classes(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and file of every class that others may import."""
    for path in python_files(folder):
        yield from ((name, path.relative_to(folder).as_posix()) for name in _classes(path))


def doubled_classes(folder: Path) -> list[str]:
    files: dict[str, list[str]] = {}
    for name, file in classes(folder):
        files.setdefault(name, []).append(file)
    return [f"class {name}: {', '.join(where)}" for name, where in sorted(files.items()) if len(where) > 1]


def doubled_files(folder: Path) -> list[str]:
    files: dict[str, list[str]] = {}
    for path in python_files(folder):
        where = path.relative_to(folder)
        if path.name != "__init__.py" and where.parts[0] != COMMANDS:
            files.setdefault(path.name, []).append(where.as_posix())
    return [f"{name}: {', '.join(where)}" for name, where in sorted(files.items()) if len(where) > 1]


def gone_names(folder: Path) -> list[str]:
    """Classes and files whose name has a word that was given up."""
    named = [(name, file, re.findall(r"[A-Z]?[a-z]+", name)) for name, file in classes(folder)]
    for path in python_files(folder):
        where = path.relative_to(folder).as_posix()
        named += [(where, where, re.findall(r"[a-z]+", where.removesuffix(".py")))]
    return [
        f"{file}: {name} is named after {word!r}; the field says {GONE[word]}"
        for name, file, words in named
        for word in map(str.lower, words)
        if word in GONE
    ]


@scan
def _gone(source: Source) -> list[str]:
    if not GONE_IDENTIFIER.search(source.text):
        return []
    readline = io.StringIO(source.text).readline
    return [
        token.string
        for token in tokenize.generate_tokens(readline)
        if token.type == tokenize.NAME and token.string in GONE_IDENTIFIERS
    ]


def gone_identifiers(folder: Path) -> list[str]:
    found = []
    for path in python_files(folder):
        names = set(_gone(path))
        where = path.relative_to(folder).as_posix()
        found += [f"{where}: {name} was given up for {GONE_IDENTIFIERS[name]}" for name in sorted(names)]
    return found


CHECKS = [private_words, doubled_classes, doubled_files, gone_names, gone_identifiers]


@pytest.mark.parametrize("check", CHECKS)
def test_the_code_speaks_the_language_of_the_field(check):
    assert check(PACKAGE) == []


def test_private_words_are_found(tmp_path):
    files = {"a.py": '"""Sample tokens of each prompt."""\n', "b.py": "# Whoever waits for what was drawn.\n"}
    assert private_words(write(tmp_path, files)) == [
        "a person (the engine, the caller): 90.91 of 1,000 words of docstrings and comments; at most 1.2",
        "to draw (sample, generate): 90.91 of 1,000 words of docstrings and comments; at most 0.6",
    ]


def test_names_that_stand_twice_or_came_back_are_found(tmp_path):
    files = {
        "a/one.py": "class Batch: ...\nclass _Own: ...\n",
        "b/one.py": "class Batch: ...\nclass _Own: ...\n",
        "b/fleet.py": "class EnginePump: ...\n",
        "cli/one.py": "",
    }
    folder = write(tmp_path, files)
    assert doubled_classes(folder) == ["class Batch: a/one.py, b/one.py"]
    assert doubled_files(folder) == ["one.py: a/one.py, b/one.py"]
    assert gone_names(folder) == [
        "b/fleet.py: EnginePump is named after 'pump'; the field says background rollouts",
        "b/fleet.py: b/fleet.py is named after 'fleet'; the field says engine pool",
    ]


def test_an_identifier_that_came_back_is_found(tmp_path):
    folder = write(tmp_path, {"a.py": "births = [1]\n", "b.py": "steps = [1]  # births\n"})
    assert gone_identifiers(folder) == ["a.py: births was given up for steps, oldest steps"]
