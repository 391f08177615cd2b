"""The heap gives out the earliest entry first, equal times as they arrived, and finds entries by itself."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from timer_service.domain.heap import Entry, IndexedHeap

EXAMPLE = [("a", 5), ("b", 3), ("c", 8), ("d", 3), ("e", 1)]


def example() -> tuple[IndexedHeap[str], dict[str, Entry[str]]]:
    """Return the worked example of the design, and its entries by key."""
    entries = {key: Entry(key, at, seq) for seq, (key, at) in enumerate(EXAMPLE, start=1)}
    heap: IndexedHeap[str] = IndexedHeap()
    for entry in entries.values():
        heap.push(entry)
    return heap, entries


def drained(heap: IndexedHeap[str]) -> list[str]:
    keys = []
    while (entry := heap.pop()) is not None:
        keys.append(entry.key)
    return keys


def test_worked_example_push():
    """Pushing a@5, b@3, c@8, d@3, e@1 gives the arrays of the design, one after the other."""
    heap: IndexedHeap[str] = IndexedHeap()
    arrays = []
    for seq, (key, at) in enumerate(EXAMPLE, start=1):
        heap.push(Entry(key, at, seq))
        arrays.append("".join(heap.items()))
    assert arrays == ["a", "ba", "bac", "bdca", "ebcad"]


def test_worked_example_pop():
    """Popping gives e, leaves the array of the design, and then gives b, d, a, c."""
    heap, entries = example()
    assert heap.pop() is entries["e"]
    assert heap.items() == ["b", "d", "c", "a"]
    assert drained(heap) == ["b", "d", "a", "c"]


def test_an_empty_heap_has_nothing_to_give():
    """Peek and pop of an empty heap are None, its length is 0, before and after use."""
    heap: IndexedHeap[str] = IndexedHeap()
    for _ in range(2):
        assert heap.peek() is None
        assert heap.pop() is None
        assert len(heap) == 0
        assert heap.items() == []
        heap.push(Entry("x", 1, 1))
        heap.pop()


def test_peek_leaves_the_entry_in():
    """Peek gives the earliest entry again and again and takes nothing out."""
    heap, entries = example()
    assert heap.peek() is heap.peek() is entries["e"]
    assert len(heap) == 5


def test_entries_know_their_place():
    """The index of an entry is its place in the array, and -1 before, and after pop and remove."""
    heap, entries = example()
    assert [entries[key].index for key in heap.items()] == [0, 1, 2, 3, 4]
    heap.pop()
    heap.remove(entries["b"])
    assert entries["e"].index == entries["b"].index == -1
    assert [entries[key].index for key in heap.items()] == [0, 1, 2]
    assert Entry("new", 1, 1).index == -1


def test_equal_times_come_out_in_the_order_of_arrival():
    """Ties go by seq; keys are never compared, so they may be of a kind that has no order, such as dicts."""
    keys = [{"number": number} for number in range(50)]
    entries = [Entry(key, 7, seq) for seq, key in enumerate(keys)]
    for shuffled in (entries[::-1], random.Random(5).sample(entries, k=50)):
        heap: IndexedHeap[dict[str, int]] = IndexedHeap()
        for entry in shuffled:
            heap.push(entry)
        popped = [heap.pop() for _ in keys]
        assert [entry and entry.key for entry in popped] == keys


def test_seq_decides_only_between_equal_times():
    """An earlier time wins over a smaller seq."""
    heap: IndexedHeap[str] = IndexedHeap()
    heap.push(Entry("later", 2, 1))
    heap.push(Entry("earlier", 1, 2))
    assert drained(heap) == ["earlier", "later"]


def lopsided() -> tuple[IndexedHeap[str], dict[str, Entry[str]]]:
    """Return a heap whose left branch is late and whose right branch is early: [r L R l1 l2 r1 r2]."""
    times = {"r": 0, "L": 50, "R": 1, "l1": 60, "l2": 70, "r1": 2, "r2": 3}
    entries = {key: Entry(key, at, seq) for seq, (key, at) in enumerate(times.items())}
    return IndexedHeap.build(entries.values()), entries


def test_remove_from_the_middle_may_lift_the_last_entry():
    """The last entry takes the free place and rises when it comes from an earlier branch."""
    heap, entries = lopsided()
    assert heap.items() == ["r", "L", "R", "l1", "l2", "r1", "r2"]
    heap.remove(entries["l1"])
    assert heap.items() == ["r", "r2", "R", "L", "l2", "r1"]
    assert drained(heap) == ["r", "R", "r1", "r2", "L", "l2"]


def test_remove_from_the_middle_lifts_by_seq_too():
    """At equal times the last entry rises when its seq is smaller."""
    entries = {key: Entry(key, 0, seq) for key, seq in zip("rLRabcd", (0, 50, 1, 60, 70, 2, 3), strict=True)}
    heap = IndexedHeap.build(entries.values())
    heap.remove(entries["a"])
    assert heap.items() == ["r", "d", "R", "L", "b", "c"]
    assert drained(heap) == ["r", "R", "c", "d", "L", "b"]


def test_remove_may_sink_the_last_entry():
    """Taking out the first or a middle entry puts a late last one where it belongs."""
    heap, entries = lopsided()
    heap.remove(entries["r"])
    heap.remove(entries["R"])
    assert drained(heap) == ["r1", "r2", "L", "l1", "l2"]


def test_remove_the_last_place_and_the_only_entry():
    """Nothing moves when the entry stands last, and a heap can be emptied by removing."""
    heap, entries = lopsided()
    heap.remove(entries["r2"])
    assert heap.items() == ["r", "L", "R", "l1", "l2", "r1"]
    single: IndexedHeap[str] = IndexedHeap.build([entry := Entry("x", 1, 1)])
    single.remove(entry)
    assert (len(single), entry.index) == (0, -1)


@pytest.mark.parametrize(
    ("key", "at", "seq", "array", "order"),
    [
        ("c", 0, 3, "cbead", "cebda"),  # up to the top
        ("e", 9, 5, "bdcae", "bdace"),  # down to the end
        ("a", 3, 1, "eacbd", "eabdc"),  # up before two of the same time
        ("d", 3, 1, "edcab", "edbac"),  # up by its seq alone
        ("b", 3, 6, "edcab", "edbac"),  # down by its seq alone
        ("b", 3, 2, "ebcad", "ebdac"),  # not at all
        ("d", 4, 4, "ebcad", "ebdac"),  # later, but nowhere else
    ],
)
def test_update_moves_an_entry(key: str, at: int, seq: int, array: str, order: str):
    """Update moves the entry to its new time, in both directions, and keeps it the same entry."""
    heap, entries = example()
    heap.update(entries[key], at, seq)
    assert (entries[key].at, entries[key].seq) == (at, seq)
    assert "".join(heap.items()) == array
    assert [entries[k].index for k in heap.items()] == list(range(5))
    assert drained(heap) == list(order)


MISUSES: dict[str, Callable[[IndexedHeap[str], Entry[str]], object]] = {
    "remove": lambda heap, entry: heap.remove(entry),
    "update": lambda heap, entry: heap.update(entry, 1, 99),
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES.keys())
def test_an_entry_that_is_not_in_this_heap_is_refused(misuse: Callable[..., object]):
    """Removing or moving a new, popped, removed or foreign entry raises ValueError and changes nothing."""
    heap, entries = example()
    other, foreign = example()
    other.pop()
    heap.pop()
    heap.remove(entries["c"])
    empty: IndexedHeap[str] = IndexedHeap()
    with pytest.raises(ValueError, match="not in this heap"):
        misuse(empty, Entry("new", 5, 9))
    for entry in (Entry("new", 5, 9), entries["e"], entries["c"], *foreign.values()):
        before = (entry.at, entry.seq, entry.index)
        with pytest.raises(ValueError, match="not in this heap"):
            misuse(heap, entry)
        assert (entry.at, entry.seq, entry.index) == before
    assert drained(heap) == ["b", "d", "a"]


def test_pushing_an_entry_twice_is_refused():
    """An entry is in at most one heap, once; after pop or remove it may be pushed again."""
    heap, entries = example()
    other: IndexedHeap[str] = IndexedHeap()
    for target in (heap, other):
        with pytest.raises(ValueError, match="already"):
            target.push(entries["a"])
    assert (len(heap), len(other)) == (5, 0)
    heap.remove(entries["a"])
    other.push(entries["a"])
    assert drained(other) == ["a"]
    assert drained(heap) == ["e", "b", "d", "c"]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 6, 7, 8, 100, 1_000])
def test_build_makes_a_heap_of_any_number_of_entries(size: int):
    """A heap built at once gives out the same order as one built by pushes, and can be used like it."""
    numbers = random.Random(size)
    entries = [Entry(str(seq), numbers.randrange(max(1, size // 3)), seq) for seq in range(size)]
    expected = [entry.key for entry in sorted(entries, key=lambda entry: (entry.at, entry.seq))]
    heap = IndexedHeap.build(iter(entries))
    assert [int(key) for key in heap.items()] == [e.seq for e in sorted(entries, key=lambda e: e.index)]
    assert len(heap) == size
    assert drained(heap) == expected


def test_build_refuses_repeated_and_foreign_entries():
    """Build raises ValueError and leaves all entries as they were, so that they can be used otherwise."""
    _, taken = example()
    fresh = [Entry("x", 1, 1), Entry("y", 2, 2)]
    for entries in ([*fresh, fresh[0]], [*fresh, taken["a"]]):
        with pytest.raises(ValueError, match="already"):
            IndexedHeap.build(entries)
        assert [entry.index for entry in fresh] == [-1, -1]
    assert taken["a"].index == 3
    assert drained(IndexedHeap.build(fresh)) == ["x", "y"]


def test_entries_can_carry_more():
    """A subclass with further slots goes through the heap unchanged, and entries have no dict."""

    class Armed(Entry[str]):
        __slots__ = ("phase",)

        def __init__(self, key: str, at: int, seq: int, phase: str) -> None:
            super().__init__(key, at, seq)
            self.phase = phase

    heap: IndexedHeap[str] = IndexedHeap()
    heap.push(armed := Armed("k", 1, 2, "waiting"))
    assert heap.pop() is armed
    assert (armed.phase, repr(armed)) == ("waiting", "Armed('k', at=1, seq=2, index=-1)")
    assert not hasattr(armed, "__dict__")


class Counted(int):
    """A time that counts how often times are compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) < int(other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and int(self) == int(other)

    __hash__ = int.__hash__


def comparisons(act: Callable[..., object], *args: object) -> int:
    before = Counted.compared
    act(*args)
    return Counted.compared - before


def test_the_work_is_logarithmic_and_a_build_linear():
    """No operation compares more than two times per level, and building needs two per entry at most."""
    size = 10_000
    numbers = random.Random(8)
    entries = [Entry(seq, Counted(numbers.randrange(10**6)), seq) for seq in range(size)]
    heaps: list[IndexedHeap[int]] = []
    assert comparisons(lambda: heaps.append(IndexedHeap.build(entries))) <= 2 * size
    heap = heaps[0]
    most = 2 * math.ceil(math.log2(size)) + 1
    for entry in numbers.sample(entries, k=300):
        assert comparisons(heap.update, entry, Counted(numbers.randrange(10**6)), entry.seq) <= most
        assert comparisons(heap.remove, entry) <= most
        assert comparisons(heap.push, entry) <= most
    assert all(comparisons(heap.pop) <= most for _ in range(300))


def test_a_heap_may_be_made_of_entries_at_once():
    """As ``build`` does, in the order of a build and with the same refusals."""
    entries = [Entry(key, at, seq) for seq, (key, at) in enumerate(zip("abcde", (5, 3, 8, 3, 1), strict=True))]
    heap = IndexedHeap(entries)
    assert heap.items()[0] == "e"
    assert [entry.index for entry in sorted(entries, key=lambda entry: entry.index)] == list(range(5))
    with pytest.raises(ValueError, match="in a heap already"):
        IndexedHeap(entries)
