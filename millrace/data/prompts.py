"""Prompts from rows: splits off held-out problems, renders and tokenises once, streams without end."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from millrace.config.inputs import (
    ANSWER_COLUMNS,
    AUTO,
    ENVIRONMENT_ROWS,
    PROMPT_COLUMNS,
    TASK_PREFIX,
    DataConfig,
    source_fractions,
)
from millrace.data.chat import CHAT, as_text, messages_of, plain_text, render, template_of
from millrace.data.curriculum import Curriculum
from millrace.data.rows import DataError, Row, column, read_rows
from millrace.data.stored_rows import Numbers, StoredRows
from millrace.data.streamed_prompts import StreamedPrompts, of_source
from millrace.data.tasks import task_rows
from millrace.data.tool_schema import read_tools
from millrace.types import Prompt

# The column with the tools that the chat template shows.
TOOLS_COLUMN = "tools"
# Default number of held-out rows, and their maximum fraction of all problems.
EVAL_SIZE, EVAL_FRACTION = 256, 0.1
R = TypeVar("R")

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Rows to train on and rows to evaluate on, in the order of the source. No problem is on both sides.

    Of `num_read` rows of `data.train`, `num_duplicates` problems of a reasoning-gym task were left out, and
    `num_held_out` because their problem is evaluated on by another row.
    """

    train: list[Row] | StoredRows
    eval: list[Row]
    num_read: int
    num_duplicates: int
    num_held_out: int


def read_split(
    config: DataConfig, *, seed: int, environment_rows: Callable[[int, int], Iterable[Row]] | None = None
) -> Split:
    """Read the data and hold out what evaluation needs.

    The identity of a problem is `data.identity_column`, else its prompt. With `data.eval`, its first
    `eval_size` rows are used for evaluation, and no problem in it is trained on. Otherwise `eval_size`
    problems of `data.train` (by default at most a tenth) are sampled by seed: one row of each is used for
    evaluation, and none is trained on. `environment_rows` generates so many problems of the environment from
    a seed. Raises DataError if the data cannot be read, or nothing is left to train on.
    """
    rows, num_read = _read_train(config, seed, environment_rows)
    num_duplicates = num_read - len(rows)
    digest_N, source_N = _digests(rows, config), _sources_of(rows)
    if config.sources:
        _refuse_shared(rows, digest_N, source_N)
    if config.eval is not None:
        held_rows = read_rows(config.eval)
        held = _digests(held_rows, config)
        evaluated = held_rows[: config.eval_size or EVAL_SIZE]
    else:
        chosen = _held_out(digest_N, source_N, config, seed)
        held = digest_N[chosen]
        evaluated = list(rows.read(chosen)) if isinstance(rows, StoredRows) else [rows[n] for n in chosen]
    kept = np.flatnonzero(~np.isin(digest_N, held))
    left = set(source_N[kept].tolist())
    for name in [source.name for source in config.sources] or [""]:
        if name not in left:
            place = f"source {name}" if name else config.train
            raise DataError(
                f"every problem of {place} is also in {config.eval}, so nothing is left to train on; give "
                "another data.eval, or null to hold out a part of data.train"
            )
    num_held_out = len(rows) - len(kept) - (0 if config.eval is not None else len(evaluated))
    kept = kept[_first(len(kept), config, seed)]
    train = rows.only(kept) if isinstance(rows, StoredRows) else [rows[number] for number in kept]
    return Split(train, evaluated, num_read, num_duplicates, num_held_out)


def _first(count: int, config: DataConfig, seed: int) -> np.ndarray:
    """The places of those of `count` rows that `data.train_size` leaves, in order."""
    size = count if config.train_size is None else min(count, config.train_size)
    if not config.shuffle:
        return np.arange(size)
    # The third number separates this random stream from those of epochs and of the held-out problems.
    return np.sort(np.random.default_rng([seed, 0, 2]).permutation(count)[:size])


def _read_train(
    config: DataConfig, seed: int, environment_rows: Callable[[int, int], Iterable[Row]] | None
) -> tuple[list[Row] | StoredRows, int]:
    """The rows to train on and to hold out, and how many were read, with duplicates of a task."""
    if config.train == ENVIRONMENT_ROWS:
        if environment_rows is None:
            raise DataError("the environment generates no problems; set data.train to a file")
        rows = list(environment_rows(config.task_size, seed))
        return rows, len(rows)
    if config.train.startswith(TASK_PREFIX):
        generated = task_rows(config.train, config.task, size=config.task_size, seed=seed)
        firsts = np.unique(_digests(generated, config), return_index=True)[1]
        return [generated[number] for number in np.sort(firsts)], len(generated)
    found = StoredRows.joined(_of_each(config, StoredRows.of)) if config.streaming else read_files(config)
    return found, len(found)


def read_files(config: DataConfig) -> list[Row]:
    """Every row of `data.train`, or of `data.sources`, one source after the other.

    DataError if one cannot be read; it names the source.
    """
    return [row for rows in _of_each(config, read_rows) for row in rows]


def _of_each(config: DataConfig, read: Callable[[str, str], R]) -> list[R]:
    """What `read` makes of the path and the name of each source; without sources, of `data.train` alone."""
    if not config.sources:
        return [read(config.train, "")]
    found = []
    for source in config.sources:
        try:
            found.append(read(source.data, source.name))
        except DataError as error:
            raise DataError(f"source {source.name}: {error}") from None
    return found


def _sources_of(rows: Sequence[Row]) -> np.ndarray:
    """Return the source of each row, [N]."""
    return rows.sources() if isinstance(rows, StoredRows) else np.array([row.source for row in rows], str)


def _digests(rows: Iterable[Row], config: DataConfig) -> np.ndarray:
    """A hash of each row's identity, [N]: what is held of a problem where its row is on disk."""
    return np.fromiter((_digest(row, config) for row in rows), "S16")


def _digest(row: Row, config: DataConfig) -> bytes:
    return hashlib.sha256(_identity(row, config).encode("utf-8", "surrogatepass")).digest()[:16]


def refuse_shared(rows: Sequence[Row], config: DataConfig) -> None:
    """Raise DataError if a problem is in two sources, whose weights would then mean nothing."""
    _refuse_shared(rows, _digests(rows, config), _sources_of(rows))


def _refuse_shared(rows: Sequence[Row], digest_N: np.ndarray, source_N: np.ndarray) -> None:
    _, first, problem_N = np.unique(digest_N, return_index=True, return_inverse=True)
    first_N = first[problem_N]
    shared = np.flatnonzero(source_N != source_N[first_N])
    if len(shared):
        row, other = rows[int(shared[0])], rows[int(first_N[shared[0]])]
        raise DataError(
            f"{len(shared)} rows have a problem of another source, the first: {row.where} of {row.source} "
            f"and {other.where} of {other.source}; remove them from one of the two"
        )


def _held_out(digest_N: np.ndarray, source_N: np.ndarray, config: DataConfig, seed: int) -> np.ndarray:
    """The numbers of the rows that are split off for evaluation; of each source as its weight asks for."""
    first = np.sort(np.unique(digest_N, return_index=True)[1])
    counts = Counter(source_N[first].tolist())
    sizes = _held_out_sizes(counts, config)
    chosen = []
    for name in [source.name for source in config.sources] or [""]:
        count = counts[name]
        if sizes[name] >= count:
            if name:
                raise DataError(
                    f"{sizes[name]} problems of source {name} are held out and it has only {count}, so "
                    "nothing is left to train on; lower data.eval_size, or set data.eval"
                )
            raise DataError(
                f"data.eval_size holds out {sizes[name]} problems and {config.train} has only {count}, so "
                f"nothing is left to train on; set data.eval_size below {count}"
            )
        # The third number separates this random stream from that of an epoch, which is seeded [seed, epoch].
        order = np.random.default_rng([source_seed(seed, name), 0, 1]).permutation(count)
        chosen.append(first[source_N[first] == name][order[: sizes[name]]])
    return np.sort(np.concatenate(chosen))


def _held_out_sizes(counts: Mapping[str, int], config: DataConfig) -> dict[str, int]:
    """How many problems of each source are held out: by largest remainders, and at least one."""

    def most(count: int) -> int:
        return min(EVAL_SIZE, max(1, int(EVAL_FRACTION * count)))

    total = config.eval_size or most(sum(counts.values()))
    if not config.sources:
        return dict.fromkeys(counts, total)
    fractions = source_fractions(config.sources, [counts[source.name] for source in config.sources])
    exact = {one.name: total * part for one, part in zip(config.sources, fractions, strict=True)}
    sizes = {name: int(size) for name, size in exact.items()}
    for name in sorted(exact, key=lambda name: sizes[name] - exact[name])[: total - sum(sizes.values())]:
        sizes[name] += 1
    if config.eval_size is None:
        sizes = {name: min(size, most(counts[name])) for name, size in sizes.items()}
    return {name: max(1, size) for name, size in sizes.items()}


def source_seed(seed: int, name: str) -> int:
    """Return a seed for one of several sources, whatever others there are; without a name, `seed` itself."""
    if not name:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")


def corpus(split: Split, config: DataConfig) -> Iterator[str]:
    """The texts a tokenizer is trained on: prompts and demonstrations of the rows to train on, never others.

    Raises DataError if the template is `chat`, or a row cannot be used, as in `make_prompts`.
    """
    for row in split.train:
        own = config.of_source(row.source)
        yield plain_text(own.template, _prompt(row, own, row.where), row.where)
        demonstration = _demonstration(row, own, _answer(row, own))
        yield from [demonstration] if isinstance(demonstration, str) else demonstration or ()


def make_prompts(
    rows: Sequence[Row],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prefix: str,
    max_prompt_tokens: int,
) -> tuple[Sequence[Prompt], int]:
    """Render and tokenise rows of one side of a split; return the prompts, and how many were dropped.

    Of rows on disk every one is rendered once, to find what cannot be used, and again when it is needed.

    The prompt of row 17 gets the id `prefix:17`, whichever others are dropped. Prompts longer than
    `max_prompt_tokens` are dropped, or raise an error, as set by `data.too_long`. A chat template gets the
    tools of the column `tools` (`read_tools`), where a row has it. Raises DataError if a
    column is missing or not text, no answer matches, a prompt is too long, or none is left.
    """
    if not rows:
        raise DataError(f"there are no {prefix} rows")
    prompts: list[Prompt] = []
    kept = array("q")
    shortest = None
    for number, row in enumerate(rows):
        own = config.of_source(row.source)
        text, token_ids = _rendered(tokenizer, own, row)
        length = len(token_ids)
        if length > max_prompt_tokens:
            if config.too_long == "refuse":
                raise DataError(
                    f"{row.where}: the prompt has {length} tokens and at most {max_prompt_tokens} "
                    "are allowed; raise data.max_prompt_tokens, or set data.too_long to filter"
                )
            shortest = min(shortest or length, length)
            continue
        prompt = _completed(f"{prefix}:{number}", row, own, text, token_ids)
        kept.append(number)
        if not isinstance(rows, StoredRows):
            prompts.append(prompt)
    if not kept:
        raise DataError(
            f"all {len(rows)} {prefix} prompts are longer than {max_prompt_tokens} tokens (the shortest has "
            f"{shortest}); raise data.max_prompt_tokens"
        )
    if isinstance(rows, StoredRows):
        number_N = np.array(kept, np.int64)
        make = partial(_made, config=config, tokenizer=tokenizer, prefix=prefix)
        return StreamedPrompts(rows.only(number_N), number_N, make), len(rows) - len(kept)
    return prompts, len(rows) - len(kept)


def _made(row: Row, number: int, *, config: DataConfig, tokenizer: Any, prefix: str) -> Prompt:
    own = config.of_source(row.source)
    return _completed(f"{prefix}:{number}", row, own, *_rendered(tokenizer, own, row))


def _completed(id: str, row: Row, config: DataConfig, text: str, token_ids: tuple[int, ...]) -> Prompt:
    answer = _answer(row, config)
    return Prompt(id, token_ids, text, answer, row, _demonstration(row, config, answer), row.source)


def untokenized_prompts(rows: Sequence[Row], config: DataConfig, *, prefix: str) -> list[Prompt]:
    """Render rows for a server, which tokenizes itself and writes the chat template; ids as `make_prompts`.

    The text of a chat is its messages, one below the other. Raises DataError as `make_prompts`.
    """
    prompts = []
    for number, row in enumerate(rows):
        own = config.of_source(row.source)
        value, answer = _prompt(row, own, row.where), _answer(row, own)
        if template_of(own.template, value) == CHAT:
            text = "\n\n".join(str(one.get("content") or "") for one in messages_of(value, row.where))
        else:
            text = plain_text(own.template, value, row.where)
        if not text:
            raise DataError(f"{row.where}: the prompt is empty")
        prompts.append(Prompt(f"{prefix}:{number}", (), text, answer, row, source=row.source))
    return prompts


def chat_request(config: DataConfig, prompt: Prompt) -> dict[str, Any] | None:
    """Return `messages`, and `tools` where the row has them, of a prompt for a chat; None for plain text."""
    config = config.of_source(prompt.source)
    value = _prompt(prompt.row, config, prompt.id)
    if template_of(config.template, value) != CHAT:
        return None
    tools = read_tools(prompt.row.get(TOOLS_COLUMN), prompt.id)
    return {"messages": messages_of(value, prompt.id)} | ({"tools": list(tools)} if tools else {})


class PromptStream:
    """An endless stream of prompts: every epoch yields each prompt once, in its own order.

    The order of epoch e is a permutation seeded with `[seed, e]`; without `shuffle`, it is the given one. A
    curriculum skips some prompts. The state of the stream is three numbers and the curriculum's state, so a
    resumed stream continues exactly.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, curriculum: Curriculum | None = None
    ) -> None:
        if not prompts:
            raise DataError("there are no prompts to deal")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._curriculum = curriculum
        self._enter(0, 0)

    def next(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; they may span epochs. DataError if the curriculum's function fails."""
        dealt: list[Prompt] = []
        while len(dealt) < num_prompts:
            if isinstance(self._prompts, StreamedPrompts):
                self._prompts.read_ahead(self._order, self._position)
            index = int(self._order[self._position])
            prompt = self._prompts[index]
            if self._curriculum is None or self._lot[index] < self._curriculum.chance(prompt):
                dealt.append(prompt)
            self._position += 1
            if self._position == len(self._prompts):
                self._enter(self._epoch + 1, 0)
        return dealt

    def learn(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """What a group of a prompt earned, for the curriculum if there is one."""
        if self._curriculum is not None and rewards:
            self._curriculum.learn(prompt, sum(rewards) / len(rewards))

    def state(self) -> dict[str, Any]:
        """`epoch`, `position` in it, `num_prompts` to check on resume, and the curriculum's `known`."""
        place = self.place()
        return place if self._curriculum is None else {**place, "known": self._curriculum.state()}

    def place(self) -> dict[str, int]:
        """The state without the curriculum's."""
        return {"epoch": self._epoch, "position": self._position, "num_prompts": len(self._prompts)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; DataError for a data set of another size, or another state."""
        epoch, position, num_prompts = (state.get(key) for key in ("epoch", "position", "num_prompts"))
        if not isinstance(epoch, int) or not isinstance(position, int) or not isinstance(num_prompts, int):
            raise DataError(f"the state of the data {dict(state)} lacks epoch, position or num_prompts")
        if num_prompts != len(self._prompts):
            raise DataError(
                f"the checkpoint was made with {num_prompts} prompts and the data now has "
                f"{len(self._prompts)}; resume with the same data and the same data settings"
            )
        if epoch < 0 or not 0 <= position < num_prompts:
            raise DataError(f"the state of the data {dict(state)} points outside its {num_prompts} prompts")
        self._enter(epoch, position)
        if self._curriculum is not None:
            self._curriculum.load_state(state.get("known", {}))

    def _enter(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        count = len(self._prompts)
        self._order: Numbers = (
            np.random.default_rng([self._seed, epoch]).permutation(count)
            if self._shuffle
            else np.arange(count)
        )
        # What a prompt's chance must exceed in this epoch.
        if self._curriculum is not None:
            self._lot = np.random.default_rng([self._seed, epoch, 1]).random(count)


def settled(config: DataConfig, prompt: Prompt) -> DataConfig:
    """The settings of a prompt's source, with the template that the prompt was made with."""
    own = config.of_source(prompt.source)
    if own.template != AUTO:
        return own
    template = template_of(own.template, _prompt(prompt.row, own, prompt.id))
    return own.model_copy(update={"template": template})


def with_templates(config: DataConfig, prompts: Sequence[Prompt]) -> DataConfig:
    """The settings with the template of every source by its first prompt.

    `data.template`, for text that comes without a row, is that of the first prompt of all.
    """
    sources = tuple(
        one.model_copy(update={"template": settled(config, of_source(prompts, one.name)[0]).template})
        for one in config.sources
    )
    update = {"template": settled(config, prompts[0]).template, "sources": sources}
    return config.model_copy(update=update)


def prompt_messages(config: DataConfig, prompt: Prompt) -> list[dict[str, Any]]:
    """The messages of a prompt that was written by the chat template. DataError if they cannot be read."""
    return messages_of(_prompt(prompt.row, config.of_source(prompt.source), prompt.id), prompt.id)


def _prompt(row: Mapping[str, Any], config: DataConfig, where: str) -> Any:
    """The value of the prompt's column; of a chat that ends with an answer, what is before it."""
    value = _prompt_value(row, config, where)
    return value if _last_reply(value) is None else value[:-1]


def _last_reply(value: Any) -> str | None:
    """The text of a chat's last message where it is the assistant's and nothing but text."""
    last = value[-1] if isinstance(value, list) and len(value) > 1 else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        return None
    said, beside = last.get("content"), any(last.get(key) for key in ("tool_calls", "reasoning_content"))
    return said if isinstance(said, str) and said and not beside else None


def _prompt_value(row: Mapping[str, Any], config: DataConfig, where: str) -> Any:
    if config.prompt_column != AUTO:
        return column(row, config.prompt_column, where)
    for name in PROMPT_COLUMNS:
        if name in row:
            return row[name]
    raise DataError(
        f"{where}: there is no column {', '.join(PROMPT_COLUMNS[:-1])} or {PROMPT_COLUMNS[-1]}; set "
        f"data.prompt_column to the prompt's; there are: {', '.join(row) or 'none'}"
    )


def _rendered(
    tokenizer: PreTrainedTokenizerBase, config: DataConfig, row: Row
) -> tuple[str, tuple[int, ...]]:
    prompt = _prompt(row, config, row.where)
    is_chat = template_of(config.template, prompt) == CHAT
    # With a plain template, a column of this name is data like any other.
    tools = read_tools(row.get(TOOLS_COLUMN), row.where) if is_chat else ()
    return render(tokenizer, config.template, prompt, row.where, tools=tools)


def _answer_column(row: Row, config: DataConfig) -> str | None:
    if config.answer_column != AUTO:
        return config.answer_column
    if "answer" in row:  # also where it is null, which is an error
        return "answer"
    return next((name for name in ANSWER_COLUMNS if _has_text(row, name)), None)


def _has_text(row: Row, name: str) -> bool:
    """Whether a column, with a dotted name or not, is there and holds text or a number."""
    try:
        return isinstance(column(row, name, row.where), str | int | float)
    except DataError:
        return False


def question_id(row: Row, config: DataConfig) -> str:
    """16 hex digits that identify a problem in any file: a hash of its `data.identity_column`, or prompt."""
    return _digest(row, config).hex()[:16]


def _identity(row: Row, config: DataConfig) -> str:
    name, config = config.identity_column, config.of_source(row.source)
    value = _prompt(row, config, row.where) if name is None else column(row, name, row.where)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _answer(row: Row, config: DataConfig) -> str:
    name = _answer_column(row, config)
    if name is None:
        reply = None if config.answer_column is None else _last_reply(_prompt_value(row, config, row.where))
        return "" if reply is None else _found(reply, "the last message", row, config)
    value = column(row, name, row.where)
    if value is None:
        raise DataError(
            f"{row.where}: column {name} is null; give every row an answer, or set "
            "data.answer_column to null if there are none"
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    return _found(as_text(value, f"column {name}", row.where), f"column {name}", row, config)


def _found(text: str, what: str, row: Row, config: DataConfig) -> str:
    """The answer in a text: all of it, or what `data.answer_pattern` finds."""
    if config.answer_pattern is None:
        return text
    match = re.search(config.answer_pattern, text)
    if match is None or match[1] is None:
        shown = text if len(text) <= 200 else f"...{text[-200:]}"
        raise DataError(
            f"{row.where}: data.answer_pattern {config.answer_pattern!r} finds no answer in {what}: {shown!r}"
        )
    return match[1]


def _demonstration(row: Row, config: DataConfig, answer: str) -> str | tuple[str, ...] | None:
    """The completion to imitate; of an episode, the texts of completions and replies in turn."""
    if config.demonstration_column is not None:
        value = column(row, config.demonstration_column, row.where)
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            # A completion as messages, as TRL has it; the first place stands for the prompt.
            value = _last_reply([None, *value]) if len(value) == 1 else None
            if value is None:
                raise DataError(
                    f"{row.where}: column {config.demonstration_column} holds messages, of which SFT "
                    "imitates one, of the assistant and of text alone; put what is before it into the prompt"
                )
        if isinstance(value, list) and len(value) % 2:
            return tuple(as_text(text, f"column {config.demonstration_column}", row.where) for text in value)
        return as_text(value, f"column {config.demonstration_column}", row.where)
    reply = _last_reply(_prompt_value(row, config, row.where))
    if reply is not None:
        return reply
    return answer if _answer_column(row, config) is not None else None
