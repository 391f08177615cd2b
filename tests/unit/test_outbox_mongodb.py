"""The MongoDB outbox against a model of what it uses (tests/support/mongo_model.py says what that is worth)."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pymongo.errors import AutoReconnect, BulkWriteError, WTimeoutError

from notify_consumer.errors import OutboxUnavailable
from notify_consumer.outbox import mongodb as module
from notify_consumer.outbox.base import Feedback, State
from notify_consumer.outbox.mongodb import MongoOutbox
from tests.support.mongo_model import MongoModel
from tests.support.notify import new_row

LONG_MS = 60_000
COMPLETE = Feedback("complete", {"n": 2**70})


@pytest.fixture
def server() -> MongoModel:
    return MongoModel()


def on(server: MongoModel, **options: Any) -> MongoOutbox:
    outbox = MongoOutbox("mongodb://me:s3cret@model", **options)
    outbox._client = server.client()
    return outbox


@pytest.fixture
async def outbox(server: MongoModel) -> AsyncIterator[MongoOutbox]:
    made = on(server)
    await made.open()
    yield made
    await made.close()


def failing(error: Exception, *, times: int = 1, only: str = "") -> Any:
    """Trouble for the next ``times`` operations (of that name)."""
    left = [times]

    def trouble(operation: str) -> None:
        if operation.startswith(only) and left[0]:
            left[0] -= 1
            raise error

    return trouble


def duplicate(code: int = 11_000) -> BulkWriteError:
    return BulkWriteError({"writeErrors": [{"code": code}], "writeConcernErrors": []})


async def test_two_that_meet_on_a_new_row_both_get_through(server: MongoModel, outbox: MongoOutbox) -> None:
    """An upsert that is refused because the other one was first is repeated; the rest of the batch stands."""
    server.trouble = failing(duplicate(), only="bulk_write")
    rows = [new_row("a"), new_row("b")]
    assert await outbox.insert(rows) == {row.resume_id for row in rows}


@pytest.mark.parametrize("error", [duplicate(121), duplicate(), AutoReconnect("gone")], ids=["other", "always", "away"])
async def test_a_batch_that_is_not_taken_is_said_to_be(
    server: MongoModel, outbox: MongoOutbox, error: Exception
) -> None:
    """Another error than a meeting, or meeting without end: OutboxUnavailable; repeating it takes the rows in."""
    server.trouble = failing(error, times=6, only="bulk_write")
    with pytest.raises(OutboxUnavailable):
        await outbox.insert([new_row("a"), new_row("b")])
    server.trouble = failing(error, times=0)
    await outbox.insert([new_row("a"), new_row("b")])
    assert (await outbox.counts())[State.PENDING] == 2


@pytest.mark.parametrize("error", [AutoReconnect("s3cret away"), WTimeoutError("no majority", 64, {})])
async def test_trouble_is_told_without_the_password(server: MongoModel, outbox: MongoOutbox, error: Exception) -> None:
    """Whatever the driver raises, also for want of a majority, is OutboxUnavailable with the place and the reason."""
    await outbox.insert([new_row()])
    (claim,) = await outbox.claim("me", {"x": 1}, LONG_MS)
    server.trouble = failing(error)
    with pytest.raises(OutboxUnavailable, match=r"mongodb://me:\*\*\*@model: ") as caught:
        await outbox.store_outcome(claim, COMPLETE)
    assert "s3cret" not in str(caught.value)
    await outbox.store_outcome(claim, COMPLETE)


async def test_a_server_that_hangs_hangs_nothing(
    server: MongoModel, outbox: MongoOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operation fails at its deadline."""
    monkeypatch.setattr(module, "DEADLINE_S", 0.05)
    server.hangs = True
    with pytest.raises(OutboxUnavailable, match="no answer within"):
        await outbox.counts()
    server.hangs = False
    assert (await outbox.counts())[State.PENDING] == 0


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # pymongo forgets a socket it can't connect
async def test_an_outbox_without_a_server_says_so() -> None:
    """The real driver, with nobody there: unavailable, without the password, and it can be closed."""
    outbox = MongoOutbox("mongodb://me:s3cret@127.0.0.1:1/?serverSelectionTimeoutMS=50")
    with pytest.raises(OutboxUnavailable, match=r"Connect call failed \('127.0.0.1', 1\)$") as caught:
        await outbox.open()
    assert "s3cret" not in str(caught.value)
    await outbox.close()
    await outbox.close()
    del caught
    gc.collect()
    with pytest.raises(OutboxUnavailable, match="closed"):
        await outbox.counts()


async def test_a_newer_schema_is_refused(server: MongoModel, outbox: MongoOutbox) -> None:
    """Collections of a later version are not touched, and the error says both versions."""
    server.collections["outbox_schema"]["outbox"]["version"] = 2
    server.indexes.clear()
    with pytest.raises(OutboxUnavailable, match="version 2; this program knows 1"):
        await on(server).open()
    assert server.indexes == {}


async def test_looking_does_not_create_an_outbox(server: MongoModel) -> None:
    """Without ``create`` a place without an outbox is an error, and stays without."""
    looking = on(server, create=False)
    with pytest.raises(OutboxUnavailable, match="there is no outbox"):
        await looking.open()
    assert server.indexes == {}
    assert not any(server.collections.values())
    await on(server).open()
    await looking.open()


async def test_what_is_looked_for_has_an_index(server: MongoModel, outbox: MongoOutbox) -> None:
    """Lane, then time, then arrival; state, then the latest change."""
    assert server.indexes == {
        "waiting": [("lane", 1), ("claimable_at", 1), ("seq", 1)],
        "state": [("state", 1), ("updated_at", -1), ("seq", -1)],
    }


@pytest.mark.parametrize("running", [True, False])
async def test_a_server_whose_clock_stepped_back_holds_nothing_up(
    server: MongoModel, outbox: MongoOutbox, running: bool
) -> None:
    """Noticed at the start or while running: a lease gets its time from now, a backoff its delay, not an hour more."""
    server.clock_ahead_ms = 3_600_000
    await outbox.insert([new_row("waiting"), new_row("leased", lane="y")])
    (claim,) = await outbox.claim("alive", {"y": 1}, LONG_MS)
    await outbox.survey(1)
    server.clock_ahead_ms = 0
    if running:
        await outbox.survey(1)
    else:
        await on(server).open()
    survey = await outbox.survey(1)
    assert set(survey.lanes) == {"x"}
    assert survey.next_in_ms is not None
    assert LONG_MS - 30_000 < survey.next_in_ms <= LONG_MS
    assert await outbox.renew([claim], LONG_MS) == set()


async def test_pruning_goes_in_pieces(server: MongoModel, outbox: MongoOutbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows are too old, each deletion is of a bounded number of them."""
    monkeypatch.setattr(module, "_PRUNE_BATCH", 3)
    await outbox.insert([new_row(f"r{at}") for at in range(7)])
    for claim in await outbox.claim("me", {"x": 7}, LONG_MS):
        await outbox.finish(await outbox.store_outcome(claim, COMPLETE), "accepted")
    deletions: list[str] = []
    server.trouble = lambda operation: deletions.append(operation) if operation == "delete_many" else None
    server.clock_ahead_ms = 10
    assert await outbox.prune_done(1) == 7
    assert len(deletions) == 3


async def test_a_claim_given_up_midway_is_no_loss(server: MongoModel, outbox: MongoOutbox) -> None:
    """A claim that fails after some rows were leased: they return when their lease is over."""
    await outbox.insert([new_row(f"r{at}") for at in range(3)])
    seen: list[str] = []

    def trouble(operation: str) -> None:
        seen.append(operation)
        if seen.count("find_one_and_update") == 3:
            raise AutoReconnect("away")

    server.trouble = trouble
    with pytest.raises(OutboxUnavailable):
        await outbox.claim("me", {"x": 3}, LONG_MS)
    server.trouble = lambda _: None
    assert len(await outbox.claim("me", {"x": 3}, LONG_MS)) == 1
    server.clock_ahead_ms = LONG_MS + 1_000
    assert len(await outbox.claim("me", {"x": 3}, LONG_MS)) == 3
