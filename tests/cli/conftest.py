from __future__ import annotations

import pytest

from tests.cli.lab import Lab


@pytest.fixture
def lab(tmp_path, capsys, monkeypatch) -> Lab:
    return Lab(tmp_path, capsys, monkeypatch)
