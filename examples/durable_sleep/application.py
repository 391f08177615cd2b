"""A customer's trial. Kill it at any time and start it again: it goes on, and finishes once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from timer_service.client import TimerClient

NATS_URL = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")
PAUSE_MS = int(os.environ.get("TRIAL_PAUSE_MS", "15000"))
JOURNAL = Path(os.environ.get("TRIAL_JOURNAL", "journal.txt"))


def once(step: str) -> None:
    """Do a step that is not in the journal yet. A real one would note it in the transaction that does it."""
    done = JOURNAL.read_text(encoding="utf-8").splitlines() if JOURNAL.exists() else []
    if step not in done:
        with JOURNAL.open("a", encoding="utf-8") as journal:
            journal.write(f"{step}\n")
        print(step, flush=True)


async def trial(timers: TimerClient, customer: str) -> None:
    """The whole flow, from its beginning, every time."""
    once(f"{customer}: welcome")
    await timers.sleep(f"trial/{customer}/ends soon", PAUSE_MS)
    once(f"{customer}: your trial ends soon")
    await timers.sleep(f"trial/{customer}/is over", PAUSE_MS)
    once(f"{customer}: your trial is over")


async def main() -> None:
    async with await TimerClient.connect(NATS_URL) as timers:
        await trial(timers, "C-1")
        print("finished", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
