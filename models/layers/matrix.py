"""A weight in the layout that its device multiplies fastest."""

import torch
import torch.nn.functional as F
from torch import nn

from specserve.models.cpu_kernels import binding as cpu
from specserve.models.layers.dispatch import uses_kernels


class Matrix(nn.Module):
    """The weight [n, k] of a linear map, or of an embedding, or of both.

    Where the C kernels take it, it is kept as their panels only, and then a row of a product is the same bits in
    every batch; else it stays as it is.
    """

    def __init__(self, weight: torch.Tensor, *, multiplies: bool = True) -> None:
        """With `multiplies` False only `rows` is to be used, for which a weight stays as it is."""
        super().__init__()
        self.shape = weight.shape
        self.in_panels = multiplies and uses_kernels(weight)
        self.weight = nn.Parameter(cpu.to_panels(weight) if self.in_panels else weight, requires_grad=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[m, k] -> [m, n]."""
        if not self.in_panels:
            return F.linear(x, self.weight, bias)
        return cpu.linear(x.contiguous(), self.weight, self.shape[0], bias)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """[m] -> the rows [m, k]."""
        if not self.in_panels:
            return F.embedding(indices, self.weight)
        return self.weight[indices // cpu.PANEL, :, indices % cpu.PANEL]
