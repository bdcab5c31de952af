from __future__ import annotations

import numpy as np
import pytest

from millrace.inference.request import Request, RequestTable
from millrace.types import SamplingParams


def put(table: RequestTable, *requests: Request) -> list[int]:
    rows = [table.free_rows.pop() for _ in requests]
    table.put(rows, requests, [request.known_tokens() for request in requests])
    return rows


def draw(table: RequestTable, row: int, tokens: list[int], version: int) -> None:
    start = int(table.num_tokens_R[row])
    table.reserve(start + len(tokens))
    table.token_RL[row, start : start + len(tokens)] = tokens
    table.logprob_RL[row, start : start + len(tokens)] = [-token / 4 for token in tokens]
    table.version_RL[row, start : start + len(tokens)] = version
    table.num_tokens_R[row] += len(tokens)


def test_a_request_comes_back_with_what_it_has_drawn() -> None:
    table = RequestTable(3, 4)
    request = Request("a", (5, 6, 7), SamplingParams(max_tokens=9, min_tokens=2), priority=3)
    (row,) = put(table, request)
    assert request.row == row and table.requests[row] is request and table.used_R.tolist().count(True) == 1
    assert (table.num_prompt_R[row], table.num_tokens_R[row]) == (3, 3)
    assert (table.limit_R[row], table.min_R[row], table.priority_R[row]) == (12, 5, 3)
    draw(table, row, [8, 9], 4)
    draw(table, row, [10], 6)
    assert table.take(row) is request
    assert request.row == -1 and not table.used_R.any() and sorted(table.free_rows) == [0, 1, 2]
    assert request.generated.tolist() == [8, 9, 10] and request.generated.dtype == np.int32
    assert request.logprobs.tolist() == [-2.0, -2.25, -2.5] and request.logprobs.dtype == np.float32
    assert request.versions.tolist() == [4, 4, 6] and request.versions.dtype == np.int32
    assert request.known_tokens().tolist() == [5, 6, 7, 8, 9, 10]


def test_a_request_that_returns_keeps_what_it_has_drawn() -> None:
    table = RequestTable(2, 4)
    request = Request("a", (5, 6, 7), SamplingParams(max_tokens=9))
    (row,) = put(table, request)
    draw(table, row, [8, 9, 1], 4)
    table.take(row)
    put(table, Request("b", (1,) * 7, SamplingParams()))
    (row,) = put(table, request)
    assert (table.num_prompt_R[row], table.num_tokens_R[row], table.limit_R[row]) == (3, 6, 12)
    draw(table, row, [2], 5)
    table.take(row)
    assert request.generated.tolist() == [8, 9, 1, 2]
    assert request.logprobs.tolist() == [-2.0, -2.25, -0.25, -0.5]
    assert request.versions.tolist() == [4, 4, 4, 5]


def test_what_a_request_took_with_it_is_its_own() -> None:
    table = RequestTable(1, 4)
    request = Request("a", (5,), SamplingParams())
    (row,) = put(table, request)
    draw(table, row, [8, 9], 4)
    table.take(row)
    draw(table, *put(table, Request("b", (1,), SamplingParams())), [3, 3], 5)
    assert request.generated.tolist() == [8, 9] and request.versions.tolist() == [4, 4]


def test_columns_grow_and_lose_nothing() -> None:
    table = RequestTable(3, 4)
    first = Request("a", (1, 2), SamplingParams())
    (row,) = put(table, first)
    table.block_RC[row, 0], table.num_blocks_R[row] = 7, 1
    long = Request("b", tuple(range(11)), SamplingParams())
    (other,) = put(table, long)
    assert table.token_RL.shape == table.logprob_RL.shape == table.version_RL.shape == (3, 12)
    assert table.block_RC.shape == (3, 3)
    assert table.token_RL[row, :2].tolist() == [1, 2] and table.blocks(row) == [7]
    draw(table, row, list(range(11)), 3)
    assert table.token_RL.shape == (3, 24) and table.block_RC.shape == (3, 6)
    assert table.token_RL[other, :11].tolist() == list(range(11))
    table.reserve(24)
    assert table.token_RL.shape == (3, 24)
    table.reserve(100)
    assert table.token_RL.shape == (3, 100) and table.block_RC.shape == (3, 25)
    assert table.take(row).generated.tolist() == list(range(11))


def test_stop_tokens_of_different_number_share_a_column() -> None:
    table = RequestTable(4, 4)
    stops = [(3,), (), (4, 5, 6), (3,)]
    rows = put(table, *(Request("", (1,), SamplingParams(stop_token_ids=stop)) for stop in stops))
    expected = [[3, -1, -1], [-1, -1, -1], [4, 5, 6], [3, -1, -1]]
    assert table.stop_RS[rows].tolist() == expected
    table.take(rows[2])
    again = put(table, Request("", (1,), SamplingParams(stop_token_ids=(9,))))
    assert again == [rows[2]] and table.stop_RS[again].tolist() == [[9, -1, -1]]


def test_a_row_starts_without_the_blocks_of_who_had_it_before() -> None:
    table = RequestTable(1, 4)
    (row,) = put(table, Request("a", (1, 2, 3, 4, 5), SamplingParams()))
    table.block_RC[row, :2], table.num_blocks_R[row] = [3, 4], 2
    table.num_computed_R[row], table.num_hashed_R[row], table.forked_R[row] = 5, 1, True
    assert table.blocks(row) == [3, 4]
    table.take(row)
    assert put(table, Request("b", (1,), SamplingParams())) == [row]
    assert table.blocks(row) == []
    assert (table.num_computed_R[row], table.num_hashed_R[row], table.forked_R[row]) == (0, 0, False)


def test_heirs_stand_where_their_leader_stands() -> None:
    table = RequestTable(4, 2)
    leader, *heirs = put(table, *(Request("", (1, 2, 3), SamplingParams()) for _ in range(3)))
    table.block_RC[leader, :2], table.num_blocks_R[leader] = [8, 6], 2
    table.num_computed_R[leader], table.num_hashed_R[leader], table.digests[leader] = 3, 1, b"one"
    table.share(leader, heirs)
    for heir in heirs:
        assert table.blocks(heir) == [8, 6] and table.digests[heir] == b"one"
        assert (table.num_computed_R[heir], table.num_hashed_R[heir]) == (3, 1)


@pytest.mark.parametrize("name", ["num_rows", "block_size"])
def test_a_table_of_nothing_is_refused(name: str) -> None:
    numbers = {"num_rows": 1, "block_size": 1}
    assert len(RequestTable(**numbers).requests) == 1
    with pytest.raises(ValueError, match=f"^{name} is 0; it must be at least 1$"):
        RequestTable(**(numbers | {name: 0}))


def test_a_free_row_cannot_be_taken() -> None:
    with pytest.raises(ValueError, match="^row 1 is free already$"):
        RequestTable(2, 4).take(1)


def test_requests_do_not_share_their_results() -> None:
    first, second = (Request("", (1,), SamplingParams()) for _ in range(2))
    assert first != second and first.generated is not second.generated and len(first.logprobs) == 0


@pytest.mark.parametrize("priority", [1_000_000_001, -1_000_000_001, 10**30])
def test_a_priority_out_of_range_is_refused(priority: int) -> None:
    sentence = f"^priority is {priority}; it must lie between -1000000000 and 1000000000$"
    with pytest.raises(ValueError, match=sentence):
        Request("", (1,), SamplingParams(), priority=priority)
    table = RequestTable(2, 4)
    rows = put(table, *(Request("", (1,), SamplingParams(), priority=sign * 10**9) for sign in (1, -1)))
    assert table.priority_R[rows].tolist() == [10**9, -(10**9)]
