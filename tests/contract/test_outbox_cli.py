"""``notify-consumer outbox list|show|revive|purge`` on every store that other processes can reach, by its URL."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg import sql
from typer.testing import CliRunner, Result

from notify_consumer.cli import app
from notify_consumer.outbox import make_outbox
from notify_consumer.outbox.base import Feedback, NewRow
from tests.support.broker import Broker
from tests.support.notify import new_row
from tests.support.outboxes import MONGODB_URL
from tests.support.postgres import Postgres

UNREADABLE = "x" * 26 + ".0"


class Place(msgspec.Struct, frozen=True):
    """An outbox as the command line names it, and the resumes in it that are pending, dead and done."""

    flags: tuple[str, ...]
    pending: str
    dead: str
    done: str

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["outbox", *arguments, *self.flags], env={"COLUMNS": "80", "TERM": "dumb"})

    def json(self, *arguments: str) -> Any:
        result = self.run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        [line] = result.stdout.splitlines()
        return json.loads(line)


def _sqlite(request: pytest.FixtureRequest) -> tuple[str, str]:
    folder: Path = request.getfixturevalue("tmp_path")
    return f"sqlite:{folder / 'outbox.db'}", "nats://127.0.0.1:1"


def _nats(request: pytest.FixtureRequest) -> tuple[str, str]:
    broker: Broker = request.getfixturevalue("broker")
    return "nats?max_bytes=33554432", broker.url


def _postgres(request: pytest.FixtureRequest) -> tuple[str, str]:
    server: Postgres = request.getfixturevalue("postgres")
    database = f"test_{secrets.token_hex(8)}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(database)))
    return server.url.replace("/postgres", f"/{database}"), "nats://127.0.0.1:1"


def _mongodb(_: pytest.FixtureRequest) -> tuple[str, str]:
    if not (url := os.environ.get(MONGODB_URL)):
        pytest.skip(f"no MongoDB server: name one in {MONGODB_URL}")
    return url, "nats://127.0.0.1:1"


@pytest.fixture(params=[_sqlite, _nats, _postgres, _mongodb], ids=lambda make: make.__name__[1:])
def place(request: pytest.FixtureRequest) -> Place:
    url, nats = request.param(request)
    mark = secrets.token_hex(4)
    rows = [new_row(f"{each}-{mark}", lane=f"{each}-{mark}") for each in ("pending", "dead", "done")]
    asyncio.run(_fill(url, nats, rows))
    return Place(("--outbox", url, "--nats", nats), *(row.resume_id for row in rows))


async def _fill(url: str, nats: str, rows: Sequence[NewRow]) -> None:
    outbox = make_outbox(url, nats=nats)
    await outbox.open()
    try:
        await outbox.insert([*rows, NewRow(UNREADABLE, "unreadable", b"{", unreadable="not JSON [/oops]")])
        _, dead, done = rows
        claims = {claim.lane: claim for claim in await outbox.claim("me", {dead.flow: 1, done.flow: 1}, 60_000)}
        await outbox.kill(claims[dead.flow], "enough is enough")
        answered = await outbox.store_outcome(claims[done.flow], Feedback("complete", {"v": 1}))
        await outbox.finish(answered, "accepted")
    finally:
        await outbox.close()


def test_rows_can_be_looked_at(place: Place) -> None:
    """A table for people, in a narrow terminal too and whatever is in an error; JSON for machines."""
    listed = place.json("list", "--state", "dead")
    assert {row["resume_id"]: row["last_error"] for row in listed["rows"]} == {
        place.dead: "enough is enough",
        UNREADABLE: "not JSON [/oops]",
    }
    assert (listed["counts"]["pending"], listed["counts"]["dead"], listed["counts"]["done"]) == (1, 2, 1)
    table = place.run("list")
    assert table.exit_code == 0
    assert "[/oops]" in table.output
    assert place.dead in table.output
    shown = place.json("show", place.pending)
    assert (shown["state"], shown["resume"]["payload"]) == ("pending", {"n": 1})
    assert json.loads(place.run("show", UNREADABLE).output)["resume"] == "{"


def test_a_dead_row_can_be_revived_once(place: Place) -> None:
    """It says what became of it; what can't be revived is exit code 1 and the reason."""
    assert place.json("revive", place.dead) == {"resume_id": place.dead, "state": "pending"}
    for resume_id, reason in (
        (place.dead, "is pending, not dead"),
        (place.done, "is done, not dead"),
        (UNREADABLE, "can't be read"),
        ("nobody.0", "is not in "),
    ):
        refused = place.run("revive", resume_id)
        assert refused.exit_code == 1
        assert f"notify-consumer: {resume_id} {reason}" in refused.output.replace("\n", " ")
    assert place.json("show", place.dead)["state"] == "pending"


def test_only_done_rows_are_purged(place: Place) -> None:
    """Those that are old enough; pending and dead ones stay."""
    assert place.json("purge", "--older-than-s", "3600") == {"removed": 0}
    removed = 0
    while not removed:  # a store's clock may take a millisecond to show that it is older
        removed = place.json("purge", "--older-than-s", "0")["removed"]
    assert removed == 1
    assert place.json("list")["counts"] == {"pending": 1, "claimed": 0, "answered": 0, "done": 0, "dead": 2}
    assert place.run("show", place.done).exit_code == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("--outbox", "postgresql://me:s3cret@127.0.0.1:1/d"),
        ("--outbox", "nats", "--nats", "nats://me:s3cret@127.0.0.1:1"),
        ("--outbox", "sqlite:/no/such/folder/outbox.db"),
    ],
)
def test_a_store_that_is_away_is_told_in_one_line(flags: tuple[str, ...]) -> None:
    """Exit code 1, no traceback, no password."""
    result = CliRunner().invoke(app, ["outbox", "list", *flags])
    assert result.exit_code == 1
    assert result.output.startswith("notify-consumer: ")
    assert "Traceback" not in result.output
    assert "s3cret" not in result.output


@pytest.mark.parametrize("flags", [("list", "--limit", str(2**70)), ("purge", "--older-than-s", str(2**70))])
def test_numbers_that_no_store_could_take_are_refused(flags: tuple[str, ...]) -> None:
    """As a mistake of whoever asked, not as a failure of the store."""
    result = CliRunner().invoke(app, ["outbox", *flags, "--outbox", "sqlite:/no/such/folder/outbox.db"])
    assert result.exit_code == 2
