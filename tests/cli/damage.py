"""A finished run, damaged in one place by a seed, and what a command then says."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cli.invoked import invoked
from tests.end_to_end.tiny import tiny_recipe

NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?")
# What no command reads back.
UNREAD = ("report.html", ".lock", "trace.json")


def flip(content: bytes, draw: random.Random) -> bytes:
    """One bit, as a bad disk flips it."""
    changed, place = bytearray(content), draw.randrange(len(content))
    changed[place] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def empty(content: bytes, draw: random.Random) -> bytes:
    return b""


def wrong_encoding(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + "größe".encode("latin-1") + content[place:]


def zeros(content: bytes, draw: random.Random) -> bytes:
    """What a file system leaves of a block that was not written."""
    place = draw.randrange(len(content))
    return content[:place] + bytes(min(512, len(content) - place)) + content[place + 512 :]


def number_instead(content: bytes, draw: random.Random) -> bytes:
    """Another value in the place of a number: huge, not finite, negative, or of another type."""
    found = list(NUMBER.finditer(content))
    if not found:
        return content + b"9"
    one = draw.choice(found)
    other = draw.choice(
        [b"9" * 40, b"1" * 5000, b"1e999", b"NaN", b"-7", b'"x"', b"null", b"[]", b"{}", b"0.5"]
    )
    return content[: one.start()] + other + content[one.end() :]


def line_twice(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    place = draw.randrange(len(lines))
    return b"".join([*lines[: place + 1], *lines[place:]])


def lines_swapped(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def deep(content: bytes, draw: random.Random) -> bytes:
    return b"[" * 200_000


CHANGES: list[Callable[[bytes, random.Random], bytes]] = [
    *(flip, flip, flip, cut, cut, empty, wrong_encoding, zeros, deep),
    *(number_instead, number_instead, number_instead, line_twice, lines_swapped),
]


def files_of(run: Path) -> list[str]:
    """What a command may read of a run, by name in it."""
    names = (path.relative_to(run).as_posix() for path in sorted(run.rglob("*")) if path.is_file())
    return [name for name in names if name not in UNREAD]


def damage(path: Path, seed: int) -> str:
    """Damage one file; gives what was done."""
    draw = random.Random(seed)
    if draw.random() < 0.06:
        path.unlink()
        path.mkdir()
        return "a folder"
    change = draw.choice(CHANGES)
    content = path.read_bytes() or b"\n"
    path.write_bytes(change(content, draw))
    return change.__name__


def make_run(folder: Path) -> Path:
    """A run of two batches with SFT; `killed` is the same one before its summary was written."""
    from millrace import train

    config = tiny_recipe(folder, {"steps": 4, "sft.steps": 2})
    run = Path(train(config, recipe="tiny", quiet=True).run)
    shutil.copytree(run, folder / "runs" / "killed")
    (folder / "runs" / "killed" / "summary.json").unlink()
    return run


@dataclass(frozen=True)
class Told:
    """What a command said."""

    code: int
    out: str
    err: str


def millrace(*words: str) -> Told:
    """A command in this process; anything but a sentence and an exit code is raised."""
    result = invoked(*words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Told(result.exit_code, result.stdout, result.stderr)


def check_told(told: Told) -> None:
    """Fail unless a command succeeded, or ended with one sentence for the user."""
    said = [line for line in told.err.splitlines() if not line.startswith("note: ")]
    assert told.code in (0, 1, 2)
    assert "Traceback" not in told.err
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", told.out + told.err)
    if told.code:
        # Of a recipe, every mistake is told.
        most = len(said) if all(line.startswith("error: recipe ") for line in said) else 1
        # That a plan does not fit is an answer, and no error.
        assert said or "it does not fit" in told.out
        assert len(said) <= max(most, 1), told.err
        assert all(line.startswith("error: ") for line in said), told.err


def copy_of(run: Path, name: str) -> Path:
    """A fresh copy of a run beside it; the folders of replays go with the one before."""
    made = run.parent / name
    for old in run.parent.glob(f"{name}*"):
        shutil.rmtree(old)
    shutil.copytree(run, made)
    return made
