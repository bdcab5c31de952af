"""Hooks of the documentation site (mkdocs.yml): pages from outside docs/, source files, formulas as MathML.

README.md becomes the first page. A source file that a page links to becomes a page of its own, so that no
link leaves the site. Formulas are converted to MathML, which browsers show without a script or a font.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Pages that are not in docs/, by their place in the repository.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".toml": "toml"}
LINK = re.compile(r"(?P<head>\[[^\]]*\]\()(?P<target>[^)\s#]+)(?P<tail>[^)]*\))")
CODE = re.compile(r"^(?P<fence> *```).*?^(?P=fence)|`[^`\n]*`", re.M | re.S)
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>', re.S)


def site_path(path: str) -> str:
    """Where a file of the repository is in the site's sources; both paths are relative to their roots."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def repository_path(uri: str) -> str:
    """The inverse of `site_path` for pages."""
    return next((path for path, page in OUTSIDE.items() if page == uri), f"docs/{uri}")


def targets(text: str, path: str) -> list[str]:
    """Return the files of the repository, relative to its root, to which the page at `path` links."""
    links = [match["target"] for match in LINK.finditer(CODE.sub("", text)) if ":" not in match["target"]]
    return [os.path.normpath(Path(path).parent / target) for target in links]


def relinked(text: str, path: str) -> str:
    """Return the page with the links between files of the repository changed to links within the site."""
    codes = [match.span() for match in CODE.finditer(text)]

    def link(match: re.Match[str]) -> str:
        inside = any(first <= match.start() < last for first, last in codes)
        if inside or ":" in match["target"]:
            return match[0]
        target = site_path(os.path.normpath(Path(path).parent / match["target"]))
        place = os.path.relpath(target, Path(site_path(path)).parent)
        return f"{match['head']}{place}{match['tail']}"

    return LINK.sub(link, text)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/, and every source file that a page links to."""
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in OUTSIDE}
    for page in files.documentation_pages():
        texts[f"docs/{page.src_uri}"] = page.content_string
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=texts[path]))
    linked = {target for path, text in texts.items() for target in targets(text, path)}
    for path in sorted(linked):
        # A page that links to nothing is found by mkdocs.
        if site_path(path).startswith("source/") and (ROOT / path).is_file():
            files.append(File.generated(config, site_path(path), content=_source(path)))
    return files


def _source(path: str) -> str:
    language = LANGUAGES.get(Path(path).suffix, "text")
    code = (ROOT / path).read_text(encoding="utf-8")
    head = f"---\ntitle: {path}\nsearch: {{exclude: true}}\n---\n\n# {path}\n"
    return f'{head}\n``````{language} linenums="1"\n{code}\n``````\n'


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Change links between files of the repository to links within the site."""
    uri = page.file.src_uri
    return markdown if uri.startswith("source/") else relinked(markdown, repository_path(uri))


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Convert formulas to MathML.

    Raises:
        ValueError: a formula cannot be converted; the message has the page and the formula.
    """

    def formula(match: re.Match[str]) -> str:
        latex, block = html.unescape(match["latex"]).strip(), match["tag"] == "div"
        try:
            shown = convert(latex, display="block" if block else "inline")
        except Exception as error:
            raise ValueError(f"{page.file.src_uri}: the formula {latex} is not valid: {error!r}") from error
        if "\\" in shown:
            raise ValueError(f"{page.file.src_uri}: the formula {latex} has a command that is not known")
        return f'<div class="formula">{shown}</div>' if block else shown

    return FORMULA.sub(formula, content)
