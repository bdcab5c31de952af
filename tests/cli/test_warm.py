"""`millrace warm`, as a user calls it."""

from __future__ import annotations

import re

import pytest

from millrace.kernels import product_cpu
from millrace.kernels.warm import GROUPS
from tests.cli.invoked import invoked


def test_it_says_what_it_compiled_and_that_there_is_nothing_left_to_do():
    for _ in range(2):
        done = invoked("warm", "--workers", "1")
        assert done.exit_code == 0, done.output
    *groups, last = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in groups] == list(GROUPS)
    assert all("compiled before" in line for line in groups)
    assert re.fullmatch(r"0 functions compiled in \d+\.\d s", last)


def test_it_fails_with_a_sentence_where_kernels_cannot_be_kept(monkeypatch):
    monkeypatch.setattr(product_cpu, "multiply", lambda: None)
    done = invoked("warm")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: compiled kernels cannot be kept: ")


@pytest.mark.slow
def test_several_processes_share_the_work():
    done = invoked("warm", "--workers", "2")
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) == len(GROUPS) + 1
