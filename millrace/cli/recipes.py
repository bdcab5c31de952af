"""`millrace recipes`: what comes with millrace."""

from __future__ import annotations

import itertools
import textwrap
from typing import Annotated

import typer

from millrace.cli.config import width

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="Print this recipe: its YAML.")]


def recipes(name: Name = None) -> None:
    """List the recipes, or print one.

    To make a recipe your own: millrace recipes quickstart > my.yaml
    """
    from millrace.config.recipe import is_method, recipe_names, recipe_text

    if name is not None:
        typer.echo(recipe_text(name), nl=False)
        return
    names = recipe_names()
    for heading, known in (
        ("Tasks: millrace train NAME", [each for each in names if not is_method(each)]),
        (
            "Methods: `base: NAME` in a recipe of your own, or millrace train quickstart base=NAME",
            [each for each in names if is_method(each)],
        ),
    ):
        typer.secho(textwrap.fill(heading, width(), break_on_hyphens=False), bold=True)
        for each in known:
            typer.echo(f"  {each}")
            folded = textwrap.fill(purpose(recipe_text(each)), width() - 6, break_on_hyphens=False)
            typer.echo(textwrap.indent(folded, "      "))


def purpose(text: str) -> str:
    """The first paragraph of the comment that a recipe opens with, in one line."""
    opening = itertools.takewhile(lambda line: line.startswith("# "), text.splitlines())
    return " ".join(line.strip("# ") for line in opening)
