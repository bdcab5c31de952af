"""`millrace recipes`: what comes with millrace."""

from __future__ import annotations

import itertools
import textwrap
from typing import Annotated

import typer

from millrace.cli.config import width

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="Print this recipe: its YAML.")]
Template = Annotated[
    bool, typer.Option("--template", help="Print a recipe to fill in, with the basic settings.")
]


def recipes(name: Name = None, *, as_template: Template = False) -> None:
    """List the recipes, or print one.

    To begin your own: millrace recipes --template > my.yaml, or millrace recipes quickstart > my.yaml
    """
    from millrace.config.recipe import ConfigError, is_method, recipe_names, recipe_text, template

    if as_template and name is not None:
        raise ConfigError("--template goes alone, without the name of a recipe")
    if as_template:
        typer.echo(template(), nl=False)
        return

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
