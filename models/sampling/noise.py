"""Counter-based noise: a function of (seed, absolute position, token id, purpose) and of nothing else.

No generator has a state, so that a token's noise is the same in any batch, with any number of drafts, after a
preemption and after a restart. A row's key is made of seed, position and purpose by SplitMix64 (Steele et al.
2014); a token's bits come from two rounds of a bijective 32-bit mixer under that key, the same integers here and
in models/cpu_kernels/sampling.c. Two lanes of 32 bits make w = 1 - u in (0, 1) with a resolution of 2**-64, since
rare tokens win with a small w.
"""

import enum
from collections.abc import Iterable

import numpy as np
import torch

_MASK64 = 2**64 - 1
_MASK32 = 2**32 - 1


class Purpose(enum.IntEnum):
    """What the noise is for; each has its own, so that none is correlated with another."""

    TARGET = 0
    DRAFT = 1
    RESIDUAL = 2
    ACCEPT = 3


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def row_keys(rows: Iterable[tuple[int, int]], purpose: Purpose) -> np.ndarray:
    """(seed, position) of each row -> [R, 4] uint32 keys."""
    keys = []
    for seed, position in rows:
        key = _splitmix64(_splitmix64(_splitmix64(seed) ^ position) ^ purpose)
        low = _splitmix64(key)
        keys.append((key & _MASK32, key >> 32, low & _MASK32, low >> 32))
    return np.array(keys, dtype=np.uint32).reshape(-1, 4)


def _mix(h: torch.Tensor) -> torch.Tensor:
    """The 32-bit mixer `lowbias32`, on int64 tensors that hold 32 bits."""
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _MASK32
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & _MASK32
    return h ^ (h >> 16)


def exponentials(keys: np.ndarray, token_ids: torch.Tensor) -> torch.Tensor:
    """[R, 4] keys and [R, n] token ids -> [R, n] float64 draws of the exponential law with mean 1."""
    lanes = torch.from_numpy(keys.astype(np.int64)).to(token_ids.device)
    high = _mix(_mix((token_ids + lanes[:, 0:1]) & _MASK32) ^ lanes[:, 1:2])
    low = _mix(_mix((token_ids + lanes[:, 2:3]) & _MASK32) ^ lanes[:, 3:4])
    w = (high.double() + (low.double() + 0.5) * 2.0**-32) * 2.0**-32
    return -torch.log1p(-w.clamp(max=1 - 2.0**-53))


def gumbel_scores(logits: torch.Tensor, keys: np.ndarray, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits [R, n] of token_ids [R, n] plus Gumbel noise, in float64: their argmax is a draw from the softmax."""
    return logits.double() - exponentials(keys, token_ids).log()
