"""A script of verl, and rows as it reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from millrace.config.recipe import from_yaml
from millrace.config.settings import RunConfig
from millrace.migrate.verl_recipe import Imported, import_verl
from millrace.migrate.verl_settings import Known
from millrace.migrate.verl_source import read_verl

SCRIPT = Path(__file__).with_name("grpo_gsm8k.sh")
GSM8K = Path(__file__).parent.parent / "end_to_end" / "gsm8k_tiny.jsonl"
KNOWN = Known(num_rows=7473)


def imported(*arguments: str, known: Known = KNOWN) -> Imported:
    """The script with arguments after it."""
    return import_verl(read_verl(SCRIPT.name, SCRIPT.read_text(encoding="utf-8"), arguments), known)


def recipe(*arguments: str, known: Known = KNOWN) -> RunConfig:
    """Its recipe, which must have no problems."""
    found = imported(*arguments, known=known)
    assert found.problems == []
    return from_yaml(found.recipe, "imported")


def verl_rows() -> list[dict[str, Any]]:
    """GSM8K-like problems as verl's preprocessing writes them."""
    rows = []
    for number, line in enumerate(GSM8K.read_text(encoding="utf-8").splitlines()):
        problem = json.loads(line)
        prompt = problem["question"] + ' Let\'s think step by step and output the final answer after "####".'
        rows.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": prompt}],
                "ability": "math",
                "reward_model": {
                    "style": "rule",
                    "ground_truth": problem["answer"].rpartition("#### ")[2].replace(",", ""),
                },
                "extra_info": {"split": "train", "index": number, **problem},
            }
        )
    return rows


def write_data(folder: Path) -> None:
    """train.parquet and test.parquet in a folder."""
    rows = verl_rows()
    folder.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:50]), folder / "train.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[50:]), folder / "test.parquet")
