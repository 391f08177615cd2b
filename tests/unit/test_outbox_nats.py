"""The parts of the NATS outbox that need no broker: the index, the broker's clock, rows as messages."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notify_consumer.outbox.base import FEEDBACK_LANE, Feedback, State
from notify_consumer.outbox.nats_bucket import BrokerClock
from notify_consumer.outbox.nats_index import Index
from notify_consumer.outbox.nats_record import VERSION, Place, Record, TooLarge, UnreadableRow, decode, encode, key_of
from timer_service.jetstream.watch import stamp_ms

PENDING = Place(VERSION, State.PENDING, "x", 0)


def later(wait_ms: int, state: State = State.CLAIMED) -> Place:
    return Place(VERSION, state, "x", wait_ms)


def waiting(index: Index, lane: str = "x") -> int:
    lanes = index.survey(1_000, 0).lanes
    return lanes[lane].count if lane in lanes else 0


# -- the broker's clock ---------------------------------------------------------------------------------------


@given(
    offset_ms=st.integers(-(10**12), 10**12), out_s=st.floats(0, 5), back_s=st.floats(0, 5), passed_s=st.floats(0, 100)
)
def test_the_brokers_time_lies_between_the_bounds(offset_ms: int, out_s: float, back_s: float, passed_s: float) -> None:
    """However long question and answer took: the lower bound is never ahead of the broker, the upper never behind."""
    clock, asked_s = BrokerClock(), 1_000.0
    answered_s = asked_s + out_s
    heard_s = answered_s + back_s
    clock.sample(answered_s * 1000 + offset_ms, asked_s, heard_s)
    now_s = heard_s + passed_s
    true_ms = now_s * 1000 + offset_ms
    assert clock.at_least_ms(now_s) <= true_ms + 0.01
    assert clock.at_most_ms(now_s) >= true_ms - 0.01
    assert clock.at_most_ms(now_s) - clock.at_least_ms(now_s) <= (out_s + back_s) * 1000 + 2


@pytest.mark.parametrize(
    ("stamp", "ms"),
    [
        ("1970-01-01T00:00:01Z", 1_000),
        ("1970-01-01T00:00:01.5Z", 1_500),
        ("1970-01-01T00:00:00.001999999Z", 1.999999),
        ("2026-11-30T21:56:00.123456789Z", 1_796_075_760_123.4568),
    ],
)
def test_instants_of_the_broker(stamp: str, ms: float) -> None:
    """With any number of digits behind the point."""
    assert stamp_ms(stamp) == pytest.approx(ms, abs=0.001)


# -- the index ------------------------------------------------------------------------------------------------


def test_a_lease_runs_from_when_it_was_stored() -> None:
    """Not earlier than to the millisecond, and a renewal replaces it."""
    index = Index()
    index.put("a", 1, later(100), 1_000)
    index.advance(1_099)
    assert waiting(index) == 0
    assert index.survey(1, 1_099).next_in_ms == 1
    index.put("a", 2, later(100), 1_050)
    index.advance(1_149)
    assert waiting(index) == 0
    index.advance(1_150)
    assert waiting(index) == 1
    assert index.survey(1, 1_150).next_in_ms is None


def test_what_is_older_changes_nothing() -> None:
    """News come from acks and from the stream, in any order; a row that is done does not come back by them."""
    index = Index()
    index.put("a", 5, later(10_000), 1_000)
    index.put("a", 4, PENDING, 999)
    index.put("a", 5, PENDING, 999)
    assert waiting(index) == 0
    index.drop("a", 4)
    assert (index.counts()[State.CLAIMED], index.strangers) == (1, set())
    index.drop("a", 6)
    assert (index.counts()[State.CLAIMED], index.strangers) == (0, {"a"})


def test_a_row_that_came_while_one_was_looked_for_stays() -> None:
    """The answer "nothing there" is about what was known when it was asked for."""
    index = Index()
    index.put("a", 1, PENDING, 1_000)
    asked = index.get("a")
    assert asked is not None
    index.put("a", 5, PENDING, 1_001)
    index.gone("a", asked)
    assert waiting(index) == 1
    asked = index.get("a")
    assert asked is not None
    index.gone("a", asked)
    assert waiting(index) == 0


def test_an_answer_that_comes_late_does_not_bring_back_what_is_done() -> None:
    """A row was read, and before the answer was here the bucket told of its end: it stays ended."""
    index = Index()
    index.follow("a", 1, PENDING, 1_000)
    index.follow("a", 3, Place(VERSION, State.DONE, "x", None), 1_002)
    index.put("a", 2, later(100), 1_001)
    assert index.counts() == dict.fromkeys(State, 0)
    index.put("a", 4, Place(VERSION, State.ANSWERED, "x", 0), 1_003)
    assert index.counts()[State.ANSWERED] == 1


def test_a_row_under_claim_is_nobody_elses() -> None:
    """Taken rows are not offered; given back they are, unless they have changed meanwhile."""
    index = Index()
    for seq, key in enumerate("abc", 1):
        index.put(key, seq, PENDING, 1_000)
    taken = index.take("x", 2)
    assert [key for key, _ in taken] == ["a", "b"]
    assert waiting(index) == 1
    index.put("a", 9, later(10_000), 1_001)
    for key, entry in taken * 2:
        index.give_back(key, entry)
    assert [key for key, _ in index.take("x", 5)] == ["b", "c"]
    assert index.take("x", 5) == []
    assert index.take("nothing", 5) == []


def test_own_writes_stay_in_the_order_of_the_stream() -> None:
    """An estimated time, up to a round trip late, does not put a row behind the next one, whose time is known."""
    index = Index()
    index.put("a", 1, PENDING, 1_010)
    index.put("c", 3, PENDING, 1_002)
    index.put("b", 2, PENDING, 1_015)
    index.put("d", 4, PENDING, 1_003)
    assert [key for key, _ in index.take("x", 5)] == ["a", "b", "c", "d"]


def test_a_clock_that_steps_back_holds_nothing_up() -> None:
    """Leases that are dated in what is now the future run anew from now, once."""
    index = Index()
    index.advance(1_000_000)
    index.put("a", 1, later(500), 1_000_000)
    index.advance(10_000)
    index.advance(10_499)
    assert waiting(index) == 0
    index.advance(10_500)
    assert waiting(index) == 1


def test_a_clock_that_trembles_changes_nothing() -> None:
    """The estimate of the broker's time goes back by milliseconds at a look: leases stay as they are."""
    index = Index()
    index.advance(1_000)
    index.put("a", 1, later(100), 1_000)
    index.advance(950)
    index.advance(1_099)
    assert waiting(index) == 0
    index.advance(1_100)
    assert waiting(index) == 1


def test_lanes_are_where_rows_wait() -> None:
    """Answered rows wait for their feedback, the others in their flow; each lane with its oldest."""
    index = Index()
    index.put("a", 1, PENDING, 1_000)
    index.put("b", 2, Place(VERSION, State.ANSWERED, "x", 0), 1_001)
    index.put("c", 3, Place(VERSION, State.PENDING, "y", 0), 1_002)
    index.put("d", 4, PENDING, 1_003)
    lanes = index.survey(1, 2_000).lanes
    assert {lane: (waiting.count, waiting.oldest_ms) for lane, waiting in lanes.items()} == {
        "x": (1, 1_000),
        FEEDBACK_LANE: (1, 1_001),
        "y": (1, 1_002),
    }


def test_done_rows_are_told_once_in_their_order() -> None:
    """Those of before then, so many at a time."""
    index = Index()
    for seq in range(10):
        index.follow(f"{seq}", seq, Place(VERSION, State.DONE, "x", None), 1_000 + seq)
    assert index.done_before(1_005, 3) == [0, 1, 2]
    assert index.done_before(1_005, 3) == [3, 4]
    assert index.done_before(1_005, 3) == []
    assert index.done_before(9_999, 99) == [5, 6, 7, 8, 9]


def test_heaps_do_not_grow_by_renewals() -> None:
    """A thousand renewals of a few rows leave a handful of places."""
    index = Index()
    for seq in range(3_000):
        index.put(f"{seq % 3}", seq, later(1_000_000), seq)
        index.put(f"y{seq % 3}", seq, Place(VERSION, State.PENDING, "y", 0), seq)
    assert len(index._later) < 200
    assert len(index._lanes["y"].heap) < 200


_STATES = [State.PENDING, State.CLAIMED, State.ANSWERED, State.DONE, State.DEAD]
_CHANGES = st.tuples(
    st.sampled_from("abcdef"), st.sampled_from(_STATES), st.sampled_from("xy"), st.integers(0, 50), st.integers(0, 20)
)


@given(st.lists(_CHANGES, max_size=60))
def test_the_index_agrees_with_a_plain_list(changes: list[tuple[str, State, str, int, int]]) -> None:
    """Whatever happens to rows: what can be claimed, in which order, and when the next can."""
    index, rows, now_ms = Index(), {}, 1_000_000
    for seq, (key, state, flow, wait_ms, passed_ms) in enumerate(changes, 1):
        now_ms += passed_ms
        wait = None if state in (State.DONE, State.DEAD) else wait_ms
        place = Place(VERSION, state, flow, wait)
        index.advance(now_ms)
        index.put(key, seq, place, now_ms)
        rows[key] = (None if wait is None else now_ms + wait, seq, place)
        if state is State.DONE:
            del rows[key]
    index.advance(now_ms)
    ready = {
        lane: [key for at_ms, _, key in sorted((r[0], r[1], k) for k, r in rows.items() if _ready(r, lane, now_ms))]
        for lane in ("x", "y", FEEDBACK_LANE)
    }
    survey = index.survey(100, now_ms)
    assert {lane: found.count for lane, found in survey.lanes.items()} == {k: len(v) for k, v in ready.items() if v}
    upcoming = [r[0] - now_ms for r in rows.values() if r[0] is not None and r[0] > now_ms]
    assert survey.next_in_ms == min(upcoming, default=None)
    assert {lane: [key for key, _ in index.take(lane, 100)] for lane in ready} == ready
    assert sum(index.counts().values()) == len(rows)


def _ready(row: tuple[int | None, int, Place], lane: str, now_ms: int) -> bool:
    return row[0] is not None and row[0] <= now_ms and row[2].lane == lane


# -- rows as messages -----------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    resume_id=st.text(max_size=50),
    flow=st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    body=st.binary(max_size=500),
    error=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
)
def test_rows_come_back_as_they_were(resume_id: str, flow: str, body: bytes, error: str | None) -> None:
    """Whatever is in them, line feeds too; headers are ASCII without line ends."""
    place = Place(VERSION, State.ANSWERED, flow, 5)
    feedback = Feedback("fail", {"n": 2**70, "text": flow})
    try:
        resume_id.encode()
    except UnicodeEncodeError:
        return
    record = Record(resume_id, "w", 1, 2, True, "me", "t", feedback, None, error, 7, place=place, body=body)
    header, data = encode(record, 2**20)
    assert header.isascii()
    assert not set(header) & set("\r\n\0")
    assert decode({"Notify-Consumer-Row": header}, data) == record


def test_a_later_version_is_not_read() -> None:
    """Whatever else it says."""
    header, data = encode(Record("a.0", "w", place=Place(VERSION + 1, State.PENDING, "x", 0)), 2**20)
    with pytest.raises(UnreadableRow, match=f"version {VERSION + 1}; this program knows {VERSION}"):
        decode({"Notify-Consumer-Row": header}, data)


@given(st.text(), st.text())
def test_keys_are_safe_and_tell_ids_apart(one: str, other: str) -> None:
    """Printable ASCII without wildcards, short, and no two ids the same."""
    key = key_of(one)
    assert key.isascii()
    assert key.isprintable()
    assert len(key) <= 200
    assert not set(key) & set(" *>")
    assert all(key.split("."))
    assert (key == key_of(other)) == (one == other)


def test_what_fits_only_compressed_is_compressed() -> None:
    """Also when the room is so short that the error has to be cut; what can't fit is refused."""
    record = Record("a.0", "w", last_error="e" * 30_000, place=PENDING, body=b"x" * 50_000)
    _, data = encode(record, 2_048)
    back = decode({"Notify-Consumer-Row": encode(record, 2_048)[0]}, data)
    assert (back.body, back.last_error) == (record.body, "e" * 200)
    with pytest.raises(TooLarge):
        encode(Record("a.0", "w", place=PENDING, body=os.urandom(5_000)), 4_096)
