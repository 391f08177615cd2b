"""A row of the NATS outbox as a message: where it stands in one header, the rest and the resume in the body.

The header is what the index lives on, so that following the bucket transfers no resumes. The body is a line of JSON
and, behind its line feed, the resume as it came: it is neither parsed nor quoted. What would not fit into a message
beside the row's own data is compressed; a resume is JSON text, which always gives way by more than a row takes.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from notify_consumer.errors import OutboxUnavailable
from notify_consumer.outbox.base import FEEDBACK_LANE, Feedback, State

HEADER = "Notify-Consumer-Row"
VERSION = 1
GROWTH_BYTES = 24 * 1024
"""Room for what a row gains on its way: an answer, an error, an owner."""
_HEADER_BYTES = 256
_SHORT_ERROR = 200
_SAFE = re.compile(r"[A-Za-z0-9_-]{1,128}\.[0-9]{1,20}")


class UnreadableRow(OutboxUnavailable):
    """A message of another version, or of another program. It is left as it is."""


class TooLarge(OutboxUnavailable):
    """No form of this row fits into a message."""


class Place(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a row stands. ``wait_ms`` from when the broker stored it the row can be claimed; None: it never can."""

    v: int
    state: State
    flow: str
    wait_ms: int | None

    @property
    def lane(self) -> str:
        return FEEDBACK_LANE if self.state is State.ANSWERED else self.flow


class Rest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the line of JSON holds.

    ``by`` names the write that made the row so: whoever lost the reply to a write finds by it that it was carried
    out. ``inserted_ms`` is None until the second write: the time of the first is the broker's to tell.
    """

    resume_id: str
    by: str
    attempts: int = 0
    sends: int = 0
    readable: bool = True
    owner: str | None = None
    token: str | None = None
    feedback: Feedback | None = None
    settled: str | None = None
    last_error: str | None = None
    inserted_ms: int | None = None
    packed: bool = False


class Record(Rest, frozen=True, kw_only=True):
    """A whole row, but for the time at which it was stored. ``body`` is the resume as it came."""

    place: Place
    body: bytes = b""


_places = msgspec.json.Decoder(Place)
_rests = msgspec.json.Decoder(Rest)
_REST_FIELDS = Rest.__struct_fields__


def key_of(resume_id: str) -> str:
    """The key of a row: its id where that is one, else a digest that no id looks like."""
    if _SAFE.fullmatch(resume_id):
        return resume_id
    return "=" + hashlib.sha256(resume_id.encode("utf-8", "surrogatepass")).hexdigest()


def encode(record: Record, max_payload: int) -> tuple[str, bytes]:
    """Header and body of the message. Raises TooLarge.

    Where the whole does not fit the resume is compressed, then the error is cut.
    """
    header = _header(record.place)
    room = max_payload - _HEADER_BYTES - len(header)
    if len(record.body) + GROWTH_BYTES > room:
        record = replace(record, body=zlib.compress(record.body, 1), packed=True)
    data = _data(record)
    if len(data) > room and record.last_error:
        data = _data(replace(record, last_error=record.last_error[:_SHORT_ERROR]))
    if len(data) > room:
        raise TooLarge(f"the row of {record.resume_id[:100]} has {len(data)} bytes; the broker takes {room}")
    return header, data


def _header(place: Place) -> str:
    text = msgspec.json.encode(place)
    return text.decode() if text.isascii() else json.dumps(msgspec.to_builtins(place))


def _data(record: Record) -> bytes:
    rest = Rest(*(getattr(record, name) for name in _REST_FIELDS))
    return msgspec.json.encode(rest) + b"\n" + record.body


def read_place(headers: Mapping[str, str] | None) -> Place:
    """Where a row stands, by the headers of its message. Raises UnreadableRow."""
    try:
        place = _places.decode((headers or {})[HEADER])
    except (KeyError, msgspec.MsgspecError) as error:
        raise UnreadableRow(f"its header can't be read: {error}") from None
    if place.v != VERSION:
        raise UnreadableRow(f"it has version {place.v}; this program knows {VERSION}")
    return place


def decode(headers: Mapping[str, str], data: bytes) -> Record:
    """The row in a message. Raises UnreadableRow."""
    place = read_place(headers)
    line, _, body = data.partition(b"\n")
    try:
        rest = _rests.decode(line)
        if rest.packed:
            body = zlib.decompress(body)
    except (msgspec.MsgspecError, zlib.error) as error:
        raise UnreadableRow(f"its body can't be read: {error}") from None
    values = (getattr(rest, name) for name in _REST_FIELDS[:-1])
    return Record(*values, place=place, body=body)
