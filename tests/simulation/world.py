"""Tasks that take turns, a clock that moves when nobody can, and dice.

A task is a thread that runs only while it holds the baton. It gives it up where it waits, and at
*points*: each call to the world outside is one. There the dice may also let its run die (`Died`
unwinds its threads: nothing of them reaches the world any more) or stop it for a while, which makes
it a zombie if another run takes over meanwhile.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, ClassVar

#: When a world begins, in seconds since 1970.
START = 1_000_000_000.0


class Died(BaseException):
    """The process is gone. No `except Exception` sees it."""


class Halt(BaseException):
    """The schedule is over: a rule was broken."""


class _Worker(threading.Thread):
    """Threads are used again by later tasks: to start one costs more than a schedule may."""

    idle: ClassVar[list[_Worker]] = []

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.go = threading.Lock()
        self.go.acquire()
        self.task: Task | None = None

    def run(self) -> None:
        while True:
            self.go.acquire()
            task = self.task
            assert task is not None
            try:
                if not task.owner.dead:
                    task.call()
            except BaseException as error:
                task.error = error
            task.done = True
            world, self.task = task.world, None
            _Worker.idle.append(self)
            world.ended(task)
            del world, task


class Task:
    """`call`, in a thread that has its turns. `owner`: the run that it dies with."""

    __slots__ = ("awaits", "call", "done", "error", "name", "owner", "until", "worker", "world")

    def __init__(self, world: World, owner: Any, name: str, call: Callable[[], object]) -> None:
        self.world = world
        self.owner = owner
        self.name = name
        self.call = call
        self.done = False
        self.error: BaseException | None = None
        #: not before; None: only when it is woken
        self.until: float | None = 0.0
        #: whose notice wakes it
        self.awaits: object = None
        self.worker = _Worker.idle.pop() if _Worker.idle else _Worker()
        if not self.worker.is_alive():
            self.worker.start()
        self.worker.task = self


class World:
    def __init__(self, seed: int | str, trace: list[str] | None = None) -> None:
        self.dice = random.Random(seed)
        self.chance = self.dice.random
        self.trace = trace
        self.now = 0.0
        self.back = threading.Lock()
        self.back.acquire()
        self.running: Task | None = None
        self.tasks: list[Task] = []
        self.points = 0
        self.numbers = 0
        #: chances at a point: that another goes on, that the run dies, that it stops
        self.switch = self.die = self.stop = 0.0
        self.deaths = 0  # so many more
        self.stops = 0
        self.broken: list[str] = []
        self.halted: Halt | None = None
        #: who goes on, drawn by the schedule; None: nobody, for now
        self.next: Callable[[], Task | None] | None = None

    # ── turns ────────────────────────────────────────────────────────────────────────────────

    def spawn(self, owner: Any, name: str, call: Callable[[], object]) -> Task:
        task = Task(self, owner, name, call)
        self.tasks.append(task)
        return task

    def run(self) -> None:
        """Until `next` names nobody."""
        self._hand_on(None)
        self.back.acquire()
        self.running = None
        if self.halted is not None:
            raise self.halted

    def _hand_on(self, task: Task | None) -> None:
        """Whoever has the baton finds out who is next, and it may be himself: then nothing has to
        be handed over, which is what costs. `task`: None if it is not one that can go on."""
        self.running = None
        following = None
        if self.halted is None and self.next is not None:
            try:
                following = self.next()
            except Halt as halt:
                self.halted = halt
            except Exception as error:  # of the simulation itself: no thread may die of it
                self.broken.append(f"the schedule fell: {type(error).__name__}: {error}")
                self.halted = Halt(str(error))
        if following is not None:
            following.awaits, following.until = None, 0.0
            self.running = following
            if following is task:
                return
            following.worker.go.release()
        else:
            self.back.release()
        if task is not None:
            task.worker.go.acquire()
            self.running = task

    def ended(self, task: Task) -> None:
        self.tasks.remove(task)
        error = task.error
        if isinstance(error, Halt):
            self.halted = error
        elif error is not None and not isinstance(error, Died):
            self.broken.append(f"{task.owner}/{task.name} fell: {type(error).__name__}: {error}")
            self.halted = Halt(str(error))
        self._hand_on(None)

    def _give_up(self, task: Task) -> None:
        self._hand_on(task)
        if task.owner.dead:
            raise Died

    def point(self, step: str) -> None:
        """A call to the world begins or ends."""
        task = self.running
        if task is None:
            return
        if task.owner.dead:
            raise Died
        self.points += 1
        drawn = self.chance()
        if drawn < self.switch:
            self._give_up(task)
            return
        drawn -= self.switch
        if drawn < self.die and self.deaths:
            self.deaths -= 1
            self.kill(task.owner, f"at {step}")
            raise Died
        drawn -= self.die
        if 0 <= drawn < self.stop and self.stops:
            self.stops -= 1
            task.owner.stopped = True
            self.say(f"{task.owner} stops at {step}")
            self._give_up(task)

    def kill(self, owner: Any, why: str) -> None:
        self.say(f"{owner} dies {why}")
        owner.dead = True

    def wait(self, awaits: object, seconds: float | None) -> None:
        """Until a notice of `awaits`, or so long."""
        task = self.running
        if task is None:
            raise AssertionError("only a task can wait")
        if task.owner.dead:
            raise Died
        task.awaits = awaits
        task.until = None if seconds is None else self.now + seconds
        self._give_up(task)

    def wake(self, awaits: object) -> None:
        for task in self.tasks:
            if task.awaits is awaits:
                task.until = self.now

    def ready(self) -> list[Task]:
        now = self.now
        return [
            task
            for task in self.tasks
            if task.until is not None
            and task.until <= now
            and not task.owner.stopped
            and not task.owner.dead
        ]

    def later(self) -> bool:
        """On to the next moment at which somebody wants to go on, if there is one."""
        moments = [
            task.until
            for task in self.tasks
            if task.until is not None and not task.owner.stopped and not task.owner.dead
        ]
        if not moments:
            return False
        self.now = max(self.now, min(moments))
        return True

    def clear(self) -> None:
        """Every task ends: threads are for others."""
        self.next = None
        for task in list(self.tasks):
            task.owner.dead = True
        while self.tasks:
            task = self.running = self.tasks[-1]
            task.worker.go.release()
            self.back.acquire()
        self.running = None

    # ── small things ─────────────────────────────────────────────────────────────────────────

    @property
    def milliseconds(self) -> int:
        """Since 1970."""
        return int((START + self.now) * 1000)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def say(self, text: str) -> None:
        if self.trace is not None:
            who = self.running
            by = f"{who.owner}/{who.name}" if who is not None else "-"
            self.trace.append(f"{self.now:9.2f} {by:<16} {text}")

    def violated(self, rule: str, text: str) -> None:
        self.broken.append(f"{rule}: {text}")
        self.say(f"!! {rule}: {text}")
        raise Halt(text)


class Condition:
    """Of `threading`. Nobody gives the baton up between two points, so there is nothing to lock."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> Condition:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait(self, timeout: float | None = None) -> bool:
        self._world.wait(self, timeout)
        return True

    def wait_for(self, is_so: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._world.now + timeout
        while not (value := is_so()):
            left = None if end is None else end - self._world.now
            if left is not None and left <= 0:
                return is_so()
            self._world.wait(self, left)
        return value

    def notify_all(self) -> None:
        self._world.wake(self)


class Lock:
    """Of `threading`; held over points."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held = False

    def __enter__(self) -> bool:
        while self._held:
            self._world.wait(self, None)
        self._held = True
        return True

    def __exit__(self, *_: object) -> None:
        self._held = False
        self._world.wake(self)


class Thread:
    """Of `threading`: a task of the run that starts it."""

    def __init__(self, world: World, target: Callable[[], object], name: str) -> None:
        self._world = world
        self._target = target
        self._name = name
        self._task: Task | None = None

    def start(self) -> None:
        assert self._world.running is not None
        owner = self._world.running.owner
        self._task = self._world.spawn(owner, self._name.removeprefix("frazil-"), self._ended)

    def _ended(self) -> None:
        try:
            self._target()
        finally:
            self._world.wake(self)

    def join(self, timeout: float | None = None) -> None:
        while self._task is not None and not self._task.done:
            self._world.wait(self, 1.0)
