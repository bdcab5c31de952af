from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.config.inputs import DataConfig
from millrace.data.prompts import PromptStream, corpus, make_prompts, read_split, settled
from millrace.data.rows import DataError, Row
from millrace.data.tokenizers import train_tokenizer
from millrace.types import Prompt

GSM8K = [
    {"question": "Ann has 3 {small} bags of 24. How many?", "answer": "3*24=<<3*24=72>>72\n#### 72"},
    {"question": "A car costs $1,000. And two?", "answer": "2*1000 = 2,000\n#### 2,000"},
    {"question": "Bo had 2 and lost 7?", "answer": "2-7=-5\n#### -5"},
]
PATTERN = r"####\s*(.+)$"
BYTES = train_tokenizer([], vocab_size=257, across_words=False)


def config(train: Path | str = "unread", **settings: Any) -> DataConfig:
    return DataConfig(train=str(train), **settings)


def saved(folder: Path, rows: list[dict[str, Any]], name: str = "data.jsonl") -> Path:
    file = folder / name
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def numbered(rows: list[dict[str, Any]]) -> list[Row]:
    return [Row(row, f"data.jsonl line {n}") for n, row in enumerate(rows, start=1)]


def made(rows: list[dict[str, Any]], limit: int = 512, **settings: Any) -> tuple[list[Prompt], int]:
    return make_prompts(numbered(rows), config(**settings), BYTES, prefix="train", max_prompt_tokens=limit)


def refusal(rows: list[dict[str, Any]], limit: int = 512, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        made(rows, limit, **settings)
    return str(caught.value)


def with_twins(seed: int) -> list[dict[str, Any]]:
    """Sixty rows of at most thirty problems, each problem in different words."""
    problems = np.random.default_rng(seed).integers(30, size=60)
    return [{"question": f"{n}: {p}?", "answer": "1", "meta": {"p": int(p)}} for n, p in enumerate(problems)]


@pytest.mark.slow_beyond(6)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("identity", ["meta.p", "meta"])
def test_no_problem_is_on_both_sides_of_a_split(tmp_path: Path, seed: int, identity: str) -> None:
    rows = with_twins(seed)
    split = read_split(config(saved(tmp_path, rows), eval_size=8, identity_column=identity), seed=seed)
    train, held = ([row["meta"]["p"] for row in side] for side in (split.train, split.eval))
    assert len(held) == len(set(held)) == 8
    assert not set(train) & set(held)
    assert sorted(train) == sorted(row["meta"]["p"] for row in rows if row["meta"]["p"] not in held)
    assert split.num_held_out == 60 - len(train) - 8
    assert (split.num_read, split.num_duplicates) == (60, 0)


def test_the_seed_decides_what_is_held_out(tmp_path: Path) -> None:
    file = saved(tmp_path, [{"question": str(n), "answer": "1"} for n in range(100)])
    first = read_split(config(file, eval_size=10), seed=1)
    assert read_split(config(file, eval_size=10), seed=1).eval == first.eval
    assert read_split(config(file, eval_size=10), seed=2).eval != first.eval
    assert [int(row["question"]) for row in first.train] == sorted(
        int(row["question"]) for row in first.train
    )
    counts = np.zeros(100)
    for seed in range(200):
        for row in read_split(config(file, eval_size=10), seed=seed).eval:
            counts[int(row["question"])] += 1
    assert counts.min() >= 5 and counts.max() <= 40


@pytest.mark.parametrize("seed", range(5))
def test_no_problem_of_the_evaluation_file_is_trained_on(tmp_path: Path, seed: int) -> None:
    rows, held = with_twins(seed), with_twins(seed + 100)[:12]
    files = saved(tmp_path, rows), str(saved(tmp_path, held, "eval.jsonl"))
    split = read_split(config(files[0], eval=files[1], eval_size=5, identity_column="meta.p"), seed=0)
    assert split.eval == held[:5]
    forbidden = {row["meta"]["p"] for row in held}
    assert split.train == [row for row in rows if row["meta"]["p"] not in forbidden]
    assert split.num_held_out == 60 - len(split.train) > 0


def test_chat_messages_tell_problems_apart(tmp_path: Path) -> None:
    def row(text: str) -> dict[str, Any]:
        return {"question": [{"role": "user", "content": text}], "answer": "1"}

    train, held = saved(tmp_path, [row("a"), row("b")]), saved(tmp_path, [row("a")], "eval.jsonl")
    split = read_split(config(train, eval=str(held)), seed=0)
    assert split.train == [row("b")]
    assert split.num_held_out == 1


@pytest.mark.parametrize("seed", range(3))
def test_twins_of_a_task_are_left_out_before_the_split(seed: int) -> None:
    task = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    settings = {"task": task, "task_size": 300, "eval_size": 20, "identity_column": "metadata.expression"}
    split = read_split(config("reasoning-gym:chain_sum", **settings), seed=seed)
    train, held = ([row["metadata"]["expression"] for row in side] for side in (split.train, split.eval))
    assert len(set(train) | set(held)) == len(train) + len(held) == 300 - split.num_duplicates
    assert len(held) == 20
    assert split.num_read == 300
    assert 100 < split.num_duplicates < 250
    assert split.num_held_out == 0


def test_a_split_that_leaves_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, [*GSM8K, GSM8K[0]])
    with pytest.raises(DataError) as caught:
        read_split(config(file, eval_size=3), seed=0)
    assert str(caught.value) == (
        f"data.eval_size holds out 3 problems and {file} has only 3, so nothing is left to train on; set "
        "data.eval_size below 3"
    )
    assert len(read_split(config(file, eval_size=2), seed=0).eval) == 2
    with pytest.raises(DataError) as caught:
        read_split(config(file, eval=str(file)), seed=0)
    assert str(caught.value) == (
        f"every problem of {file} is also in {file}, so nothing is left to train on; give another data.eval, "
        "or null to hold out a part of data.train"
    )


def test_a_missing_identity_column_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path, GSM8K)
    with pytest.raises(DataError) as caught:
        read_split(config(file, identity_column="id"), seed=0)
    assert str(caught.value) == f"{file} line 1: there is no column id; there are: question, answer"


def test_gsm8k_gives_its_questions_and_answers() -> None:
    prompts, num_dropped = made(
        GSM8K, answer_pattern=PATTERN, template="Q: {prompt}\nA: {}", demonstration_column="answer"
    )
    assert num_dropped == 0
    assert [prompt.answer for prompt in prompts] == ["72", "2,000", "-5"]
    assert [prompt.id for prompt in prompts] == ["train:0", "train:1", "train:2"]
    assert prompts[0].text == "Q: Ann has 3 {small} bags of 24. How many?\nA: {}"
    assert BYTES.decode(prompts[0].token_ids) == prompts[0].text
    assert prompts[1].row == GSM8K[1]
    assert prompts[2].demonstration == GSM8K[2]["answer"]


def test_the_answer_is_the_demonstration_unless_a_column_is_named() -> None:
    assert made(GSM8K, answer_pattern=PATTERN)[0][0].demonstration == "72"
    bare = made(GSM8K, answer_column=None)[0][0]
    assert (bare.answer, bare.demonstration) == ("", None)


def test_a_number_is_an_answer() -> None:
    rows = [{"question": "a", "answer": 72}, {"question": "b", "answer": 0.5}]
    assert [prompt.answer for prompt in made(rows)[0]] == ["72", "0.5"]


CHAT = [{"role": "user", "content": "1+1="}]


def test_by_default_columns_and_template_are_those_of_the_rows() -> None:
    for rows in ([{"question": "a", "answer": 7}], [{"prompt": "a", "answer": 7, "messages": CHAT}]):
        assert [(prompt.text, prompt.answer) for prompt in made(rows)[0]] == [("a", "7")]
    (bare,) = made([{"prompt": "a"}])[0]
    assert (bare.answer, bare.demonstration) == ("", None)
    assert settled(config(), bare).template == "{prompt}"
    for name in ("prompt", "messages"):
        given = replace(bare, row=Row({name: CHAT}, "x"))
        assert settled(config(), given).template == "chat"
        assert settled(config(template="Q: {prompt}"), given).template == "Q: {prompt}"
    assert refusal([{"task": "a"}]) == (
        "data.jsonl line 1: there is no column question, prompt, messages or problem; set data.prompt_column "
        "to the prompt's; there are: task"
    )
    # A named column must be there.
    assert "there is no column answer" in refusal([{"prompt": "a"}], answer_column="answer")


@pytest.mark.parametrize(("num_rows", "held_out"), [(2, 1), (19, 1), (20, 2), (3000, 256)])
def test_by_default_a_tenth_of_the_problems_is_held_out_and_256_at_most(
    tmp_path: Path, num_rows: int, held_out: int
) -> None:
    file = saved(tmp_path, [{"question": str(number)} for number in range(num_rows)])
    split = read_split(config(file), seed=0)
    assert (len(split.train), len(split.eval)) == (num_rows - held_out, held_out)


def test_the_chat_template_shows_the_tools_of_a_row() -> None:
    chat = train_tokenizer([], vocab_size=257, across_words=False)
    chat.chat_template = "{{ tools | tojson if tools else 'none' }}: {{ messages[0].content }}"
    tool = {"name": "calc", "description": "", "parameters": {"type": "object", "properties": {}}}
    question = [{"role": "user", "content": "1+1"}]
    rows = [{"prompt": question, "tools": [tool]}, {"prompt": question, "tools": None}, {"prompt": question}]
    prompts, _ = make_prompts(numbered(rows), config(), chat, prefix="train", max_prompt_tokens=512)
    shown = json.dumps([{"type": "function", "function": tool}])
    assert [prompt.text for prompt in prompts] == [f"{shown}: 1+1", "none: 1+1", "none: 1+1"]
    # Without a chat template a column of this name is data like any other.
    assert made([{"prompt": "1+1", "tools": 3}])[0][0].text == "1+1"
    with pytest.raises(DataError, match="line 1: tools is a number, not a list of tools"):
        rows = [{"prompt": question, "tools": 3}]
        make_prompts(numbered(rows), config(), chat, prefix="train", max_prompt_tokens=512)


def test_a_chat_that_ends_with_an_answer_is_a_prompt_and_its_demonstration() -> None:
    tokenizer = train_tokenizer([], vocab_size=257, across_words=False)
    tokenizer.chat_template = "{% for one in messages %}{{ one.role[0] }}{{ one.content }}{% endfor %}>"
    asked = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    whole = [*asked, {"role": "user", "content": "+1="}, {"role": "assistant", "content": "So 3"}]

    def of(row: dict[str, Any], **settings: Any) -> Prompt:
        rows = numbered([row])
        return make_prompts(rows, config(**settings), tokenizer, prefix="train", max_prompt_tokens=99)[0][0]

    for row in ({"messages": whole}, {"prompt": whole[:-1], "completion": whole[-1:]}):
        own = {"demonstration_column": "completion"} if "completion" in row else {}
        prompt = of(row, **own)
        assert (prompt.text, prompt.demonstration) == ("u1+1=a2u+1=>", "So 3")
    assert of({"messages": whole}).answer == "So 3"
    assert of({"messages": whole}, answer_pattern=r"(\d)").answer == "3"
    assert of({"messages": whole}, answer_column=None).answer == ""
    named = of({"messages": asked, "answer": "two"})
    assert (named.text, named.answer, named.demonstration) == ("u1+1=>", "two", "2")


def test_a_chat_whose_last_message_cannot_be_imitated_is_refused() -> None:
    call = [{"function": {"name": "calc", "arguments": {}}}]
    asked = {"role": "user", "content": "1+1="}
    for last in ({"content": None, "tool_calls": call}, {"content": "2", "reasoning_content": "1+1"}):
        said = refusal([{"messages": [asked, {"role": "assistant", **last}]}])
        assert "the last message is the assistant's, so there is nothing left for it to answer" in said
    two = [asked, {"role": "assistant", "content": "2"}]
    assert refusal([{"prompt": "a", "completion": two}], demonstration_column="completion") == (
        "data.jsonl line 1: column completion holds messages, of which SFT imitates one, of the assistant "
        "and of text alone; put what is before it into the prompt"
    )


def test_longer_prompts_are_dropped_with_a_count_and_ids_stay() -> None:
    rows = [{"question": "x" * n, "answer": "1"} for n in (5, 9, 4, 6, 5)]
    prompts, num_dropped = made(rows, limit=5)
    assert num_dropped == 2
    assert [prompt.id for prompt in prompts] == ["train:0", "train:2", "train:4"]


def test_prompts_that_cannot_be_made_are_refused_with_their_place() -> None:
    rows = [{"question": "ab", "answer": "1"}, {"question": "abcdef", "answer": None}]
    assert refusal(rows, limit=5, too_long="refuse") == (
        "data.jsonl line 2: the prompt has 6 tokens and at most 5 are allowed; raise data.max_prompt_tokens, "
        "or set data.too_long to filter"
    )
    assert refusal(rows, limit=1) == (
        "all 2 train prompts are longer than 1 tokens (the shortest has 2); raise data.max_prompt_tokens"
    )
    assert refusal(rows) == (
        "data.jsonl line 2: column answer is null; give every row an answer, or set data.answer_column to "
        "null if there are none"
    )
    assert refusal([]) == "there are no train rows"
    assert refusal(GSM8K, prompt_column="prompt") == (
        "data.jsonl line 1: there is no column prompt; there are: question, answer"
    )
    assert refusal([{"question": "a", "answer": ["1"]}]) == (
        "data.jsonl line 1: column answer is a list, not text"
    )
    assert refusal([{"question": "a", "answer": "1", "how": None}], demonstration_column="how") == (
        "data.jsonl line 1: column how is null, not text"
    )
    assert refusal([{"question": None, "answer": "1"}]) == "data.jsonl line 1: the prompt is null, not text"


def test_an_answer_the_pattern_does_not_find_is_shown() -> None:
    rows = [GSM8K[0], {"question": "a", "answer": "He has 5."}]
    assert refusal(rows, answer_pattern=PATTERN) == (
        "data.jsonl line 2: data.answer_pattern '####\\\\s*(.+)$' finds no answer in column answer: "
        "'He has 5.'"
    )
    long = refusal([{"question": "a", "answer": "x" * 300 + "y" * 200}], answer_pattern=PATTERN)
    assert long.endswith(f"column answer: '...{'y' * 200}'")
    assert "finds no answer" in refusal(GSM8K, answer_pattern="####|(never)")


def test_the_corpus_holds_prompts_and_demonstrations_of_train_rows_only(tmp_path: Path) -> None:
    settings = config(
        saved(tmp_path, GSM8K), eval_size=1, template="Q: {prompt} A:", demonstration_column="answer"
    )
    split = read_split(settings, seed=0)
    expected = [text for row in split.train for text in (f"Q: {row['question']} A:", row["answer"])]
    assert list(corpus(split, settings)) == expected
    assert len(expected) == 4
    bare = settings.model_copy(update={"demonstration_column": None, "answer_column": None})
    assert list(corpus(split, bare)) == expected[::2]


def test_a_chat_template_has_no_corpus(tmp_path: Path) -> None:
    settings = config(saved(tmp_path, GSM8K), eval_size=1, template="chat")
    with pytest.raises(DataError, match="data.template chat needs a tokenizer with a chat template"):
        list(corpus(read_split(settings, seed=0), settings))


SEVEN = [Prompt(f"train:{n}", (n,), str(n)) for n in range(7)]


def ids(prompts: list[Prompt]) -> list[int]:
    return [prompt.token_ids[0] for prompt in prompts]


def test_every_epoch_deals_each_prompt_once_in_an_order_of_its_own() -> None:
    dealt = ids(PromptStream(SEVEN, seed=5, shuffle=True).next(7 * 20))
    epochs = [dealt[start : start + 7] for start in range(0, len(dealt), 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 15
    assert epochs[3] == np.random.default_rng([5, 3]).permutation(7).tolist()


def test_without_shuffling_the_order_is_the_given_one() -> None:
    assert ids(PromptStream(SEVEN, seed=5, shuffle=False).next(10)) == [*range(7), 0, 1, 2]


def test_another_seed_deals_another_order() -> None:
    orders = {tuple(ids(PromptStream(SEVEN, seed=seed, shuffle=True).next(7))) for seed in range(20)}
    assert len(orders) > 15


@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_a_batch_may_span_epochs_and_does_not_change_the_order(size: int) -> None:
    stream = PromptStream(SEVEN, seed=1, shuffle=True)
    dealt = [prompt for _ in range(12) for prompt in stream.next(size)]
    assert ids(dealt) == ids(PromptStream(SEVEN, seed=1, shuffle=True).next(12 * size))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_resumed_stream_deals_what_the_first_would_have(shuffle: bool) -> None:
    for position in range(22):
        first = PromptStream(SEVEN, seed=3, shuffle=shuffle)
        first.next(position)
        state = json.loads(json.dumps(first.state()))
        resumed = PromptStream(SEVEN, seed=3, shuffle=shuffle)
        resumed.next(4)
        resumed.load_state(state)
        assert resumed.state() == state
        assert ids(resumed.next(17)) == ids(first.next(17))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"num_prompts": 9},
            "the checkpoint was made with 9 prompts and the data now has 7; resume with the same data and "
            "the same data settings",
        ),
        ({"position": None}, "lacks epoch, position or num_prompts"),
        ({"position": 7}, "points outside its 7 prompts"),
        ({"epoch": -1}, "points outside its 7 prompts"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    stream = PromptStream(SEVEN, seed=0, shuffle=True)
    with pytest.raises(DataError) as caught:
        stream.load_state(stream.state() | change)
    assert str(caught.value).endswith(said)
    assert stream.state() == {"epoch": 0, "position": 0, "num_prompts": 7}


def test_a_stream_of_nothing_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        PromptStream([], seed=0, shuffle=True)
    assert str(caught.value) == "there are no prompts to deal"
