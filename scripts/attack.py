"""Attack millrace in every way that its tests know, and print what became of each attack.

    make attack

Tests marked `attack` play what a model, a reward, a client or a damaged file could do. Each passes when the
attack is refused. The exit code is 0 only when every one was tried and refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

ROW = "{:66}  {:>5}  {:>7}  {}"


@dataclass
class Attack:
    """Tests of one attack: how many passed, those that did not, and the seconds of all."""

    num_refused: int = 0
    others: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Attacks:
    """A pytest plugin that counts what tests found by the name in their mark.

    Attributes:
        found: by name, in the order of their ends.
        broken: files that could not be collected.
    """

    def __init__(self) -> None:
        """Nothing is found yet."""
        self.found: dict[str, Attack] = {}
        self.broken: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be imported."""
        if report.failed:
            self.broken.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test, once it has run, and once more where its beginning or end fails."""
        attack = self.found.setdefault(str(dict(report.user_properties)["attack"]), Attack())
        attack.seconds += report.duration
        if report.outcome != "passed":
            attack.others.append(f"{report.outcome}: {report.nodeid}")
        elif report.when == "call":
            attack.num_refused += 1


def table(attacks: Attacks) -> list[str]:
    """The lines to print."""
    lines = [ROW.format("attack", "tried", "seconds", "result")]
    for name, attack in sorted(attacks.found.items()):
        tried = attack.num_refused + len(attack.others)
        result = "refused" if not attack.others else "NOT REFUSED"
        lines.append(ROW.format(name, tried, f"{attack.seconds:.1f}", result))
        lines += [f"    {other}" for other in attack.others]
    lines += [f"cannot be imported: {path}" for path in attacks.broken]
    return lines


def main(arguments: Sequence[str]) -> int:
    """Run the attacks and print the table; 0 where there were some and all were refused."""
    attacks = Attacks()
    code = pytest.main(["-q", "--no-header", "--tb=short", "-m", "attack", *arguments], plugins=[attacks])
    print("\n" + "\n".join(table(attacks)))
    whole = code == 0 and not any(attack.others for attack in attacks.found.values())
    return 0 if whole and attacks.found and not attacks.broken else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
