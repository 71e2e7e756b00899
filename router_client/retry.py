"""When a failed call may be tried again."""

import math
import random
import time
from dataclasses import dataclass

import grpc


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retries of calls that ended UNAVAILABLE before they brought anything.

    The wait doubles (`multiplier`) from `initial_backoff_s` up to `max_backoff_s`, and is shortened by up to a
    half at random, so that clients don't return in step. `max_attempts` counts the first try; 1 switches
    retries off.
    """

    max_attempts: int = 5
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.max_attempts}; it must be at least 1 (1: no retries)")
        if not 0 < self.initial_backoff_s <= self.max_backoff_s < math.inf:
            raise ValueError(
                f"initial_backoff_s is {self.initial_backoff_s} and max_backoff_s {self.max_backoff_s};"
                " they must be > 0 and finite, and the first not above the second"
            )
        if not self.multiplier >= 1:
            raise ValueError(f"multiplier is {self.multiplier}; it must be at least 1")

    def backoff_s(self, failures: int) -> float:
        """Seconds to wait after the given number of failures (>= 1), jitter included."""
        # The exponent is capped as a long row of failures must not overflow.
        backoff = min(self.max_backoff_s, self.initial_backoff_s * self.multiplier ** min(failures - 1, 64))
        return backoff * random.uniform(0.5, 1.0)


class Attempts:
    """The tries of one call under one deadline, which starts now.

    `timeout_s` is in seconds; None: no deadline.
    """

    def __init__(self, policy: RetryPolicy, timeout_s: float | None) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}; it must be > 0 seconds")
        self._policy = policy
        self._failures = 0
        self._deadline = None if timeout_s is None or math.isinf(timeout_s) else time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float | None:
        """What is left of the deadline for the next try, never below 0; None: no deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def delay_before_retry(self, code: grpc.StatusCode) -> float | None:
        """Seconds to wait before the next try after a failure with this code; None: there is no next try."""
        self._failures += 1
        if code is not grpc.StatusCode.UNAVAILABLE or self._failures >= self._policy.max_attempts:
            return None
        delay = self._policy.backoff_s(self._failures)
        remaining = self.remaining_s
        return delay if remaining is None or delay < remaining else None
