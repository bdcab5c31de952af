"""`millrace config`: what a recipe comes to, setting by setting."""

from __future__ import annotations

import json
import shutil
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.cli.train import Overrides

if TYPE_CHECKING:
    from millrace.config.recipe import Setting

OptionalRecipe = Annotated[
    str | None, typer.Argument(metavar="RECIPE", help="A recipe's name, or a file of your own (my.yaml).")
]
ShowAll = Annotated[bool, typer.Option("--all", help="Show every setting, not just the basic ones.")]
AsYaml = Annotated[bool, typer.Option("--yaml", help="Print the resolved recipe alone.")]
AsSchema = Annotated[bool, typer.Option("--schema", help="Print the JSON schema of recipes, for editors.")]
KEY_WIDTH, SOURCE_WIDTH, INDENT = 36, 10, 4


def config(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    *,
    show_all: ShowAll = False,
    as_yaml: AsYaml = False,
    as_schema: AsSchema = False,
) -> None:
    """Show the settings of a recipe: where a value comes from, the value, the meaning; then the sizes.

    Shown are the basic settings and what the recipe or an override sets; `--all` shows every setting.
    """
    from millrace.config.recipe import ConfigError, derivation, json_schema, parse_overrides, resolve, to_yaml

    if as_schema and (recipe is not None or as_yaml or show_all):
        raise ConfigError("--schema goes alone, since the schema is the same for every recipe")
    if as_yaml and show_all:
        raise ConfigError("--yaml prints every setting; leave out --all")
    if not as_schema and recipe is None:
        raise ConfigError("name a recipe (millrace recipes lists them), or ask for --schema")
    if recipe is None:
        typer.echo(json_schema())
        return
    resolved, settings = resolve(recipe, parse_overrides(overrides or []))
    if as_yaml:
        typer.echo(to_yaml(resolved), nl=False)
        return
    typer.echo(f"{'setting':{KEY_WIDTH}}{'from':{SOURCE_WIDTH}}value\n")
    shown = [one for one in settings if show_all or one.basic or one.source != "default"]
    for setting in shown:
        show_setting(setting)
    if len(shown) < len(settings):
        typer.echo(f"\n{len(settings) - len(shown)} more settings have their defaults; --all shows them")
    typer.echo("\nHow the sizes follow")
    for line in derivation(resolved):
        typer.echo(_filled(line, first=" " * INDENT, rest=" " * 2 * INDENT))


def show_setting(setting: Setting) -> None:
    """Two lines: key, source and value, and below them the meaning; longer ones are folded."""
    head = f"{setting.key:{KEY_WIDTH - 1}} {setting.source:{SOURCE_WIDTH}}"
    shown = _filled(written(setting.value), first=head, rest=" " * (KEY_WIDTH + SOURCE_WIDTH))
    typer.secho(shown, bold=setting.source != "default")
    if setting.meaning:
        typer.secho(_filled(setting.meaning, first=" " * INDENT, rest=" " * INDENT), dim=True)


def written(value: Any) -> str:
    """A value as an override spells it: JSON, which is YAML, and no quotes around a plain word."""
    plain = isinstance(value, str) and value.replace("_", "").replace("-", "").isalnum()
    return value if plain else json.dumps(value, ensure_ascii=False, default=list)


def width() -> int:
    """Columns of the terminal; 80 where there is none."""
    return shutil.get_terminal_size((80, 24)).columns


def _filled(text: str, *, first: str, rest: str) -> str:
    room = max(width(), KEY_WIDTH + SOURCE_WIDTH + 20)
    return textwrap.fill(text, room, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
