"""Whether bubblewrap is found, and how a version without --disable-userns is used."""

from __future__ import annotations

import subprocess

import pytest

from millrace.processes import bubblewrap


def test_without_bubblewrap_there_is_none(monkeypatch):
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    assert bubblewrap.find_bubblewrap.__wrapped__() is None


@pytest.mark.parametrize(("code", "path", "more"), [(0, "/bin/bwrap", 2), (1, None, 0)])
def test_what_does_not_run_is_not_used(monkeypatch, code, path, more):
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: "/bin/bwrap")
    monkeypatch.setattr(
        bubblewrap.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, code)
    )
    assert bubblewrap.find_bubblewrap.__wrapped__() == path
    assert len(bubblewrap.without_user_namespaces.__wrapped__("/bin/bwrap")) == more


def test_one_that_hangs_is_not_used(monkeypatch):
    def run(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: "/bin/bwrap")
    monkeypatch.setattr(bubblewrap.subprocess, "run", run)
    assert bubblewrap.find_bubblewrap.__wrapped__() is None
