"""What the SQLite outbox promises beyond the contract of all stores: the file, its locks, and its clock."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from notify_consumer.errors import LeaseLost, OutboxUnavailable
from notify_consumer.outbox import thread
from notify_consumer.outbox.base import Feedback, NewRow, State
from notify_consumer.outbox.schema import MIGRATIONS, migrate
from notify_consumer.outbox.sqlite import SqliteOutbox
from tests.support.notify import new_row, until

LONG_MS = 60_000
DIARY = b"dear diary, " * 500


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outbox.db"


@pytest.fixture
async def outbox(path: Path) -> AsyncIterator[SqliteOutbox]:
    made = SqliteOutbox(str(path))
    await made.open()
    yield made
    await made.close()


async def test_rows_outlive_the_process(outbox: SqliteOutbox, path: Path) -> None:
    """What an operation confirmed is there for the next one who opens the file, also without a close."""
    await outbox.insert([new_row("a"), new_row("b")])
    (claim,) = await outbox.claim("me", {"x": 1}, LONG_MS)
    await outbox.store_outcome(claim, Feedback("complete", {"n": 1}))
    other = SqliteOutbox(str(path))
    counts = await other.counts()
    assert (counts[State.PENDING], counts[State.ANSWERED]) == (1, 1)
    await other.close()


async def test_commits_reach_the_disk(outbox: SqliteOutbox) -> None:
    """The file is in WAL mode and synchronised at each commit."""
    journal, synchronous = await outbox._thread.read(
        lambda db, _: tuple(db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous"))
    )
    assert (journal, synchronous) == ("wal", 2)


def _delete(path: Path) -> None:
    for each in path.parent.glob("outbox.db*"):
        each.unlink()


def _delete_but_for_the_log(path: Path) -> None:
    path.unlink()


def _put_another_in_its_place(path: Path) -> None:
    other = path.with_name("other")
    with sqlite3.connect(other) as connection:
        migrate(connection)
    connection.close()
    _delete(path)
    other.replace(path)


@pytest.mark.parametrize("damage", [_delete, _delete_but_for_the_log, _put_another_in_its_place])
async def test_a_file_that_is_gone_is_made_anew(
    outbox: SqliteOutbox, path: Path, damage: Callable[[Path], None]
) -> None:
    """What is confirmed is in the file that has the name, where the next process looks; what was claimed is lost."""
    second = SqliteOutbox(str(path))  # closes the old file when the first one has the new one open
    await outbox.insert([new_row("a")])
    (claim,) = await outbox.claim("me", {"x": 1}, LONG_MS)
    await second.open()
    damage(path)
    for store, row in ((outbox, new_row("b")), (second, new_row("c"))):
        assert await store.insert([row]) == {row.resume_id}
    with pytest.raises(LeaseLost):
        await outbox.store_outcome(claim, Feedback("complete", {}))
    other = SqliteOutbox(str(path), create=False)
    assert (await other.counts())[State.PENDING] == 2
    for each in (second, other):
        await each.close()


async def test_a_locked_file_is_unavailable_and_comes_back(
    outbox: SqliteOutbox, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another process holds the lock writes fail cleanly and reads go on; afterwards all works again."""
    monkeypatch.setattr(thread, "BUSY_TIMEOUT_MS", 50)
    impatient = SqliteOutbox(str(path))
    await impatient.insert([new_row("a")])
    locker = sqlite3.connect(path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    with pytest.raises(OutboxUnavailable, match="locked"):
        await impatient.insert([new_row("b")])
    with pytest.raises(OutboxUnavailable, match="locked"):
        await impatient.claim("me", {"x": 1}, LONG_MS)
    assert (await impatient.counts())[State.PENDING] == 1
    locker.execute("ROLLBACK")
    locker.close()
    assert await impatient.insert([new_row("b")])
    await impatient.close()


async def test_a_short_lock_is_waited_out(outbox: SqliteOutbox, path: Path) -> None:
    """A write that meets another process's transaction waits for it instead of failing."""
    locker = sqlite3.connect(path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    writing = asyncio.create_task(outbox.insert([new_row()]))
    await asyncio.wait({writing}, timeout=0.05)
    assert not writing.done()
    locker.execute("COMMIT")
    locker.close()
    assert await writing


def test_a_file_that_is_no_database_is_left_alone(path: Path) -> None:
    """Something else under that name is an error with the file's name, not overwritten."""
    path.write_bytes(DIARY)
    outbox = SqliteOutbox(str(path))
    with pytest.raises(OutboxUnavailable, match=r"outbox\.db: file is not a database"):
        asyncio.run(outbox.open())
    assert path.read_bytes() == DIARY
    path.unlink()
    asyncio.run(outbox.open())
    asyncio.run(outbox.close())


async def test_a_newer_schema_is_refused(outbox: SqliteOutbox, path: Path) -> None:
    """A file of a later version is not touched, and the error says both versions."""
    await outbox.close()
    with sqlite3.connect(path) as later:
        later.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    later.close()
    newer = SqliteOutbox(str(path))
    with pytest.raises(OutboxUnavailable, match=f"version {len(MIGRATIONS) + 1}; this program knows"):
        await newer.open()
    await newer.close()


@pytest.mark.parametrize("resume_id", [object(), "\ud800"])
async def test_a_batch_is_all_or_none(outbox: SqliteOutbox, resume_id: Any) -> None:
    """A transaction that fails in the middle, for whatever reason, leaves nothing behind, and the store goes on."""
    broken = NewRow(resume_id, "x", b"")  # nothing that SQLite can store
    with pytest.raises(OutboxUnavailable):
        await outbox.insert([new_row("a"), broken])
    assert (await outbox.counts())[State.PENDING] == 0
    assert await outbox.insert([new_row("a")])


async def test_what_waits_together_is_committed_together(outbox: SqliteOutbox) -> None:
    """Concurrent writes share transactions: that is what keeps fsyncs few."""
    seen: list[int] = []
    run = outbox._thread._run

    def counting(batch: list[Any]) -> list[Any]:
        seen.append(len(batch))
        return run(batch)

    outbox._thread._run = counting  # type: ignore[method-assign]
    await asyncio.gather(*(outbox.insert([new_row(f"r{i}")]) for i in range(50)))
    assert sum(seen) == 50
    assert len(seen) <= 3


async def test_a_clock_that_stepped_back_holds_nothing_up(outbox: SqliteOutbox, path: Path) -> None:
    """After a step back of an hour, what was written before it is taken up in its own time from now, not in an hour."""
    await outbox.insert([new_row("waiting"), new_row("leased", lane="y")])
    await outbox.claim("dead", {"y": 1}, 50)
    await outbox.close()
    with sqlite3.connect(path) as later:  # as if all of it had been written at a clock that was an hour ahead
        later.execute("UPDATE outbox SET claimable_at = claimable_at + 3600000, updated_at = updated_at + 3600000")
    later.close()
    again = SqliteOutbox(str(path))

    async def both() -> bool:
        return set((await again.survey(1)).lanes) == {"x", "y"}

    await until(both, "both can be claimed")
    await again.close()


async def test_a_step_back_is_noticed_while_running(outbox: SqliteOutbox, path: Path) -> None:
    """The survey notices that the store's clock went back, and puts off anew what was written before."""
    await outbox.insert([new_row("waiting")])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("UPDATE outbox SET claimable_at = claimable_at + 3600000, updated_at = updated_at + 3600000")
    other.close()
    assert not (await outbox.survey(1)).lanes
    outbox._seen_ms += 3_600_000

    async def waits() -> bool:
        return "x" in (await outbox.survey(1)).lanes

    await until(waits, "the row can be claimed")


async def test_a_live_lease_survives_the_step(outbox: SqliteOutbox, path: Path) -> None:
    """A lease written before the clock stepped back is not given away: it runs its full time from now."""
    await outbox.insert([new_row()])
    (claim,) = await outbox.claim("alive", {"x": 1}, LONG_MS)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("UPDATE outbox SET claimable_at = claimable_at + 3600000, updated_at = updated_at + 3600000")
    other.close()
    again = SqliteOutbox(str(path))
    survey = await again.survey(1)
    assert not survey.lanes
    assert survey.next_in_ms is not None
    assert LONG_MS - 5_000 < survey.next_in_ms <= LONG_MS
    assert await again.renew([claim], LONG_MS) == set()
    await again.close()


_CLAIMER = """
import asyncio, sys
from notify_consumer.outbox.sqlite import SqliteOutbox
from notify_consumer.outbox.base import Feedback

async def main(path, owner):
    outbox = SqliteOutbox(path)
    await outbox.open()
    print("open", flush=True)
    sys.stdin.readline()
    while claims := await outbox.claim(owner, {"x": 3}, 60_000):
        for claim in claims:
            print(claim.resume_id, flush=True)
            await outbox.finish(await outbox.store_outcome(claim, Feedback("complete", {})), "accepted")
    await outbox.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_two_processes_share_a_file(outbox: SqliteOutbox, path: Path) -> None:
    """Two processes that claim at once get every row between them, none twice."""
    await outbox.insert([new_row(f"r{i}") for i in range(100)])
    pipe = asyncio.subprocess.PIPE
    processes = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", _CLAIMER, path, f"p{n}", stdin=pipe, stdout=pipe)
        for n in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"open\n"
    outputs = await asyncio.gather(*(process.communicate(b"go\n") for process in processes))
    ids = [line for out, _ in outputs for line in out.split()]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(ids) == 100
    assert len(set(ids)) == 100
    assert (await outbox.counts())[State.DONE] == 100


async def test_a_long_backlog_does_not_slow_the_survey(outbox: SqliteOutbox) -> None:
    """The survey and the claim walk the index: no scan of all rows, however many there are."""
    from notify_consumer.outbox import sqlite as module

    plans = await outbox._thread.read(
        lambda db, _: [
            row["detail"]
            for sql, values in (
                (module._SURVEY, {"now": 1, "limit": 1}),
                (module._CLAIMABLE, ("x", 1, 1)),
            )
            for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", values)
        ]
    )
    scans = [plan for plan in plans if "SCAN" in plan and "outbox" in plan]
    searches = [plan for plan in plans if "SEARCH outbox" in plan]
    assert scans == []
    assert len(searches) >= 5
    assert all("outbox_waiting" in plan for plan in searches)
    assert not any("TEMP B-TREE" in plan for plan in plans)
