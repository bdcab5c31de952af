"""Commands of `millrace` in the process of the test."""

from __future__ import annotations

from unittest import mock

from typer.testing import CliRunner, Result

from millrace.cli.main import all_commands, app


def invoked(*words: str, **variables: str) -> Result:
    """What a command ends with, under these further environment variables."""
    # Else typer would make all commands anew.
    with mock.patch("typer.testing._get_command", lambda _: all_commands()):
        return CliRunner(env=variables).invoke(app, list(words))
