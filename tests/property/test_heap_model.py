"""Whatever is done to it, the heap behaves as a sorted list would, and its inside stays in order."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from timer_service.domain.heap import Entry, IndexedHeap

# Few different values: ties, where mistakes live, are common.
TIMES = st.integers(0, 3)
SEQS = st.integers(0, 5)


def check_inside(heap: IndexedHeap[Any], entries: list[Entry[Any]]) -> None:
    """Check that the heap holds exactly `entries`, each at its index, and no parent after its child."""
    array = heap._array
    assert sorted(map(id, array)) == sorted(map(id, entries))
    assert [entry.index for entry in array] == list(range(len(array)))
    for index in range(1, len(array)):
        parent, child = array[(index - 1) // 2], array[index]
        assert (parent.at, parent.seq) <= (child.at, child.seq)


class HeapAgainstSortedList(RuleBasedStateMachine):
    """The model is a list, searched and sorted anew at every step; keys are objects without any order."""

    def __init__(self) -> None:
        super().__init__()
        self.heap: IndexedHeap[object] = IndexedHeap()
        self.model: list[Entry[object]] = []

    @rule(entries=st.lists(st.tuples(TIMES, SEQS), max_size=20))
    def build(self, entries: list[tuple[int, int]]) -> None:
        for entry in self.model:
            self.heap.remove(entry)
        self.model = [Entry(object(), at, seq) for at, seq in entries]
        self.heap = IndexedHeap.build(self.model)

    @rule(at=TIMES, seq=SEQS)
    def push(self, at: int, seq: int) -> None:
        entry = Entry(object(), at, seq)
        self.heap.push(entry)
        self.model.append(entry)

    @rule()
    def pop(self) -> None:
        popped = self.heap.pop()
        if popped is None:
            assert self.model == []
            return
        assert popped.index == -1
        assert (popped.at, popped.seq) == min((entry.at, entry.seq) for entry in self.model)
        self.model.remove(popped)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        entry = self.model.pop(data.draw(st.integers(0, len(self.model) - 1)))
        self.heap.remove(entry)
        assert entry.index == -1

    @precondition(lambda self: self.model)
    @rule(data=st.data(), at=TIMES, seq=SEQS)
    def update(self, data: st.DataObject, at: int, seq: int) -> None:
        entry = self.model[data.draw(st.integers(0, len(self.model) - 1))]
        self.heap.update(entry, at, seq)
        assert (entry.at, entry.seq) == (at, seq)

    @invariant()
    def inside_is_in_order(self) -> None:
        check_inside(self.heap, self.model)

    @invariant()
    def outside_agrees_with_the_model(self) -> None:
        first = self.heap.peek()
        assert len(self.heap) == len(self.heap.items()) == len(self.model)
        assert (first is None) == (not self.model)
        if first is not None:
            assert (first.at, first.seq) == min((entry.at, entry.seq) for entry in self.model)


HeapAgainstSortedList.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
test_the_heap_behaves_as_a_sorted_list = HeapAgainstSortedList.TestCase


def test_long_mixed_use_of_a_larger_heap():
    """After thousands of mixed steps a growing heap still drains in exact (at, seq) order."""
    numbers = random.Random(20)
    heap: IndexedHeap[int] = IndexedHeap()
    live: dict[int, Entry[int]] = {}
    for step in range(6_000):
        action = numbers.random()
        if action < 0.5 or not live:
            live[step] = Entry(step, numbers.randrange(500), step)
            heap.push(live[step])
        elif action < 0.6:
            entry = heap.pop()
            assert entry is min(live.values(), key=lambda entry: (entry.at, entry.seq))
            del live[entry.key]
        elif action < 0.85:
            heap.update(live[numbers.choice(list(live))], numbers.randrange(500), step)
        else:
            heap.remove(live.pop(numbers.choice(list(live))))
        if step % 50 == 0:
            check_inside(heap, list(live.values()))
    assert len(live) > 100
    expected = sorted(live.values(), key=lambda entry: (entry.at, entry.seq))
    assert [heap.pop() for _ in expected] == expected


@pytest.mark.parametrize("seed", range(24))
def test_a_seeded_round(seed: int):
    """Pushes, pops, moves and removals beside a sorted list; order, length and index map are checked at each step."""
    numbers = random.Random(seed)
    spread = (1, 4, 1_000)[seed % 3]  # nothing but ties, many ties, few
    heap: IndexedHeap[object] = IndexedHeap()
    model: list[Entry[object]] = []
    for seq in range(400):
        draining = seq % 200 >= 120
        match numbers.choices(["push", "pop", "move", "remove"], (1 if draining else 5, 2, 3, 1))[0]:
            case "push":
                heap.push(entry := Entry(object(), numbers.randrange(spread), seq))
                model.append(entry)
            case "pop":
                assert heap.pop() is (model.pop(0) if model else None)
            case "move" if model:
                heap.update(numbers.choice(model), numbers.randrange(spread), seq)
            case "remove" if model:
                heap.remove(model.pop(numbers.randrange(len(model))))
        model.sort(key=lambda entry: (entry.at, entry.seq))
        check_inside(heap, model)
        assert heap.peek() is (model[0] if model else None)
        assert len(heap) == len(model)
    assert [heap.pop() for _ in model] == model
