"""Requests, completions and groups come back bit for bit; bytes that are no encoding are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from millrace.rollout.backend import GenerateRequest
from millrace.rollout.serialization import (
    Packed,
    decode,
    encode,
    from_bytes,
    pack_groups,
    pack_requests,
    pack_results,
    to_bytes,
    unpack_groups,
    unpack_requests,
    unpack_results,
)
from millrace.types import Completion, Group, Outcome, Prompt, SamplingParams, Support, Trajectory, Turn
from tests.rollout.test_remote_shared import check_same
from tests.rollout.test_remote_shared import completion as any_completion

PROMPTS = {name: Prompt(name, (1, 2), name) for name in ("a", "b")}


def completion(*tokens, seed, support=False):
    rng, count = np.random.default_rng(seed), len(tokens)
    among = Support(
        np.arange(2 * count, dtype=np.int32),
        np.full(count, 2, np.int32),
        rng.random(count).astype(np.float32),
    )
    return Completion(
        token_ids=tokens,
        logprobs=-rng.random(count).astype(np.float32),
        versions=rng.integers(0, 9, count).astype(np.int32),
        finish_reason="length",
        text=f"text {seed} \n🛞",
        support=among if support else None,
    )


def groups():
    """Turns of several lengths, one with support; an outcome that failed and one that is missing."""
    first = Trajectory(
        (
            Turn((1, 2), completion(4, 5, 6, seed=0), 0.5, "s", 2, 1, 0.25),
            Turn((), completion(7, seed=1, support=True)),
        ),
        Outcome("score", 0.1 + 0.2, parts={"length": 0.3}),
    )
    second = Trajectory((Turn((1, 2, 3), completion(8, 9, seed=2)),), Outcome.failure("it hung"))
    third = Trajectory((Turn((150_000,), completion(150_000, seed=3)),))
    return {7: Group(PROMPTS["b"], (first, second)), 3: Group(PROMPTS["a"], (third,))}


def numbers(drawn):
    held = [drawn.logprobs, drawn.versions]
    if drawn.support is not None:
        held += [drawn.support.token_ids, drawn.support.counts, drawn.support.logprobs]
    return [(column.dtype, column.tobytes()) for column in held]


def test_groups_come_back_bit_for_bit():
    words, columns = pack_groups(groups())
    there = unpack_groups(json.loads(json.dumps(words)), columns, PROMPTS)
    assert list(there) == [7, 3]
    for number, group in groups().items():
        assert there[number].prompt is group.prompt
        for ours, other in zip(there[number].trajectories, group.trajectories, strict=True):
            assert str(ours.outcome) == str(other.outcome)  # NaN is not equal to itself
            for turn, expected in zip(ours.turns, other.turns, strict=True):
                assert turn.observation == expected.observation
                assert (turn.reward, turn.state) == (expected.reward, expected.state)
                assert (turn.calls, turn.invalid_calls) == (expected.calls, expected.invalid_calls)
                assert turn.progress == expected.progress
                assert turn.completion.token_ids == expected.completion.token_ids
                assert turn.completion.text == expected.completion.text
                assert numbers(turn.completion) == numbers(expected.completion)


def test_groups_of_earlier_versions_have_no_calls_and_no_progress():
    words, columns = pack_groups(groups())
    assert any(words.pop("turn_progress"))
    del words["turn_calls"]
    turns = [turn for t in unpack_groups(words, columns, PROMPTS)[7].trajectories for turn in t.turns]
    assert {(turn.calls, turn.invalid_calls, turn.progress) for turn in turns} == {(None, 0, None)}


def test_no_groups_are_groups_too():
    assert unpack_groups(*pack_groups({}), PROMPTS) == {}


@pytest.mark.parametrize("name", ["observations", "token_ids", "logprobs", "support_counts"])
@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_columns_that_do_not_fit_are_refused(name, change):
    words, columns = pack_groups(groups())
    column = columns[name]
    columns[name] = np.append(column, column[:1]) if change == "longer" else column[:-1]
    with pytest.raises(ValueError, match=r"holds|three must agree|counts"):
        unpack_groups(words, columns, PROMPTS)


def through(packed: Packed) -> Packed:
    """What another process gets."""
    return from_bytes(to_bytes(*packed))


def test_fields_and_arrays_come_back_as_they_were() -> None:
    arrays = {
        "x": np.arange(6, dtype=np.int64).reshape(2, 3),
        "turned": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "empty": np.empty((0, 2), np.float32),
        "byte": np.array(7, np.uint8),
    }
    fields, back = through(({"é": [1, None, float("inf")]}, arrays))
    assert fields == {"é": [1, None, float("inf")]} and list(back) == list(arrays)
    for name, array in arrays.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(back[name], array)
        back[name][...] = 1  # it is memory of its own
    header, data = encode({}, arrays)
    assert b"".join(data) == b"".join(array.tobytes() for array in arrays.values())
    assert json.loads(header)["arrays"][1] == ["turned", "int16", [3, 2]]


@pytest.mark.parametrize(
    ("entries", "num_bytes", "words"),
    [
        ([["x", "object", [1]]], 8, "array x is object; it may be uint8, "),
        ([["x", "int32", [2]]], 7, r"array x has shape \[2\], for which the 7 bytes do not suffice"),
        ([["x", "int32", [-1, -1]]], 4, r"array x has shape \[-1, -1\]"),
        ([["x", "int16", [1]]], 4, "2 bytes belong to no array"),
        ([["x", "int16"]], 4, "a header cannot be read: ValueError"),
        (7, 4, "a header cannot be read: TypeError"),
    ],
)
def test_bytes_that_are_no_encoding_are_refused(entries: object, num_bytes: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode(json.dumps({"arrays": entries}).encode(), bytearray(num_bytes))


@pytest.mark.parametrize("header", [b"{nothing", b"{}", b"[]"])
def test_a_header_that_is_none_is_refused(header: bytes) -> None:
    with pytest.raises(ValueError, match="^a header cannot be read: (JSONDecodeError|KeyError|TypeError)"):
        decode(header, bytearray())


EVERYTHING = SamplingParams(
    max_tokens=9,
    temperature=0.5,
    top_k=3,
    top_p=0.25,
    stop_token_ids=(1, 2),
    stop=("é", "\n"),
    seed=(1 << 80) + 1,
    min_tokens=1,
    min_p=0.125,
    repetition_penalty=1.1,
    presence_penalty=-0.1,
    frequency_penalty=0.3,
    allowed_token_ids=(4, 5),
    forbidden_token_ids=(6,),
    logit_bias=((4, 0.1), (5, -2.0)),
    logprobs="raw",
    prompt_logprobs=True,
    prompt_top_tokens=True,
)


def test_requests_arrive_as_they_were() -> None:
    plain = SamplingParams()
    for name in SamplingParams.__slots__:
        assert getattr(EVERYTHING, name) != getattr(plain, name)
    requests = [
        GenerateRequest("a", (1, 2), EVERYTHING),
        GenerateRequest("b", (1, 2), plain),
        GenerateRequest("c", (), plain),
        GenerateRequest("d", (1 << 40,), plain),
        GenerateRequest("e", (1, 2), plain),
    ]
    fields, arrays = through(pack_requests(requests))
    assert unpack_requests(fields, arrays) == [requests[:2], requests[2:3], requests[3:4], requests[4:]]
    assert len(arrays["tokens"]) == 5
    assert list(arrays) == ["tokens"]


def test_partial_output_arrives_with_its_request() -> None:
    begun = [None, any_completion(4), None, any_completion(7)]
    requests = [
        GenerateRequest(f"{i}", (i // 2,), SamplingParams(), completed) for i, completed in enumerate(begun)
    ]
    found = [request for group in unpack_requests(*through(pack_requests(requests))) for request in group]
    assert [request.id for request in found] == ["0", "1", "2", "3"]
    assert found[0].partial_output is None and found[2].partial_output is None
    for place in (1, 3):
        check_same(found[place].partial_output, begun[place])


@pytest.mark.parametrize("num", [0, 1, 24])
def test_completions_arrive_as_they_were(num: int) -> None:
    completed = [(f"request {seed}", seed, 2 * seed, any_completion(seed)) for seed in range(num)]
    back = unpack_results(*through(pack_results(completed)))
    assert [one[:3] for one in back] == [one[:3] for one in completed]
    for one, other in zip(completed, back, strict=True):
        check_same(one[3], other[3])
