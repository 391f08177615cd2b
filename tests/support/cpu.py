"""How much of a core a process uses."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

_TICKS_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_S


async def rests(pid: int, below: float, *, over_s: float = 2.0, looks: int = 6) -> None:
    """Hold a process to a part of a core. What spins does so for ever, so one quiet look out of several is enough: a
    machine that is busy otherwise makes processor time dearer, and what was asked before may not have ended."""
    shares: list[float] = []
    while not shares or shares[-1] >= below:
        assert len(shares) < looks, f"process {pid} takes {shares} of a core, {below} at most is allowed"
        shares.append(await cpu_share(pid, over_s))


async def cpu_share(pid: int, over_s: float) -> float:
    """The part of a core that a process takes while we look: 0.05 is five percent."""
    begun_s, used_s = time.monotonic(), cpu_s(pid)
    await asyncio.sleep(over_s)
    return (cpu_s(pid) - used_s) / (time.monotonic() - begun_s)
