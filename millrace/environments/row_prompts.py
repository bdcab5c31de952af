"""Prompts of rows as other packages take them: messages in the column `prompt`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.data.chat import messages_of
from millrace.data.rows import DataError
from millrace.environments.running_episodes import EnvironmentFailed

PROMPT_COLUMN = "prompt"


def row_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of the column `prompt`; text is a message of the user.

    Raises:
        EnvironmentFailed: the row has no such column, or it is neither text nor messages.
    """
    if PROMPT_COLUMN not in row:
        raise EnvironmentFailed("has a row without the column prompt; add it")
    value = row[PROMPT_COLUMN]
    try:
        return messages_of(value, "row")
    except DataError as error:
        raise EnvironmentFailed(f"cannot read the prompt of its row: {error}") from None
