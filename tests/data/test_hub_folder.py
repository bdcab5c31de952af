"""Folders of the Hugging Face Hub are read by the configs of their README.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.data.rows import DataError, read_rows
from millrace.data.stored_rows import StoredRows

README = """---
license: mit
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: "main/part-*"
  - split: test
    path: ["main/held.jsonl", "extra/**/*.jsonl"]
- config_name: short
  data_files: ["extra/b.jsonl", "main/part-1.jsonl"]
---
# Data
"""


def hub(folder: Path, readme: str = README) -> Path:
    """A folder whose rows have the names of their files."""
    for name in ("main/part-1", "main/part-0", "main/held", "extra/deep/a", "extra/b", "unnamed"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jsonl").write_text(json.dumps({"question": name}), encoding="utf-8")
    (folder / "README.md").write_text(readme, encoding="utf-8")
    return folder


def names(path: Path) -> list[str]:
    return [row["question"] for row in read_rows(str(path))]


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_rows(str(path))
    return str(caught.value)


def test_config_and_split_select_files_in_order(tmp_path: Path) -> None:
    folder = hub(tmp_path)
    assert names(folder) == names(folder / "main" / "train") == ["main/part-0", "main/part-1"]
    assert (
        names(folder / "test") == names(folder / "main" / "test") == ["main/held", "extra/b", "extra/deep/a"]
    )
    assert names(folder / "short") == ["extra/b", "main/part-1"]
    assert [row["question"] for row in StoredRows.of(str(folder / "test"))] == names(folder / "test")
    # A folder that is there is read itself.
    assert names(folder / "main") == ["main/held", "main/part-0", "main/part-1"]


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ("- data_files: extra/b.jsonl", ["extra/b"]),
        ("- {config_name: a, data_files: unnamed.jsonl}\n- {data_files: extra/b.jsonl}", ["extra/b"]),
        (
            "- {data_files: unnamed.jsonl}\n- {config_name: a, default: true, data_files: extra/b.jsonl}",
            ["extra/b"],
        ),
    ],
)
def test_the_default_config(tmp_path: Path, configs: str, expected: list[str]) -> None:
    assert names(hub(tmp_path, f"---\nconfigs:\n{configs}\n---\n")) == expected


@pytest.mark.parametrize(
    "readme", ["# Data\n", "---\nlicense: mit\n---\n", "---\nconfigs: []\n---\n", "---\nconfigs:\n"]
)
def test_a_readme_without_configs_changes_nothing(tmp_path: Path, readme: str) -> None:
    assert len(names(hub(tmp_path, readme))) == 6


@pytest.mark.parametrize(
    ("configs", "path", "said"),
    [
        (
            "- {config_name: a, data_files: unnamed.jsonl}\n- {config_name: b, data_files: extra/b.jsonl}",
            "",
            "F/README.md has several configs; name one of them as F/a, F/b",
        ),
        (
            "- {config_name: a, data_files: unnamed.jsonl}",
            "c/test",
            "F/README.md has no config c; there are: a",
        ),
        (
            "- {config_name: a, data_files: unnamed.jsonl}",
            "test",
            "config a of F/README.md has no split test; name one of its splits as F/a/train",
        ),
        (
            "- {config_name: a, data_dir: main}",
            "",
            "config a of F/README.md names the folder main; give the path of a folder or of files in F",
        ),
        (
            "- data_files: gone/*.parquet",
            "",
            "config default of F/README.md names gone/*.parquet for the split train, and F has no such file; "
            "download it, or correct the pattern",
        ),
        (
            "- data_files: ../*",
            "",
            "config default of F/README.md names ../* for the split train, and F has no such file; "
            "download it, or correct the pattern",
        ),
        (
            "- data_files: {train: a.jsonl}",
            "",
            "F/README.md has configs that cannot be used: configs.0.data_files",
        ),
        (
            "- a: b: c",
            "",
            "F/README.md line 3 cannot be read: mapping values are not allowed here; correct the YAML",
        ),
    ],
)
def test_what_cannot_be_found_is_one_sentence(tmp_path: Path, configs: str, path: str, said: str) -> None:
    folder = hub(tmp_path, f"---\nconfigs:\n{configs}\n---\n")
    assert refusal(folder / path).replace(str(folder), "F").startswith(said)
