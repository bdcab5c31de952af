"""`make attack`: what is tried, what its table says, and when it fails."""

from __future__ import annotations

import pytest

from tests.house.scripts import load_script

attack = load_script("attack")


def report(name: str, outcome: str, when: str = "call") -> pytest.TestReport:
    return pytest.TestReport(
        f"tests/{name}",
        ("", 0, ""),
        {},
        outcome,
        None,
        when,
        user_properties=[("attack", name)],
        duration=1.5,
    )


def run(monkeypatch, reports, code: int = 0) -> int:
    """The exit code where pytest gives these reports."""

    def main(arguments, plugins):
        assert arguments[-2:] == ["attack", "-x"]
        for one in reports:
            plugins[0].pytest_runtest_logreport(one)
        return code

    monkeypatch.setattr(attack.pytest, "main", main)
    return attack.main(["-x"])


def test_all_refused_is_success(monkeypatch, capsys):
    reports = [report("fork", "passed", when) for when in ("setup", "call", "teardown")] + [
        report("forge", "passed"),
        report("forge", "passed"),
    ]
    assert run(monkeypatch, reports) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["forge", "2", "3.0", "refused"],
        ["fork", "1", "4.5", "refused"],
    ]


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_one_that_was_not_refused_or_not_tried_is_failure(monkeypatch, capsys, outcome):
    assert run(monkeypatch, [report("fork", "passed"), report("forge", outcome)]) == 1
    shown = capsys.readouterr().out
    assert "NOT REFUSED" in shown and f"    {outcome}: tests/forge" in shown


@pytest.mark.parametrize(("reports", "code"), [([], 0), ([], 5), ([report("fork", "passed")], 1)])
def test_nothing_tried_or_an_error_of_pytest_is_failure(monkeypatch, reports, code):
    assert run(monkeypatch, reports, code) == 1


def test_a_file_that_cannot_be_imported_is_failure(monkeypatch, capsys):
    def main(arguments, plugins):
        plugins[0].pytest_collectreport(pytest.CollectReport("tests/test_x.py", "failed", None, []))
        plugins[0].pytest_runtest_logreport(report("fork", "passed"))
        return 0

    monkeypatch.setattr(attack.pytest, "main", main)
    assert attack.main([]) == 1
    assert "cannot be imported: tests/test_x.py" in capsys.readouterr().out
