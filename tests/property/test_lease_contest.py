"""Whatever happens to processes, messages and the broker, one process holds a lease in the end, and never two."""

from __future__ import annotations

from itertools import cycle

import hypothesis.strategies as st
from hypothesis import example, given, settings

from tests.support.contest import World

_HAPPENINGS = st.sampled_from(["start", "kill", "stop", "freeze", "thaw", "cut", "heal"])
_STEPS = st.lists(st.tuples(_HAPPENINGS, st.integers(0, 3), st.floats(0, 4)), max_size=25)
_BROKER = st.sampled_from(["full", "room", "deleted", "made"])
_DELAYS = st.lists(st.floats(0.0001, 0.15), min_size=3, max_size=12)


def happen(world: World, what: str, which: int) -> None:
    if what == "start":
        if sum(process.alive for process in world.processes) < 4:
            world.start("abc"[which % 3])
    elif what in ("full", "room"):
        world.full = what == "full"
    elif what in ("deleted", "made"):
        world.bucket, world.stored = what == "made", world.stored if what == "made" and world.bucket else None
    else:
        living = [process for process in world.processes if process.alive]
        if living:
            process = living[which % len(living)]
            if what not in ("cut", "heal") or process.connected == (what == "cut"):
                getattr(process, what)()


def calm(world: World) -> None:
    """All is well again, for a while."""
    world.full, world.bucket = False, True
    world.start("d")
    for process in world.processes:
        if process.alive and process.frozen:
            process.thaw()
        if process.alive and not process.connected:
            process.heal()
    world.run(12)
    assert len(world.holders()) == 1, world
    (holder,) = world.holders()
    assert world.stored is not None
    assert world.stored.process == holder.name


@settings(max_examples=150, deadline=None)
@example(steps=[("thaw", 0, 1.0), ("cut", 0, 0.0), ("start", 0, 0.25)], delays=[0.125, 0.0625, 0.125])
@given(steps=_STEPS, delays=_DELAYS)
def test_never_two_and_one_in_the_end(steps: list[tuple[str, int, float]], delays: list[float]) -> None:
    """Deaths, stops, freezes and cuts at any time, with messages of any delay: no two hold it at any instant."""
    world = World(cycle(delays))
    world.start("a")
    for what, which, pause in steps:
        happen(world, what, which)
        world.run(pause)
    calm(world)
    assert world.overlaps == 0


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(_HAPPENINGS | _BROKER, st.integers(0, 3), st.floats(0, 4)), max_size=25), delays=_DELAYS
)
def test_one_in_the_end_whatever_the_broker_refuses(steps: list[tuple[str, int, float]], delays: list[float]) -> None:
    """As above with a broker that is full, or has lost the bucket, in between."""
    world = World(cycle(delays))
    world.start("a")
    for what, which, pause in steps:
        happen(world, what, which)
        world.run(pause)
    calm(world)
