from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.rewards.row_encoding import decode_row, encode_row

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.integers()), inner)
    ),
    max_leaves=12,
)


def types_of(value: Any) -> Any:
    """The shape of a value by type, which equality alone does not tell (1 == 1.0 == True)."""
    if isinstance(value, dict):
        return [(types_of(key), types_of(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [type(value), *map(types_of, value)]
    return type(value)


@settings(max_examples=20)
@given(st.dictionaries(st.text(), values))
def test_a_row_comes_back_as_it_was(row):
    back = decode_row(json.loads(json.dumps(encode_row(row))))
    assert back == row and types_of(back) == types_of(row)


@pytest.mark.parametrize(
    ("value", "name"),
    [(datetime.date(2026, 1, 1), "datetime.date"), (b"x", "builtins.bytes"), ({1}, "builtins.set")],
)
def test_what_json_cannot_carry_is_named(value, name):
    with pytest.raises(TypeError, match=name):
        encode_row({"question": "1 + 1", "extra": [value]})
