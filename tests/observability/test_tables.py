from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.observability.files import FileError
from millrace.observability.tables import read_table, write_table

ROW = {
    "step": 12,
    "prompt": "2 + 2 = <b>",
    "reward": 1.0,
    "reason": "",
    "token_ids": [5, 6, 7],
    "logprobs": [-0.5, -1.25, 0.0],
}


def test_rows_come_back_as_they_were(tmp_path: Path):
    rows = [ROW, {**ROW, "reward": 0.25, "reason": "no number", "token_ids": [], "logprobs": []}]
    write_table(tmp_path / "rollouts" / "step-000012.parquet", rows)
    assert read_table(tmp_path / "rollouts" / "step-000012.parquet") == rows


def test_a_failed_reward_stays_nan(tmp_path: Path):
    write_table(tmp_path / "t.parquet", [{"reward": 1.0}, {"reward": math.nan}])
    first, second = read_table(tmp_path / "t.parquet")
    assert first["reward"] == 1.0 and math.isnan(second["reward"])


def test_a_folder_named_like_a_setting_adds_no_column(tmp_path: Path):
    write_table(tmp_path / "seed=5" / "t.parquet", [{"step": 1}])
    assert read_table(tmp_path / "seed=5" / "t.parquet") == [{"step": 1}]


def test_no_rows_make_an_empty_table(tmp_path: Path):
    write_table(tmp_path / "t.parquet", [])
    assert read_table(tmp_path / "t.parquet") == []


def test_rows_with_other_columns_are_refused_by_number(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"row 1 of t.parquet and row 0 differ in the columns \['answer', 'step'\]"
    ):
        write_table(tmp_path / "t.parquet", [{"step": 1}, {"answer": "x"}])


def test_a_write_that_breaks_off_leaves_the_old_table_and_nothing_beside_it(tmp_path: Path, monkeypatch):
    import pyarrow.parquet

    path = tmp_path / "t.parquet"
    write_table(path, [{"step": 1}])

    def break_off(table: object, where: Path, **options: object) -> None:
        Path(where).write_bytes(b"PAR1 half a table")
        raise OSError("no space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", break_off)
    with pytest.raises(OSError, match="no space left"):
        write_table(path, [{"step": 2}])
    assert read_table(path) == [{"step": 1}]
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.parquet"]


def test_a_missing_or_broken_table_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"table .*none.parquet does not exist"):
        read_table(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"not a table at all")
    with pytest.raises(ValueError, match=r"bad.parquet is not a Parquet file"):
        read_table(tmp_path / "bad.parquet")


def test_a_flipped_byte_within_a_table_is_found(tmp_path):
    path = tmp_path / "t.parquet"
    write_table(path, [{"text": f"answer {number}", "reward": number / 7} for number in range(200)])
    whole = path.read_bytes()
    rows, found = read_table(path), 0
    for place in range(4, len(whole), 23):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        try:
            # Some bytes, such as the name of what wrote the file, mean nothing.
            assert read_table(path) == rows
        except FileError as error:
            assert "t.parquet is not a Parquet file that is whole: " in str(error)
            found += 1
    assert found > len(range(4, len(whole), 23)) // 2


def test_a_table_without_checksums_is_read_too(tmp_path):
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "old.parquet")
    assert read_table(tmp_path / "old.parquet") == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_column_of_arrays_keeps_their_dtype(tmp_path, dtype):
    """Log-probabilities in float32 take half the room."""
    import pyarrow.parquet as pq

    values = np.array([-0.1, -1e-9], dtype)
    write_table(tmp_path / "t.parquet", [{"logprobs": values}])
    assert (
        str(pq.read_schema(tmp_path / "t.parquet").field("logprobs").type.value_type)
        == {
            "float32": "float",
            "float64": "double",
        }[dtype]
    )
    assert read_table(tmp_path / "t.parquet") == [{"logprobs": values.tolist()}]
