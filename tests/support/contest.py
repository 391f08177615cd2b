"""A lease that several processes contend for, in virtual time: messages take a while, processes freeze and die."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, repeat

from timer_service.domain.lease import Contender, Record, Step

_PATIENCE_S = 0.6
_ASK_S = 0.5
Action = Callable[[], None]


class World:
    """The key on the broker, the processes, and the order in which things happen."""

    def __init__(self, delays: Iterator[float] | None = None) -> None:
        self.now = 0.0
        self.stored: Record | None = None
        self.revision = 0
        self.full = False
        self.bucket = True
        self.writes = 0
        self.reads = 0
        self.processes: list[Process] = []
        self.overlaps = 0
        """How often two processes held the lease at the same instant."""
        self._delays = delays or repeat(0.001)
        self._queue: list[tuple[float, int, Action]] = []
        self._order = count()

    def start(self, instance: str) -> Process:
        process = Process(self, instance, f"{instance}-{next(self._order):05}")
        self.processes.append(process)
        process.turn()
        return process

    def later(self, delay_s: float, action: Action) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), action))

    def send(self, action: Action) -> None:
        """What travels takes a while."""
        self.later(next(self._delays), action)

    def run(self, seconds: float) -> None:
        """Let that much time pass."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            self._look()
            action()
            self._look()
        self.now = end

    def until(self, condition: Callable[[], bool], within: float) -> float:
        """Let time pass until ``condition``; returns how much that was."""
        begun = self.now
        while not condition():
            assert self._queue, f"nothing will happen any more: {self}"
            assert self._queue[0][0] <= begun + within, f"not within {within} s: {self}"
            self.run(self._queue[0][0] - self.now)
        return self.now - begun

    @property
    def record(self) -> Record:
        assert self.stored is not None
        return self.stored

    def holders(self) -> list[Process]:
        return [process for process in self.processes if process.holds]

    def _look(self) -> None:
        self.overlaps += len(self.holders()) > 1

    def __repr__(self) -> str:
        return f"at {self.now}: {self.revision}: {self.stored}; held by {self.holders()}"


class Process:
    """One contender, run as ``timer_service.jetstream.lease`` runs it."""

    def __init__(self, world: World, instance: str, name: str) -> None:
        self.world, self.instance, self.name = world, instance, name
        self.contender = Contender(instance, name, f"ask.{name}")
        self.alive = self.connected = True
        self.frozen = False
        self._busy: object = None
        self._mail: list[Action] = []

    def __repr__(self) -> str:
        return self.name

    @property
    def holds(self) -> bool:
        return self.alive and self.contender.holds(self.world.now)

    @property
    def epoch(self) -> int:
        assert self.contender.mine is not None
        return self.contender.mine.epoch

    @property
    def duplicate(self) -> bool:
        return self.contender.mine is None and self.contender.holder_lives

    # -- what happens to it ---------------------------------------------------------------------------------

    def kill(self) -> None:
        self.alive = self.connected = False

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        mail, self._mail = self._mail, []
        for action in mail:
            self._take(action)
        self.turn()

    def cut(self) -> None:
        """Its connection is gone, which it notices at once."""
        self.connected = False
        self._take(self.contender.cut_off)
        if self._busy is not None:
            self._busy = None
            self._take(lambda: self.contender.unanswered(self.world.now))

    def heal(self) -> None:
        self.connected = True
        self._take(lambda: self.contender.returned(self.world.now))

    def stop(self) -> None:
        """A clean stop: it gives up what it has."""
        if self.contender.mine is not None and self.connected:
            given_up = self.contender.propose(given_up=True)
            self.world.send(lambda: self._arrives(given_up, self.contender.revision, self.world.now, object()))
        self.alive = False
        self.connected = False

    # -- what it does -----------------------------------------------------------------------------------------

    def turn(self) -> None:
        if not self.alive or self.frozen or not self.connected or self._busy is not None:
            return
        now, contender = self.world.now, self.contender
        step = contender.step(now)
        if step is Step.WAIT:
            due = contender.due_s(now)
            if due < math.inf:
                self.world.later(due - now, lambda: self._take(lambda: None))
            return
        if step is Step.ASK:
            self._ask()
            self.turn()
            return
        token = self._busy = object()
        self.world.later(_PATIENCE_S, lambda: self._answer(token, self._silence(step)))
        if step is Step.READ:
            self.world.reads += 1
            self.world.send(lambda: self._read(token))
        else:
            record, revision = contender.propose(), contender.revision
            self.world.send(lambda: self._arrives(record, revision, now, token))

    def _silence(self, step: Step) -> Action:
        silent = self.contender.not_read if step is Step.READ else self.contender.unanswered
        return lambda: silent(self.world.now)

    def _answer(self, token: object, action: Action) -> None:
        def take() -> None:
            if self._busy is token:
                self._busy = None
                action()

        self._take(take)

    def _take(self, action: Action) -> None:
        if self.alive and self.frozen:
            self._mail.append(action)
        elif self.alive:
            action()
            self.turn()

    def _read(self, token: object) -> None:
        world = self.world
        if not world.bucket:
            asked = world.now
            self._reply(token, lambda: self.contender.no_bucket(asked, world.now))
            return
        found, revision = (world.stored, world.revision) if world.stored is not None else (None, 0)
        self._reply(token, lambda: self.contender.found(found, revision, world.now))

    def _reply(self, token: object, action: Action) -> None:
        self.world.send(lambda: self._answer(token, action) if self.connected else None)

    def _arrives(self, record: Record, revision: int, sent: float, token: object) -> None:
        """A write reaches the broker: everybody else hears it, whatever becomes of it."""
        world, contender = self.world, self.contender
        others = [other for other in world.processes if other is not self and other.connected]
        for other in others:
            world.send(partial(other._hears, record))
        if not world.bucket:
            if others:
                return  # somebody listens on the subject, so the broker sees no reason to complain
            self._reply(token, lambda: contender.refused(record, sent, world.now))
        elif world.full:
            self._reply(token, lambda: contender.no_room(record, sent))
        elif revision != (world.revision if world.stored else 0):
            self._reply(token, lambda: contender.overtaken(world.now))
        else:
            world.writes += 1
            world.revision += 1
            world.stored, stored_at = record, world.revision
            self._reply(token, lambda: contender.written(record, stored_at, sent))

    def _hears(self, record: Record) -> None:
        if self.connected:
            self._take(lambda: self.contender.heard(record, self.world.now))

    def _ask(self) -> None:
        asked = self.contender.asking(self.world.now)
        there = any(other.name == asked.process and other.connected for other in self.world.processes)
        if there:
            self.world.later(_ASK_S, lambda: self._take(lambda: self.contender.is_connected(asked)))
        else:
            self.world.send(lambda: self._take(lambda: self.contender.is_gone(asked)))
