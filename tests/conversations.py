"""How many conversations the property tests have in their whole; `make agents` asks for a number."""

from __future__ import annotations

import os

NUM_CONVERSATIONS = int(os.environ.get("TESTS_CONVERSATIONS", "10000"))
