"""How far a run is: what the engine reports, made into a place among the phases and an estimate of the time left."""

import threading
import time
from collections.abc import Callable, Mapping

from app.runs.outcome import PhaseTime
from app.runs.transitions import Position
from pruning.errors import CancelledError


class Tracker:
    """The progress callback of one run; writes nothing itself, so that it costs the measured work nothing.

    ``expected`` names the phases in order, each with the seconds it should take or None. Once ``cancel`` is set,
    the next report raises CancelledError. Read from other threads with :meth:`position`.
    """

    def __init__(
        self,
        expected: Mapping[str, float | None],
        cancel: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._expected = dict(expected)
        self._order = list(self._expected)
        self._cancel = cancel
        self._clock = clock
        self._lock = threading.Lock()
        self._phase: str | None = None
        self._step = 0
        self._done = self._total = 0
        self._unit = ""
        self._began = self._moved = clock()
        self._times: dict[str, PhaseTime] = {}

    def __call__(self, phase: str, done: int, total: int, unit: str) -> None:
        """See :class:`pruning.progress.Progress`."""
        if self._cancel.is_set():
            raise CancelledError("the run was cancelled")
        now = self._clock()
        with self._lock:
            if phase != self._phase:
                self._close(now)
                self._phase, self._began, self._moved = phase, now, now
                if phase in self._order:
                    self._step = self._order.index(phase) + 1
            if done != self._done:
                self._moved = now  # reports in between, as of each token of an iteration, say nothing of the rate
            self._done, self._total, self._unit = done, total, unit

    def position(self) -> Position | None:
        """How far the run is now; None before its first report."""
        with self._lock:
            if self._phase is None:
                return None
            return Position(
                phase=self._phase,
                done=self._done,
                total=self._total,
                unit=self._unit,
                step=max(self._step, 1),
                steps=len(self._order),
                remaining_s=self._remaining(self._clock()),
            )

    def times(self) -> dict[str, PhaseTime]:
        """Seconds and units of work of each phase so far, the one under way included."""
        with self._lock:
            self._close(self._clock())
            self._began = self._clock()
            return {phase: spent for phase, spent in self._times.items() if phase in self._order}

    def _close(self, now: float) -> None:
        if self._phase is not None:
            before = self._times.get(self._phase, PhaseTime(0.0, 0))
            self._times[self._phase] = PhaseTime(before.seconds + now - self._began, max(self._total, before.total))

    def _remaining(self, now: float) -> float | None:
        """Seconds for what is left of this phase at its own rate, and for the coming ones as expected."""
        assert self._phase is not None
        left: list[float | None] = [self._expected[phase] for phase in self._order[max(self._step, 1) :]]
        expected = self._expected.get(self._phase)
        if 0 < self._done <= self._total:
            rate = (self._moved - self._began) / self._done
            left.append(max(0.0, rate * (self._total - self._done) - (now - self._moved)))
        else:
            left.append(max(0.0, expected - (now - self._began)) if expected is not None else None)
        known = [seconds for seconds in left if seconds is not None]
        return sum(known) if len(known) == len(left) else None
