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
        self.dtype = weight.dtype  # of what comes in and goes out
        self.weight = nn.Parameter(cpu.to_panels(weight) if self.in_panels else weight, requires_grad=False)
        self.scales: torch.Tensor | None = None

    @torch.no_grad()
    def quantize(self) -> None:
        """Keep int8 weights and a factor for each row from now on, so that the largest of a row is 127."""
        if self.scales is not None:
            return
        largest = self.weight.abs().amax(dim=1, keepdim=True).float()  # of panels: [P, 1, 16]
        scales = torch.where(largest > 0, largest / 127, 1.0).to(self.dtype)
        rounded = (self.weight / scales).round_().clamp_(-127, 127)
        self.weight = nn.Parameter(rounded.to(torch.int8), requires_grad=False)
        self.scales = scales.flatten()[: self.shape[0]].contiguous()

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[m, k] -> [m, n]."""
        if self.in_panels:
            return cpu.linear(x.contiguous(), self.weight, self.shape[0], bias, self.scales)
        if self.scales is None:
            return F.linear(x, self.weight, bias)
        product = F.linear(x, self.weight.to(self.dtype)) * self.scales
        return product if bias is None else product + bias

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """[m] -> the rows [m, k]."""
        if self.in_panels:
            rows = self.weight[indices // cpu.PANEL, :, indices % cpu.PANEL]
        else:
            rows = F.embedding(indices, self.weight)
        return rows if self.scales is None else rows * self.scales[indices, None]
