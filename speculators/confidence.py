"""How often drafts turn out right, by the probability that the drafter gave to its likeliest token there.

That probability is known before a token is chosen, so what is decided by it doesn't depend on the token.
"""

from collections.abc import Sequence

NUM_BINS = 10
DECAY = 0.995  # of what earlier drafts say, per draft of a bin
PRIOR_WEIGHT = 4.0  # drafts that the probability itself counts for


class Confidence:
    """Learns from what becomes of drafts."""

    def __init__(self) -> None:
        self._hits = [PRIOR_WEIGHT * (index + 0.5) / NUM_BINS for index in range(NUM_BINS)]
        self._trials = [PRIOR_WEIGHT] * NUM_BINS
        self._all_hits, self._all_trials = PRIOR_WEIGHT / 2, PRIOR_WEIGHT

    @property
    def average(self) -> float:
        """The chance of a draft that nothing is known of."""
        return self._all_hits / self._all_trials

    def chance(self, probability: float) -> float:
        """The chance that a draft is right, if all before it are."""
        index = _bin(probability)
        return self._hits[index] / self._trials[index]

    def observe(self, probabilities: Sequence[float], num_accepted: int) -> None:
        """What became of a draft; nothing is known of those behind the first wrong one."""
        for position, probability in enumerate(probabilities[: num_accepted + 1]):
            index, hit = _bin(probability), position < num_accepted
            self._hits[index] = DECAY * self._hits[index] + hit
            self._trials[index] = DECAY * self._trials[index] + 1
            self._all_hits, self._all_trials = DECAY * self._all_hits + hit, DECAY * self._all_trials + 1


def _bin(probability: float) -> int:
    return min(NUM_BINS - 1, max(0, int(probability * NUM_BINS)))
