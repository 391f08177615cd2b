"""What every outbox store promises (notify_consumer/outbox/base.py), on every store.

Leases and backoffs run by the store's own clock, so the tests use short ones and wait for what follows from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from notify_consumer.errors import LeaseLost
from notify_consumer.outbox.base import FEEDBACK_LANE, Claim, Feedback, NewRow, Outbox, State
from tests.support.notify import new_row, until
from tests.support.outboxes import STORES

LONG_MS = 60_000
SHORT_MS = 30
COMPLETE = Feedback("complete", {"v": 1, "command_id": "notify:x", "generation": 2**62})

Maker = Callable[[], Outbox]


@pytest.fixture(params=STORES)
def maker(request: pytest.FixtureRequest) -> Maker:
    """Makes outboxes on one and the same store."""
    return STORES[request.param](request).make


@pytest.fixture
async def outbox(maker: Maker) -> AsyncIterator[Outbox]:
    made = maker()
    await made.open()
    yield made
    await made.close()


async def taken(outbox: Outbox, lane: str = "x", *, owner: str = "me", lease_ms: int = LONG_MS) -> Claim:
    """A claim of the one row in ``lane``, as soon as it can be claimed."""

    async def attempt() -> list[Claim]:
        return await outbox.claim(owner, {lane: 1}, lease_ms)

    claims: list[Claim] = await until(attempt, f"a claim in {lane}")
    return claims[0]


async def state_of(outbox: Outbox, resume_id: str) -> State:
    row = await outbox.get(resume_id)
    assert row is not None
    return row.state


async def done_row(outbox: Outbox, name: str = "order-1") -> str:
    """A row that went all the way."""
    await outbox.insert([new_row(name)])
    claim = await outbox.store_outcome(await taken(outbox), COMPLETE)
    await outbox.finish(claim, "accepted")
    return claim.resume_id


# -- taking in ------------------------------------------------------------------------------------------------


async def test_a_resume_is_taken_in_once(outbox: Outbox) -> None:
    """Inserting tells which rows were new, and leaves known ones as they are."""
    first, second = new_row("a"), new_row("b")
    assert await outbox.insert([first]) == {first.resume_id}
    claim = await taken(outbox)
    assert await outbox.insert([first, second]) == {second.resume_id}
    assert await state_of(outbox, claim.resume_id) is State.CLAIMED
    await outbox.back_off(claim, 0, "still mine")


async def test_the_same_resume_twice_in_one_batch_is_one_row(outbox: Outbox) -> None:
    """A batch may hold a resume more than once."""
    row = new_row()
    assert await outbox.insert([row, row]) == {row.resume_id}
    assert (await outbox.counts())[State.PENDING] == 1


async def test_nothing_to_insert_is_fine(outbox: Outbox) -> None:
    """An empty batch changes nothing."""
    assert await outbox.insert([]) == set()


async def test_an_unreadable_row_is_dead_until_a_readable_one_comes(outbox: Outbox) -> None:
    """An unreadable resume is kept visibly, is never claimed or revived, and gives way to a readable copy."""
    good = new_row()
    bad = NewRow(good.resume_id, "unreadable", b"{", unreadable="broken")
    assert await outbox.insert([bad]) == {good.resume_id}
    assert not await outbox.claim("me", {"unreadable": 1, "x": 1}, LONG_MS)
    assert not await outbox.revive(good.resume_id)
    row = await outbox.get(good.resume_id)
    assert row is not None
    assert (row.state, row.last_error, row.body) == (State.DEAD, "broken", b"{")
    assert await outbox.insert([bad]) == set()
    assert await outbox.insert([good]) == {good.resume_id}
    claim = await taken(outbox)
    assert claim.body == good.body


async def test_a_readable_row_never_gives_way(outbox: Outbox) -> None:
    """A dead row that was readable stays dead, whatever arrives under its id."""
    row = new_row()
    await outbox.insert([row])
    await outbox.kill(await taken(outbox), "enough")
    assert await outbox.insert([row, NewRow(row.resume_id, "unreadable", b"{", unreadable="broken")]) == set()
    kept = await outbox.get(row.resume_id)
    assert kept is not None
    assert (kept.state, kept.last_error, kept.body) == (State.DEAD, "enough", row.body)


async def test_of_one_batch_the_readable_copy_stays(outbox: Outbox) -> None:
    """A batch that has a resume readable and unreadable keeps the readable one, whichever comes first."""
    first, second = new_row("a"), new_row("b")
    broken = [NewRow(row.resume_id, "unreadable", b"{", unreadable="broken") for row in (first, second)]
    assert await outbox.insert([broken[0], first, second, broken[1]]) == {first.resume_id, second.resume_id}
    for row in (first, second):
        kept = await outbox.get(row.resume_id)
        assert kept is not None
        assert (kept.state, kept.body, kept.last_error) == (State.PENDING, row.body, None)


async def test_texts_that_no_store_expects_hold_nothing_up(outbox: Outbox) -> None:
    """NUL, half a surrogate pair, a dollar sign, a very long flow: the row goes its way, the text stays readable."""
    odd = "$claimable_at \0 \ud800 %s {} \N{SNOWMAN}"
    flows = ["$state", "a\0b", "c\ud800d", "long" * 5_000]
    rows = [new_row(f"r{at}", lane=flow) for at, flow in enumerate(flows)]
    broken = NewRow("x" * 26 + ".0", "unreadable", b"{", unreadable=odd)
    assert len(await outbox.insert([*rows, broken])) == 5
    survey = await outbox.survey(5)
    claims = await outbox.claim("$owner", dict.fromkeys(survey.lanes, 1), LONG_MS)
    assert {claim.resume_id for claim in claims} == {row.resume_id for row in rows}
    assert {claim.owner for claim in claims} == {"$owner"}
    by_id = {claim.resume_id: claim for claim in claims}
    back, dead, done, again = (by_id[row.resume_id] for row in rows)
    await outbox.back_off(back, 0, odd)
    await outbox.kill(dead, odd)
    feedback = Feedback("complete", {"$set": "$state \0", "n": 2**70})
    await outbox.finish(await outbox.store_outcome(done, feedback), odd)
    await outbox.release(again)
    kept = {each: await outbox.get(each.resume_id) for each in (back, dead, done)}
    for row in kept.values():
        assert row is not None
        text = row.settled if row.state is State.DONE else row.last_error
        assert text is not None
        assert text.startswith("$claimable_at ")
        assert text.endswith(" %s {} \N{SNOWMAN}")
    assert [row.feedback for row in kept.values() if row is not None and row.feedback] == [feedback]


# -- claiming -------------------------------------------------------------------------------------------------


async def test_a_claim_carries_the_row(outbox: Outbox) -> None:
    """A claim has the body as it came in, its owner, and counts the attempt."""
    row = new_row()
    await outbox.insert([row])
    claim = await taken(outbox, owner="somebody")
    assert (claim.resume_id, claim.body, claim.owner) == (row.resume_id, row.body, "somebody")
    assert (claim.flow, claim.lane, claim.attempts, claim.sends, claim.feedback) == ("x", "x", 1, 0, None)
    kept = await outbox.get(row.resume_id)
    assert kept is not None
    assert (kept.owner, kept.attempts) == ("somebody", 1)


async def test_a_live_lease_is_not_stolen(outbox: Outbox) -> None:
    """While a lease runs nobody gets the row, its owner neither."""
    await outbox.insert([new_row()])
    await taken(outbox)
    assert await outbox.claim("other", {"x": 5}, LONG_MS) == []
    assert await outbox.claim("me", {"x": 5}, LONG_MS) == []


async def test_claims_are_what_was_wanted(outbox: Outbox) -> None:
    """At most the wanted number per lane, the first come first, and no other lane."""
    rows = [new_row(f"{lane}{i}", lane=lane) for i in range(4) for lane in ("x", "y", "z")]
    for row in rows:
        await outbox.insert([row])
    claims = await outbox.claim("me", {"x": 2, "y": 1, "nothing": 3}, LONG_MS)
    wanted = [rows[at].resume_id for at in (0, 1, 3)]  # x0, y0, x1
    assert sorted(claim.resume_id for claim in claims) == sorted(wanted)


async def test_concurrent_claims_share_nothing(maker: Maker) -> None:
    """However many claim at once, through however many connections, each row goes to one of them."""
    boxes = [maker() for _ in range(3)]
    for each in boxes:
        await each.open()
    await boxes[0].insert([new_row(f"r{i}") for i in range(60)])
    rounds = await asyncio.gather(*(box.claim(f"{n}", {"x": 7}, LONG_MS) for n in range(4) for box in boxes))
    ids = [claim.resume_id for claims in rounds for claim in claims]
    assert len(ids) == 60
    assert len(set(ids)) == 60
    for each in boxes:
        await each.close()


async def test_what_waited_longer_comes_first(outbox: Outbox) -> None:
    """A row that backed off stands behind those that came meanwhile, however early it was taken in."""
    await outbox.insert([new_row("a")])
    claim = await taken(outbox)
    await outbox.insert([new_row("b")])
    await outbox.back_off(claim, SHORT_MS, "later")

    async def both() -> bool:
        waiting = (await outbox.survey(5)).lanes.get("x")
        return waiting is not None and waiting.count == 2

    await until(both, "both wait")
    assert (await taken(outbox)).resume_id == new_row("b").resume_id
    again = await taken(outbox)
    assert (again.resume_id, again.waited_ms >= 0) == (claim.resume_id, True)


async def test_a_batch_comes_in_its_order(outbox: Outbox) -> None:
    """Rows of one batch are claimed in the order in which they stood in it."""
    rows = [new_row(f"r{at}") for at in range(20)]
    await outbox.insert(rows)
    claims = [await taken(outbox) for _ in rows]
    assert [claim.resume_id for claim in claims] == [row.resume_id for row in rows]


async def test_a_claim_of_a_dead_owner_runs_out(outbox: Outbox) -> None:
    """After the lease another owner gets the row, and the attempt that died counts."""
    await outbox.insert([new_row()])
    first = await taken(outbox, lease_ms=SHORT_MS)
    second = await taken(outbox, owner="other")
    assert second.resume_id == first.resume_id
    assert second.token != first.token
    assert second.attempts == 2


async def test_renewing_keeps_a_lease(outbox: Outbox) -> None:
    """A renewed lease runs from the renewal; nothing is lost."""
    await outbox.insert([new_row("a"), new_row("b", lane="y")])
    claim = await taken(outbox, lease_ms=SHORT_MS)
    assert await outbox.renew([claim], LONG_MS) == set()
    await taken(outbox, "y", lease_ms=SHORT_MS)
    await taken(outbox, "y")  # a lease of that length, begun later, has run out by now
    assert await outbox.claim("other", {"x": 1}, LONG_MS) == []


async def test_a_late_owner_whose_row_nobody_took_goes_on(outbox: Outbox) -> None:
    """A lease that ran out unnoticed is still good for every write, and can be renewed."""
    await outbox.insert([new_row("a"), new_row("b", lane="y")])
    claim = await taken(outbox, lease_ms=1)
    await taken(outbox, "y", lease_ms=SHORT_MS)
    await taken(outbox, "y")
    assert await outbox.renew([claim], LONG_MS) == set()
    await outbox.finish(await outbox.store_outcome(claim, COMPLETE), "accepted")


# -- the fence ------------------------------------------------------------------------------------------------


async def test_a_frozen_owner_is_refused_at_every_write(outbox: Outbox) -> None:
    """Once another owner has the row, no write of the former one comes through or changes anything."""
    await outbox.insert([new_row()])
    stale = await taken(outbox, lease_ms=SHORT_MS)
    await taken(outbox, owner="other")
    before = await outbox.get(stale.resume_id)
    for write in (
        outbox.store_outcome(stale, COMPLETE),
        outbox.finish(stale, "accepted"),
        outbox.back_off(stale, 1, "late"),
        outbox.kill(stale, "late"),
        outbox.release(stale),
    ):
        with pytest.raises(LeaseLost):
            await write
    assert await outbox.renew([stale], LONG_MS) == {stale.resume_id}
    assert await outbox.get(stale.resume_id) == before


async def test_the_same_owner_name_does_not_help(outbox: Outbox) -> None:
    """The token counts: a process that starts again under the same name neither has nor keeps the old claim."""
    await outbox.insert([new_row()])
    old = await taken(outbox, owner="host", lease_ms=SHORT_MS)
    new = await taken(outbox, owner="host")
    with pytest.raises(LeaseLost):
        await outbox.finish(old, "accepted")
    await outbox.store_outcome(new, COMPLETE)


async def test_a_settled_row_refuses_its_owner(outbox: Outbox) -> None:
    """Done, dead and handed back end the claim."""
    await outbox.insert([new_row("a"), new_row("b", lane="y"), new_row("c", lane="z")])
    done, dead, back = await taken(outbox), await taken(outbox, "y"), await taken(outbox, "z")
    await outbox.finish(await outbox.store_outcome(done, COMPLETE), "accepted")
    await outbox.kill(dead, "enough")
    await outbox.back_off(back, 0, "again")
    for claim in (done, dead, back):
        with pytest.raises(LeaseLost):
            await outbox.store_outcome(claim, COMPLETE)
    assert await outbox.renew([done, dead, back], LONG_MS) == {c.resume_id for c in (done, dead, back)}


async def test_an_unknown_row_refuses(outbox: Outbox) -> None:
    """A claim of a row that is not there is lost."""
    await outbox.insert([new_row()])
    claim = await taken(outbox)
    ghost = Claim(**{f: getattr(claim, f) for f in Claim.__struct_fields__} | {"resume_id": "gone.0"})
    with pytest.raises(LeaseLost):
        await outbox.finish(ghost, "accepted")


# -- answers --------------------------------------------------------------------------------------------------


async def test_an_answer_outlives_its_owner(outbox: Outbox) -> None:
    """An answered row comes back as its feedback only: in the feedback lane, with the answer, whole."""
    await outbox.insert([new_row()])
    claim = await taken(outbox, lease_ms=SHORT_MS)
    answered = await outbox.store_outcome(claim, COMPLETE)
    assert (answered.feedback, answered.lane, answered.sends) == (COMPLETE, FEEDBACK_LANE, 1)
    assert await state_of(outbox, claim.resume_id) is State.ANSWERED
    again = await taken(outbox, FEEDBACK_LANE, owner="other")
    assert (again.resume_id, again.feedback) == (claim.resume_id, COMPLETE)
    assert (again.attempts, again.sends) == (1, 2)
    assert await outbox.claim("other", {"x": 1}, LONG_MS) == []


async def test_storing_an_answer_again_is_the_same(outbox: Outbox) -> None:
    """A write whose reply was lost may be repeated."""
    await outbox.insert([new_row()])
    claim = await taken(outbox)
    assert await outbox.store_outcome(claim, COMPLETE) == await outbox.store_outcome(claim, COMPLETE)


async def test_an_answered_row_stays_leased(outbox: Outbox) -> None:
    """Between answer and feedback nobody else takes the row."""
    await outbox.insert([new_row()])
    await outbox.store_outcome(await taken(outbox), COMPLETE)
    assert await outbox.claim("other", {FEEDBACK_LANE: 1, "x": 1}, LONG_MS) == []


async def test_a_done_row_remembers_its_end(outbox: Outbox) -> None:
    """Done: how it was settled and the feedback stay, the body goes, and nothing waits."""
    resume_id = await done_row(outbox)
    row = await outbox.get(resume_id)
    assert row is not None
    assert (row.state, row.settled, row.feedback, row.body, row.owner) == (
        State.DONE,
        "accepted",
        COMPLETE,
        b"",
        None,
    )
    survey = await outbox.survey(10)
    assert (dict(survey.lanes), survey.next_in_ms) == ({}, None)


async def test_feedback_of_done_rows_is_sent_again(outbox: Outbox) -> None:
    """Requeueing takes exactly the done ones, and then their stored feedback can be claimed, not their handler."""
    resume_id = await done_row(outbox)
    pending = new_row("other", lane="y")
    await outbox.insert([pending])
    assert await outbox.requeue_feedback([resume_id, pending.resume_id, "unknown.0"]) == {resume_id}
    assert await outbox.requeue_feedback([resume_id]) == set()
    claim = await taken(outbox, FEEDBACK_LANE)
    assert (claim.resume_id, claim.feedback, claim.sends) == (resume_id, COMPLETE, 1)
    await outbox.finish(claim, "duplicate")
    assert await state_of(outbox, resume_id) is State.DONE


# -- giving back ----------------------------------------------------------------------------------------------


async def test_backing_off_puts_a_row_off(outbox: Outbox) -> None:
    """A row that backed off waits out its delay, keeps the error and counts its attempts."""
    await outbox.insert([new_row("a"), new_row("b", lane="y")])
    await outbox.back_off(await taken(outbox), LONG_MS, "boom")
    await outbox.back_off(await taken(outbox, "y"), SHORT_MS, "boom")
    again = await taken(outbox, "y")
    assert again.attempts == 2
    assert await outbox.claim("me", {"x": 1}, LONG_MS) == []
    row = await outbox.get(new_row("a").resume_id)
    assert row is not None
    assert (row.state, row.last_error, row.owner) == (State.PENDING, "boom", None)


async def test_backing_off_feedback_keeps_the_answer(outbox: Outbox) -> None:
    """Feedback that was not heard of stays answered."""
    await outbox.insert([new_row()])
    await outbox.back_off(await outbox.store_outcome(await taken(outbox), COMPLETE), 0, "no outcome")
    claim = await taken(outbox, FEEDBACK_LANE)
    assert (claim.feedback, claim.sends, claim.attempts) == (COMPLETE, 2, 1)


async def test_releasing_is_as_if_never_claimed(outbox: Outbox) -> None:
    """A released row can be claimed at once, and its attempt (or send) does not count."""
    await outbox.insert([new_row()])
    await outbox.release(await taken(outbox))
    claim = await taken(outbox)
    assert claim.attempts == 1
    await outbox.release(await outbox.store_outcome(claim, COMPLETE))
    again = await taken(outbox, FEEDBACK_LANE)
    assert (again.attempts, again.sends, again.feedback) == (1, 1, COMPLETE)


async def test_the_dead_wait_to_be_revived(outbox: Outbox) -> None:
    """A dead row is never claimed; revived it starts from nothing, its former answer forgotten."""
    await outbox.insert([new_row()])
    claim = await outbox.store_outcome(await taken(outbox), COMPLETE)
    await outbox.kill(claim, "rejected")
    row = await outbox.get(claim.resume_id)
    assert row is not None
    assert (row.state, row.last_error) == (State.DEAD, "rejected")
    assert await outbox.claim("me", {"x": 1, FEEDBACK_LANE: 1}, LONG_MS) == []
    assert await outbox.revive(claim.resume_id)
    assert not await outbox.revive(claim.resume_id)
    again = await taken(outbox)
    assert (again.attempts, again.feedback, again.body) == (1, None, row.body)


async def test_only_the_dead_are_revived(outbox: Outbox) -> None:
    """Neither an unknown nor a done row is revived."""
    assert not await outbox.revive("unknown.0")
    assert not await outbox.revive(await done_row(outbox))


# -- looking --------------------------------------------------------------------------------------------------


async def test_the_survey_tells_what_waits(outbox: Outbox) -> None:
    """Each lane with its number up to the limit; what is leased or backing off is not there, but when it will be."""
    await outbox.insert([new_row(f"x{i}") for i in range(5)] + [new_row("y", lane="y"), new_row("z", lane="z")])
    await taken(outbox, "y", lease_ms=LONG_MS)
    await outbox.back_off(await taken(outbox, "z"), LONG_MS // 2, "later")
    survey = await outbox.survey(3)
    assert {lane: waiting.count for lane, waiting in survey.lanes.items()} == {"x": 3}
    assert survey.next_in_ms is not None
    assert 0 < survey.next_in_ms <= LONG_MS // 2


async def test_a_row_that_can_be_claimed_again_is_surveyed(outbox: Outbox) -> None:
    """A lease that ran out waits in its lane like any other row, and is no longer among what comes later."""
    await outbox.insert([new_row("a"), new_row("b", lane="y")])
    claim = await taken(outbox, lease_ms=SHORT_MS)
    await outbox.store_outcome(await taken(outbox, "y", lease_ms=SHORT_MS), COMPLETE)

    async def both() -> bool:
        return set((await outbox.survey(5)).lanes) == {"x", FEEDBACK_LANE}

    await until(both, "both leases ran out")
    survey = await outbox.survey(5)
    assert (survey.lanes["x"].count, survey.next_in_ms) == (1, None)
    assert abs(survey.lanes["x"].oldest_ms - claim.expires_at_ms) < SHORT_MS


async def test_the_survey_knows_who_waits_longest(outbox: Outbox) -> None:
    """The oldest waiting row of each lane is told, so that lanes can be compared."""
    await outbox.insert([new_row("a", lane="late")])
    await outbox.back_off(await taken(outbox, "late"), SHORT_MS, "later")
    await outbox.insert([new_row("b", lane="early")])

    async def both() -> bool:
        return set((await outbox.survey(1)).lanes) == {"early", "late"}

    await until(both, "both lanes wait")
    lanes = (await outbox.survey(1)).lanes
    rows = {lane: await outbox.get(new_row(name).resume_id) for lane, name in (("late", "a"), ("early", "b"))}
    assert {lane: waiting.oldest_ms for lane, waiting in lanes.items()} == {
        lane: row and row.claimable_at_ms for lane, row in rows.items()
    }


async def test_pruning_takes_old_done_rows_only(outbox: Outbox) -> None:
    """Done rows go when they are older than asked; everything else stays."""
    resume_id = await done_row(outbox)
    await outbox.insert([new_row("pending", lane="y"), new_row("dead", lane="z")])
    await outbox.kill(await taken(outbox, "z"), "enough")
    assert await outbox.prune_done(LONG_MS) == 0

    async def pruned() -> bool:
        return await outbox.prune_done(1) == 1

    await until(pruned, "the row is older than a millisecond")
    assert await outbox.get(resume_id) is None
    counts = await outbox.counts()
    assert (counts[State.PENDING], counts[State.DEAD], counts[State.DONE]) == (1, 1, 0)


async def test_browsing_shows_the_latest_first(outbox: Outbox) -> None:
    """Rows of one state or of all, as many as asked for, with every field that get() has."""
    await outbox.insert([new_row("a")])
    await outbox.insert([new_row("b", lane="y")])
    claim = await taken(outbox)
    await outbox.kill(claim, "enough")
    dead = await outbox.browse(State.DEAD, 10)
    assert dead == [await outbox.get(claim.resume_id)]
    assert len(await outbox.browse(None, 10)) == 2
    assert len(await outbox.browse(None, 1)) == 1


async def test_counts_name_every_state(outbox: Outbox) -> None:
    """States without rows are counted as zero."""
    assert await outbox.counts() == dict.fromkeys(State, 0)
    await outbox.insert([new_row()])
    assert (await outbox.counts())[State.PENDING] == 1
