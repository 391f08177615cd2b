"""What the MongoDB outbox has its server do to a document: aggregation expressions, applied to it as it is then.

In an expression a text that begins with $ is the name of a field: whatever comes from outside goes through
``exactly``. Each ``dict`` of changes is one ``$set``, all of which sees the document as it was before.
"""

from __future__ import annotations

from typing import Any

from bson import ObjectId
from pymongo import UpdateOne

from notify_consumer.outbox.base import NewRow, State, storable

Document = dict[str, Any]

NOW: Document = {"$toLong": "$$NOW"}
ANSWERED: Document = {"$eq": ["$state", State.ANSWERED.value]}
HANDED_BACK: Document = {"$cond": [ANSWERED, State.ANSWERED.value, State.PENDING.value]}
UNLEASED: Document = {"owner": None, "token": None, "updated_at": NOW}


def exactly(value: object) -> Document:
    return {"$literal": value}


def after_ms(delay_ms: int) -> Document:
    return {"$add": [NOW, exactly(delay_ms)]}


def counted(field: str, counts: Document, by: int) -> Document:
    return {"$cond": [counts, {"$add": [f"${field}", exactly(by)]}, f"${field}"]}


def insertion(row: NewRow, batch: str) -> UpdateOne:
    """Puts ``row`` where there is none of its id, or an unreadable one and ``row`` is readable."""
    readable = row.unreadable is None
    new = {
        "_id": exactly(row.resume_id),
        "seq": exactly(ObjectId()),  # grows with each one that this process makes: who came first in a millisecond
        "batch": exactly(batch),
        "flow": exactly(storable(row.flow)),
        "lane": exactly(storable(row.flow)),
        "state": State.PENDING.value if readable else State.DEAD.value,
        "readable": exactly(readable),
        "body": exactly(row.body),
        "attempts": exactly(0),
        "sends": exactly(0),
        "feedback": None,
        "settled": None,
        "last_error": exactly(row.unreadable and storable(row.unreadable)),
        "owner": None,
        "token": None,
        "claimable_at": NOW if readable else None,
        "inserted_at": {"$ifNull": ["$inserted_at", NOW]},
        "updated_at": NOW,
    }
    absent: Document = {"$eq": [{"$type": "$state"}, "missing"]}
    gives_way: Document = {"$and": [{"$not": ["$readable"]}, exactly(readable)]}
    step = {"$replaceWith": {"$cond": [{"$or": [absent, gives_way]}, new, "$$ROOT"]}}
    return UpdateOne({"_id": row.resume_id}, [step], upsert=True)


def lease(owner: str, token: str, lease_ms: int) -> Document:
    return {
        "waited_from": "$claimable_at",
        "state": {"$cond": [ANSWERED, State.ANSWERED.value, State.CLAIMED.value]},
        "attempts": counted("attempts", {"$not": [ANSWERED]}, 1),
        "sends": counted("sends", ANSWERED, 1),
        "owner": exactly(storable(owner)),
        "token": exactly(token),
        "claimable_at": after_ms(lease_ms),
        "updated_at": NOW,
    }


RELEASED: Document = {
    **UNLEASED,
    "state": HANDED_BACK,
    "attempts": counted("attempts", {"$not": [ANSWERED]}, -1),
    "sends": counted("sends", ANSWERED, -1),
    "claimable_at": NOW,
}
REQUEUED: Document = {
    "state": State.ANSWERED.value,
    "sends": exactly(0),
    "claimable_at": NOW,
    "updated_at": NOW,
}
REVIVED: Document = {
    "state": State.PENDING.value,
    "lane": "$flow",
    "attempts": exactly(0),
    "sends": exactly(0),
    "feedback": None,
    "claimable_at": NOW,
    "updated_at": NOW,
}
REBASED: Document = {
    "claimable_at": {"$add": [NOW, {"$max": [{"$subtract": ["$claimable_at", "$updated_at"]}, exactly(0)]}]},
    "updated_at": NOW,
}
