"""The plan of the next step, where leases may pin the blocks that requests need. No torch.

The engine and its simulation share it.
"""

from __future__ import annotations

from millrace.inference.kv_blocks import KvLeases
from millrace.inference.scheduler import Plan, Scheduler


def next_plan(scheduler: Scheduler, leases: KvLeases) -> Plan | None:
    """Plan a step; where nothing runs for want of leased blocks, leases end, or a request might never."""
    leases.end_due()
    while (plan := scheduler.schedule()) is None:
        stuck = scheduler.num_waiting and not scheduler.num_running and scheduler.paused == "no"
        if not stuck or not leases.end_oldest():
            return None
    return plan
