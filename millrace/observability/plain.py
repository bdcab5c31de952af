"""Text of models and files, made safe to print: no control character reaches the terminal."""

from __future__ import annotations

import re

# C0, DEL and C1 controls, marks and overrides of writing direction, line and paragraph separators, and the
# halves of surrogate pairs, which no encoding can hold.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def plain_text(text: str, limit: int = 500) -> str:
    r"""Escape untrusted text so that it is one line that a terminal shows as it is.

    Control characters (C0, DEL, C1), controls of writing direction, U+2028, U+2029 and lone surrogates become
    escapes such as ``\x1b``. The rest stays, a backslash too: the result is to be read, not to be parsed. Of
    a text longer than `limit`, the end is replaced by "…" and the number of characters left out. A
    negative limit is a ValueError.
    """
    if limit < 0:
        raise ValueError(f"limit is {limit}; it must be 0 or more")
    left_out = len(text) - limit
    shown = _UNSAFE.sub(_escaped, text[:limit])
    return f"{shown}… ({left_out} more characters)" if left_out > 0 else shown


def _escaped(found: re.Match[str]) -> str:
    character = found.group()
    code = ord(character)
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
