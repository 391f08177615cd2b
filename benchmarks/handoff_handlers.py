"""What `benchmarks.handoff` has the notify consumer run: three flows, each noting when a resume reached it."""

import asyncio
import os
import time

from notify_consumer import Handlers, Resume

SLOW_S = 2.0
LIMIT_PER_S = 50
handlers = Handlers()
_free_at = {"limited": 0.0}


def _note(resume: Resume) -> None:
    with open(os.environ["HANDOFF_JOURNAL"], "a") as journal:
        journal.write(f"{resume.timer['flow_id']} {resume.payload['sent_ns']} {time.time_ns()}\n")


@handlers.flow("quick")
async def quick(resume: Resume) -> None:
    """Nothing to do."""
    _note(resume)


@handlers.flow("slow")
async def slow(resume: Resume) -> None:
    """Two seconds each."""
    _note(resume)
    await asyncio.sleep(SLOW_S)


@handlers.flow("limited")
async def limited(resume: Resume) -> None:
    """Waits for a far side that takes 50 a second, one after the other."""
    _note(resume)
    now = asyncio.get_running_loop().time()
    _free_at["limited"] = max(_free_at["limited"], now) + 1 / LIMIT_PER_S
    await asyncio.sleep(_free_at["limited"] - now)
