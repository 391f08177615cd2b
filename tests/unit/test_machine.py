"""What each input does to a timer in each phase: the contract, sections 2 and 3, as a table and its footnotes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.commands import LINEAGE, NAME, REF, command
from timer_service.domain.codes import Status
from timer_service.domain.identity import LineageKey, derive_timer_ref
from timer_service.domain.machine import Decision, Refused, Settled, Write, decide, elapse, note_resumed
from timer_service.domain.model import (
    ABSENT,
    MAX_DUE_MS,
    AnyCommand,
    Occurrence,
    Order,
    Phase,
    Resumed,
    Timer,
    Wake,
)
from timer_service.wire.commands import Kind

LINEAGE_REF = derive_timer_ref(LineageKey(**LINEAGE))


def written(decision: Decision | None) -> Timer:
    assert isinstance(decision, Write), decision
    return decision.timer


def after(timer: Timer | None, *inputs: AnyCommand | Wake) -> Timer:
    """The timer after ``inputs``, all of which must be accepted. A wake comes when it was published."""
    for given in inputs:
        timer = written(decided(timer, given))
    assert timer is not None
    return timer


def wake(generation: int, at_ms: int) -> Wake:
    return Wake(REF, generation, at_ms)


def feedback(kind: Kind, timer: Timer, at_ms: int, **changes: Any) -> AnyCommand:
    """The answer to the resume of ``timer``, which must have elapsed or be about to."""
    fields = {"timer_ref": timer.timer_ref, "generation": timer.generation, "fence": timer.fence, **changes}
    return command(kind, at_ms, command_id=f"{kind}@{at_ms}", **fields)


def started(**changes: Any) -> Timer:
    """Stored at 1,000 and due at 2,000."""
    return after(None, command("start", 1_000, command_id="first", **changes))


def elapsed(**changes: Any) -> Timer:
    return after(started(**changes), wake(0, 2_000))


def ended(how: Phase = Phase.COMPLETED, **changes: Any) -> Timer:
    timer = elapsed(**changes)
    match how:
        case Phase.COMPLETED:
            return after(timer, feedback("complete", timer, 2_100))
        case Phase.FAILED:
            return after(timer, feedback("fail", timer, 2_100))
        case _:
            waiting = started(**changes)
            return after(waiting, command("cancel", 1_500, command_id="stop", timer_ref=waiting.timer_ref))


def told(decision: Decision | None) -> str:
    """A decision in a word or two: what the publisher is told, else the phase, with the generation/fence stored."""
    match decision:
        case Write():
            timer = decision.timer
            return f"{decision.code or timer.phase} {timer.generation}/{timer.fence}"
        case Settled():
            return decision.code or decision.status
        case Refused():
            return decision.code
        case None:
            return "nothing"


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────
# The timer was started once (generation 0, fence 1), and elapsed (fence 2); "marked" had a cancel too late, "ended"
# was completed (fence 3). A cell says what is stored, generation/fence behind it, or what the publisher is told.

TABLE = """
input                      | absent        | waiting          | elapsed          | marked           | ended
start, replace             | waiting 0/1   | waiting 1/2      | waiting 1/3      | waiting 1/3      | waiting 1/4
start, replace, same       | waiting 0/1   | waiting 1/2      | waiting 1/3      | waiting 1/3      | waiting 1/4
start, reject              | waiting 0/1   | conflict         | conflict         | conflict         | waiting 1/4
start, reject, same        | waiting 0/1   | duplicate        | duplicate        | duplicate        | waiting 1/4
lineage, replace           | waiting 0/1   | waiting 1/2      | waiting 1/3      | waiting 1/3      | already_terminal
lineage, reject            | waiting 0/1   | conflict         | conflict         | conflict         | already_terminal
lineage, reject, same      | waiting 0/1   | duplicate        | duplicate        | duplicate        | already_terminal
cancel                     | unknown_timer | cancelled 0/2    | too_late 0/2     | too_late 0/2     | already_terminal
cancel, this generation    | unknown_timer | cancelled 0/2    | too_late 0/2     | too_late 0/2     | already_terminal
cancel, other generation   | unknown_timer | stale_generation | stale_generation | stale_generation | already_terminal
complete                   | unknown_timer | not_elapsed      | completed 0/3    | completed 0/3    | already_terminal
complete, other generation | unknown_timer | stale_generation | stale_generation | stale_generation | already_terminal
complete, other fence      | unknown_timer | not_elapsed      | stale_fence      | stale_fence      | already_terminal
fail                       | unknown_timer | not_elapsed      | failed 0/3       | failed 0/3       | already_terminal
fail, other generation     | unknown_timer | stale_generation | stale_generation | stale_generation | already_terminal
fail, other fence          | unknown_timer | not_elapsed      | stale_fence      | stale_fence      | already_terminal
retry                      | unknown_timer | not_elapsed      | waiting 1/3      | cancelled 0/3    | already_terminal
retry, none left           | unknown_timer | not_elapsed      | failed 0/3       | cancelled 0/3    | already_terminal
retry, other generation    | unknown_timer | stale_generation | stale_generation | stale_generation | already_terminal
retry, other fence         | unknown_timer | not_elapsed      | stale_fence      | stale_fence      | already_terminal
wake                       | nothing       | elapsed 0/2      | nothing          | nothing          | nothing
wake, early                | nothing       | nothing          | nothing          | nothing          | nothing
wake, other generation     | nothing       | nothing          | nothing          | nothing          | nothing
"""


def cells() -> list[tuple[str, str, str]]:
    head, *rows = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
    return [(row[0], situation, cell) for row in rows for situation, cell in zip(head[1:], row[1:], strict=True)]


SITUATIONS: dict[str, Callable[..., Timer | None]] = {
    "absent": lambda **_: None,
    "waiting": started,
    "elapsed": elapsed,
    "marked": lambda **changes: marked(elapsed(**changes)),
    "ended": ended,
}


def marked(timer: Timer) -> Timer:
    return after(timer, command("cancel", 2_050, command_id="late", timer_ref=timer.timer_ref))


def first_start(row: str) -> dict[str, Any]:
    """How the timer of a row was started."""
    fields: dict[str, Any] = {"timer": LINEAGE if row.startswith("lineage") else NAME, "max_retries": 1}
    if "none left" in row:
        fields["max_retries"] = 0
    if "reject" in row:
        fields["if_exists"] = "reject"
    if "replace" in row:
        fields["if_exists"] = "replace"
    return fields


def input_of(row: str) -> AnyCommand | Wake:
    """What a row brings in: later than all that happened before, under a new command id."""
    what, *more = row.split(", ")
    fields: dict[str, Any] = {"command_id": "new"}
    generation = 7 if "other generation" in more else 0
    match what:
        case "start" | "lineage":
            fields |= first_start(row)
            return command("start", 3_000, **fields if "same" in more else {**fields, "payload": "other"})
        case "cancel":
            return command("cancel", 3_000, **fields, generation=generation if more else None)
        case "wake":
            return wake(generation, 1_999 if "early" in more else 3_000)
    fields |= {"generation": generation, "fence": 7 if "other fence" in more else 2}
    kinds: dict[str, Kind] = {"complete": "complete", "retry": "retry", "fail": "fail"}
    return command(kinds[what], 3_000, **fields)


def decided(timer: Timer | None, given: AnyCommand | Wake) -> Decision | None:
    return elapse(timer, given, given.woken_at_ms or 0) if isinstance(given, Wake) else decide(timer, given)


@pytest.mark.parametrize(("row", "situation", "cell"), cells(), ids=lambda text: text.replace(" ", "-"))
def test_each_cell(row: str, situation: str, cell: str):
    """Every input in every phase does what the table says, and the timer that was there is left as it was."""
    timer = SITUATIONS[situation](**first_start(row))
    before = repr(timer)
    assert told(decided(timer, input_of(row))) == cell
    assert repr(timer) == before


@pytest.mark.parametrize("how", [Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED])
@pytest.mark.parametrize("row", ["cancel", "complete", "fail", "retry", "lineage, reject", "lineage, replace"])
def test_all_ends_are_alike(row: str, how: Phase):
    """An ended timer takes no feedback and no cancel, and an ended lineage no start, however it ended."""
    refused = decided(ended(how, **first_start(row)), input_of(row))
    assert isinstance(refused, Refused)
    assert refused.code == "already_terminal"
    assert how in refused.message


# ── what a start stores ─────────────────────────────────────────────────────────────────────────────────────


def test_the_first_start():
    """Generation 0, fence 1, due after the delay counted from when the broker stored it."""
    given = command("start", 1_000, seq=5, command_id="a", max_retries=None, payload=[1])
    timer = after(None, given)
    assert (timer.phase, timer.generation, timer.fence, timer.due_at_ms) == (Phase.WAITING, 0, 1, 2_000)
    assert (timer.max_retries, timer.retries_used, timer.delay_ms, timer.applied) == (None, 0, 1_000, Order(1_000, 5))
    assert timer.timeline == (Occurrence(0, 1_000, 2_000),)
    assert [receipt.command_id for receipt in timer.receipts] == ["a"]
    assert (timer.status, timer.failure_code, timer.message, timer.ended_at_ms) == (None, ABSENT, ABSENT, None)


@pytest.mark.parametrize(
    ("due", "at_ms", "due_at_ms"),
    [({"delay_ms": 5}, 1_000, 1_005), ({"at_ms": 7}, 1_000, 7), ({"at": "1970-01-01T00:00:09Z"}, 1_000, 9_000)],
)
def test_due(due: dict[str, Any], at_ms: int, due_at_ms: int):
    """A delay counts from when the command was stored; an instant stands as it is, in the past too."""
    assert after(None, command("start", at_ms, due=due)).due_at_ms == due_at_ms


def test_a_delay_that_leads_beyond_2200():
    """100 years from late in 2100 on are refused, also for a retry; the last instant is taken."""
    late = MAX_DUE_MS - 1_000
    assert after(None, command("start", late, due={"delay_ms": 1_000})).due_at_ms == MAX_DUE_MS
    assert told(decide(None, command("start", late, due={"delay_ms": 1_001}))) == "invalid_due"
    timer = after(started(max_retries=2), wake(0, late))
    assert told(decide(timer, feedback("retry", timer, late, due={"delay_ms": 1_001}))) == "invalid_due"
    assert told(decide(timer, feedback("retry", timer, late + 1))) == "invalid_due"
    assert told(decide(timer, feedback("retry", timer, late))) == "waiting 1/3"


def test_a_replacement_takes_everything_from_the_new_start():
    """One step to the next generation: new due time, payload and retries; the past stays in the timeline."""
    first = after(
        elapsed(max_retries=3, payload="old"),
        command("retry", 2_100, command_id="r", generation=0, fence=2, due={"delay_ms": 50}),
    )
    assert first.retries_used == 1
    second = after(first, command("start", 2_120, command_id="new", due={"at_ms": 9_000}, payload="new"))
    assert (second.generation, second.fence, second.due_at_ms, second.retries_used) == (2, 4, 9_000, 0)
    assert (bytes(second.payload), second.max_retries, second.delay_ms) == (b'"new"', 0, None)  # type: ignore[arg-type]
    assert [(one.generation, one.answer) for one in second.timeline] == [(0, "retry"), (1, "replace"), (2, None)]
    assert second.timeline[1].answered_at_ms == 2_120
    assert elapse(second, wake(1, 9_000), 9_000) is None


def test_feedback_for_a_replaced_occurrence_is_stale():
    """After a replacement the old occurrence can't be answered, nor elapse."""
    old = elapsed()
    new = after(old, command("start", 2_100, command_id="new"))
    for kind in ("complete", "retry", "fail"):
        assert told(decide(new, feedback(kind, old, 2_200))) == "stale_generation"
    again = after(new, wake(1, 3_100))
    assert told(decide(again, feedback("complete", old, 3_200))) == "stale_generation"
    assert told(decide(again, feedback("complete", again, 3_200, fence=old.fence))) == "stale_fence"


def test_a_name_starts_again_after_its_end():
    """The next generation and fence; retries used, the cancel mark and the end are gone, the memory is kept."""
    timer = elapsed(max_retries=1)
    timer = after(timer, feedback("fail", timer, 2_100, failure_code="no_stock", message="none"))
    again = after(replace(timer, archive_seq=7, status=timer.phase), command("start", 9_000, command_id="again"))
    assert (again.generation, again.fence, again.retries_used, again.archive_seq) == (1, 4, 0, 7)
    assert (again.status, again.failure_code, again.message, again.ended_at_ms) == (None, ABSENT, ABSENT, None)
    assert [receipt.command_id for receipt in again.receipts] == ["first", "fail@2100", "again"]
    assert [one.answer for one in again.timeline] == ["fail", None]


# ── the command id ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_known_command_is_a_duplicate_with_the_code_of_then():
    """Repeating what was accepted changes nothing and tells what was told, in every later phase."""
    start = command("start", 1_000, command_id="first", max_retries=1)
    late = command("cancel", 2_050, command_id="late")
    timer = marked(elapsed(max_retries=1))
    assert decide(timer, start) == Settled(Status.DUPLICATE, None)
    assert decide(timer, late) == Settled(Status.DUPLICATE, "too_late")
    retry = feedback("retry", timer, 2_100)
    done = after(timer, retry)
    for given, code in ((start, None), (late, "too_late"), (retry, None)):
        assert decide(done, given) == Settled(Status.DUPLICATE, code)
        assert decide(after(done, command("start", 9_000, command_id="again")), given) == Settled(
            Status.DUPLICATE, code
        )


def test_a_reused_command_id_with_other_content_is_a_conflict():
    """Whatever the kind and the phase."""
    for timer in (started(), elapsed(), marked(elapsed()), ended(), ended(Phase.CANCELLED)):
        assert told(decide(timer, command("start", 3_000, command_id="first", payload=1))) == "conflict"
        assert told(decide(timer, command("cancel", 3_000, command_id="first"))) == "conflict"
        assert told(decide(timer, command("complete", 3_000, command_id="first"))) == "conflict"


def test_the_last_16_accepted_commands_are_remembered():
    """Receipts of 16 accepted commands are kept, over ends and new starts; refusals and repetitions take no place."""
    given = [command("start", 1_000 + n, command_id=f"s{n}") for n in range(17)]
    timer = after(None, *given)
    assert [receipt.command_id for receipt in timer.receipts] == [f"s{n}" for n in range(1, 17)]
    timer = after(timer, command("cancel", 2_000, command_id="stop"))
    decide(timer, command("complete", 2_001, command_id="refused"))
    assert [receipt.command_id for receipt in timer.receipts] == [*(f"s{n}" for n in range(2, 17)), "stop"]
    again = after(timer, command("start", 3_000, command_id="again"))
    assert [receipt.command_id for receipt in again.receipts] == [*(f"s{n}" for n in range(3, 17)), "stop", "again"]
    assert decide(again, given[3]) == Settled(Status.DUPLICATE)


def test_the_last_16_generations_are_in_the_timeline():
    """Older ones make room, over ends and new starts too."""
    timer = after(None, *(command("start", 1_000 + n, command_id=f"s{n}") for n in range(20)))
    assert [one.generation for one in timer.timeline] == list(range(4, 20))
    timer = after(timer, command("cancel", 2_000, command_id="stop"), command("start", 3_000, command_id="again"))
    assert [one.generation for one in timer.timeline] == list(range(5, 21))


# ── superseded ──────────────────────────────────────────────────────────────────────────────────────────────


def newest(how: str) -> Timer:
    """A timer whose newest start or cancel was stored at 1,800."""
    match how:
        case "replaced":
            return after(started(), command("start", 1_800, command_id="newer"))
        case "cancelled":
            return after(started(), command("cancel", 1_800, command_id="newer"))
        case "too late":
            timer = after(None, command("start", 1_000, command_id="first", due={"at_ms": 1_000}, max_retries=5))
            return after(timer, wake(0, 1_000), command("cancel", 1_800, command_id="newer"))
        case _:
            timer = newest("too late")
            return after(timer, feedback("complete", timer, 1_900))


@pytest.mark.parametrize("how", ["replaced", "cancelled", "too late", "completed"])
@pytest.mark.parametrize("at_ms", [1_799, 1_800])
def test_an_older_start_that_would_replace_is_superseded(how: str, at_ms: int):
    """Stored before the newest start or cancel, or in the same place when its receipt has dropped out: accepted,
    and nothing changes. One stored later replaces, or begins again."""
    timer = newest(how)
    assert decide(timer, command("start", at_ms, command_id="x")) == Settled(Status.ACCEPTED, "superseded")
    assert isinstance(decide(timer, command("start", 1_800, seq=2, command_id="x")), Write)


@pytest.mark.parametrize("how", ["replaced", "too late"])
def test_an_older_cancel_is_superseded(how: str):
    """Unless it names a generation: then it means that one, and says so whenever it comes."""
    timer = newest(how)
    assert decide(timer, command("cancel", 1_799, command_id="x")) == Settled(Status.ACCEPTED, "superseded")
    assert isinstance(decide(timer, command("cancel", 1_801, command_id="x")), Write)
    assert isinstance(decide(timer, command("cancel", 1_799, command_id="x", generation=timer.generation)), Write)
    assert told(decide(timer, command("cancel", 1_799, command_id="x", generation=9))) == "stale_generation"


@pytest.mark.parametrize("how", ["cancelled", "completed"])
def test_an_older_start_does_not_revive_an_ended_name(how: str):
    """Also one that rejects: before the end it would have been refused or repeated, so it must not begin now."""
    timer = newest(how)
    old = command("start", 1_799, command_id="x", if_exists="reject")
    assert decide(timer, old) == Settled(Status.ACCEPTED, "superseded")
    assert isinstance(decide(timer, command("start", 1_801, command_id="x", if_exists="reject")), Write)


def test_an_older_start_that_rejects_is_judged_by_the_living_timer():
    """It would change nothing anyway: duplicate or conflict."""
    timer = newest("replaced")
    old = command("start", 1_700, command_id="x", if_exists="reject")
    assert told(decide(timer, old)) == "conflict"
    assert told(decide(replace(timer, start_content=old.content), old)) == "duplicate"


def test_feedback_is_never_superseded():
    """Generation and fence say what it means; when it was stored does not matter."""
    timer = newest("too late")
    for kind in ("complete", "retry", "fail"):
        assert isinstance(decide(timer, feedback(kind, timer, 5)), Write)


def test_a_lineage_that_has_ended_is_not_superseded_but_ended():
    """Nothing would begin: the start of an ended lineage is refused, however old it is."""
    timer = ended(timer=LINEAGE)
    for if_exists in ("reject", "replace"):
        assert told(decide(timer, command("start", 500, command_id="x", timer=LINEAGE, if_exists=if_exists))) == (
            "already_terminal"
        )


def test_what_was_applied_last_never_goes_back():
    """A cancel that names its generation may be older than the start: what is older still stays superseded."""
    timer = after(started(), command("start", 1_800, command_id="newer"))
    timer = after(timer, command("cancel", 1_500, command_id="by generation", generation=1))
    assert (timer.phase, timer.applied) == (Phase.CANCELLED, Order(1_800, 1))
    assert told(decide(timer, command("start", 1_700, command_id="x"))) == "superseded"


def test_feedback_does_not_count_as_applied():
    """Only starts and cancels are ordered against one another."""
    timer = elapsed(max_retries=1)
    again = after(timer, feedback("retry", timer, 5_000))
    assert again.applied == Order(1_000, 1)
    assert isinstance(decide(again, command("cancel", 4_000, command_id="x")), Write)


# ── the order of checks ─────────────────────────────────────────────────────────────────────────────────────


def test_the_command_id_comes_before_all():
    """Known: duplicate or conflict, though it would be superseded, stale, too early or too late as well."""
    timer = newest("replaced")
    assert told(decide(timer, command("start", 1_000, command_id="first"))) == "duplicate"
    assert told(decide(timer, command("start", 1_000, command_id="first", payload=1))) == "conflict"
    done = ended()
    assert told(decide(done, command("start", 1_000, command_id="first"))) == "duplicate"
    assert told(decide(done, command("retry", 9_000, command_id="first", generation=7))) == "conflict"


def test_superseded_comes_before_the_end():
    """A cancel from before the end that no longer matters is settled, not refused."""
    timer = newest("completed")
    assert told(decide(timer, command("cancel", 1_799, command_id="x"))) == "superseded"
    assert told(decide(timer, command("cancel", 1_801, command_id="x"))) == "already_terminal"


def test_generation_comes_before_phase_and_fence():
    """Another generation is stale, whether the present one waits or not and whatever the fence."""
    assert told(decide(started(), command("complete", 3_000, generation=1, fence=9))) == "stale_generation"
    assert told(decide(elapsed(), command("complete", 3_000, generation=1, fence=9))) == "stale_generation"


def test_phase_comes_before_fence():
    """A waiting occurrence can't be answered, whatever the fence."""
    assert told(decide(started(), command("complete", 3_000, generation=0, fence=1))) == "not_elapsed"
    assert told(decide(started(), command("complete", 3_000, generation=0, fence=9))) == "not_elapsed"


def test_staleness_comes_before_what_a_retry_asks_for():
    """A stale retry is stale, even if its due time could not be met or no retry is left."""
    timer = elapsed(due={"at_ms": 2_000})
    assert told(decide(timer, command("retry", 3_000, generation=0, fence=9))) == "stale_fence"


# ── elapse ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_elapse_writes_the_timeline():
    """When it was woken, when it elapsed, how late that was; everything else stays as it was."""
    before = started()
    timer = written(elapse(before, Wake(REF, 0, 2_005), 2_030))
    assert timer.current == Occurrence(0, 1_000, 2_000, woken_at_ms=2_005, elapsed_at_ms=2_030, lateness_ms=30)
    assert timer == replace(before, phase=Phase.ELAPSED, fence=2, timeline=timer.timeline)


def test_due_exactly_now_elapses_and_a_millisecond_before_does_not():
    """Never early, and not late without need."""
    assert elapse(started(), wake(0, 2_000), 1_999) is None
    assert told(elapse(started(), wake(0, 1_000), 2_000)) == "elapsed 0/2"


# ── feedback ────────────────────────────────────────────────────────────────────────────────────────────────


def test_ends_say_what_happened():
    """Failure code and message as sent, null where there is nothing; when the broker stored the answer."""
    timer = elapsed()
    done = after(timer, feedback("complete", timer, 2_100))
    assert (done.failure_code, done.message, done.ended_at_ms) == (None, None, 2_100)
    failed = after(timer, feedback("fail", timer, 2_200, failure_code="no_stock", message="none left"))
    assert (failed.failure_code, failed.message, failed.ended_at_ms) == ("no_stock", "none left", 2_200)
    stopped = after(started(), command("cancel", 1_500, reason="not needed"))
    assert (stopped.failure_code, stopped.message, stopped.ended_at_ms) == (None, "not needed", 1_500)
    for end, answer in ((done, "complete"), (failed, "fail"), (stopped, "cancel")):
        assert (end.current.answer, end.current.answered_at_ms) == (answer, end.ended_at_ms)


def test_a_retry_waits_again():
    """The next generation with the same payload and key, one retry more used."""
    timer = elapsed(max_retries=2, payload="p")
    again = after(timer, feedback("retry", timer, 2_100, due={"delay_ms": 300}))
    assert (again.generation, again.fence, again.retries_used, again.due_at_ms) == (1, 3, 1, 2_400)
    assert (again.payload, again.payload_sha256, again.start_content) == (
        timer.payload,
        timer.payload_sha256,
        timer.start_content,
    )
    assert again.receipts[-1].command_id == "retry@2100"
    assert again.timeline[0].answer == "retry"
    assert again.timeline[1] == Occurrence(1, 2_100, 2_400)


@pytest.mark.parametrize("max_retries", [0, 1, 2, 5])
def test_a_retry_beyond_max_retries_ends_the_timer(max_retries: int):
    """So many retries and no more: the next one is accepted and ends it as failed."""
    timer = elapsed(max_retries=max_retries)
    for used in range(max_retries):
        timer = after(timer, feedback("retry", timer, 10_000 + used, due={"at_ms": 1}))
        timer = after(timer, wake(timer.generation, 10_000 + used))
    assert timer.retries_used == max_retries
    end = after(timer, feedback("retry", timer, 20_000))
    assert (end.phase, end.failure_code, end.retries_used) == (Phase.FAILED, "max_retries_exceeded", max_retries)
    assert end.generation == timer.generation
    assert end.current.answer == "retry"


def test_without_limit_a_timer_is_retried_for_ever():
    """``max_retries`` null never runs out."""
    timer = elapsed(max_retries=None)
    for used in range(100):
        timer = after(timer, feedback("retry", timer, 10_000 + used, due={"at_ms": 1}))
        timer = after(timer, wake(timer.generation, 10_000 + used))
    assert timer.retries_used == timer.generation == 100


def test_a_new_start_gives_new_retries():
    """Retries used start from 0 with a replacement."""
    timer = elapsed(max_retries=1)
    timer = after(timer, feedback("retry", timer, 2_100), command("start", 2_200, command_id="new", max_retries=1))
    timer = after(timer, wake(timer.generation, 9_000))
    assert told(decide(timer, feedback("retry", timer, 9_100))) == "waiting 3/6"


def test_a_retry_without_due_repeats_the_last_delay():
    """That of the start, or of the last retry that gave one; an instant in between does not count."""
    timer = elapsed(max_retries=9, due={"delay_ms": 700})
    waits = []
    for due in (None, {"delay_ms": 50}, None, {"at_ms": 9_000}, None):
        timer = after(timer, feedback("retry", timer, timer.due_at_ms + 10, due=due))
        waits.append(timer.due_at_ms - timer.current.accepted_at_ms)
        timer = after(timer, wake(timer.generation, timer.due_at_ms))
    assert waits[:3] == [700, 50, 50]
    assert timer.timeline[-2].due_at_ms == 9_000
    assert waits[4] == 50


def test_a_retry_without_any_delay_to_repeat():
    """After an absolute start, also one over a delayed one: invalid_due, until a retry gives a delay."""
    timer = elapsed(max_retries=9, due={"at_ms": 2_000})
    assert told(decide(timer, feedback("retry", timer, 2_100))) == "invalid_due"
    again = after(timer, feedback("retry", timer, 2_100, due={"delay_ms": 40}))
    again = after(again, wake(1, 2_140))
    assert after(again, feedback("retry", again, 2_200)).due_at_ms == 2_240
    replaced = after(
        started(max_retries=9), command("start", 1_500, command_id="n", due={"at_ms": 1_600}, max_retries=9)
    )
    replaced = after(replaced, wake(1, 1_600))
    assert told(decide(replaced, feedback("retry", replaced, 1_700))) == "invalid_due"


def test_a_retry_with_a_due_time_in_the_past():
    """Is due at once."""
    timer = elapsed(max_retries=1)
    assert after(timer, feedback("retry", timer, 2_100, due={"at_ms": 5})).due_at_ms == 5


# ── too late ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cancel_after_it_elapsed_marks_the_timer():
    """The resume stands and the fence does not move; the receipt keeps the code."""
    before = elapsed(max_retries=5)
    timer = marked(before)
    assert (timer.cancel_requested, timer.fence, timer.phase) == (True, before.fence, Phase.ELAPSED)
    assert timer.receipts[-1].code == "too_late"
    assert timer.timeline == before.timeline


def test_a_retry_of_a_marked_timer_cancels_it():
    """Whether or not it gives a due time, and before retries are counted."""
    for changes in ({}, {"due": {"delay_ms": 5}}):
        for max_retries in (0, 5, None):
            timer = marked(elapsed(max_retries=max_retries))
            end = after(timer, feedback("retry", timer, 2_100, **changes))
            assert (end.phase, end.fence, end.failure_code, end.current.answer) == (Phase.CANCELLED, 3, None, "retry")


def test_a_marked_timer_takes_complete_and_fail_as_usual():
    """The mark is about arming it again, about nothing else."""
    timer = marked(elapsed())
    assert after(timer, feedback("complete", timer, 2_100)).phase is Phase.COMPLETED
    assert after(timer, feedback("fail", timer, 2_100)).phase is Phase.FAILED


def test_a_replacement_clears_the_mark():
    """The next occurrence is retried as usual."""
    timer = after(marked(elapsed()), command("start", 2_100, command_id="new", max_retries=1))
    assert timer.cancel_requested is False
    timer = after(timer, wake(1, 9_000))
    assert told(decide(timer, feedback("retry", timer, 9_100))) == "waiting 2/5"


# ── what is known of resumes travels with the next write ────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["complete", "fail", "retry"])
def test_an_answer_carries_what_is_known_of_the_resumes(kind: Kind):
    """When the last one was published, and how many; an answer proves at least one."""
    timer = elapsed(max_retries=1)
    known = written(decide(timer, feedback(kind, timer, 2_100), Resumed(2_020, 3)))
    assert (known.timeline[0].resumed_at_ms, known.timeline[0].resumes) == (2_020, 3)
    unknown = written(decide(timer, feedback(kind, timer, 2_100)))
    assert (unknown.timeline[0].resumed_at_ms, unknown.timeline[0].resumes) == (None, 1)


def test_a_replacement_and_a_late_cancel_carry_it_too():
    """They come after the resume, though they prove nothing about it."""
    timer = elapsed()
    for given in (command("start", 2_100, command_id="n"), command("cancel", 2_100, command_id="n")):
        assert written(decide(timer, given, Resumed(2_020, 2))).timeline[0].resumes == 2
        assert written(decide(timer, given)).timeline[0].resumes == 0


def test_noting_resumes_moves_nothing_else():
    """The fence stays, the count never falls."""
    timer = note_resumed(elapsed(), Resumed(2_020, 3))
    assert timer == replace(elapsed(), timeline=timer.timeline)
    assert (timer.current.resumed_at_ms, timer.current.resumes) == (2_020, 3)
    assert note_resumed(timer, Resumed(2_030, 2)).current.resumes == 3
