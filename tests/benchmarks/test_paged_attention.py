"""What the benchmark of attention over the pool counts; nothing here looks at a clock or needs a GPU."""

from __future__ import annotations

import paged_attention
import pytest
import torch


def test_a_decode_reads_each_key_and_value_once():
    # 2 (keys and values) x 3 requests x 100 tokens x 8 heads x 128 numbers x 2 bytes
    assert paged_attention.kv_bytes(3, 100) == 1_228_800
    case = paged_attention.summary(3, 100, 4, {"ours": 0.5, "copy": 0.25})
    assert case["bytes_per_s"] == {"ours": 2_457_600.0, "copy": 4_915_200.0}
    assert case["ours_over_copy"] == 0.5


def test_pools_take_turns_until_the_cache_has_forgotten_the_first():
    assert paged_attention.num_pools(256, 8192) == 1
    # 512 tokens are 2 MiB
    assert paged_attention.num_pools(1, 512) == 512
    assert paged_attention.num_pools(3, 512) == 171


def test_requests_share_no_block_and_use_all_of_them():
    rows = paged_attention.decode_rows(5, 33, "cpu")
    assert sorted(rows.block_BC.flatten().tolist()) == list(range(15))
    assert rows.start_B.tolist() == [32] * 5 and rows.first_B.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_gpu_it_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["paged_attention.py"])
    with pytest.raises(SystemExit) as ended:
        paged_attention.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("benchmarks/paged_attention.py needs CUDA")
