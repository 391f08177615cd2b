"""What the PostgreSQL outbox promises beyond the contract of all stores: the server may go, hang, lock and be wrong."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from msgspec.structs import replace

from notify_consumer.errors import BadSetting, LeaseLost, OutboxUnavailable
from notify_consumer.outbox import postgres as module
from notify_consumer.outbox import postgres_connections as connections
from notify_consumer.outbox.base import FEEDBACK_LANE, Feedback, NewRow, Outbox, State
from notify_consumer.outbox.postgres import PostgresOutbox
from notify_consumer.outbox.postgres_connections import Session
from notify_consumer.outbox.postgres_statements import MIGRATIONS
from notify_consumer.outbox.sqlite import SqliteOutbox
from tests.support.notify import new_row, until
from tests.support.postgres import PASSWORD, Postgres, need_postgres

LONG_MS = 60_000
COMPLETE = Feedback("complete", {"n": 2**70})


@pytest.fixture(scope="module")
def fragile() -> Iterator[Postgres]:
    """A server that the tests of this file may freeze and stop."""
    with Postgres(need_postgres()) as running:
        yield running


@pytest.fixture
def schema() -> str:
    return f"test_{secrets.token_hex(8)}"


@pytest.fixture
async def outbox(postgres: Postgres, schema: str) -> AsyncIterator[PostgresOutbox]:
    made = PostgresOutbox(postgres.url, schema=schema)
    await made.open()
    yield made
    await made.close()


@pytest.fixture
async def on_fragile(fragile: Postgres, schema: str) -> AsyncIterator[PostgresOutbox]:
    made = PostgresOutbox(fragile.url, schema=schema)
    await made.open()
    yield made
    await made.close()


async def pending(outbox: PostgresOutbox) -> int:
    return (await outbox.counts())[State.PENDING]


# -- the server goes ------------------------------------------------------------------------------------------


async def test_a_server_that_is_away_is_unavailable_and_comes_back(
    fragile: Postgres, on_fragile: PostgresOutbox
) -> None:
    """While it is stopped every operation says why, at once and without the password; then all goes on."""
    await on_fragile.insert([new_row("a")])
    fragile.stop(hard=True)
    try:
        for operation in (on_fragile.counts, on_fragile.open, lambda: on_fragile.insert([new_row("b")])):
            with pytest.raises(OutboxUnavailable, match="refused") as caught:
                await operation()
            assert PASSWORD not in str(caught.value)
    finally:
        fragile.start()
    assert await on_fragile.insert([new_row("b")])
    assert await pending(on_fragile) == 2


async def test_a_restart_between_two_operations_is_not_noticed(fragile: Postgres, on_fragile: PostgresOutbox) -> None:
    """Connections that ended while they were idle are not used: the next operation simply works."""
    await asyncio.gather(*(on_fragile.insert([new_row(f"r{at}")]) for at in range(20)))
    fragile.stop()
    fragile.start()
    assert await pending(on_fragile) == 20
    await asyncio.gather(*(on_fragile.counts() for _ in range(20)))


async def test_a_frozen_server_hangs_nothing(
    fragile: Postgres, on_fragile: PostgresOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many operations there are: each fails at its deadline, on old connections and new ones, and on none."""
    monkeypatch.setattr(connections, "DEADLINE_S", 1.0)
    await on_fragile.insert([new_row()])
    with fragile.paused():
        async with asyncio.timeout(30):
            results = await asyncio.gather(*(on_fragile.counts() for _ in range(12)), return_exceptions=True)
            assert {type(result) for result in results} == {OutboxUnavailable}
            with pytest.raises(OutboxUnavailable, match="no answer within 1 s"):
                await on_fragile.counts()
    monkeypatch.undo()
    assert await pending(on_fragile) == 1


async def test_a_frozen_server_does_not_keep_a_cancelled_operation(
    fragile: Postgres, on_fragile: PostgresOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gives up an operation gets away long before its deadline, and the outbox can be closed."""
    monkeypatch.setattr(connections, "DEADLINE_S", 600.0)
    with fragile.paused():
        async with asyncio.timeout(30):
            asking = asyncio.create_task(on_fragile.counts())
            await asyncio.wait({asking}, timeout=0.1)
            asking.cancel()
            await asyncio.wait({asking})
            assert asking.cancelled()
            await on_fragile.close()


async def test_a_cancelled_operation_leaves_the_connection_in_order(
    postgres: Postgres, outbox: PostgresOutbox, schema: str
) -> None:
    """Operations that are cancelled while they wait for a lock take neither a slot nor another's answer with them."""
    with psycopg.connect(postgres.url) as locker:
        locker.execute(f'LOCK TABLE "{schema}".outbox'.encode())
        waiting = [asyncio.create_task(outbox.counts()) for _ in range(connections.SIZE)]
        await asyncio.wait(waiting, timeout=0.1)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        locker.rollback()
    assert await outbox.insert([new_row()]) == {new_row().resume_id}
    assert [await outbox.counts() for _ in range(connections.SIZE)] == [await outbox.counts()] * connections.SIZE


async def test_a_locked_table_is_unavailable_and_comes_back(
    postgres: Postgres, outbox: PostgresOutbox, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While somebody holds the table every operation fails by itself; afterwards all works again."""
    monkeypatch.setattr(module, "LOCK_TIMEOUT_MS", 100)
    impatient = PostgresOutbox(postgres.url, schema=schema)
    await impatient.insert([new_row("a")])
    with psycopg.connect(postgres.url) as locker:
        locker.execute(f'LOCK TABLE "{schema}".outbox'.encode())
        for operation in (impatient.insert([new_row("b")]), impatient.claim("me", {"x": 1}, 1), impatient.counts()):
            with pytest.raises(OutboxUnavailable, match="lock timeout"):
                await operation
    assert await impatient.insert([new_row("b")])
    assert await pending(impatient) == 2
    await impatient.close()


_SQLITE_LOCKER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.readline()
"""


async def test_stores_locked_for_ten_seconds_go_on_afterwards(
    postgres: Postgres, outbox: PostgresOutbox, schema: str, tmp_path: Path
) -> None:
    """C33, time-outs as they are: what is asked meanwhile fails, nothing crashes or hangs, and then all works."""
    file = tmp_path / "outbox.db"
    boxes: list[Outbox] = [outbox, SqliteOutbox(str(file))]
    for each in boxes:
        await each.insert([new_row("a")])
    pipe = asyncio.subprocess.PIPE
    locker = await asyncio.create_subprocess_exec(sys.executable, "-c", _SQLITE_LOCKER, file, stdin=pipe, stdout=pipe)
    assert locker.stdout is not None
    assert await locker.stdout.readline() == b"locked\n"
    with psycopg.connect(postgres.url) as other:
        other.execute(f'LOCK TABLE "{schema}".outbox'.encode())
        until_s = time.monotonic() + 10
        refused = await asyncio.gather(*(_refusals(each, until_s) for each in boxes))
    await locker.communicate(b"go\n")
    assert min(refused) >= 1
    for each in boxes:
        assert await each.insert([new_row("b")]) == {new_row("b").resume_id}
        assert {claim.resume_id for claim in await each.claim("me", {"x": 5}, LONG_MS)} == {
            new_row("a").resume_id,
            new_row("b").resume_id,
        }
        await each.close()


async def _refusals(outbox: Outbox, until_s: float) -> int:
    refused = 0
    while time.monotonic() < until_s:
        with pytest.raises(OutboxUnavailable):
            await outbox.insert([new_row("c")])
        refused += 1
    return refused


# -- replies that are lost ------------------------------------------------------------------------------------


async def test_what_was_committed_unheard_may_be_repeated(
    outbox: PostgresOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operation is carried out, its reply gets lost, and it is asked for again: nothing happens twice."""
    run = outbox._connections.run

    async def deaf(work: Any) -> Any:
        await run(work)
        raise OutboxUnavailable("the reply was lost")

    async def twice(operation: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(outbox._connections, "run", deaf)
            with pytest.raises(OutboxUnavailable):
                await operation()
        return await operation()

    row = new_row()
    assert await twice(lambda: outbox.insert([row])) == set()
    assert len(await twice(lambda: outbox.claim("me", {"x": 1}, 30))) <= 1  # the first one's lease may run out
    (claim,) = await until(lambda: outbox.claim("me", {"x": 1}, LONG_MS), "what was claimed unheard runs out")
    assert await twice(lambda: outbox.renew([claim], LONG_MS)) == set()
    answered = await twice(lambda: outbox.store_outcome(claim, COMPLETE))
    with pytest.raises(LeaseLost):
        await twice(lambda: outbox.finish(answered, "accepted"))
    assert await twice(lambda: outbox.requeue_feedback([row.resume_id])) == set()
    kept = await outbox.get(row.resume_id)
    assert kept is not None
    assert (kept.state, kept.feedback, kept.settled) == (State.ANSWERED, COMPLETE, "accepted")


async def test_what_waits_together_is_written_together(outbox: PostgresOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers and ends that come at a time share statements; each still has its own fence."""
    await outbox.insert([new_row(f"r{at}") for at in range(50)])
    claims = await outbox.claim("me", {"x": 50}, LONG_MS)
    stale = replace(claims[0], token="another")
    statements: list[bytes] = []
    run = outbox._run

    async def counting(statement: bytes, **values: Any) -> Any:
        statements.append(statement)
        assert values.get("ids", []) == sorted(
            values.get("ids", [])
        )  # so that two on the same rows don't lock each other out
        return await run(statement, **values)

    monkeypatch.setattr(outbox, "_run", counting)
    await outbox.renew(claims[::-1], LONG_MS)
    statements.clear()
    answers = (outbox.store_outcome(claim, COMPLETE) for claim in (stale, *claims))
    lost, *answered = await asyncio.gather(*answers, return_exceptions=True)
    assert isinstance(lost, LeaseLost)
    ends = (outbox.finish(claim, claim.resume_id) for claim in claims)
    assert set(await asyncio.gather(*ends, outbox.finish(stale, "x"), return_exceptions=True)) >= {None}
    assert answered == [replace(claim, lane=FEEDBACK_LANE, feedback=COMPLETE, sends=1) for claim in claims]
    assert len(statements) <= 4
    rows = await outbox.browse(State.DONE, 100)
    assert {row.resume_id: row.settled for row in rows} == {claim.resume_id: claim.resume_id for claim in claims}


async def test_writes_that_wait_together_fail_together(fragile: Postgres, on_fragile: PostgresOutbox) -> None:
    """When the server goes, each of them is told, and each may be repeated."""
    await on_fragile.insert([new_row(f"r{at}") for at in range(10)])
    claims = await on_fragile.claim("me", {"x": 10}, LONG_MS)
    fragile.stop(hard=True)
    try:
        results = await asyncio.gather(
            *(on_fragile.store_outcome(claim, COMPLETE) for claim in claims), return_exceptions=True
        )
        assert {type(result) for result in results} == {OutboxUnavailable}
    finally:
        fragile.start()
    for claim in claims:
        await on_fragile.finish(await on_fragile.store_outcome(claim, COMPLETE), "accepted")


async def test_renewing_and_writing_do_not_lock_each_other_out(outbox: PostgresOutbox) -> None:
    """Renewals of all claims beside writes of many of them, in whatever order they are given."""
    await outbox.insert([new_row(f"r{at}") for at in range(100)])
    claims = await outbox.claim("me", {"x": 100}, LONG_MS)
    for at in range(20):
        mixed = claims[::-1] if at % 2 else claims
        answers = (outbox.store_outcome(claim, COMPLETE) for claim in mixed)
        renewals = (outbox.renew(order, LONG_MS) for order in (claims, claims[::-1]))
        await asyncio.gather(*answers, *renewals)


# -- the tables -----------------------------------------------------------------------------------------------


async def test_many_processes_create_the_tables_at_once(postgres: Postgres, schema: str) -> None:
    """One of them creates, the others wait for it; each can work."""
    boxes = [PostgresOutbox(postgres.url, schema=schema) for _ in range(8)]
    await asyncio.gather(*(each.open() for each in boxes))
    assert await boxes[0].insert([new_row()])
    assert [await pending(each) for each in boxes] == [1] * 8
    assert postgres.query(f"SELECT version FROM {schema}.schema_version") == [(1,)]
    for each in boxes:
        await each.close()


async def test_a_newer_schema_is_refused(postgres: Postgres, outbox: PostgresOutbox, schema: str) -> None:
    """Tables of a later version are not touched, and the error says both versions."""
    later = len(MIGRATIONS) + 1
    postgres.query(f"INSERT INTO {schema}.schema_version VALUES ({later})")
    newer = PostgresOutbox(postgres.url, schema=schema)
    with pytest.raises(OutboxUnavailable, match=f"version {later}; this program knows {len(MIGRATIONS)}"):
        await newer.open()
    await newer.close()


async def test_looking_does_not_create_an_outbox(postgres: Postgres, schema: str) -> None:
    """Without ``create`` a place without tables is an error, and stays without."""
    looking = PostgresOutbox(postgres.url, schema=schema, create=False)
    with pytest.raises(OutboxUnavailable, match=f"no outbox .*{schema}"):
        await looking.open()
    assert postgres.query("SELECT to_regnamespace(%s)", schema) == [(None,)]
    await looking.close()


async def test_few_rights_are_enough(postgres: Postgres, outbox: PostgresOutbox, schema: str) -> None:
    """Where the tables exist, an account that may use them is enough; where not, the error says what is missing."""
    role = f"worker_{secrets.token_hex(4)}"
    for statement in (
        f"CREATE ROLE {role} LOGIN PASSWORD 'x'",
        f"GRANT USAGE ON SCHEMA {schema} TO {role}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.outbox TO {role}",
        f"GRANT SELECT ON {schema}.schema_version TO {role}",
        f"GRANT USAGE ON SEQUENCE {schema}.outbox_seq TO {role}",
    ):
        postgres.query(statement)
    url = postgres.url.replace(f"tester:{quote(PASSWORD, safe='')}", f"{role}:x")
    worker = PostgresOutbox(url, schema=schema)
    await worker.insert([new_row()])
    (claim,) = await worker.claim("me", {"x": 1}, LONG_MS)
    await worker.finish(await worker.store_outcome(claim, COMPLETE), "accepted")
    await asyncio.sleep(0.01)
    assert await worker.prune_done(1) == 1
    await worker.close()
    elsewhere = PostgresOutbox(url, schema="not_there")
    with pytest.raises(OutboxUnavailable, match="permission denied for database"):
        await elsewhere.open()
    await elsewhere.close()


async def test_another_encoding_is_refused(postgres: Postgres) -> None:
    """A database that can't hold every text is refused at once, not at the first text."""
    name = f"latin_{secrets.token_hex(4)}"
    postgres.query(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    outbox = PostgresOutbox(postgres.url.replace("/postgres", f"/{name}"))
    with pytest.raises(OutboxUnavailable, match="LATIN1; it has to be in UTF8"):
        await outbox.open()
    await outbox.close()


async def test_tables_that_were_dropped_come_back(postgres: Postgres, outbox: PostgresOutbox, schema: str) -> None:
    """Whoever drops the tables of a running consumer loses rows, and not the consumer."""
    await outbox.insert([new_row()])
    postgres.query(f"DROP SCHEMA {schema} CASCADE")
    with pytest.raises(OutboxUnavailable, match="does not exist"):
        await outbox.counts()
    assert await pending(outbox) == 0
    assert await outbox.insert([new_row()])


# -- sessions -------------------------------------------------------------------------------------------------


async def setting(outbox: PostgresOutbox, name: str) -> str:
    async def work(session: Session) -> str:
        found = await (await session.execute("SELECT current_setting(%s)", (name,))).fetchone()
        return str(found and found[0])

    return await outbox._connections.run(work)


async def test_a_database_that_does_not_wait_for_its_disk_is_overruled(postgres: Postgres, schema: str) -> None:
    """An operation is durable when it returns, whatever the database's default is; other levels stay as they are."""
    for given, used in (("off", "on"), ("remote_apply", "remote_apply")):
        options = quote(f"-c synchronous_commit={given} -c default_transaction_isolation=serializable")
        outbox = PostgresOutbox(f"{postgres.url}?options={options}", schema=schema)
        assert await setting(outbox, "synchronous_commit") == used
        assert await setting(outbox, "transaction_isolation") == "read committed"
        await outbox.close()


async def test_there_are_few_connections(postgres: Postgres, schema: str) -> None:
    """However many operations there are at a time, they share ``SIZE`` connections, and close gives them up."""
    outbox = PostgresOutbox(f"{postgres.url}?application_name={schema}", schema=schema)
    await asyncio.gather(*(outbox.insert([new_row(f"r{at}")]) for at in range(60)))
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
    assert postgres.query(count, schema) == [(connections.SIZE,)]
    await outbox.close()
    await outbox.close()
    await until(lambda: postgres.query(count, schema) == [(0,)], "no connection is left")
    with pytest.raises(OutboxUnavailable, match="closed"):
        await outbox.counts()


async def test_a_wrong_password_is_told_without_it(postgres: Postgres) -> None:
    """The error names the place and the reason, and neither shows the password."""
    secret = "not:the@one"
    outbox = PostgresOutbox(postgres.url.replace(quote(PASSWORD, safe=""), quote(secret, safe="")))
    with pytest.raises(OutboxUnavailable, match="password authentication failed") as caught:
        await outbox.open()
    assert f"tester:***@127.0.0.1:{postgres.port}" in str(caught.value)
    assert secret not in str(caught.value)
    assert quote(secret, safe="") not in str(caught.value)
    await outbox.close()


@pytest.mark.parametrize(
    "url", ["postgresql://me:secret@h/db?sslmod=x", "postgresql://me:sec%zzret@h/db", "postgresql://me:sec/ret@h/db"]
)
def test_a_url_that_cannot_be_read_is_refused(url: str) -> None:
    """What libpq does not understand is refused before anything is connected, without the password."""
    with pytest.raises(BadSetting) as caught:
        PostgresOutbox(url)
    assert "sec" not in str(caught.value)
    assert ("sslmod" in str(caught.value)) == ("sslmod" in url)


# -- what waits -----------------------------------------------------------------------------------------------


async def test_no_statement_scans_or_sorts_the_table(outbox: PostgresOutbox, schema: str) -> None:
    """On a table without statistics, just as it is created, every statement about rows walks an index."""
    statements = outbox._statements
    lease = {"lanes": ["x"], "counts": [3], "owner": "me", "token": "t", "lease_ms": 1}
    held = {"ids": ["a"], "tokens": ["t"], "values": ["v"]}
    for statement, values in (
        (statements.survey, {"limit": 5}),
        (statements.claim, lease),
        (statements.renew, {"ids": ["a"], "tokens": ["t"], "lease_ms": 1}),
        (statements.answer, {**held, "lane": ""}),
        (statements.finish, held),
        (statements.kill, {"resume_id": "x", "token": "t", "reason": "r"}),
        (statements.requeue, {"ids": ["a"]}),
        (statements.prune, {"older_than_ms": 1, "limit": 5}),
        (statements.counts, {}),
    ):
        plan = await _plan(outbox, statement, values)
        assert "Seq Scan on outbox" not in plan, plan
        assert "Bitmap" not in plan, plan
        assert "Sort" not in plan, plan
        assert "Index" in plan, plan
    plan = await _plan(outbox, statements.browse, {"states": ["done"], "limit": 5})
    assert "Index Scan Backward using outbox_state" in plan, plan


async def _plan(outbox: PostgresOutbox, statement: bytes, values: dict[str, Any]) -> str:
    async def work(session: Session) -> str:
        cursor = await session.execute(b"EXPLAIN " + statement, values)
        return "\n".join(line for (line,) in await cursor.fetchall())

    return await outbox._connections.run(work)


async def test_resumes_that_come_twice_at_a_time_do_not_lock_each_other_out(
    outbox: PostgresOutbox, postgres: Postgres, schema: str
) -> None:
    """Two consumers take the same batches in, each in its own order: each row is new to one of them."""
    other = PostgresOutbox(postgres.url, schema=schema)
    for at in range(20):
        rows = [new_row(f"r{at}.{each}") for each in range(30)]
        mine, theirs = await asyncio.gather(outbox.insert(rows), other.insert(rows[::-1]))
        assert mine | theirs == {row.resume_id for row in rows}
        assert mine & theirs == set()
    await other.close()


async def test_a_batch_is_written_in_the_order_of_its_ids(
    outbox: PostgresOutbox, postgres: Postgres, schema: str
) -> None:
    """So that two who take the same rows in wait for one another in one direction only."""
    first, second = sorted((new_row("a"), new_row("b")), key=lambda row: row.resume_id)
    hold = f"""
        INSERT INTO {schema}.outbox (resume_id, seq, flow, lane, state, readable, body, inserted_at, updated_at)
        VALUES (%s, 0, '', '', 'done', true, '', 0, 0)
    """.encode()
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
    with psycopg.connect(postgres.url) as other, psycopg.connect(postgres.url) as third:
        other.execute(hold, (second.resume_id,))
        inserting = asyncio.create_task(outbox.insert([second, first]))
        await until(lambda: postgres.query(waits, f"%{schema}%") == [(1,)], "it waits for the second")
        third.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            third.execute(hold, (first.resume_id,))
        third.rollback()
        other.rollback()
    assert await inserting == {first.resume_id, second.resume_id}


async def test_a_locked_row_holds_nothing_up(outbox: PostgresOutbox, postgres: Postgres, schema: str) -> None:
    """A row that somebody else has locked is passed over, by claims and by pruning; the others are taken."""
    rows = [new_row(f"r{at}") for at in range(3)]
    await outbox.insert(rows)
    lock = f"SELECT 1 FROM {schema}.outbox WHERE resume_id = %s FOR UPDATE".encode()
    with psycopg.connect(postgres.url) as other:
        other.execute(lock, (rows[0].resume_id,))
        claims = await outbox.claim("me", {"x": 2}, LONG_MS)
        assert [claim.resume_id for claim in claims] == [row.resume_id for row in rows[1:]]
        other.rollback()
        for claim in claims:
            await outbox.finish(await outbox.store_outcome(claim, COMPLETE), "accepted")
        other.execute(lock, (claims[0].resume_id,))
        await until(lambda: outbox.prune_done(1), "the one that is free is old enough")
        assert (await outbox.counts())[State.DONE] == 1
        other.rollback()


async def test_pruning_goes_in_pieces(outbox: PostgresOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows are too old, each statement removes a bounded number of them."""
    monkeypatch.setattr(module, "_PRUNE_BATCH", 3)
    await outbox.insert([new_row(f"r{at}") for at in range(7)])
    for claim in await outbox.claim("me", {"x": 7}, LONG_MS):
        await outbox.finish(await outbox.store_outcome(claim, COMPLETE), "accepted")
    statements: list[bytes] = []
    run = outbox._run

    async def counting(statement: bytes, **values: object) -> Any:
        statements.append(statement)
        return await run(statement, **values)

    monkeypatch.setattr(outbox, "_run", counting)
    await asyncio.sleep(0.01)  # older than a millisecond
    assert await outbox.prune_done(1) == 7
    assert len(statements) == 3


@pytest.mark.parametrize("running", [True, False])
async def test_a_server_whose_clock_stepped_back_holds_nothing_up(
    postgres: Postgres, outbox: PostgresOutbox, schema: str, running: bool
) -> None:
    """Noticed at the start or while running: a lease gets its time from now, a backoff its delay, not an hour more."""
    await outbox.insert([new_row("waiting"), new_row("leased", lane="y"), new_row("alive", lane="z")])
    await outbox.claim("dead", {"y": 1}, 50)
    (alive,) = await outbox.claim("alive", {"z": 1}, LONG_MS)
    hour = "claimable_at = claimable_at + 3600000, updated_at = updated_at + 3600000"
    postgres.query(f"UPDATE {schema}.outbox SET {hour}")
    if running:
        await outbox.survey(1)
        outbox._seen_ms += 3_600_000
        await outbox.survey(1)
    else:
        again = PostgresOutbox(postgres.url, schema=schema)
        await again.open()
        await again.close()

    async def both() -> bool:
        return set((await outbox.survey(1)).lanes) == {"x", "y"}

    await until(both, "both can be claimed")
    survey = await outbox.survey(1)
    assert survey.next_in_ms is not None
    assert LONG_MS - 30_000 < survey.next_in_ms <= LONG_MS
    assert await outbox.renew([alive], LONG_MS) == set()


async def test_a_very_long_flow_has_a_lane(outbox: PostgresOutbox) -> None:
    """What is too long for an index shares the lane of its beginning, before and after it is revived."""
    row = new_row(lane="f" * 10_000)
    await outbox.insert([row, NewRow("y" * 26 + ".0", "\0", b"")])
    lane = "f" * 200
    (claim,) = await outbox.claim("me", {lane: 1}, LONG_MS)
    assert (claim.flow, claim.lane) == (row.flow, lane)
    await outbox.kill(claim, "enough")
    assert await outbox.revive(row.resume_id)
    assert set((await outbox.survey(1)).lanes) == {lane, "\N{REPLACEMENT CHARACTER}"}
    (claim,) = await outbox.claim("me", {lane: 1}, LONG_MS)
    assert (await outbox.store_outcome(claim, COMPLETE)).lane == FEEDBACK_LANE
