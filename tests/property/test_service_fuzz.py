"""The whole service in memory under commands and stored bytes of any kind: nothing breaks, nobody waits for it.

A few seconds by default; ``DURABLE_TIMER_FUZZ=20`` looks at twenty times as many cases.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.bodies import JUNK, bodies, mutated
from tests.support.commands import NAME, REF
from tests.support.lives import lives
from tests.support.ring import Ring, play
from timer_service.domain.identity import NameKey, TimerRef, derive_timer_ref
from timer_service.domain.model import Timer
from timer_service.wire.commands import KINDS
from timer_service.wire.records import UnreadableRecord, decode_resume, decode_wake, encode, terminal_record

EFFORT = int(os.environ.get("DURABLE_TIMER_FUZZ", "1"))


def examples(number: int) -> settings:
    return settings(
        max_examples=number * EFFORT,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


# -- commands -------------------------------------------------------------------------------------------------

_KEYS = [NAME, {"name": "other"}, {"flow_id": "f", "flow_version": "1", "root_execution_id": "r", "node_id": "n"}]
_REFS = [REF, derive_timer_ref(NameKey("other"))]
_DELAYS = st.sampled_from([{"delay_ms": 1}, {"delay_ms": 2_000}, {"at_ms": 0}, {"delay_ms": 90_000}])


@st.composite
def near(draw: st.DrawFn) -> tuple[str, bytes]:
    """Subject and body of a command that is likely to concern one of a few timers, in its present state or not."""
    kind, fields = draw(bodies())
    fields["command_id"] = draw(st.sampled_from(["a", "b", "c", "d", "e", "f"]))
    if "timer" in fields and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(_KEYS))
        fields = {**fields, "timer": key, "due": draw(_DELAYS), "edges": None, "runtime_sha256": None}
    if "timer_ref" in fields:
        fields["timer_ref"] = draw(st.sampled_from(_REFS))
    if "fence" in fields:
        fields |= {"generation": draw(st.integers(0, 2)), "fence": draw(st.integers(1, 6))}
    if not draw(st.integers(0, 4)):
        fields = draw(mutated(fields))
    return f"durable_timer.commands.{kind}.v1", json.dumps(fields).encode()


_SUBJECTS = st.sampled_from([*KINDS, "x", ""]).flatmap(
    lambda kind: st.sampled_from([f"durable_timer.commands.{kind}.v1", f"durable_timer.commands.{kind}.v2", kind])
)
junk = st.tuples(_SUBJECTS, st.binary(max_size=60) | JUNK.map(lambda value: json.dumps(value).encode()))
_HEADERS = st.sampled_from([None, {}, {"Durable-Timer-Reply": "$KV.x"}, {"Durable-Timer-Reply": "_INBOX.>"}])


@examples(60)
@given(
    st.lists(st.tuples(near() | near() | junk, _HEADERS, st.sampled_from([0.0, 0.0, 0.5, 3.0])), max_size=14),
    st.integers(1, 2),
)
def test_any_commands(sent: list[tuple[tuple[str, bytes], dict[str, str] | None, float]], replicas: int) -> None:
    """Whatever is sent: each is settled once with one outcome, every refusal is recorded, nothing breaks."""

    async def story() -> None:
        async with Ring(replicas) as ring:
            seqs = []
            for (subject, body), headers, pause_s in sent:
                seqs.append((ring.publish(subject, body, headers), headers))
                await asyncio.sleep(pause_s)
            await ring.settle()
            ring.sound()
            told = [ring.outcomes(seq) for seq, headers in seqs if headers is None]
            assert all(len(outcomes) == 1 for outcomes in told)
            assert len(ring.publicity.outcomes) == len(told), "a reply went where it must not"
            refused = Counter(outcome.code for outcomes in told for outcome in outcomes if outcome.status == "rejected")
            recorded = Counter(rejection.code for rejection in ring.publicity.rejections)
            assert refused <= recorded
            assert sum(recorded.values()) <= len(sent)
            _one_record_an_end(ring)

    play(story())


def _one_record_an_end(ring: Ring) -> None:
    for timer_ref in ring.archive._records:
        ends = [record.generation for record in ring.archive.records(timer_ref)]
        assert ends == sorted(set(ends)), "an end was archived twice"


# -- stored records -------------------------------------------------------------------------------------------

_ODD = st.sampled_from(
    [b"0", b"-1", b"1e400", b"1.5", b"9" * 30, b"9" * 5_000, b"-" + b"9" * 25, b"null", b'"x"', b"[]", b"{}", b"true",
     b'"\\ud800"', b'"\xff"', b"9007199254740993", b"9223372036854775807"]
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """A stored record after an accident: a value, a few bytes, or its end is other than it was."""
    match draw(st.integers(0, 4)):
        case 0:
            return draw(st.binary(max_size=40))
        case 1:
            cut = draw(st.integers(0, len(data)))
            return data[:cut] + draw(st.binary(max_size=3)) + data[cut + draw(st.integers(0, 3)) :]
        case _:
            fields = json.loads(data)
            for _ in range(draw(st.integers(1, 2))):
                places = [fields, fields, *fields.get("timeline", [])[-1:]]
                place = draw(st.sampled_from([place for place in places if isinstance(place, dict)]))
                if place:
                    place[draw(st.sampled_from(sorted(place)))] = "@odd@"
            text = json.dumps(fields).encode()
            for _ in range(text.count(b'"@odd@"')):
                text = text.replace(b'"@odd@"', draw(_ODD), 1)
            return text


@st.composite
def accidents(draw: st.DrawFn) -> tuple[TimerRef, bytes, bool]:
    """A timer, its damaged record, and whether that stands in the archive."""
    timer: Timer = draw(lives(most=8))
    archived = timer.phase.ended and draw(st.booleans())
    return timer.timer_ref, draw(damaged(encode(terminal_record(timer) if archived else timer))), archived


@examples(80)
@given(st.lists(accidents(), min_size=1, max_size=3), st.booleans(), st.lists(st.binary(max_size=30), max_size=3))
def test_any_stored_bytes(found: list[tuple[TimerRef, bytes, bool]], at_start: bool, garbage: list[bytes]) -> None:
    """States, archive records and wakes of any bytes crash nothing; commands for them are settled; others go on."""

    async def story() -> None:
        ring = Ring()
        if at_start:
            _store(ring, found)
        async with ring:
            await ring.ask("start", timer={"name": "healthy"}, due={"delay_ms": 3_000})
            if not at_start:
                _store(ring, found)
            for data in garbage:
                ring.wake(data)
            for timer_ref, _, _ in found:
                wake = {"v": 1, "timer_ref": timer_ref, "generation": 0, "woken_at_ms": 1}
                ring.wake(json.dumps(wake).encode())
                for kind, fields in _feedback(timer_ref):
                    seq = ring.send(kind, **fields)
                    await ring.until(lambda seq=seq: ring.outcomes(seq), f"the outcome of {kind}")  # type: ignore[misc]
            healthy = derive_timer_ref(NameKey("healthy"))
            resume = await ring.resume(healthy, 0)
            assert resume.due_at_ms <= ring.clock.now_ms() < resume.due_at_ms + 60_000
            await ring.ask("complete", timer_ref=healthy, generation=0, fence=resume.fence)
            await ring.until(lambda: not ring.state.peek(healthy).timer, "the end of the healthy one")
            await asyncio.sleep(300)
            assert not ring.queued
            assert ring.wakes_unsettled == 0
            assert ring.log.mistakes == []
            assert ring.replicas[0].crashed() == []

    play(story())


def _store(ring: Ring, found: list[tuple[TimerRef, bytes, bool]]) -> None:
    for timer_ref, data, archived in found:
        if archived:
            ring.archive._seq += 1
            ring.archive._records.setdefault(timer_ref, []).append((data, ring.archive._seq))
        else:
            ring.state.overwrite(timer_ref, data)


def _feedback(timer_ref: str) -> list[tuple[str, dict[str, Any]]]:
    named = {"timer_ref": timer_ref, "generation": 0, "fence": 2}
    return [("complete", named), ("retry", named), ("cancel", {"timer_ref": timer_ref, "wait_ms": 0})]


@examples(300)
@given(st.binary(max_size=80) | JUNK.map(lambda value: json.dumps(value).encode()) | lives(most=3).flatmap(
    lambda timer: damaged(encode({"v": 1, "timer_ref": timer.timer_ref, "generation": 1, "woken_at_ms": 5})))
)  # fmt: skip
def test_any_wakes_and_resumes(data: bytes) -> None:
    """Bytes are a wake or a resume, or UnreadableRecord: no other way out; and what was read can be written."""
    for decode in (decode_wake, decode_resume):
        try:
            encode(decode(data))
        except UnreadableRecord:
            continue


@pytest.mark.parametrize(
    ("field", "value"), [("due_at_ms", "9" * 30), ("due_at_ms", "-1"), ("generation", "9" * 25), ("fence", "9" * 20)]
)
def test_a_number_that_breaks_arithmetic_is_unreadable(field: str, value: str) -> None:
    """A state with a number that no calculation survives is a problem of that timer alone, before and while it runs."""

    async def story() -> None:
        ring = Ring()
        async with ring:
            await ring.ask("start", timer=NAME, due={"delay_ms": 5_000})
            stored = ring.state.peek(REF).timer
            assert stored is not None
            fields = {**json.loads(encode(stored)), field: "@"}
            ring.state.overwrite(REF, json.dumps(fields).replace('"@"', value).encode())
            await ring.until(lambda: len(ring.replicas[0].problems) == 1, "the problem to be seen")
            assert (await ring.ask("cancel", timer_ref=REF)).code == "state_unreadable"
            await asyncio.sleep(60)
            assert ring.resumes.standing() == []
            ring.sound()

    play(story())
