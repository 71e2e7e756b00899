"""What sampling does with whole rows of logits [R, V]: in C where the kernels take them, else in torch.

Both give the same answer (sums up to rounding), and a row's answer does not depend on the other rows.
"""

import numpy as np
import torch

from specserve.models.cpu_kernels import binding
from specserve.models.layers.dispatch import uses_kernels
from specserve.models.sampling.noise import gumbel_scores

# Elements that the torch form of gumbel_argmax works on at once; each takes some 60 bytes.
DRAWN_AT_ONCE = 2**23


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """[R] the first of the largest; -1 for a row with NaN or +inf, or with nothing but -inf."""
    if uses_kernels(logits):
        return binding.argmax(logits)
    values, token_ids = logits.max(dim=1)
    return torch.where(values.isfinite(), token_ids, -1)


def row_mass(logits: torch.Tensor) -> torch.Tensor:
    """[R, 3] float64: the maximum m, the sum of exp(x - m), the sum of (x - m) exp(x - m); not for rows of NaNs."""
    if uses_kernels(logits):
        return binding.row_mass(logits)
    largest = logits.amax(dim=1, keepdim=True)
    shifted = logits - largest
    weights = shifted.exp()
    weighted = torch.where(weights > 0, shifted * weights, 0.0)
    sums = [total.sum(dim=1, keepdim=True, dtype=torch.float64) for total in (weights, weighted)]
    return torch.cat([largest.double(), *sums], dim=1)


def log_z(logits: torch.Tensor) -> torch.Tensor:
    """[R] float64: the logarithm of the sum of the exponentials."""
    largest, mass, _ = row_mass(logits).unbind(dim=1)
    return largest + mass.log()


def sorted_head(logits: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The num_tokens largest logits of each row and their token ids, ties in the order of ids; both [R, num_tokens]."""
    if uses_kernels(logits):
        return binding.sorted_head(logits, num_tokens)
    # One integer for value and id, as topk promises nothing about ties: floats as ordered integers, -0 as 0.
    vocab_size = logits.shape[1]
    bits = logits.float().view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    keys = ordered * 2**32 + torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    token_ids = vocab_size - 1 - (keys.topk(num_tokens, dim=1).values & 0xFFFFFFFF)
    return logits.gather(1, token_ids), token_ids


def scale(logits: torch.Tensor, inverse_temperatures: torch.Tensor) -> torch.Tensor:
    """Logits over temperature, shifted so that 0 is the largest: no temperature makes that overflow upwards."""
    return (logits - logits.amax(dim=1, keepdim=True)).mul_(inverse_temperatures[:, None])


def gumbel_argmax(logits: torch.Tensor, inverse_temperatures: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
    """[R] token ids: a draw from softmax(logits / temperature) under each row's keys [R, 4] (noise.row_keys).

    -1 where argmax gives -1.
    """
    if uses_kernels(logits):
        return binding.gumbel_argmax(logits, inverse_temperatures, keys)
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    rows_at_once = max(1, DRAWN_AT_ONCE // logits.shape[1])
    drawn = []
    for first in range(0, len(logits), rows_at_once):
        some = slice(first, first + rows_at_once)
        scaled = scale(logits[some], inverse_temperatures[some])
        drawn.append(gumbel_scores(scaled, keys[some], token_ids.expand(scaled.shape)).argmax(dim=1))
    return torch.where(argmax(logits) < 0, -1, torch.cat(drawn))
