"""Records, outcomes and numbers as people like to read them: short lines and tables, no business logic."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from timer_service.domain.codes import Status
from timer_service.wire.canonical import exact_json
from timer_service.wire.records import Outcome

PHASE_STYLES = {
    "waiting": "cyan",
    "elapsed": "yellow",
    "completed": "green",
    "failed": "red",
    "cancelled": "magenta",
}
_PAYLOAD_CHARS = 300
_COMMANDS = 4
LATE_MS = 100
"""From here on a story says why."""
_STEPS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000))


def console(*, stderr: bool = False) -> Console:
    """Where people read. Without a terminal: plain text, not folded at 80 columns."""
    plain = Console(stderr=stderr)
    return plain if plain.is_terminal else Console(stderr=stderr, width=200, no_color=True)


def clean(text: str) -> str:
    """``text`` from outside, safe for a terminal: what can't be printed is replaced."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def duration(ms: int) -> str:
    """``1 h 30 m``, ``12.3 s``, ``40 ms``: two units at most."""
    if ms < 1000:
        return f"{ms} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f} s"
    parts, rest = [], ms
    for unit, size in _STEPS:
        if rest >= size:
            parts.append(f"{rest // size} {unit}")
            rest %= size
    if len(parts) < 2 and rest >= 1000:
        parts.append(f"{rest // 1000} s")
    return " ".join(parts[:2])


def instant(at_ms: int | None) -> str:
    """Local time to the millisecond, a dash for what has not happened."""
    if at_ms is None:
        return "–"
    local = datetime.fromtimestamp(at_ms // 1000, UTC).astimezone()
    return f"{local:%Y-%m-%d %H:%M:%S}.{at_ms % 1000:03d}"


def relative(at_ms: int, now_ms: int) -> str:
    """``in 30 m`` or ``2.0 s ago``."""
    ahead_ms = at_ms - now_ms
    return f"in {duration(ahead_ms)}" if ahead_ms >= 0 else f"{duration(-ahead_ms)} ago"


def key(parts: Mapping[str, str]) -> str:
    """A timer's key in one line: its name (with a namespace that is not the default), or its place in a flow."""
    if "name" in parts:
        namespace = parts.get("namespace", "default")
        return clean(parts["name"] if namespace == "default" else f"{namespace}/{parts['name']}")
    flow = f"{parts['flow_id']}@{parts['flow_version']}"
    return clean(f"{flow} {parts['node_id']} of {parts['root_execution_id']}")


def outcome(kind: str, settled: Outcome, now_ms: int) -> Text:
    """The outcome of a command in two lines: what became of it, and the timer as it is now."""
    text = _verdict(kind, settled)
    if settled.phase is not None:
        text.append("\n  now ").append(settled.phase, PHASE_STYLES.get(settled.phase, ""))
        if settled.phase == "waiting" and settled.due_at_ms is not None:
            text.append(f", due {instant(settled.due_at_ms)} ({relative(settled.due_at_ms, now_ms)})")
        text.append(f", generation {settled.generation}, fence {settled.fence}")
    if settled.timer_ref is not None:
        text.append(f"\n  {settled.timer_ref}", "dim")
    return text


def _verdict(kind: str, settled: Outcome) -> Text:
    refused = settled.status == Status.REJECTED
    text = Text(f"✗ {kind} " if refused else f"✓ {kind} ", "red" if refused else "green")
    text.append(str(settled.status))
    if settled.code is not None:
        text.append(f" ({settled.code})")
    if settled.message:
        text.append(f": {clean(settled.message)}", "default")
    return text


# -- the story of one timer -----------------------------------------------------------------------------------


def story(record: Mapping[str, Any], now_ms: int) -> RenderableType:
    """A stored record on one screen: what it is, what it waits for, and everything that happened to it."""
    head = Text(key(record["timer"]), "bold")
    head.append(f"   {record['timer_ref']}", "dim")
    facts = Table.grid(padding=(0, 2))
    for label, value in _facts(record, now_ms):
        facts.add_row(Text(label, "dim"), value)
    return Group(head, facts, "", _timeline(record["timeline"], now_ms))


def _facts(record: Mapping[str, Any], now_ms: int) -> list[tuple[str, Text]]:
    phase = record["phase"]
    facts = [("phase", Text(phase, PHASE_STYLES.get(phase, "")).append(_ending(record), "default"))]
    live = f" ({relative(record['due_at_ms'], now_ms)})" if phase in ("waiting", "elapsed") else ""
    facts.append(("due", Text(f"{instant(record['due_at_ms'])}{live}")))
    waits = _waits_for(record, now_ms)
    if waits:
        facts.append(("waits for", Text(waits)))
    limit = record["max_retries"]
    allowed = "no limit" if limit is None else f"at most {limit}"
    facts.append(("occurrence", Text(f"generation {record['generation']}, fence {record['fence']}")))
    facts.append(("retries", Text(f"{record['retries_used']} used, {allowed}")))
    late = _why_late(record["timeline"])
    if late:
        facts.append(("why late", Text(late)))
    if record.get("receipts"):
        facts.append(("commands", Text(_commands(record["receipts"]))))
    if "payload" in record:
        text = clean(exact_json(record["payload"]).decode())
        shown = text if len(text) <= _PAYLOAD_CHARS else f"{text[:_PAYLOAD_CHARS]}… ({len(text)} characters)"
        facts.append(("payload", Text(shown)))
    return facts


def _ending(record: Mapping[str, Any]) -> str:
    parts = []
    if record.get("ended_at_ms") is not None:
        parts.append(f" since {instant(record['ended_at_ms'])}")
    if record.get("failure_code"):
        parts.append(f", code {record['failure_code']}")
    if record.get("message"):
        parts.append(f": {clean(record['message'])}")
    return "".join(parts)


def _waits_for(record: Mapping[str, Any], now_ms: int) -> str:
    if record["phase"] == "waiting":
        if record["due_at_ms"] > now_ms:
            return "its due time"
        return "the timer service: it is overdue (`durable-timer stats`, `durable-timer doctor`)"
    if record["phase"] != "elapsed":
        return "" if record.get("status") else "the archive: it has ended and is about to be filed"
    asked = " (a cancel came too late: a retry will end it)" if record.get("cancel_requested") else ""
    answer = f"{record['timer_ref']} {record['generation']} {record['fence']}"
    return f"an answer{asked}: durable-timer complete|retry|fail {answer}"


def _why_late(timeline: list[Mapping[str, Any]]) -> str:
    """Where the time went between due and fired, of the last occurrence that was late; empty when none was."""
    fired = [entry for entry in timeline if (entry["lateness_ms"] or 0) >= LATE_MS]
    if not fired or fired[-1]["woken_at_ms"] is None:
        return ""
    entry = fired[-1]
    possible_ms = max(entry["due_at_ms"], entry["accepted_at_ms"] or 0)
    parts = [
        (possible_ms - entry["due_at_ms"], "it was due before it was started"),
        (entry["woken_at_ms"] - possible_ms, "nobody woke it: service or broker away, or busy"),
        (entry["elapsed_at_ms"] - entry["woken_at_ms"], "from its wake until that was stored"),
    ]
    told = [f"{duration(ms)} {why}" for ms, why in parts if ms >= LATE_MS // 2]
    return f"generation {entry['generation']}: " + ",\n".join(told)


def _commands(receipts: list[Any]) -> str:
    """The ids of the last commands that were accepted, newest last."""
    shown = [clean(str(receipt[0])) for receipt in receipts[-_COMMANDS:]]
    before = len(receipts) - len(shown)
    return (f"… {before} before, " if before else "") + ", ".join(shown)


def _timeline(timeline: list[Mapping[str, Any]], now_ms: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for column in ("gen", "accepted", "due", "fired", "late", "sent", "answer", "answered"):
        table.add_column(column, justify="right" if column in ("gen", "late", "sent") else "left")
    for entry in timeline:
        lateness = entry["lateness_ms"]
        table.add_row(
            str(entry["generation"]),
            _brief(entry["accepted_at_ms"], now_ms),
            _brief(entry["due_at_ms"], now_ms),
            _brief(entry["elapsed_at_ms"], now_ms),
            "–" if lateness is None else duration(lateness),
            str(entry["resumes"] or "–"),  # known with the next write only
            entry["answer"] or "–",
            _brief(entry["answered_at_ms"], now_ms),
        )
    return table


def _brief(at_ms: int | None, now_ms: int) -> str:
    """An instant of today without its date."""
    text = instant(at_ms)
    return text[11:] if text[:10] == instant(now_ms)[:10] else text


# -- many timers ----------------------------------------------------------------------------------------------

LIST_HEAD = f"{'PHASE':<10} {'DUE':<23} {'':>16}  {'GEN':>4}  TIMER"


def line(
    phase: str, due_at_ms: int, generation: int, parts: Mapping[str, str], ref: str, now_ms: int, *, colour: bool
) -> str:
    """One timer in a list."""
    rest = f"{instant(due_at_ms):<23} {relative(due_at_ms, now_ms):>16}  {generation:>4}  {key(parts)}  [{ref}]"
    return f"{_coloured(phase) if colour else f'{phase:<10}'} {rest}"


_ANSI = {"cyan": 36, "yellow": 33, "green": 32, "red": 31, "magenta": 35}


def _coloured(phase: str) -> str:
    """A phase in its colour, ten columns wide; by hand, since lists are long and rich takes its time."""
    code = _ANSI.get(PHASE_STYLES.get(phase, ""))
    return f"{phase:<10}" if code is None else f"\x1b[{code}m{phase:<10}\x1b[0m"


def size(count: int) -> str:
    """Bytes in the largest unit that leaves a number from 1."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
