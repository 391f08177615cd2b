"""The in-process scheduler beside the everyday way: `heapq`, where a moved or cancelled entry stays in as a dead one.

    python -m benchmarks.scheduler                 # 100,000 keys, each moved once, five rounds
    python -m benchmarks.scheduler --moves 10      # keys that are put off again and again

All contenders do the same steps on the same times within a round: arm all keys, move each of them so many times, cancel
half, fire the rest in order. Prints a table of operations a second of CPU time and, in brackets, the ratio to `heapq`,
both medians over the rounds; the same for all steps together, in keys; and how many entries each holds after the moves.
"""

import argparse
import asyncio
import gc
import heapq
import random
import time
from collections.abc import Callable
from itertools import count
from statistics import median
from typing import Protocol

from timer_service.clock import ManualClock
from timer_service.scheduler import DelayedScheduler, Entry, IndexedHeap, TimerQueue

STEPS = ("arm", "move", "cancel", "fire", "all steps")
_LAST = 1_000_000_000


class Contender(Protocol):
    """What each of them can do. `fire` returns the keys in the order in which they fired."""

    def arm(self, key: int, at: int) -> object: ...

    def cancel(self, key: int) -> object: ...

    def fire(self) -> list[int]: ...

    def held(self) -> int: ...


class Lazy:
    """`heapq` as its documentation shows it: the dead stay in until they come up."""

    def __init__(self) -> None:
        self._heap: list[list[int]] = []
        self._live: dict[int, list[int]] = {}
        self._seq = count()

    def arm(self, key: int, at: int) -> None:
        old = self._live.get(key)
        if old is not None:
            old[2] = -1
        entry = self._live[key] = [at, next(self._seq), key]
        heapq.heappush(self._heap, entry)

    def cancel(self, key: int) -> None:
        self._live.pop(key)[2] = -1

    def fire(self) -> list[int]:
        fired: list[int] = []
        while self._heap:
            _, _, key = heapq.heappop(self._heap)
            if key >= 0:
                del self._live[key]
                fired.append(key)
        return fired

    def held(self) -> int:
        return len(self._heap)


class Bare:
    """`IndexedHeap` with a dict of its entries, as the service's driver uses it."""

    def __init__(self) -> None:
        self._heap: IndexedHeap[int] = IndexedHeap()
        self._entries: dict[int, Entry[int]] = {}
        self._seq = count()

    def arm(self, key: int, at: int) -> None:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(key, at, next(self._seq))
            self._heap.push(entry)
        else:
            self._heap.update(entry, at, next(self._seq))

    def cancel(self, key: int) -> None:
        self._heap.remove(self._entries.pop(key))

    def fire(self) -> list[int]:
        fired: list[int] = []
        while (entry := self._heap.pop()) is not None:
            del self._entries[entry.key]
            fired.append(entry.key)
        return fired

    def held(self) -> int:
        return len(self._heap)


class Queue:
    """`TimerQueue`, fired by `run` on a clock that jumps."""

    def __init__(self) -> None:
        self._clock = ManualClock()
        self._queue: TimerQueue[int] = TimerQueue(self._clock)
        self.arm = self._queue.schedule
        self.cancel = self._queue.cancel
        self.held = self._queue.__len__

    def fire(self) -> list[int]:
        fired: list[int] = []
        self._clock.advance(_LAST)
        asyncio.run(self._run_once(fired))
        return fired

    async def _run_once(self, fired: list[int]) -> None:
        task = asyncio.create_task(self._queue.run(fired.append))
        await asyncio.sleep(0)  # its first look fires all that is due
        task.cancel()


class Threads:
    """`DelayedScheduler`, driven by `run_due`."""

    def __init__(self) -> None:
        self._scheduler: DelayedScheduler[int] = DelayedScheduler(10**9)
        self._fired: list[int] = []
        self.cancel = self._scheduler.cancel
        self.held = self._scheduler.__len__

    def arm(self, key: int, at: int) -> None:
        self._scheduler.schedule(key, at, lambda: self._fired.append(key))

    def fire(self) -> list[int]:
        self._scheduler.run_due(_LAST)
        return self._fired


CONTENDERS: dict[str, Callable[[], Contender]] = {
    "heapq, lazy deletion": Lazy,
    "IndexedHeap": Bare,
    "TimerQueue": Queue,
    "DelayedScheduler": Threads,
}


def measure(contender: Contender, keys: int, moves: int, seed: int) -> tuple[dict[str, float], int, list[int]]:
    """Operations a second of each step, the entries held after the moves, and what fired."""
    numbers = random.Random(seed)
    times = [numbers.randrange(_LAST) for _ in range(keys * (1 + moves))]
    cancelled = numbers.sample(range(keys), keys // 2)
    fired: list[int] = []
    seconds: dict[str, float] = {}
    seconds["arm"] = seconds_for(lambda: each(contender.arm, range(keys), times))
    seconds["move"] = seconds_for(lambda: each(contender.arm, list(range(keys)) * moves, times[keys:]))
    held = contender.held()
    seconds["cancel"] = seconds_for(lambda: each(contender.cancel, cancelled))
    seconds["fire"] = seconds_for(lambda: fired.extend(contender.fire()))
    seconds["all steps"] = sum(seconds.values())
    done = {"arm": keys, "move": keys * moves, "cancel": len(cancelled), "fire": len(fired), "all steps": keys}
    return {step: done[step] / taken for step, taken in seconds.items()}, held, fired


def each(act: Callable[..., object], *arguments: "range | list[int]") -> None:
    for given in zip(*arguments, strict=False):
        act(*given)


def seconds_for(act: Callable[[], object]) -> float:
    """CPU seconds of `act`, without pauses for garbage: other work on this machine hardly counts."""
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        act()
        return time.process_time() - start
    finally:
        gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--moves", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    held: dict[str, int] = {}
    for seed in range(options.rounds):
        orders: set[tuple[int, ...]] = set()
        for name, make in CONTENDERS.items():
            measured, held[name], fired = measure(make(), options.keys, options.moves, seed)
            rates[name].append(measured)
            orders.add(tuple(fired))
        if len(orders) != 1:
            raise SystemExit("they did not fire the same keys in the same order")
    report(rates, held)


def report(rates: dict[str, list[dict[str, float]]], held: dict[str, int]) -> None:
    everyday = next(iter(CONTENDERS))
    print(f"| contender | {' | '.join(STEPS)} | entries held after the moves |")
    print("|---" * (len(STEPS) + 2) + "|")
    for name, rounds in rates.items():
        cells = []
        for step in STEPS:
            ratio = median(mine[step] / theirs[step] for mine, theirs in zip(rounds, rates[everyday], strict=True))
            cells.append(f"{median(mine[step] for mine in rounds):,.0f} ({ratio:.2f}x)")
        print(f"| {name} | {' | '.join(cells)} | {held[name]:,} |")


if __name__ == "__main__":
    main()
