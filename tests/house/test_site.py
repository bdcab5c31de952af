"""The documentation site builds without a warning, loads nothing from a network, and can be searched."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from tests.house.scripts import load_script
from tests.house.source import ROOT

hooks = load_script("site_hooks")
LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")


def built(site: Path, docs: Path = ROOT / "docs") -> Path:
    build(load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(docs), site_dir=str(site)))
    return site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, str]:
    return {str(path.relative_to(site)): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}


def test_every_document_is_a_page_and_the_readme_is_the_first(pages: dict[str, str]) -> None:
    sources = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")] + list(hooks.OUTSIDE)
    expected = {re.sub(r"(README|index)?\.md$", "", hooks.site_path(source)) for source in sources}
    shown = {re.sub(r"(index)?\.html$", "", page) for page in pages}
    assert expected - shown == set()
    assert "make train" in pages["index.html"]
    assert "class Completion" in re.sub(r"<[^>]*>", "", pages["source/millrace/types.py.html"])


def test_the_site_loads_nothing_from_a_network(site: Path, pages: dict[str, str]) -> None:
    assert {name: found for name, page in pages.items() if (found := LOADED.findall(page))} == {}
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert len(styles) > 2
    assert [style for style in styles if re.search(r"url\([\"']?(https?:)?//|@import", style)] == []
    # A diagram of this kind makes the theme load a script.
    assert [name for name, page in pages.items() if 'class="mermaid"' in page] == []
    assert LOADED.findall('<script src="https://example.org/x.js">') == ["https://example.org/x.js"]


def test_the_search_finds_a_term_without_a_server(site: Path, pages: dict[str, str]) -> None:
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    entries = json.loads(index.removeprefix("var __index = "))["docs"]
    found = {entry["location"] for entry in entries if "max_staleness" in entry["text"]}
    assert {"async.html", "reference.html", "glossary.html"} <= {place.partition("#")[0] for place in found}
    assert [entry["location"] for entry in entries if entry["location"].startswith("source/")] == []
    first = pages["index.html"]
    assert first.index("site/iframe-worker.js") < first.index("javascripts/bundle")


def test_formulas_are_shown_without_a_script(pages: dict[str, str]) -> None:
    assert pages["algorithms/grpo.html"].count("<math") > 5
    assert {name for name, page in pages.items() if 'class="arithmatex"' in page} == set()


@pytest.mark.slow
def test_links_and_anchors_that_lead_nowhere_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (docs / "glossary.md").open("a", encoding="utf-8") as page:
        page.write("\n[a](gone.md) [b](reading.md#nowhere) [c](../millrace/gone.py)\n")
    with pytest.raises(Abort):
        built(tmp_path / "site", docs)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 3 and all("glossary.md" in warning for warning in warnings)
    for warning, target in zip(warnings, ("gone.md", "source/millrace/gone.py.md", "#nowhere"), strict=True):
        assert f"{target}'" in warning


def test_links_of_the_repository_become_links_of_the_site() -> None:
    page = "[a](reading.md#x) [b](../millrace/types.py) `[c](../d.py)` [e](https://f.org) [g](../README.md)\n"
    page += "```\n[h](../i.py)\n```\n![j](pictures/k.svg)\n"
    assert hooks.relinked(page, "docs/async.md") == (
        "[a](reading.md#x) [b](source/millrace/types.py.md) `[c](../d.py)` [e](https://f.org) [g](index.md)\n"
        "```\n[h](../i.py)\n```\n![j](pictures/k.svg)\n"
    )
    assert hooks.relinked("[a](docs/async.md)", "README.md") == "[a](async.md)"
    assert hooks.relinked("[a](../../CHANGELOG.md)", "docs/algorithms/grpo.md") == "[a](../changelog.md)"


def test_a_formula_that_is_not_valid_is_named() -> None:
    class page:
        class file:
            src_uri = "grpo.md"

    shown = hooks.on_page_content('<div class="arithmatex">\\[a &lt; b\\]</div>', page, None, None)
    assert shown.startswith('<div class="formula"><math') and "<mo>&#x0003C;</mo>" in shown
    for latex, problem in ((r"\frac", "is not valid"), (r"\nosuch{a}", "has a command that is not known")):
        with pytest.raises(ValueError, match=re.escape(f"grpo.md: the formula {latex} {problem}")):
            hooks.on_page_content(f'<span class="arithmatex">\\({latex}\\)</span>', page, None, None)
