"""Attempts to escape: all are refused in bubblewrap and wasm, and succeed where nothing isolates."""

from __future__ import annotations

import itertools
import os

import pytest

from millrace.environments.sandbox.escape_probe import PROBED, try_escapes

NAMES = {
    "read a file of the host",
    "write a file of the host",
    "follow a link to a file of the host",
    "change a file that is shown",
    "open memory or devices",
    "change a setting of the kernel",
    "connect to the host or a network",
    "see or signal processes of the host",
    "signal the parent",
    "read the parent's environment or memory",
    "make a namespace",
    "mount, or make a device",
    "gain rights",
    "take memory that is not counted",
    "write 1 GiB of files",
    "take 2 GiB of memory in one process",
    "take 2 GiB of memory in eight processes",
    "start processes without end",
    "compute without end",
    "print 1 GiB",
    "outlive the run as a daemon",
    "outlive the sandbox as a daemon",
}
# What every user may do whose programs are not isolated.
OPEN_TO_ALL = {
    "read a file of the host",
    "write a file of the host",
    "follow a link to a file of the host",
    "connect to the host or a network",
    "see or signal processes of the host",
    "signal the parent",
    "gain rights",
}


@pytest.mark.world
@pytest.mark.attack("a program escapes from its sandbox, or takes all there is")
@pytest.mark.parametrize("kind", PROBED)
def test_no_attempt_succeeds(opened, kind):
    found = list(try_escapes(lambda limits: opened(kind, limits)))
    assert {one.name for one in found} == NAMES
    assert [(one.name, one.detail) for one in found if not one.refused] == []


@pytest.mark.slow
@pytest.mark.world
def test_attempts_succeed_without_isolation(opened):
    attempts = try_escapes(lambda limits: opened("none", limits))
    # Those up to "gain rights" change nothing; then there would be a file of 1 GiB.
    found = {one.name: one.refused for one in itertools.islice(attempts, 13)}
    attempts.close()
    assert {name for name, refused in found.items() if not refused} >= OPEN_TO_ALL
    assert (os.getuid() != 0) or not found["make a namespace"]
