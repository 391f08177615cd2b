"""Rows a second through the outbox stores, each beside the bare limit of what it stands on.

    python -m benchmarks.outbox [--rows 2000] [--rounds 3] [--only sqlite,postgres,nats]

A round measures everything in turn; the table shows medians over the rounds. The bare limits are what the same server,
through the same driver from this one process, does with rows of that size and nothing else: the stores can't be faster.
PostgreSQL runs with fsync on, as it would; its server and the broker are started here and thrown away.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import psycopg

from benchmarks.limit import measure_limit
from notify_consumer.outbox.base import Claim, Feedback, NewRow, Outbox
from notify_consumer.outbox.nats_kv import NatsOutbox
from notify_consumer.outbox.postgres import PostgresOutbox
from notify_consumer.outbox.sqlite import SqliteOutbox
from tests.support.postgres import Postgres, installed
from timer_service.embedded import EmbeddedBroker

BODY = b"x" * 600
FEEDBACK = Feedback("complete", {"v": 1, "timer_ref": "r" * 26, "payload": "y" * 100})
BATCH = 100
WORKERS = 32
LEASE_MS = 600_000
FSYNC = {"fsync": "on", "full_page_writes": "on", "shared_buffers": "128MB"}

Figures = dict[str, float]


def rows_of(count: int, prefix: str) -> list[NewRow]:
    return [NewRow(f"{prefix}.{at}".rjust(28, "r"), f"flow-{at % 4}", BODY) for at in range(count)]


def batches(rows: list[NewRow]) -> Iterator[list[NewRow]]:
    return (rows[at : at + BATCH] for at in range(0, len(rows), BATCH))


async def timed(count: int, work: Awaitable[object]) -> float:
    """Per second, when ``work`` does ``count`` of them."""
    begun = time.perf_counter()
    await work
    return count / (time.perf_counter() - begun)


async def each_in_workers(claims: list[Claim], work: Callable[[Claim], Awaitable[object]]) -> None:
    """As a relay does it: ``WORKERS`` at a time."""
    left = iter(claims)

    async def worker() -> None:
        for claim in left:
            await work(claim)

    await asyncio.gather(*(worker() for _ in range(WORKERS)))


async def measure(outbox: Outbox, count: int, name: str) -> Figures:
    """The steps of a row's life one after another, then whole lives side by side."""
    figures: Figures = {}
    rows = rows_of(count, f"{name}a")

    async def insert_all() -> None:
        for batch in batches(rows):
            await outbox.insert(batch)

    figures["insert, batches of 100"] = await timed(count, insert_all())
    claims: list[Claim] = []

    async def claim_all() -> None:
        while got := await outbox.claim("me", {f"flow-{at}": BATCH // 4 for at in range(4)}, LEASE_MS):
            claims.extend(got)

    figures["claim, batches of 100"] = await timed(count, claim_all())

    async def settle(claim: Claim) -> None:
        await outbox.finish(await outbox.store_outcome(claim, FEEDBACK), "accepted")

    figures["answer and finish, 32 at a time"] = await timed(count, each_in_workers(claims, settle))
    figures["whole life"] = await timed(count, lives(outbox, rows_of(count, f"{name}b")))
    return figures


async def lives(outbox: Outbox, rows: list[NewRow]) -> None:
    """Inserting goes on while rows are surveyed, claimed and settled."""
    open_rows = len(rows)
    slots = asyncio.Semaphore(WORKERS)
    tasks: set[asyncio.Task[None]] = set()

    async def settle(claim: Claim) -> None:
        nonlocal open_rows
        await outbox.finish(await outbox.store_outcome(claim, FEEDBACK), "accepted")
        open_rows -= 1
        slots.release()

    async def insert_all() -> None:
        for batch in batches(rows):
            await outbox.insert(batch)

    inserting = asyncio.create_task(insert_all())
    while open_rows:
        await slots.acquire()
        free = 1
        while not slots.locked():
            await slots.acquire()
            free += 1
        waiting = (await outbox.survey(WORKERS)).lanes
        wanted = {lane: min(found.count, max(1, free // len(waiting))) for lane, found in waiting.items()}
        claims = await outbox.claim("me", dict(list(wanted.items())[:free]), LEASE_MS) if wanted else []
        for _ in range(free - len(claims)):
            slots.release()
        for claim in claims:
            task = asyncio.create_task(settle(claim))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(0 if claims else 0.001)
    await inserting


# -- the bare limits ------------------------------------------------------------------------------------------------


def bare_sqlite(folder: Path, count: int) -> Figures:
    with contextlib.closing(sqlite3.connect(folder / "bare.db", isolation_level=None)) as bare:
        bare.execute("PRAGMA journal_mode = WAL")
        bare.execute("PRAGMA synchronous = FULL")
        bare.execute("CREATE TABLE IF NOT EXISTS bare (id INTEGER PRIMARY KEY, body BLOB)")
        begun = time.perf_counter()
        for _ in range(count // BATCH):
            bare.execute("BEGIN")
            bare.executemany("INSERT INTO bare (body) VALUES (?)", [(BODY,)] * BATCH)
            bare.execute("COMMIT")
        in_batches = count / (time.perf_counter() - begun)
        begun = time.perf_counter()
        for _ in range(count):
            bare.execute("UPDATE bare SET body = ? WHERE id = 1", (BODY,))
        return {
            "bare insert, batches of 100": in_batches,
            "bare update, a commit each": count / (time.perf_counter() - begun),
        }


async def bare_postgres(url: str, count: int) -> Figures:
    """Four connections, as many as the store has; one statement a transaction."""
    async with contextlib.AsyncExitStack() as stack:
        links = [
            await stack.enter_async_context(await psycopg.AsyncConnection.connect(url, autocommit=True))
            for _ in range(4)
        ]
        await links[0].execute("CREATE TABLE IF NOT EXISTS bare (id serial PRIMARY KEY, body bytea)")

        async def insert_all() -> None:
            for _ in range(count // BATCH):
                await links[0].execute(
                    "INSERT INTO bare (body) SELECT unnest(%b::bytea[])", ([BODY] * BATCH,), prepare=True
                )

        in_batches = await timed(count, insert_all())
        left = iter(range(1, count + 1))

        async def update(link: psycopg.AsyncConnection[object]) -> None:
            for at in left:
                await link.execute("UPDATE bare SET body = %b WHERE id = %s", (BODY, at), prepare=True)

        updates = await timed(count, asyncio.gather(*map(update, links)))
    return {"bare insert, batches of 100": in_batches, "bare update, a commit each": updates}


# -- the stores -----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def opened(outbox: Outbox) -> AsyncIterator[Outbox]:
    await outbox.open()
    try:
        yield outbox
    finally:
        await outbox.close()


async def sqlite_round(folder: Path, count: int, name: str) -> Figures:
    async with opened(SqliteOutbox(str(folder / f"{name}.db"))) as outbox:
        return {**bare_sqlite(folder, count), **await measure(outbox, count, name)}


async def postgres_round(server: Postgres, count: int, name: str) -> Figures:
    async with opened(PostgresOutbox(server.url, schema=name)) as outbox:
        return {**await bare_postgres(server.url, count), **await measure(outbox, count, name)}


async def nats_round(broker: EmbeddedBroker, count: int, name: str) -> Figures:
    async with opened(NatsOutbox(broker.url, bucket=f"BENCH_{name}", max_bytes=2**28)) as outbox:
        bare = {"bare publish, acknowledged, 256 in flight": (await measure_limit(broker.url, 1.0))["acked_per_s"]}
        return {**bare, **await measure(outbox, count, name)}


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="rows per second through the outbox stores")
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="sqlite,postgres,nats", help="stores, with commas")
    options = parser.parse_args()
    results: dict[str, list[Figures]] = {name: [] for name in options.only.split(",")}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="durable-timer-bench-")))
        rounds: dict[str, Callable[[str], Awaitable[Figures]]] = {
            "sqlite": lambda name: sqlite_round(folder, options.rows, name)
        }
        if "postgres" in results:
            programs = installed()
            if programs is None:
                parser.error("no PostgreSQL server is installed (apt install postgresql)")
            server = stack.enter_context(Postgres(programs, options=FSYNC))
            rounds["postgres"] = lambda name: postgres_round(server, options.rows, name)
        if "nats" in results:
            broker = stack.enter_context(EmbeddedBroker(folder / "nats"))
            rounds["nats"] = lambda name: nats_round(broker, options.rows, name)
        for at in range(options.rounds):
            for store, found in results.items():
                found.append(asyncio.run(_run(rounds[store](f"{store}{at}"))))
    print(f"{os.cpu_count()} cores, {options.rows} rows, median of {options.rounds} rounds\n")
    steps = list(dict.fromkeys(step for found in results.values() for step in found[0]))
    print(f"| rows per second | {' | '.join(results)} |\n|---|{'---|' * len(results)}")
    for step in steps:
        cells = (
            f"{statistics.median(r[step] for r in found):,.0f}" if step in found[0] else ""
            for found in results.values()
        )
        print(f"| {step} | {' | '.join(cells)} |")


async def _run(work: Awaitable[Figures]) -> Figures:
    return await work


if __name__ == "__main__":
    main()
