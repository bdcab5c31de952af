"""Data files of a folder of the Hugging Face Hub, as `configs` in the YAML of its README.md names them."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path

import yaml

from millrace.observability.files import FileError, Shape, checked, read_text

README = "README.md"
FENCE = "---"
DEFAULT = "default"
TRAIN = "train"


class HubFolderError(ValueError):
    """The data files cannot be found; the message names the README.md and what to change."""


class _SplitFiles(Shape):
    split: str
    path: str | list[str]


class _Config(Shape):
    config_name: str = DEFAULT
    data_files: str | list[str | _SplitFiles] = []
    data_dir: str | None = None
    default: bool = False

    def splits(self) -> dict[str, list[str]]:
        """The patterns of each split; files without a split are trained on."""
        found: dict[str, list[str]] = {}
        for one in [self.data_files] if isinstance(self.data_files, str) else self.data_files:
            split, path = (one.split, one.path) if isinstance(one, _SplitFiles) else (TRAIN, one)
            found.setdefault(split, []).extend([path] if isinstance(path, str) else path)
        return found


class _Card(Shape):
    configs: list[_Config] = []


def hub_files(path: Path) -> list[Path]:
    """Return the files of a split, in the order they are read; none if no README.md names data files.

    Args:
        path: a folder; or one with `CONFIG`, `SPLIT` or `CONFIG/SPLIT` behind it that together is no path. By
            default the config is that with `default: true`, else that named default, else the only one, and
            the split is train.

    Raises:
        HubFolderError: the YAML cannot be read, there is no such config or split, or a file is missing.
    """
    if glob.has_magic(str(path)):
        return []
    above = [path] if path.exists() else path.parents[:2]
    folder = next((each for each in above if (each / README).is_file()), None)
    configs = {} if folder is None else _configs(folder / README)
    if folder is None or not configs:
        return []
    words = path.relative_to(folder).parts
    name = words[0] if len(words) == 2 or (words and words[0] in configs) else _default(configs)
    if name is None and not words:
        there = ", ".join(f"{folder}/{each}" for each in configs)
        raise HubFolderError(f"{folder / README} has several configs; name one of them as {there}")
    if name not in configs:
        there = ", ".join(configs)
        raise HubFolderError(f"{folder / README} has no config {words[0]}; there are: {there}")
    split = words[-1] if words and words != (name,) else TRAIN
    return _files_of(folder, configs[name], split)


def _default(configs: Mapping[str, _Config]) -> str | None:
    by_flag = [name for name, config in configs.items() if config.default]
    return next((name for name in (*by_flag, DEFAULT) if name in configs), _only(configs))


def _only(configs: Mapping[str, _Config]) -> str | None:
    return next(iter(configs)) if len(configs) == 1 else None


def _files_of(folder: Path, config: _Config, split: str) -> list[Path]:
    """The files of a split that the patterns of a config name."""
    title, splits = f"config {config.config_name} of {folder / README}", config.splits()
    if not splits:
        where = "no data files" if config.data_dir is None else f"the folder {config.data_dir}"
        raise HubFolderError(f"{title} names {where}; give the path of a folder or of files in {folder}")
    if split not in splits:
        there = ", ".join(f"{folder}/{config.config_name}/{each}" for each in splits)
        raise HubFolderError(f"{title} has no split {split}; name one of its splits as {there}")
    files: dict[Path, None] = {}
    for pattern in splits[split]:
        # Files outside the folder are none of the data set's.
        inside = not Path(pattern).is_absolute() and ".." not in Path(pattern).parts
        names = glob.glob(pattern, root_dir=folder, recursive=True) if inside else []
        found = [folder / name for name in sorted(names) if (folder / name).is_file()]
        if not found:
            raise HubFolderError(
                f"{title} names {pattern} for the split {split}, and {folder} has no such file; download it, "
                "or correct the pattern"
            )
        files |= dict.fromkeys(found)
    return list(files)


def _configs(readme: Path) -> dict[str, _Config]:
    """The configs by name; none if the YAML at the beginning of the file has no `configs`."""
    try:
        lines = read_text(readme, mend="save it as UTF-8").splitlines()
    except FileError as error:
        raise HubFolderError(str(error)) from None
    fences = [number for number, line in enumerate(lines) if line.rstrip() == FENCE][:2]
    if len(fences) < 2 or fences[0] > 0:
        return {}
    try:
        tree = yaml.safe_load("\n".join(lines[1 : fences[1]]))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 2}" if mark else ""
        problem = getattr(error, "problem", None) or "it is not YAML"
        raise HubFolderError(
            f"{readme}{where} cannot be read: {problem}; correct the YAML between its lines {FENCE}"
        ) from None
    if not isinstance(tree, Mapping) or not tree.get("configs"):
        return {}
    try:
        return {one.config_name: one for one in checked(_Card, tree).configs}
    except ValueError as error:
        raise HubFolderError(f"{readme} has configs that cannot be used: {error}; correct them") from None
