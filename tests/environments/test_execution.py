"""RunLimits and notes, and the encoding between a sandbox and its server."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest

from millrace.environments.sandbox.execution import Ended, RunLimits, limit_note
from millrace.environments.sandbox.fork_server import pack, unpack


@pytest.mark.parametrize("name", [field.name for field in fields(RunLimits)])
def test_a_limit_is_positive(name):
    with pytest.raises(ValueError, match=f"^{name} is 0; a limit is above 0$"):
        RunLimits(**{name: 0})


def test_every_end_but_an_exit_has_its_own_note():
    notes = {ended: limit_note(ended, RunLimits()) for ended in get_args(Ended)}
    assert notes.pop("exit") == "" and len(set(notes.values())) == 6


@pytest.mark.parametrize("parts", [(), (b"",), (b"\x00" * 5, b"", b"text")])
def test_what_was_packed_is_unpacked(parts):
    assert unpack(pack({"ended": "exit", "text": "é\ud800"}, *parts)) == (
        {"ended": "exit", "text": "é\ud800"},
        list(parts),
    )
