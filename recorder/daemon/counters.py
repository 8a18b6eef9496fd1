"""What the daemon counts, and whether the store answers. Any thread."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

_LONGEST_WAIT_S = 30.0


class Counters:
    """Sums by a name and one word, such as a reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, Counter[str]] = {}

    def add(self, name: str, word: str = "", amount: int = 1) -> None:
        with self._lock:
            self._sums.setdefault(name, Counter())[word] += amount

    def of(self, name: str) -> dict[str, int]:
        """Return the sums of a name by their words."""
        with self._lock:
            return dict(self._sums.get(name, ()))

    def total(self, name: str) -> int:
        return sum(self.of(name).values())


class Health:
    """Whether the store answers; after an error nothing is asked for a while, which doubles up to half a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._wait_s = 0.0
        self._until_s = 0.0
        self.problem = ""
        """The last error, as a sentence; empty while all is well."""
        self.answered_s = 0.0
        """When the store has last done what it was asked, by the wall clock; 0: never."""

    @property
    def is_open(self) -> bool:
        """Whether the store may be asked now."""
        return self._clock() >= self._until_s

    def succeeded(self) -> None:
        with self._lock:
            self._wait_s, self._until_s, self.problem, self.answered_s = 0.0, 0.0, "", time.time()

    def failed(self, problem: str) -> None:
        with self._lock:
            if self._clock() < self._until_s:  # others have failed with it
                return
            self._wait_s = min(max(2 * self._wait_s, 0.5), _LONGEST_WAIT_S)
            self._until_s = self._clock() + self._wait_s * random.uniform(0.7, 1.3)
            self.problem = problem
