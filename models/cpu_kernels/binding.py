"""ctypes binding of kernels.c. All tensors are float32 on the CPU unless stated."""

import ctypes
import functools
import importlib.machinery
from pathlib import Path

import numpy as np
import torch

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class AttentionBatch(ctypes.Structure):
    """What all layers of one forward share (the struct of the same name in kernels.c)."""

    _fields_ = (
        *((name, _INT) for name in ("num_tokens", "num_seqs", "max_blocks", "block_size")),
        *((name, _INT) for name in ("num_heads", "num_kv_heads", "head_dim", "max_query_len")),
        *((name, _POINTER) for name in ("slot_mapping", "block_tables", "cu_seqlens_q", "seq_lens")),
        ("num_threads", _INT),
    )


class KernelsMissingError(RuntimeError):
    """The compiled kernels aren't installed."""


@functools.cache
def kernels() -> ctypes.CDLL:
    """The library, loaded once. torch is imported first, so that both share one OpenMP runtime.

    Raises KernelsMissingError if it was never built.
    """
    folder = Path(__file__).parent
    candidates = [folder / f"_kernels{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    path = next((candidate for candidate in candidates if candidate.exists()), None)
    if path is None:
        raise KernelsMissingError(
            f"the CPU kernels are not built ({candidates[0].name} is not in {folder}); install a C compiler and "
            "run `pip install -e .`, or start with --attention-backend torch"
        )
    library = ctypes.CDLL(str(path))
    library.paged_attention.argtypes = (
        ctypes.POINTER(AttentionBatch),
        *(_POINTER, _INT) * 3,
        *(_POINTER, _POINTER, _FLOAT, _INT, _POINTER),
    )
    library.paged_attention.restype = ctypes.c_int
    library.rms_norm.argtypes = (_POINTER, _POINTER, _POINTER, _FLOAT, _INT, _INT, _POINTER, _INT)
    library.rms_norm.restype = None
    library.gated_activation.argtypes = (_POINTER, _INT, _INT, _INT, _POINTER, _INT)
    library.gated_activation.restype = None
    library.gumbel_argmax.argtypes = (_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT)
    library.gumbel_argmax.restype = None
    return library


@functools.cache
def are_built() -> bool:
    """Whether the kernels can be loaded."""
    try:
        kernels()
    except KernelsMissingError:
        return False
    return True


def is_supported(*tensors: torch.Tensor) -> bool:
    """Whether the kernels take these tensors: contiguous float32 on the CPU."""
    return all(
        tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Root-mean-square norm of x [..., E] times weight [E]; with a residual, x += residual first, in place."""
    out = torch.empty_like(x)
    width = x.shape[-1]
    kernels().rms_norm(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        eps,
        x.numel() // width,
        width,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[N, 2F] -> [N, F]: SiLU of the first half times the second."""
    return _gated_activation(gate_up, 0)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[N, 2F] -> [N, F]: GELU (tanh form) of the first half times the second."""
    return _gated_activation(gate_up, 1)


def _gated_activation(gate_up: torch.Tensor, activation: int) -> torch.Tensor:
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    kernels().gated_activation(
        gate_up.data_ptr(), num_tokens, width, activation, out.data_ptr(), torch.get_num_threads()
    )
    return out


def gumbel_argmax(logits: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
    """A draw from softmax(logits [R, V]) for each row, under keys [R, 4] uint32 (models/sampling/noise.py).

    [R] int64; -1 where every logit is -inf.
    """
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    scratch = torch.empty_like(logits)
    keys = np.ascontiguousarray(keys, dtype=np.uint32)
    kernels().gumbel_argmax(
        logits.data_ptr(),
        *logits.shape,
        keys.ctypes.data,
        scratch.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
