"""Gated activations of a packed [gate, up] projection."""

import torch
import torch.nn.functional as F

from specserve.models.cpu_kernels import binding as cpu
from specserve.models.layers.dispatch import uses_kernels


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[N, 2F] -> silu(gate) * up [N, F]."""
    if uses_kernels(gate_up):
        return cpu.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[N, 2F] -> gelu(gate) * up [N, F], with the tanh approximation of gelu."""
    if uses_kernels(gate_up):
        return cpu.gelu_tanh_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


GATED_ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}
