"""The scripts in benchmarks/ import each other by name, as Python does for a script's own folder."""

from __future__ import annotations

import sys

from tests.house.source import ROOT

sys.path.append(str(ROOT / "benchmarks"))
