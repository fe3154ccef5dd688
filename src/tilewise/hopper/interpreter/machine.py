"""Who runs when: partitions of all programs as threads that take turns, and what memory does behind their backs.

One thread runs at a time. Where it waits, the next is drawn among all that can go on and the transfers under way, so
each seed is another order in which warps, programs and TMA may meet, and a wait that nothing can end is found.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np

from .products import Products

# How often a partition that could go on lets others go first.
_YIELDS = 0.2


class Deadlock(RuntimeError):
    """Every partition waits, and nothing is under way."""


class _Stopped(BaseException):
    """Ends a thread whose launch has failed elsewhere."""


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that were announced have landed."""

    def __init__(self, count: int) -> None:
        self._count = self._pending = count
        self._bytes = 0
        self._phase = 0

    def passed(self, parity: int) -> bool:
        """Whether the last phase that ended is of this parity; before the first, as if one of parity 1 had."""
        return self._phase % 2 != parity

    def arrive(self, count: int) -> None:
        if count > self._pending:
            raise RuntimeError(f"{count} arrivals at a barrier that waits for {self._pending} of {self._count}")
        self._pending -= count
        self._end()

    def expect(self, size: int) -> None:
        """Arrive, and announce so many bytes."""
        self._bytes += size
        self.arrive(1)

    def landed(self, size: int) -> None:
        self._bytes -= size
        self._end()

    def _end(self) -> None:
        if self._pending == 0 and self._bytes == 0:
            self._phase += 1
            self._pending = self._count


class Store:
    """A store by TMA, and how far it has come: shared memory was read, memory was written."""

    def __init__(self) -> None:
        self.read = self.written = False


class Task:
    """A partition of a program.

    `products` are its matrix products, `unfenced` what it has written to shared memory that TMA and matrix products may
    not see yet, `stores` its stores by TMA, oldest first.
    """

    def __init__(self, machine: Machine, program: int, body: Callable[[], None]) -> None:
        self.program = program
        self.products = Products()
        self.unfenced: list[np.ndarray] = []
        self.stores: list[Store] = []
        self.done = False
        self.ready: Callable[[], bool] = lambda: True
        self._machine, self._body = machine, body
        self._go = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._machine.failed:
                # A GPU warns of no NaN; NumPy's setting is each thread's own.
                with np.errstate(all="ignore"):
                    self._body()
        except _Stopped:
            pass
        except BaseException as error:
            self._machine.failed = self._machine.failed or error
        self.done = True
        self._machine.back.release()

    def resume(self) -> None:
        """Run until it waits or ends."""
        self._go.release()
        self._machine.back.acquire()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Called by the task itself: go on when `ready` says so."""
        if ready() and self._machine.random.random() > _YIELDS:
            return
        self.ready = ready
        self._machine.back.release()
        self._go.acquire()
        if self._machine.failed:
            raise _Stopped


class Machine:
    """One launch."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.back = threading.Semaphore(0)
        self.failed: BaseException | None = None
        self.barriers: dict[int, Barrier] = {}  # by the address of what they are
        self.kept: list[object] = []  # so that addresses stay theirs
        self.transfers: list[Callable[[], None]] = []
        self._tasks: list[Task] = []
        self._current: Task | None = None

    @property
    def current(self) -> Task:
        """The task that runs."""
        assert self._current is not None
        return self._current

    def start(self, program: int, body: Callable[[], None]) -> Task:
        """A partition more."""
        task = Task(self, program, body)
        self._tasks.append(task)
        return task

    def run(self) -> None:
        """Until all have ended; raises what one of them raised."""
        while self._tasks and not self.failed:
            ready = [task for task in self._tasks if task.ready()]
            choices = len(ready) + len(self.transfers)
            if not choices:
                self.failed = Deadlock(f"{len(self._tasks)} partitions wait for barriers that nothing will complete")
                break
            chosen = self.random.randrange(choices)
            if chosen >= len(ready):
                self._transfer(chosen - len(ready))
            else:
                self._resume(ready[chosen])
        for task in list(self._tasks):
            # Something has failed, which ends them.
            self._resume(task)
        while self.transfers and not self.failed:
            self._transfer(0)
        if self.failed:
            raise self.failed

    def _transfer(self, at: int) -> None:
        """Do one of the transfers under way, which belong to no task."""
        try:
            self.transfers.pop(at)()
        except Exception as error:
            self.failed = error

    def _resume(self, task: Task) -> None:
        self._current = task
        task.resume()
        if task.done:
            self._tasks.remove(task)
