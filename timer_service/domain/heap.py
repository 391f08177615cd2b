"""An indexed binary min-heap: every entry knows its place, so it can be moved or taken out without a search.

The heap is one array; the children of position i are at 2i + 1 and 2i + 2. The order is (at, seq) and never
looks at keys, so keys need not be comparable. There are no stale entries: what was removed is gone, and the
length is exact. Not safe for use from several threads at once.
"""

from collections.abc import Iterable
from typing import Generic, TypeVar

K = TypeVar("K")


class Entry(Generic[K]):
    """One key with its place in time. Subclasses may add slots.

    `at` is a time in any integer unit, `seq` breaks ties between equal times (the smaller comes first),
    `index` is the position in the heap, -1 while in none. While an entry is in a heap only the heap may
    change `at`, `seq` and `index`: use `IndexedHeap.update`.
    """

    __slots__ = ("at", "index", "key", "seq")

    def __init__(self, key: K, at: int, seq: int) -> None:
        self.key = key
        self.at = at
        self.seq = seq
        self.index = -1

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key!r}, at={self.at}, seq={self.seq}, index={self.index})"


class IndexedHeap(Generic[K]):
    """Entries by (at, seq), the smallest first. Equal (at, seq) come out in no particular order."""

    __slots__ = ("_array",)

    def __init__(self, entries: Iterable[Entry[K]] = ()) -> None:
        """A heap of `entries`, built in O(n).

        ValueError, with no entry changed, if one of them is in a heap already or comes twice.
        """
        self._array: list[Entry[K]] = list(entries)
        array = self._array
        _number(array)
        # The second half are leaves. Going backwards, both children of a position are heaps when it sinks.
        for index in range(len(array) // 2 - 1, -1, -1):
            _sink(array, index, array[index])

    @classmethod
    def build(cls, entries: Iterable[Entry[K]]) -> "IndexedHeap[K]":
        """The same under a name of its own: return a heap of `entries`, in O(n)."""
        return cls(entries)

    def __len__(self) -> int:
        return len(self._array)

    def items(self) -> list[K]:
        """Return the keys in array order: the first is the smallest, the rest are not sorted. O(n)."""
        return [entry.key for entry in self._array]

    def peek(self) -> Entry[K] | None:
        """Return the smallest entry and leave it in; None when empty. O(1)."""
        return self._array[0] if self._array else None

    def push(self, entry: Entry[K]) -> None:
        """Add `entry`, in O(log n). ValueError if it is in a heap already."""
        if entry.index != -1:
            raise ValueError("the entry is in a heap already")
        array = self._array
        array.append(entry)
        _rise(array, len(array) - 1, entry)

    def pop(self) -> Entry[K] | None:
        """Take out and return the smallest entry; None when empty. O(log n)."""
        array = self._array
        if not array:
            return None
        top = array[0]
        last = array.pop()
        if array:
            _sink(array, 0, last)
        top.index = -1
        return top

    def remove(self, entry: Entry[K]) -> None:
        """Take `entry` out, in O(log n). ValueError, with nothing changed, if it is not in this heap."""
        index = self._position(entry)
        array = self._array
        last = array.pop()
        if last is not entry:
            _settle(array, index, last, entry.at, entry.seq)
        entry.index = -1

    def update(self, entry: Entry[K], at: int, seq: int) -> None:
        """Move `entry` to (at, seq), up or down, in O(log n).

        ValueError, with nothing changed, if it is not in this heap.
        """
        index = self._position(entry)
        old_at, old_seq = entry.at, entry.seq
        entry.at = at
        entry.seq = seq
        _settle(self._array, index, entry, old_at, old_seq)

    def _position(self, entry: Entry[K]) -> int:
        array = self._array
        index = entry.index
        if not 0 <= index < len(array) or array[index] is not entry:
            raise ValueError("the entry is not in this heap")
        return index


def _number(array: list[Entry[K]]) -> None:
    """Give every entry its index; on a repeated or foreign one take all of them back and raise ValueError."""
    for index, entry in enumerate(array):
        if entry.index != -1:
            for numbered in array[:index]:
                numbered.index = -1
            raise ValueError("an entry is in a heap already, or comes twice")
        entry.index = index


def _settle(array: list[Entry[K]], index: int, entry: Entry[K], old_at: int, old_seq: int) -> None:
    """Put `entry` where (old_at, old_seq) stood, and sift it the one way in which it can be out of order.

    What takes the place of a removed entry comes from another branch, so it may have to rise.
    """
    at = entry.at
    if at < old_at or (at == old_at and entry.seq < old_seq):
        _rise(array, index, entry)
    else:
        _sink(array, index, entry)


# The two sifts move a hole, not the entry: one write per level. The comparisons are spelled out, since a call
# per comparison (or a tuple per side) would be most of the cost.


def _rise(array: list[Entry[K]], index: int, entry: Entry[K]) -> None:
    """Move `entry` from the hole at `index` up to its place."""
    at, seq = entry.at, entry.seq
    while index > 0:
        above = (index - 1) >> 1
        parent = array[above]
        parent_at = parent.at
        if parent_at < at or (parent_at == at and parent.seq <= seq):
            break
        array[index] = parent
        parent.index = index
        index = above
    array[index] = entry
    entry.index = index


def _sink(array: list[Entry[K]], index: int, entry: Entry[K]) -> None:
    """Move `entry` from the hole at `index` down to its place."""
    at, seq, size = entry.at, entry.seq, len(array)
    below = 2 * index + 1
    while below < size:
        child = array[below]
        child_at = child.at
        right = below + 1
        if right < size:
            other = array[right]
            other_at = other.at
            if other_at < child_at or (other_at == child_at and other.seq < child.seq):
                child, child_at, below = other, other_at, right
        if at < child_at or (at == child_at and seq <= child.seq):
            break
        array[index] = child
        child.index = index
        index = below
        below = 2 * index + 1
    array[index] = entry
    entry.index = index
