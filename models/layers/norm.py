"""RMS normalisation."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from specserve.models.cpu_kernels import binding as cpu
from specserve.models.layers.dispatch import uses_kernels
from specserve.models.weights import WeightReader


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension.

    With `unit_offset` the checkpoint holds weight - 1 (Gemma); the sum is made at load and kept in float32, since
    small weights would vanish beside 1 in a shorter format.
    """

    def __init__(self, reader: WeightReader, size: int, eps: float, *, unit_offset: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = reader.allocate(size, dtype=torch.float32 if unit_offset else None)
        reader.copy("weight", self.weight)
        if unit_offset:
            self.weight.add_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same shape."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor | None, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise x + residual [N, size] (None is 0); gives the normalised sum and the sum, perhaps in residual."""
        if x is None:
            return rms_norm(residual, self.weight, self.eps), residual
        if uses_kernels(x, residual, self.weight):
            return cpu.rms_norm(residual, self.weight, self.eps, x), residual
        residual = residual + x
        return rms_norm(residual, self.weight, self.eps), residual


class HeadNorm(nn.Module):
    """RMSNorm of each head, where groups of heads have weights of their own; `parts` gives each its heads."""

    def __init__(
        self, reader: WeightReader, parts: Mapping[str, int], head_dim: int, eps: float, *, unit_offset: bool
    ) -> None:
        super().__init__()
        norms = [RMSNorm(reader.scope(name), head_dim, eps, unit_offset=unit_offset) for name in parts]
        rows = [norm.weight.expand(heads, head_dim) for norm, heads in zip(norms, parts.values(), strict=True)]
        self.weight = nn.Parameter(torch.cat(rows), requires_grad=False)  # [H, D]
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, H, D] -> the same shape, perhaps in place."""
        if uses_kernels(self.weight) and cpu.takes_heads(x):
            return cpu.head_norm(x, self.weight, self.eps)
        normalized = F.rms_norm(x.to(self.weight.dtype), x.shape[-1:], None, self.eps)
        return (normalized * self.weight).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS normalisation in weight's precision."""
    if uses_kernels(x, weight):
        return cpu.rms_norm(x, weight, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
