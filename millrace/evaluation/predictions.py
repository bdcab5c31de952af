"""The prediction of an answer, in a form in which equal ones are equal text, for majority votes."""

from __future__ import annotations

import re
from collections.abc import Mapping

# The name of the number or text beside a score that is its prediction, as in verl's reward functions.
PREDICTION_KEY = "pred"
_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_BOXED = "\\boxed"
_MARKS = re.compile(r"####|(?:answer|result)(?: is|:| =)", re.IGNORECASE)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}")


def prediction_of(text: str, extras: Mapping[str, object], *, whole: bool) -> str:
    r"""Return the normalised prediction of an answer.

    It is what the reward returned as `pred` beside its score; else, if `whole`, the text; else what is in the
    last `\boxed{}`, behind the last `####`, `Answer:` or `answer is`, or the last number of the last line.

    Args:
        text: the answer.
        extras: of its outcome.
        whole: the reward compares the text as it is.
    """
    for name, value in extras.items():
        if name.rpartition("/")[2] == PREDICTION_KEY:
            return normalised(str(value))
    if whole:
        return " ".join(text.split())
    boxed = _last_boxed(text)
    if boxed is not None:
        return normalised(boxed)
    marks = list(_MARKS.finditer(text))
    if marks:
        return normalised(text[marks[-1].end() :].strip().partition("\n")[0])
    last = text.strip().rpartition("\n")[2]
    numbers = _NUMBER.findall(last)
    return normalised(numbers[-1] if numbers else last)


def normalised(text: str) -> str:
    r"""Remove what does not change a value: spaces, case, `$`, thousands separators, `\text{}`."""
    text = _FRACTION.sub(r"\1/\2", _WRAPPED.sub(r"\1", text))
    text = " ".join(text.replace("$", " ").replace("\\!", "").split()).casefold().lstrip(" :*").rstrip(" .:*")
    bare = text.replace(" ", "")
    if _NUMBER.fullmatch(bare):
        return _plain_number(bare.replace(",", ""))
    return text


def _plain_number(text: str) -> str:
    """Write a number without zeros that do not count, so that 3, 3.0 and +03.00 are one."""
    whole, _, fraction = text.lstrip("+-").partition(".")
    found = f"{whole.lstrip('0') or '0'}.{fraction.rstrip('0')}".rstrip(".")
    return f"-{found}" if text[0] == "-" and found != "0" else found


def _last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} whose braces match."""
    at = text.rfind(_BOXED)
    while at >= 0:
        start = at + len(_BOXED)
        depth = 0
        for place in range(start, len(text)):
            if text[place] == "{":
                depth += 1
            elif text[place] == "}":
                depth -= 1
                if depth == 0:
                    return text[start + 1 : place]
            if depth == 0:
                break
        at = text.rfind(_BOXED, 0, at)
    return None
