"""The settings that a verl script or YAML file sets: every key with its value and its line.

A script is read by `shell_script`; its words `key=value`, `+key=value`, `++key=value` and `~key` are Hydra's. A
YAML file, and one that `--config-path` and `--config-name` of a script name, is a tree of the same keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.config.recipe import ConfigError, parse_overrides, parse_tree
from millrace.migrate.shell_script import Given, Script

OVERRIDE = re.compile(r"(\+{0,2})([A-Za-z_][\w/]*(?:@[\w.]+)?(?:\.[\w@/-]+)*)=")
DELETION = re.compile(r"~([A-Za-z_][\w.]*)$")
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
MODULE = re.compile(r"(verl|recipe|verl_recipe)\.[\w.]+")
# Of verl itself, whose keys are its defaults.
VERL_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "generation")
# What starts the training, by the end of its module or file.
SFT_TRAINERS = ("fsdp_sft_trainer", "sft_trainer", "sft_trainer_ray")
NOT_TRAINING = ("main_generation", "main_eval", "main_generation_server", "model_merger")
# Of a command of python on a file, to count as a training.
FEWEST_KEYS = 3


@dataclass(frozen=True, slots=True)
class VerlValue:
    """A value, and where it is set; `problem` is why it is not known, if it is not."""

    value: Any
    where: str
    problem: str = ""


@dataclass(slots=True)
class VerlSource:
    """The settings of a training by key, what contradicts itself, and what starts it."""

    name: str
    trainer: str = "main_ppo"
    is_megatron: bool = False
    values: dict[str, VerlValue] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def is_sft(self) -> bool:
        """Whether it is supervised fine-tuning alone."""
        return self.trainer in SFT_TRAINERS

    def set(self, key: str, value: VerlValue) -> None:
        """Set a key; two values of one script contradict each other."""
        before = self.values.get(key)
        if before is not None and before.where.startswith("line") and value.where.startswith("line"):
            if before.value != value.value and not before.problem and not value.problem:
                self.problems.append(
                    f"{self.name} {value.where}: {key} is {_shown(value.value)}, and {_shown(before.value)} in "
                    f"{before.where}; remove one of them"
                )
        self.values[key] = value


def read_verl(
    name: str, text: str, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> VerlSource:
    """Read a verl script (.sh) or configuration (.yaml), with arguments as the script or verl would get them.

    Raises:
        ConfigError: it cannot be read, starts no training or several, or an argument is not key=value.
    """
    if Path(name).suffix in (".yaml", ".yml"):
        source = VerlSource(name)
        _set_tree(source, text, name)
        _set_words(source, [Given(word, 0) for word in arguments])
    else:
        source = _from_script(name, text, arguments, variables or {})
    _resolve(source)
    return source


def _from_script(
    name: str, text: str, arguments: Sequence[str], variables: Mapping[str, str]
) -> VerlSource:
    script = Script(name, _starts_training, list(arguments), variables)
    commands = script.read(text)
    if not commands:
        raise ConfigError(
            f"{name} starts no training of verl (python3 -m verl.trainer.main_ppo key=value ...); name the script "
            "or the YAML file that does"
        )
    if len(commands) > 1:
        lines = ", ".join(str(command[0].line) for command in commands)
        raise ConfigError(f"{name} starts {len(commands)} trainings (lines {lines}); keep one of them in a copy")
    (command,) = commands
    place = next(
        place for place, word in enumerate(command) if MODULE.fullmatch(word.text) or word.text.endswith(".py")
    )
    trainer = command[place].text.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    if trainer in NOT_TRAINING:
        raise ConfigError(
            f"{name} line {command[place].line}: {trainer} trains nothing; use millrace generate or millrace "
            "evaluate"
        )
    source = VerlSource(name, trainer)
    options = [word for word in command[place + 1 :] if word.text.startswith("--")]
    _read_config(source, options)
    _set_words(source, [word for word in command[place + 1 :] if word not in options])
    # A script that ends without $@ would not pass them on.
    passed = {word.text for word in command}
    _set_words(
        source,
        [Given(word, 0) for word in arguments if word not in passed and (OVERRIDE.match(word) or word[0] == "~")],
    )
    return source


def _starts_training(words: Sequence[str]) -> bool:
    module = any(MODULE.fullmatch(word) for word in words)
    keys = sum(OVERRIDE.match(word) is not None for word in words)
    is_python = any(re.search(r"python[\d.]*$|torchrun$", word) for word in words[:4])
    return (module and keys > 0) or (
        is_python and keys >= FEWEST_KEYS and any(word.endswith(".py") for word in words)
    )


def _read_config(source: VerlSource, options: Sequence[Given]) -> None:
    """Read the YAML that --config-path and --config-name name, unless it is verl's own."""
    given = {word.text.partition("=")[0].lstrip("-"): word for word in options}
    config = given.get("config-name")
    if config is None:
        return
    base = config.text.partition("=")[2].removesuffix(".yaml")
    if base in VERL_CONFIGS:
        source.is_megatron = "megatron" in base
        return
    folder = given["config-path"].text.partition("=")[2] if "config-path" in given else "."
    path = Path(folder) / f"{base}.yaml"
    if config.problem or not path.is_file():
        source.problems.append(
            config.problem
            or f"{source.name} line {config.line}: the configuration {path} does not exist here; start in the folder "
            "that the script starts in"
        )
        source.is_megatron = "megatron" in base
        return
    _set_tree(source, path.read_text(encoding="utf-8"), str(path))


def _set_tree(source: VerlSource, text: str, name: str) -> None:
    tree = parse_tree(text, name)
    for base in tree.pop("defaults", None) or ():
        if isinstance(base, str) and "megatron" in base:
            source.is_megatron = True
    tree.pop("hydra", None)
    for key, value in _leaves(tree):
        source.set(key, VerlValue(value, name))


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        elif key != "_target_":
            yield f"{above}{key}", value


def _set_words(source: VerlSource, words: Sequence[Given]) -> None:
    for word in words:
        where = f"line {word.line}" if word.line else "an argument"
        found = OVERRIDE.match(word.text)
        deleted = DELETION.match(word.text)
        if deleted is not None:
            source.values = {
                key: value
                for key, value in source.values.items()
                if not f"{key}.".startswith(f"{deleted[1]}.")
            }
        elif found is None:
            source.problems.append(
                word.problem
                or f"{source.name} {where}: {word.text} is not of the form key=value; correct it or remove it"
            )
        elif word.problem:
            source.set(found[2], VerlValue(None, where, word.problem))
        else:
            text = word.text[found.end() :]
            try:
                (value,) = parse_overrides([f"value={text}"]).values()
            except ConfigError:
                value = text  # a path or a name with signs of YAML, which Hydra takes as it is
            for key, inner in _inner(found[2], value):
                source.set(key, VerlValue(inner, where))


def _inner(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        yield from _leaves(value, f"{key}.")
    else:
        yield key, value


def _resolve(source: VerlSource) -> None:
    """Replace references such as ${data.train_batch_size} by the values of these keys."""
    for key, given in list(source.values.items()):
        value = given.value
        for _ in range(8):
            if not isinstance(value, str) or "${" not in value:
                break
            found = REFERENCE.fullmatch(value)
            if found is not None and found[1] in source.values:
                value = source.values[found[1]].value
                continue
            value = REFERENCE.sub(
                lambda name: str(source.values[name[1]].value) if name[1] in source.values else name[0], value
            )
        problem = given.problem
        if isinstance(value, str) and "${" in value:
            problem = f"{source.name} {given.where}: {key} is {value}, a reference that has no value here; write it"
        source.values[key] = VerlValue(value, given.where, problem)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
