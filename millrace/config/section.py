"""What sections of the configuration are, and what several of them check."""

from __future__ import annotations

import os
import re

from pydantic import BaseModel, ConfigDict

from millrace.errors import SetupError


class Section(BaseModel):
    """A part of the configuration: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def given_in(section: Section) -> set[str]:
    """Return the fields that are set to a value other than their default."""
    kept = set()
    for name in section.model_fields_set:
        info = type(section).model_fields[name]
        if info.is_required() or getattr(section, name) != info.get_default(call_default_factory=True):
            kept.add(name)
    return kept


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression; raise ValueError with the mistake if it is invalid."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None


def is_function(name: str) -> bool:
    """Whether it has the form of a user's own function, module:function or path/to/file.py:function."""
    return re.fullmatch(r"([\w.]+|[^:]+\.py):\w+", name) is not None


def check_function(name: str) -> str:
    """Return the reference of a user's own function; ValueError if it has another form."""
    if not is_function(name):
        raise ValueError(f"{name!r} is not of the form module:function or path/to/file.py:function")
    return name


def check_url(url: str, path: str) -> str:
    """Return the address of an endpoint, such as one that ends in `path`; ValueError if it is none."""
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url):
        raise ValueError(f"{url!r} is no URL of the form http://host:port{path} or https://...")
    return url


def api_key(variable: str, what: str) -> str:
    """Return the key in an environment variable, without which `what` cannot be used.

    Raises:
        SetupError: it is not set, or holds what is no key.
    """
    key = os.environ.get(variable, "")
    if not key:
        raise SetupError(
            f"{what} takes its key from the variable {variable}, which is not set; set it, or remove "
            "api_key_env"
        )
    if not (key.isascii() and key.isprintable()):  # an error of the header would show the key
        raise SetupError(f"the variable {variable} holds what is no key; correct it")
    return key
