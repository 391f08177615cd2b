"""Whatever happens to a timer, in whatever order: what the contract says never happens does not happen."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from tests.support.commands import LINEAGE, NAME, REF, command
from timer_service.domain.codes import Status
from timer_service.domain.identity import LineageKey, derive_timer_ref
from timer_service.domain.machine import Refused, Settled, Write, decide, elapse, note_resumed
from timer_service.domain.model import AnyCommand, Cancel, Order, Phase, Resumed, Start, Timer, Wake
from timer_service.wire.commands import Kind
from timer_service.wire.records import decode_timer, encode, terminal_record

DUES = st.one_of(
    st.fixed_dictionaries({"delay_ms": st.sampled_from([1, 500, 100_000])}),
    st.fixed_dictionaries({"at_ms": st.sampled_from([0, 1_000_000, 1_001_000, 2_000_000])}),
)
AGES = st.sampled_from([0, 0, 0, 1, 700, 5_000])  # how long ago it was stored; mostly nothing overtakes anything
OFFSETS = st.sampled_from([0, 0, 0, 0, -1, 1])
KEPT = 16


class OneTimer(RuleBasedStateMachine):
    """One timer under random commands, wakes and repetitions, with a book of what was accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.timer: Timer | None = None
        self.lineage = False
        self.ref = REF
        self.now_ms = 1_000_000
        self.count = 0
        self.accepted: list[tuple[AnyCommand, str | None]] = []
        self.applied = Order(0, 0)
        self.elapsed: set[int] = set()
        self.over: set[int] = set()
        """Generations that were cancelled, replaced or answered: they must never elapse again."""

    @initialize(lineage=st.sampled_from([False, False, True]), started=st.sampled_from([True, True, False]))
    def choose(self, lineage: bool, started: bool) -> None:
        self.lineage = lineage
        self.ref = derive_timer_ref(LineageKey(**LINEAGE)) if lineage else REF
        if started:
            self.start(0, due={"delay_ms": 500}, max_retries=3)

    # -- what can happen --

    @rule(by_ms=st.sampled_from([1, 400, 1_000, 200_000]))
    def time_passes(self, by_ms: int) -> None:
        self.now_ms += by_ms

    @rule(
        due=DUES,
        age=AGES,
        if_exists=st.sampled_from([None, "replace", "replace", "reject"]),
        max_retries=st.sampled_from([0, 1, 3, None]),
        payload=st.integers(0, 1),
    )
    def start(self, age: int, **fields: Any) -> None:
        self.take(self.command("start", age, timer=LINEAGE if self.lineage else NAME, **fields))

    @rule(age=AGES, named=st.booleans(), offset=OFFSETS)
    def cancel(self, age: int, named: bool, offset: int) -> None:
        self.take(self.by_ref("cancel", age, generation=self.generation(offset) if named else None))

    @rule(
        kind=st.sampled_from(["complete", "fail", "retry", "retry", "retry"]),
        generation=OFFSETS,
        fence=OFFSETS,
        due=st.none() | DUES,
        resumed=st.booleans(),
    )
    def answer(self, kind: Kind, generation: int, fence: int, due: dict[str, int] | None, resumed: bool) -> None:
        fields: dict[str, Any] = {"due": due} if kind == "retry" else {}
        fence = max(1, fence + (self.timer.fence if self.timer else 1))
        given = self.by_ref(kind, 0, generation=self.generation(generation), fence=fence, **fields)
        self.take(given, Resumed(self.now_ms, 2) if resumed else None)

    @precondition(lambda self: self.timer is not None and self.timer.phase is Phase.ELAPSED)
    @rule(kind=st.sampled_from(["complete", "fail", "retry", "retry", "retry"]), due=st.none() | DUES)
    def answer_the_resume(self, kind: Kind, due: dict[str, int] | None) -> None:
        self.answer(kind, 0, 0, due, resumed=True)

    @precondition(lambda self: self.timer is not None and self.timer.phase is Phase.WAITING)
    @rule(early_ms=st.sampled_from([0, 0, 1]))
    def wake_when_due(self, early_ms: int) -> None:
        assert self.timer is not None
        self.now_ms = max(self.now_ms, self.timer.due_at_ms - early_ms)
        self.wake(0)

    @rule(offset=OFFSETS)
    def wake(self, offset: int) -> None:
        generation = self.generation(offset)
        write = elapse(self.timer, Wake(self.ref, generation, self.now_ms), self.now_ms)
        if write is None:
            return
        before = self.timer
        assert before is not None
        assert before.due_at_ms <= self.now_ms, "elapsed before it was due"
        assert generation == before.generation
        assert generation not in self.elapsed, "elapsed twice"
        assert generation not in self.over, "elapsed after it was cancelled, replaced or answered"
        self.elapsed.add(generation)
        self.store(write.timer, fence=before.fence + 1)

    @precondition(lambda self: self.timer is not None and self.timer.phase is Phase.ELAPSED)
    @rule()
    def resume_is_published_again(self) -> None:
        assert self.timer is not None
        self.store(note_resumed(self.timer, Resumed(self.now_ms, self.timer.current.resumes + 1)), self.timer.fence)

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def repeat_an_accepted_command(self, data: st.DataObject) -> None:
        self.repeat(data.draw(st.sampled_from(self.accepted[-KEPT:])))

    @precondition(lambda self: self.accepted)
    @rule(data=st.data(), fence=st.integers(100, 200))
    def reuse_a_command_id(self, data: st.DataObject, fence: int) -> None:
        known = data.draw(st.sampled_from(self.accepted[-KEPT:]))[0]
        other = command("complete", self.now_ms, command_id=known.command_id, timer_ref=self.ref, fence=fence)
        refused = decide(self.timer, other)
        assert isinstance(refused, Refused)
        assert refused.code == "conflict"

    @precondition(lambda self: len(self.accepted) > KEPT)
    @rule(data=st.data())
    def repeat_a_forgotten_command(self, data: st.DataObject) -> None:
        self.repeat_forgotten(data.draw(st.sampled_from(self.accepted[:-KEPT])))

    @precondition(lambda self: self.timer is not None and self.timer.phase.ended)
    @rule(seq=st.integers(1, 1_000))
    def archive(self, seq: int) -> None:
        """The live entry is gone; the next command meets the archive record."""
        assert self.timer is not None
        self.timer = replace(terminal_record(self.timer), archive_seq=seq)

    # -- the book --

    def command(self, kind: Kind, age_ms: int, **fields: Any) -> AnyCommand:
        self.count += 1
        at_ms = self.now_ms - age_ms
        return command(kind, at_ms, seq=self.count, command_id=f"c{self.count}", **fields)

    def by_ref(self, kind: Kind, age_ms: int, **fields: Any) -> AnyCommand:
        return self.command(kind, age_ms, timer_ref=self.ref, **fields)

    def generation(self, offset: int) -> int:
        return max(0, offset + (self.timer.generation if self.timer else 0))

    def repeat(self, known: tuple[AnyCommand, str | None]) -> None:
        given, code = known
        assert decide(self.timer, given) == Settled(Status.DUPLICATE, code)

    def repeat_forgotten(self, known: tuple[AnyCommand, str | None]) -> None:
        decision = decide(self.timer, known[0])
        assert not isinstance(decision, Write), "a command that was accepted long ago is carried out again"

    def take(self, given: AnyCommand, resumed: Resumed | None = None) -> None:
        before, image = self.timer, repr(self.timer)
        decision = decide(before, given, resumed)
        assert repr(before) == image, "a decision changed what it was about"
        if not isinstance(decision, Write):
            return
        after = decision.timer
        self.check_order(given)
        if before is None:
            self.store(after, fence=1)
        else:
            assert not (self.lineage and before.phase.ended), "an ended lineage lives again"
            self.store(after, fence=before.fence if decision.code == "too_late" else before.fence + 1)
            if after.phase is not Phase.ELAPSED:
                self.over.add(before.generation)
        self.accepted.append((given, decision.code))

    def check_order(self, given: AnyCommand) -> None:
        if isinstance(given, Start | Cancel):
            if isinstance(given, Start) or given.generation is None:
                assert given.order > self.applied, "an older start or cancel was carried out"
            self.applied = max(self.applied, given.order)

    def store(self, after: Timer, fence: int) -> None:
        before = self.timer
        assert after.fence == fence, "the fence moves by one at each transition, and at nothing else"
        if before is None:
            assert (after.generation, after.phase) == (0, Phase.WAITING)
        else:
            began = after.phase is Phase.WAITING
            assert after.generation == before.generation + began, "each occurrence has a generation of its own"
            assert (
                before.phase is not Phase.WAITING or after.phase is not Phase.ELAPSED or after.due_at_ms <= self.now_ms
            )
        self.timer = after

    # -- always --

    @invariant()
    def the_memory_is_whole_and_bounded(self) -> None:
        if self.timer is None:
            return
        kept = [(receipt.command_id, receipt.code) for receipt in self.timer.receipts]
        assert kept == [(given.command_id, code) for given, code in self.accepted[-KEPT:]]
        generations = [occurrence.generation for occurrence in self.timer.timeline]
        assert generations == list(range(self.timer.generation + 1))[-KEPT:]
        assert self.timer.applied == self.applied

    @invariant()
    def retries_stay_within_their_limit(self) -> None:
        if self.timer is not None and self.timer.max_retries is not None:
            assert 0 <= self.timer.retries_used <= self.timer.max_retries

    @invariant()
    def an_end_says_so(self) -> None:
        if self.timer is not None:
            assert self.timer.phase.ended == (self.timer.ended_at_ms is not None)

    @invariant()
    def it_survives_storage(self) -> None:
        if self.timer is not None:
            assert decode_timer(encode(self.timer), self.ref) == self.timer


OneTimer.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
test_one_timer = OneTimer.TestCase


@pytest.mark.parametrize("seed", range(10))
def test_long_lives(seed: int):
    """The same with many steps each, most of which do something: elapsed, answered, retried, begun again."""
    numbers = random.Random(seed)
    for _ in range(4):
        one = OneTimer()
        one.choose(lineage=numbers.random() < 0.2, started=True)
        for _ in range(150):
            something_happens(one, numbers)
            one.the_memory_is_whole_and_bounded()
            one.retries_stay_within_their_limit()
            one.an_end_says_so()


def something_happens(one: OneTimer, numbers: random.Random) -> None:
    phase = one.timer.phase if one.timer else None
    due = numbers.choice([None, {"delay_ms": 700}, {"at_ms": 1_000_000}])
    match numbers.randrange(8):
        case 0:
            if_exists = numbers.choice([None, "reject", "replace"])
            max_retries = numbers.choice([0, 2, 3, None])
            age = numbers.choice([0, 0, 5_000])
            one.start(age, due=due or {"delay_ms": 5}, if_exists=if_exists, max_retries=max_retries)
        case 1:
            one.cancel(numbers.choice([0, 5_000]), numbers.random() < 0.5, numbers.choice([0, 0, -1]))
        case 2:
            one.answer(numbers.choice(["complete", "retry", "fail"]), numbers.choice([0, -1]), 0, due, False)
        case 3:
            one.repeat(numbers.choice(one.accepted[-KEPT:]))
        case 4 if len(one.accepted) > KEPT:
            one.repeat_forgotten(numbers.choice(one.accepted[:-KEPT]))
        case _ if phase is Phase.WAITING:
            one.time_passes(1)
            one.wake_when_due(numbers.choice([0, 1]))
        case _ if phase is Phase.ELAPSED:
            one.time_passes(1)
            one.answer_the_resume(numbers.choice(["retry", "retry", "retry", "retry", "complete", "fail"]), due)
        case _:
            one.time_passes(1_000)
