"""Chooses between the C kernels and torch for elementwise work."""

import torch

from specserve.models.cpu_kernels import binding as cpu


def uses_kernels(*tensors: torch.Tensor) -> bool:
    """Whether the kernels are there and take these tensors; torch does the same, more slowly, everywhere."""
    return cpu.is_supported(*tensors) and cpu.are_built()
