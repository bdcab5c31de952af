"""`make decoders`: the page lists every causal decoder of transformers, none of them accepted and wrong."""

from __future__ import annotations

import re

import pytest
import transformers

from tests.house.scripts import load_script

decoders = load_script("decoders")
PAGE = decoders.PAGE.read_text(encoding="utf-8")
# Of a row: model type and, where it is refused, why.
ROWS = {
    name: reason or ""
    for name, reason in re.findall(r"^\| `([^`]+)` \| `[^`]+` \|(?: [^|]+ \| (.*) \|)?$", PAGE, re.MULTILINE)
}


def test_the_page_lists_every_decoder_and_none_is_accepted_and_wrong():
    assert f"Every causal decoder of transformers {transformers.__version__}:" in PAGE, "run: make decoders"
    assert sorted(ROWS) == decoders.families()
    assert "Accepted and wrong" not in PAGE
    assert sum(not reason for reason in ROWS.values()) >= 65


@pytest.mark.slow
def test_a_row_is_right_or_says_why_not(capsys):
    assert decoders.main(["qwen3", "gpt_oss"]) == 0
    right, refused, total = capsys.readouterr().out.splitlines()
    assert right.split() == ["qwen3", "right"]
    assert refused.split()[0] == "gpt_oss" and "attention sinks" in refused
    assert total == "1 right, 0 accepted and wrong, of 2"


@pytest.mark.slow
def test_what_is_accepted_and_wrong_is_an_error_and_stands_on_the_page(monkeypatch, capsys):
    chosen = decoders.chosen_logprobs

    def wrong(*args, **options):
        logprob_N, entropy_N = chosen(*args, **options)
        return logprob_N + 0.5, entropy_N

    monkeypatch.setattr(decoders, "chosen_logprobs", wrong)
    assert decoders.main(["llama"]) == 1
    assert "WRONG by 0.5" in capsys.readouterr().out
    assert "## Accepted and wrong" in decoders.page([decoders.row("llama")])


def test_a_name_that_is_none_is_refused(capsys):
    assert decoders.main(["lama"]) == 2
    assert "lama is no causal decoder of transformers" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_row_of_the_page_is_what_is_found(name):
    row = decoders.row(name)
    assert not row.wrong, f"off by {row.difference}"
    assert row.reason.replace("|", " ") == ROWS[name]
