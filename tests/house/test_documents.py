"""What the documentation shows is true: its Python runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.config.explain import known_keys
from millrace.config.recipe import ConfigError, load_recipe, parse_overrides, recipe_names
from tests.cli.invoked import invoked
from tests.forked import Forked
from tests.house.source import ROOT, write

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.M | re.S)
SHELLS = ("bash", "console", "sh", "shell")
TIMEOUT_S = 300


def documents(root: Path) -> list[Path]:
    """The pages whose code must run."""
    return [path for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))] if path.exists()]


def blocks(path: Path, languages: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """First line number and text of each fenced block in one of these languages."""
    text = path.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        if match["language"] in languages:
            lines = [line.removeprefix(match["indent"]) for line in match["body"].splitlines()]
            yield text.count("\n", 0, match.start("body")) + 1, "\n".join(lines)


def python_error(path: Path, folder: Path, root: Path = ROOT) -> str:
    """Run a page's Python blocks in order as one program, in an empty folder; what went wrong, or nothing.

    Each block keeps its line numbers, so that a traceback points into the page.
    """
    lines: list[str] = []
    for first, text in blocks(path, ("python", "py")):
        lines += [""] * (first - 1 - len(lines)) + text.splitlines()
    script = folder / f"{path.stem}.py"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    program = Forked(_run, script, root, name="page")
    try:
        _, told = program.communicate(TIMEOUT_S)
        return "" if program.returncode == 0 else f"{path.name}:\n{told[-2000:]}"
    finally:
        program.kill()


def _run(script: Path, root: Path) -> None:
    # Other tests run: a second thread would wait for one.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.chdir(script.parent)
    sys.path[:0] = [str(script.parent), str(root)]
    runpy.run_path(str(script), run_name="__main__")


def commands(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and words of every command in the page's shell blocks that starts with millrace or make."""
    for first, text in blocks(path, SHELLS):
        joined = text.replace("\\\n", "\0")  # a command over several lines counts where it starts
        number = first
        for line in joined.split("\n"):
            for part in re.split(r"&&|\|\||;|\|", line.replace("\0", " ").removeprefix("$ ")):
                words = _words(part)
                if words and Path(words[0]).name in ("millrace", "make"):
                    yield number, [Path(words[0]).name, *words[1:]]
            number += 1 + line.count("\0")


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []  # the inside of a quoted text


def command_faults(path: Path, helps: dict[str, str], targets: set[str]) -> list[str]:
    """Commands of a page that would not be understood.

    Args:
        path: the page.
        helps: what `millrace SUBCOMMAND --help` prints, for each subcommand that exists.
        targets: what `make` knows.
    """
    found = []
    for line, (program, *words) in commands(path):
        faults = _make_faults(words, targets) if program == "make" else _millrace_faults(words, helps)
        found += [f"{path.name}:{line} {fault}" for fault in faults]
    return found


def _make_faults(words: list[str], targets: set[str]) -> Iterator[str]:
    for word in words:
        if "=" not in word and not word.startswith("-") and word not in targets:
            yield f"there is no make target {word}"


def _millrace_faults(words: list[str], helps: dict[str, str]) -> Iterator[str]:
    if not words or words[0].startswith("-"):
        return
    subcommand, *rest = words
    if subcommand not in helps:
        yield f"there is no command millrace {subcommand}"
        return
    for word in rest:
        option = word.partition("=")[0]
        if word.startswith("--") and not re.search(rf"{re.escape(option)}\b", helps[subcommand]):
            yield f"millrace {subcommand} has no option {option}"
    plain = [word for word in rest if not word.startswith("-")]
    overrides = [word for word in plain if re.match(r"[a-z_][\w.]*=", word)]
    if overrides or subcommand == "train":
        yield from _override_faults(plain[:1], overrides)


def _override_faults(recipe: list[str], overrides: list[str]) -> Iterator[str]:
    if recipe and recipe[0] in recipe_names():
        try:
            load_recipe(recipe[0], parse_overrides(overrides))
        except ConfigError as error:
            yield str(error)
        return
    if recipe and re.fullmatch(r"[a-z][a-z0-9_-]*", recipe[0]):
        yield f"there is no recipe {recipe[0]}"
    known = known_keys()
    for key in (word.partition("=")[0] for word in overrides):
        # Below a list or a free mapping any name may stand.
        if key not in known and not key.startswith(("rewards.", "model.shape.", "data.task.")):
            yield f"there is no setting {key}"


def setting_faults(path: Path) -> list[str]:
    """Settings in backquotes that a recipe does not have, such as `rollout.max_stalenes`."""
    known, text = known_keys(), path.read_text(encoding="utf-8")
    sections = {key.partition(".")[0] for key in known if "." in key}
    found = []
    for match in re.finditer(r"`([a-z_]+)((?:\.[a-z_0-9]+)+)(?=[:=`])", FENCE.sub("", text)):
        key = match[1] + match[2]
        whole = key in known or any(other.startswith(f"{key}.") for other in known)
        if match[1] in sections and not whole and not key.endswith(".py"):
            found.append(f"{path.name} there is no setting {key}")
    return found


def link_faults(path: Path) -> list[str]:
    found = []
    text = FENCE.sub(lambda match: "\n" * match[0].count("\n"), path.read_text(encoding="utf-8"))
    text = re.sub(r"`[^`\n]*`", "", text)
    for match in re.finditer(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)", text):
        target, _, anchor = match[1].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        place = path.parent / target if target else path
        line = text.count("\n", 0, match.start()) + 1
        if not place.exists():
            found.append(f"{path.name}:{line} {target} does not exist")
        elif anchor and place.suffix == ".md" and anchor not in _anchors(place):
            found.append(f"{path.name}:{line} {place.name} has no heading #{anchor}")
    return found


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+?)\s*$", FENCE.sub("", path.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def make_targets(makefile: Path) -> set[str]:
    return set(re.findall(r"^([a-z-]+):", makefile.read_text(encoding="utf-8"), re.M))


def subcommand_help(name: str) -> str | None:
    """What `millrace NAME --help` prints; None where there is no such command."""
    done = invoked(name, "--help", COLUMNS="200", NO_COLOR="1", TERM="dumb")
    return done.stdout if done.exit_code == 0 else None


PAGES = documents(ROOT)
LINKED = [*PAGES, *(path for path in sorted(ROOT.glob("*.md")) if path not in PAGES)]


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("path", [p for p in PAGES if any(blocks(p, ("python", "py")))], ids=lambda p: p.stem)
def test_the_python_in_the_documentation_runs(path, tmp_path):
    assert python_error(path, tmp_path) == ""


def test_the_commands_in_the_documentation_exist():
    named = {
        words[1]
        for page in LINKED
        for _, words in commands(page)
        if words[0] == "millrace" and len(words) > 1
    }
    helps = {name: shown for name in named if name[0] != "-" and (shown := subcommand_help(name)) is not None}
    targets = make_targets(ROOT / "Makefile")
    assert [fault for page in LINKED for fault in command_faults(page, helps, targets)] == []


def test_the_settings_that_the_documentation_names_exist():
    # These also have the names of other systems and of older versions.
    others = ("glossary.md", "log.md", "CHANGELOG.md")
    assert [fault for page in LINKED if page.name not in others for fault in setting_faults(page)] == []


def test_settings_that_do_not_exist_are_found(tmp_path):
    page = "`rollout.max_staleness` `rollout.max_stalenes` `policy.kl` `policy.loss.knd: x` `other.thing`\n"
    path = write(tmp_path, {"page.md": page}) / "page.md"
    assert setting_faults(path) == [
        "page.md there is no setting rollout.max_stalenes",
        "page.md there is no setting policy.loss.knd",
    ]


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.stem)
def test_the_links_in_the_documentation_lead_somewhere(path):
    assert link_faults(path) == []


@pytest.mark.world
def test_python_that_fails_is_found_with_its_line(tmp_path):
    good = "# Page\n\n```python\nx = 2\n```\n\nthen\n\n```python\nassert x == 2\n```\n"
    write(tmp_path, {"good.md": good, "bad.md": good + "\n```python\nassert x == 3\n```\n"})
    assert python_error(tmp_path / "good.md", tmp_path) == ""
    assert "line 14" in python_error(tmp_path / "bad.md", tmp_path)


def test_commands_that_would_fail_are_found(tmp_path):
    page = """```console
$ millrace --help
$ .venv/bin/millrace train runs/mine.yaml steps=50 stepz=1 rewards.0.weight=2  # a comment
$ millrace trian && millrace train \\
    quickstrat
$ make test && make tests ARGS="-x"
$ millrace train mine.yaml --device cpu --devize cpu
not a command
```
```python
millrace = "trian"
```
"""
    path = write(tmp_path, {"page.md": page}) / "page.md"
    assert command_faults(path, {"train": "--device TEXT"}, {"test"}) == [
        "page.md:3 there is no setting stepz",
        "page.md:4 there is no command millrace trian",
        "page.md:4 there is no recipe quickstrat",
        "page.md:6 there is no make target tests",
        "page.md:7 millrace train has no option --devize",
    ]


def test_overrides_of_a_shipped_recipe_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "recipe_names", lambda: ["mine"])
    recipe = "steps: 1\ndata: {train: x.jsonl}\nrewards: [{kind: exact}]\n"
    monkeypatch.setattr("millrace.config.recipe.recipe_text", lambda name: recipe)
    page = "```bash\nmillrace train mine steps=2\nmillrace train mine data.trian=x\n```\n"
    path = write(tmp_path, {"page.md": page}) / "page.md"
    (found,) = command_faults(path, {"train": ""}, set())
    assert found == "page.md:3 recipe mine: unknown key data.trian; did you mean data.train?"


def test_links_that_lead_nowhere_are_found(tmp_path):
    page = "# Top of It!\n[a](other.md) [b](gone.md)\n"
    page += "[c](#top-of-it) [d](other.md#part-two) [e](other.md#three)\n"
    page += "[web](https://example.org/gone) `[code](gone.md)`\n```\n[code](gone.md)\n```\n"
    write(tmp_path, {"page.md": page, "other.md": "## Part two\n"})
    assert link_faults(tmp_path / "page.md") == [
        "page.md:2 gone.md does not exist",
        "page.md:3 other.md has no heading #three",
    ]


def test_the_reading_list_names_files_and_what_they_define() -> None:
    text = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| \[[^\]]+\]\(\.\./([^)]+)\) \| (\d+) \| [^|]+ \| ([^|]+) \|$", text, re.M)
    assert len(rows) == 12
    assert sum(int(minutes) for _, minutes, _ in rows) < 200
    for file, _, answer in rows:
        code = (ROOT / file).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", answer):
            assert re.search(rf"^\s*(class|def) {name.rpartition('.')[2]}\b", code, re.M), f"{file}: {name}"
