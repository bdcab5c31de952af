"""How many conversations the long property tests have; `make agents` runs ten thousand of them."""

from __future__ import annotations

import os

NUM_CONVERSATIONS = int(os.environ.get("TESTS_CONVERSATIONS", "2000"))
