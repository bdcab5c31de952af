"""`millrace import-config`: a training of verl as a recipe, and what became of each of its settings."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.cli.config import width

if TYPE_CHECKING:
    from millrace.migrate.verl_settings import Known
    from millrace.migrate.verl_source import VerlSource

ScriptFile = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="A shell script that starts verl (.sh), or its configuration (.yaml)."
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ARGUMENT", help="Arguments of the script, such as trainer.total_epochs=3 or ~KEY."
    ),
]
Variables = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Value of a variable of the script.")
]
Rows = Annotated[
    int | None, typer.Option(min=1, help="Rows of the training data, where the file is not on this machine.")
]
RewardKind = Annotated[
    str | None,
    typer.Option(
        metavar="KIND", help="Reward to take: gsm8k, number, exact, task, or module:function of yours."
    ),
]
Output = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write the recipe to this new file (.yaml).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON, with the recipe in it.")]


def import_config(
    file: ScriptFile,
    arguments: Arguments = None,
    *,
    variables: Variables = None,
    rows: Rows = None,
    reward: RewardKind = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Turn a training of verl into a recipe, and report what became of every setting.

    The script is read, never run. The recipe is printed, and the report on standard error; with --output the
    recipe goes to the file. Without a recipe, the errors name what to change.
    """
    from millrace.config.recipe import ConfigError
    from millrace.migrate.verl_recipe import import_verl, report
    from millrace.migrate.verl_settings import Known
    from millrace.migrate.verl_source import read_verl

    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{file} does not exist; give a shell script or a YAML file of verl")
    if output is not None and Path(output).exists():
        raise ConfigError(f"{output} exists; name another file")
    if output is not None and Path(output).suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{output} does not end in .yaml, as recipes do; add it")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text") from None
    source = read_verl(path.name, text, arguments or [], dict(map(_pair, variables or [])))
    imported = import_verl(source, _known(source, Known(rows, (), reward)))
    if as_json:
        outcomes = [asdict(each) for each in imported.outcomes]
        fields = {"problems": imported.problems, "counts": imported.counts, "recipe": imported.recipe or None}
        typer.echo(json.dumps({"keys": outcomes, **fields}, ensure_ascii=False, default=str))
    else:
        typer.echo(report(imported, width=width()), err=output is None)
    if imported.problems:
        raise ConfigError("\n".join(imported.problems))
    if output is not None:
        Path(output).write_text(imported.recipe, encoding="utf-8")
    elif not as_json:
        typer.echo(imported.recipe, nl=False)


def _pair(word: str) -> tuple[str, str]:
    from millrace.config.recipe import ConfigError

    name, equals, value = word.partition("=")
    if not equals or not name:
        raise ConfigError(f"--set {word} is not of the form NAME=VALUE, such as --set DATA_DIR=data")
    return name, value


def _known(source: VerlSource, given: Known) -> Known:
    """Add what the training data holds, if it is here: rows, and the sources that they name."""
    from millrace.data.rows import read_rows
    from millrace.migrate.verl_recipe import train_files

    paths = train_files(source)
    if not paths or not all(Path(path).is_file() for path in paths):
        return given
    num_rows, by_file = 0, dict[str, tuple[str, ...]]()
    for path in paths:
        rows = read_rows(path)
        num_rows += len(rows)
        by_file[path] = tuple(
            dict.fromkeys(str(row["data_source"]) for row in rows if row.get("data_source"))
        )
    sources = tuple(dict.fromkeys(name for names in by_file.values() for name in names))
    return replace(given, num_rows=given.num_rows or num_rows, sources=sources, file_sources=by_file)
