"""The settings that a verl script or YAML file sets: every key with its value and its line.

A script is read by `shell_script`; its words `key=value`, `+key=value`, `++key=value` and `~key` are Hydra's.
A YAML file, and one that `--config-path` and `--config-name` of a script name, is a tree of the same keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from millrace.config.recipe import ConfigError, parse_overrides, parse_tree
from millrace.migrate.shell_script import Given, Script

OVERRIDE = re.compile(r"(\+{0,2})([A-Za-z_][\w/]*(?:@[\w.]+)?(?:\.[\w@/-]+)*)=")
DELETION = re.compile(r"~([A-Za-z_][\w.]*)$")
REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^{}]*))?\}")
MODULE = re.compile(r"(verl|recipe|verl_recipe)\.[\w.]+")
# Of verl itself, whose keys are its defaults.
VERL_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "generation")
# What starts the training, by the end of its module or file.
SFT_TRAINERS = ("fsdp_sft_trainer", "sft_trainer", "sft_trainer_ray")
# Keys of supervised fine-tuning, and of its first trainer alone.
OF_FSDP_SFT = {
    "model.partial_pretrain",
    "data.multiturn.enable",
    "data.prompt_dict_keys",
    "optim.lr_scheduler",
}
OF_SFT = OF_FSDP_SFT | {"data.messages_key", "data.max_length", "data.pad_mode", "optim.lr"}
NOT_TRAINING = ("main_generation", "main_eval", "main_generation_server", "model_merger")
# Of a command of python on a file, to count as a training.
FEWEST_KEYS = 3
MAX_REFERENCES = 8


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

    def place(self, given: VerlValue | None) -> str:
        """Where a value is set, to begin a message with."""
        if given is None or given.where.endswith((".yaml", ".yml")):
            return f"{self.name if given is None else given.where}:"
        return f"{self.name} {given.where}:"

    def set(self, key: str, value: VerlValue) -> None:
        """Set a key; two values of one script contradict each other."""
        before = self.values.get(key)
        both = [
            each for each in (before, value) if each and each.where.startswith("line") and not each.problem
        ]
        if len(both) == 2 and both[0].value != value.value:
            self.problems.append(
                f"{self.place(value)} {key} is {_shown(value.value)}, and {_shown(both[0].value)} in "
                f"{both[0].where}; remove one of them"
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
        source.trainer = _trainer_of(source.values)
    else:
        source = _from_script(name, text, arguments, variables or {})
    _resolve(source)
    return source


def _trainer_of(keys: Iterable[str]) -> str:
    """What a configuration starts, by its keys: those of each trainer are its own."""
    found = set(keys)
    if any(key.startswith("actor_rollout_ref.") for key in found) or not found & OF_SFT:
        return "main_ppo"
    return "fsdp_sft_trainer" if found & OF_FSDP_SFT else "sft_trainer"


def _from_script(name: str, text: str, arguments: Sequence[str], variables: Mapping[str, str]) -> VerlSource:
    script = Script(name, _starts_training, list(arguments), variables)
    commands = script.read(text)
    if not commands:
        raise ConfigError(
            f"{name} starts no training of verl (python3 -m verl.trainer.main_ppo key=value ...); name the "
            "script "
            "or the YAML file that does"
        )
    if len(commands) > 1:
        lines = ", ".join(str(command[0].line) for command in commands)
        raise ConfigError(
            f"{name} starts {len(commands)} trainings (lines {lines}); keep one of them in a copy"
        )
    (command,) = commands
    place = next(
        place
        for place, word in enumerate(command)
        if MODULE.fullmatch(word.text) or word.text.endswith(".py")
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
    _set_words(
        source,
        [word for word in command[place + 1 :] if word not in options and word.text not in arguments],
    )
    # Last, as "$@" has them, and where a script does not end with it.
    overrides = [word for word in arguments if OVERRIDE.match(word) or DELETION.match(word)]
    _set_words(source, [Given(word, 0) for word in overrides])
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
            or f"{source.name} line {config.line}: the configuration {path} does not exist here; start in "
            "the folder "
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
    """Replace references, ${data.train_batch_size} or ${oc.select:KEY,DEFAULT}, by what they refer to."""
    for key, given in list(source.values.items()):
        value, problem = given.value, given.problem
        for _ in range(MAX_REFERENCES):
            if not isinstance(value, str) or "${" not in value:
                break
            whole = REFERENCE.fullmatch(value)
            if whole is not None:
                value = _referred(source, key, whole)
            else:
                value = REFERENCE.sub(partial(_as_text, source, key), value)
        if isinstance(value, str) and "${" in value:
            place = source.place(given)
            problem = f"{place} {key} is {value}, a reference that has no value here; write its value"
        source.values[key] = VerlValue(value, given.where, problem)


def _referred(source: VerlSource, key: str, found: re.Match[str]) -> Any:
    """The value of a reference in a key, or its default; the reference itself if it has none."""
    name, default = found.groups()
    if name.startswith("."):
        name = f"{key.rpartition('.')[0]}{name}"
    if name in source.values:
        return source.values[name].value
    below = {each: given for each, given in source.values.items() if each.startswith(f"{name}.")}
    if default is None and not found[0].startswith("${oc.select"):
        return found[0]
    # A section is referred to for defaults alone, and a missing key without a default is null.
    return None if below or default is None else parse_overrides([f"value={default}"])["value"]


def _as_text(source: VerlSource, key: str, found: re.Match[str]) -> str:
    return str(_referred(source, key, found))


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
