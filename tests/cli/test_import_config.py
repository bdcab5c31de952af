"""`millrace import-config`: the recipe on standard output or in a file, the report, and data that is here."""

from __future__ import annotations

import json
from pathlib import Path

from millrace.config.recipe import load_recipe
from tests.migrate.pieces import SCRIPT, verl_rows, write_data

SMALL = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=4")


def test_the_recipe_is_printed_and_the_report_beside_it(lab):
    done = lab("import-config", str(SCRIPT), "--rows", "7473")
    assert done.code == 0
    Path("mine.yaml").write_text(done.out)
    assert load_recipe("mine.yaml").steps == 105
    assert done.err.endswith("37 keys: 11 taken, 18 converted, 7 not needed, 1 no counterpart, 0 unknown\n")


def test_rows_that_are_here_are_counted_and_choose_the_reward(lab):
    write_data(Path("mine"))
    assert len(verl_rows()) == 60
    done = lab("import-config", str(SCRIPT), *SMALL, "--set", "DATA_DIR=mine", "--output", "mine.yaml")
    assert (done.code, done.err) == (0, "")
    assert "37 keys" in done.out
    config = load_recipe("mine.yaml")
    assert config.steps == 15 * (50 // 16)
    assert (config.data.train, config.rewards[0].kind) == ("mine/train.parquet", "gsm8k")


def test_the_report_as_json_has_the_recipe_or_the_problems(lab):
    done = lab("import-config", str(SCRIPT), "--json", "--rows", "7473", "--reward", "number")
    found = json.loads(done.out)
    assert found["counts"]["taken"] == 11 and len(found["keys"]) == 37
    assert "kind" in found["recipe"] and "number" in found["recipe"] and found["problems"] == []
    failed = lab("import-config", str(SCRIPT), "--json")
    found = json.loads(failed.out)
    assert (failed.code, found["recipe"], len(found["problems"])) == (2, None, 1)
    assert failed.err == f"error: {found['problems'][0]}\n"


def test_files_are_checked_first(lab):
    Path("taken.yaml").write_text("")
    for words, problem in [
        (["gone.sh"], "error: gone.sh does not exist; give a shell script or a YAML file of verl\n"),
        ([str(SCRIPT), "--output", "taken.yaml"], "error: taken.yaml exists; name another file\n"),
        (
            [str(SCRIPT), "--output", "mine"],
            "error: mine does not end in .yaml, as recipes do; add it\n",
        ),
        (
            [str(SCRIPT), "--set", "A"],
            "error: --set A is not of the form NAME=VALUE, such as --set DATA_DIR=data\n",
        ),
    ]:
        done = lab("import-config", *words)
        assert (done.code, done.out, done.err) == (2, "", problem)
