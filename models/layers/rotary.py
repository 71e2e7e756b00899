"""Rotary position embeddings with the scalings of the Llama families.

Formulas: RoFormer (arXiv 2104.09864); linear and dynamic NTK scaling as transformers has them; YaRN
(arXiv 2309.00071); llama3 as in Meta's Llama 3.1 code.
"""

import math

import torch

from specserve.models.cpu_kernels import binding as cpu
from specserve.models.layers.dispatch import uses_kernels
from specserve.models.rope_config import RopeConfig


class RotaryEmbedding:
    """Cosines and sines for one RopeConfig."""

    def __init__(self, rope: RopeConfig, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.rope = rope
        self.head_dim = head_dim
        self.dtype = dtype
        self.inv_freq = inverse_frequencies(rope, head_dim).to(device)  # [D/2]
        self.attention_factor = _attention_factor(rope)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map positions [N] to cos, sin [N, 1, D] for `apply_rotary`; once a forward."""
        where = positions.float().unsqueeze(-1)
        angles = where * (self._dynamic_frequencies(where) if self.rope.kind == "dynamic" else self.inv_freq)
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor  # [N, D/2]
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return cos.to(self.dtype).unsqueeze(1), sin.to(self.dtype).unsqueeze(1)

    def _dynamic_frequencies(self, where: torch.Tensor) -> torch.Tensor:
        """Frequencies [N, D/2] at positions [N, 1].

        transformers scales by the longest sequence that is in the batch. Cached keys can't change, and a result must
        not depend on its neighbours, so here a token scales by its own position: as in decoding one sequence there.
        """
        rope, limit, dim = self.rope, self.rope.max_position_embeddings, self.head_dim
        length = (where + 1.0).clamp_min(limit)
        base = rope.theta * (rope.factor * length / limit - (rope.factor - 1.0)) ** (dim / (dim - 2))
        return 1.0 / base ** _exponents(dim).to(where.device)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads x [N, H, D], perhaps in place; the signs of rotate_half are in `sin`."""
    if uses_kernels(cos, sin) and cpu.takes_heads(x):
        return cpu.rotate(x, cos, sin)
    return x.roll(x.shape[-1] // 2, dims=-1).mul_(sin).add_(x * cos)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[D/2] float32."""
    inv_freq = 1.0 / rope.theta ** _exponents(head_dim)
    if rope.frequency_factors is not None:
        inv_freq = inv_freq / torch.tensor(rope.frequency_factors)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq)
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq, head_dim)
    return inv_freq


def _exponents(head_dim: int) -> torch.Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend between."""
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)  # over the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return inv_freq * (kept + (1.0 - kept) / rope.factor)


def _yarn(rope: RopeConfig, inv_freq: torch.Tensor, head_dim: int) -> torch.Tensor:
    def dimension(num_rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return inv_freq * (1.0 - interpolated) + inv_freq / rope.factor * interpolated


def _attention_factor(rope: RopeConfig) -> float:
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1.0 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
