"""A model of as much of MongoDB as the outbox uses, after its documentation. It is no MongoDB.

What passes on it is consistent in itself: filters and expressions do what the outbox needs, if the documented operators
do what is written here. Whatever it does not know it refuses. Real servers are tested where one is named
(NOTIFY_CONSUMER_TEST_MONGODB_URL).
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import bson
from bson import ObjectId
from pymongo import ReadPreference, UpdateOne, WriteConcern
from pymongo.errors import BulkWriteError

Document = dict[str, Any]
_CODEC: bson.CodecOptions[Document] = bson.CodecOptions(document_class=dict)


class MongoModel:
    """A server with one database. Clients of it are made by ``client``."""

    def __init__(self) -> None:
        self.collections: dict[str, Document] = {}
        self.indexes: dict[str, list[tuple[str, int]]] = {}
        self.clock_ahead_ms = 0
        self.trouble: Callable[[str], None] = lambda _operation: None
        """Called before each operation with its name; what it raises the operation raises."""
        self.hangs = False

    def client(self) -> Any:
        admin = SimpleNamespace(command=self._hello)
        model = SimpleNamespace(admin=admin, close=self._close)
        model.get_database = lambda name, **options: _Database(self, model, options)
        return model

    @property
    def now(self) -> datetime.datetime:
        """The server's clock."""
        now_s = (time.time_ns() // 1_000_000 + self.clock_ahead_ms) / 1000
        return datetime.datetime.fromtimestamp(now_s, datetime.UTC).replace(tzinfo=None)

    async def entered(self, operation: str, *sent: Any) -> None:
        bson.encode({"sent": sent})  # all of it has to be BSON
        await asyncio.sleep(600 if self.hangs else 0)
        self.trouble(operation)

    async def _hello(self, name: str) -> Document:
        assert name == "hello"
        await self.entered("hello")
        return {"localTime": self.now}

    async def _close(self) -> None:
        await asyncio.sleep(0)


class _Database:
    def __init__(self, model: MongoModel, client: Any, options: Document) -> None:
        assert options["write_concern"] == WriteConcern("majority", wtimeout=4_000, j=True)
        assert options["read_preference"] == ReadPreference.PRIMARY
        self.client, self._model = client, model

    def __getitem__(self, name: str) -> _Collection:
        return _Collection(self._model, self, name)


class _Collection:
    def __init__(self, model: MongoModel, database: _Database, name: str) -> None:
        self.database, self._model, self._name = database, model, name
        self._rows: Document = model.collections.setdefault(name, {})

    async def create_index(self, keys: list[tuple[str, int]], *, name: str) -> None:
        await self._model.entered("create_index", keys)
        self._model.indexes[name] = keys

    async def find_one(self, which: Document, *, sort: list[tuple[str, int]] | None = None) -> Document | None:
        await self._model.entered("find_one", which)
        return next(iter(self._found(which, sort)), None)

    def find(self, which: Document, projection: Document | None = None) -> _Cursor:
        assert projection in (None, {"_id": True})
        return _Cursor(self._model, which, lambda sort: self._found(which, sort))

    async def count_documents(self, which: Document, *, limit: int | None = None) -> int:
        await self._model.entered("count_documents", which)
        return len(self._found(which)[:limit])

    async def find_one_and_update(
        self, which: Document, steps: list[Document], *, sort: list[tuple[str, int]], return_document: bool
    ) -> Document | None:
        await self._model.entered("find_one_and_update", which, steps)
        assert return_document
        found = self._found(which, sort)
        return self._stored(_applied(steps, found[0], self._model.now)) if found else None

    async def update_one(self, which: Document, steps: Any, *, upsert: bool = False) -> SimpleNamespace:
        await self._model.entered("update_one", which, steps)
        found = self._found(which)
        if found:
            if isinstance(steps, list):
                self._stored(_applied(steps, found[0], self._model.now))
        elif upsert:
            assert set(steps) == {"$setOnInsert"}
            self._stored({**which, **steps["$setOnInsert"]})
        return SimpleNamespace(matched_count=len(found[:1]))

    async def update_many(self, which: Document, steps: list[Document]) -> None:
        await self._model.entered("update_many", which, steps)
        for row in self._found(which):
            self._stored(_applied(steps, row, self._model.now))

    async def delete_many(self, which: Document) -> SimpleNamespace:
        await self._model.entered("delete_many", which)
        found = self._found(which)
        for row in found:
            del self._rows[row["_id"]]
        return SimpleNamespace(deleted_count=len(found))

    async def bulk_write(self, updates: list[UpdateOne], *, ordered: bool) -> None:
        assert not ordered
        errors = []
        for at, update in enumerate(updates):
            which, steps = update._filter, update._doc
            assert update._upsert
            assert isinstance(steps, list)
            try:
                await self._model.entered("bulk_write", which, steps)
            except BulkWriteError as error:
                errors += [{**each, "index": at} for each in error.details["writeErrors"]]
                continue
            found = self._found(dict(which)) or [dict(which)]
            self._stored(_applied(list(steps), found[0], self._model.now))
        if errors:
            raise BulkWriteError({"writeErrors": errors, "writeConcernErrors": []})

    def _found(self, which: Document, sort: list[tuple[str, int]] | None = None) -> list[Document]:
        found = [row for row in self._rows.values() if _matches(row, which)]
        for field, direction in reversed(sort or []):
            found.sort(key=lambda row: _sortable(row[field]), reverse=direction < 0)
        return [dict(row) for row in found]

    def _stored(self, row: Document) -> Document:
        kept = bson.decode(bson.encode(row), _CODEC)
        self._rows[kept["_id"]] = kept
        return dict(kept)


class _Cursor:
    def __init__(self, model: MongoModel, which: Document, found: Callable[[Any], list[Document]]) -> None:
        self._model, self._which, self._found = model, which, found
        self._sort: list[tuple[str, int]] | None = None
        self._limit: int | None = None

    def sort(self, keys: list[tuple[str, int]]) -> _Cursor:
        self._sort = keys
        return self

    def limit(self, count: int) -> _Cursor:
        self._limit = count
        return self

    async def __aiter__(self) -> AsyncIterator[Document]:
        await self._model.entered("find", self._which)
        for row in self._found(self._sort)[: self._limit]:
            yield row


def _sortable(value: Any) -> tuple[int, Any]:
    order = (type(None), int, str, ObjectId)
    at = next(at for at, kind in enumerate(order) if isinstance(value, kind))
    return at, value or 0 if at < 2 else value


# -- filters: a comparison holds between values of one kind only -----------------------------------------------

_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "$lte": lambda value, bound: value <= bound,
    "$lt": lambda value, bound: value < bound,
    "$gt": lambda value, bound: value > bound,
}


def _matches(row: Document, which: Document) -> bool:
    return all(_meets(row.get(field), wanted) for field, wanted in which.items())


def _meets(value: Any, wanted: Any) -> bool:
    if not isinstance(wanted, dict):
        return bool(value == wanted)
    for operator, bound in wanted.items():
        if operator == "$in":
            held = value in bound
        else:
            same = isinstance(value, str) == isinstance(bound, str) and value is not None
            held = same and _COMPARISONS[operator](value, bound)
        if not held:
            return False
    return True


# -- expressions -----------------------------------------------------------------------------------------------

_MISSING = object()
_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "$eq": lambda one, other: one == other,
    "$add": lambda *numbers: sum(numbers),
    "$subtract": lambda one, other: one - other,
    "$max": lambda *numbers: max(numbers),
    "$and": lambda *conditions: all(map(_true, conditions)),
    "$or": lambda *conditions: any(map(_true, conditions)),
    "$not": lambda condition: not _true(condition),
    "$cond": lambda condition, then, otherwise: then if _true(condition) else otherwise,
    "$ifNull": lambda value, otherwise: otherwise if value in (None, _MISSING) else value,
    "$type": lambda value: "missing" if value is _MISSING else type(value).__name__,
    "$toLong": lambda date: round(date.replace(tzinfo=datetime.UTC).timestamp() * 1000),
}


def _true(value: Any) -> bool:
    return value is not _MISSING and bool(value)


def _applied(steps: list[Document], row: Document, now: datetime.datetime) -> Document:
    for step in steps:
        ((stage, expression),) = step.items()
        value = _evaluated(expression, row, now)
        row = {"$set": {**row, **value}, "$replaceWith": value}[stage]
    return row


def _evaluated(expression: Any, row: Document, now: datetime.datetime) -> Any:
    if isinstance(expression, str) and expression.startswith("$"):
        if expression.startswith("$$"):
            return {"$$NOW": now, "$$ROOT": row}[expression]
        return row.get(expression[1:], _MISSING)
    if not isinstance(expression, dict):
        return expression
    if any(key.startswith("$") for key in expression):
        ((operator, arguments),) = expression.items()
        if operator == "$literal":
            return arguments
        arguments = arguments if isinstance(arguments, list) else [arguments]
        return _OPERATORS[operator](*(_evaluated(each, row, now) for each in arguments))
    return {field: _evaluated(each, row, now) for field, each in expression.items()}
