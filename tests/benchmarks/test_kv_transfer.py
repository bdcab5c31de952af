"""What the benchmark of the KV transfer counts; nothing here looks at a clock."""

from __future__ import annotations

import kv_transfer

from tests.close import close_fp64


def test_ratios_are_of_medians_without_the_first_two_turns() -> None:
    first = {"prefill": 9.0, "export": 9.0, "import": 9.0, "first token": 9.0, "bytes": 5e9, "computed": 4}
    later = {"prefill": 8.0, "export": 0.5, "import": 1.5, "first token": 0.25, "bytes": 5e9, "computed": 4}
    found = kv_transfer.summary([first, first, later, later, later])
    close_fp64(found["prefill_s"], 8.0)
    close_fp64(found["first_token_s"], 0.25)
    close_fp64(found["transfer_over_prefill"], 0.25)
    close_fp64(found["gb_per_s"], 2.5)
    close_fp64(found["megabytes"], 5000.0)
