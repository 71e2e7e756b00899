"""ctypes binding of the C kernels. All tensors are contiguous float32 on the CPU unless stated."""

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


_SIGNATURES = {
    "paged_attention": (
        ctypes.c_int,
        (ctypes.POINTER(AttentionBatch), *(_POINTER, _INT) * 3, _POINTER, _POINTER, _FLOAT, _INT, _POINTER),
    ),
    "rms_norm": (None, (_POINTER, _POINTER, _POINTER, _FLOAT, _INT, _INT, _POINTER, _INT)),
    "gated_activation": (None, (_POINTER, _INT, _INT, _INT, _POINTER, _INT)),
    "argmax": (None, (_POINTER, _INT, _INT, _POINTER, _INT)),
    "row_mass": (None, (_POINTER, _INT, _INT, _POINTER, _INT)),
    "sorted_head": (ctypes.c_int, (_POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _INT)),
    "gumbel_argmax": (None, (_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT)),
}


class KernelsMissingError(RuntimeError):
    """The compiled kernels can't be loaded."""


def load_kernels(folder: Path) -> ctypes.CDLL:
    """Load the library from its folder. torch is imported first, so that both share one OpenMP runtime.

    Raises KernelsMissingError if it was never built or doesn't load.
    """
    candidates = [folder / f"_kernels{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    path = next((candidate for candidate in candidates if candidate.exists()), None)
    way_out = "install a C compiler and run `pip install -e .`, or start with --attention-backend torch"
    if path is None:
        raise KernelsMissingError(f"the CPU kernels are not built ({candidates[0].name} is not in {folder}); {way_out}")
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise KernelsMissingError(f"the CPU kernels do not load ({error}); {way_out}") from error
    return library


@functools.cache
def kernels() -> ctypes.CDLL:
    """The library beside this file, loaded once. Raises KernelsMissingError."""
    return load_kernels(Path(__file__).parent)


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


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """See row_ops.argmax."""
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    kernels().argmax(logits.data_ptr(), *logits.shape, out.data_ptr(), torch.get_num_threads())
    return out


def row_mass(logits: torch.Tensor) -> torch.Tensor:
    """See row_ops.row_mass."""
    out = torch.empty(logits.shape[0], 3, dtype=torch.float64)
    kernels().row_mass(logits.data_ptr(), *logits.shape, out.data_ptr(), torch.get_num_threads())
    return out


def sorted_head(logits: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See row_ops.sorted_head."""
    values = torch.empty(logits.shape[0], num_tokens)
    token_ids = torch.empty(logits.shape[0], num_tokens, dtype=torch.int64)
    if kernels().sorted_head(
        logits.data_ptr(),
        *logits.shape,
        num_tokens,
        values.data_ptr(),
        token_ids.data_ptr(),
        torch.get_num_threads(),
    ):
        raise MemoryError("no memory to sort a row of logits")
    return values, token_ids


def gumbel_argmax(logits: torch.Tensor, inverse_temperatures: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
    """See row_ops.gumbel_argmax; inverse_temperatures [R] is contiguous float32."""
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    keys = np.ascontiguousarray(keys, dtype=np.uint32)
    kernels().gumbel_argmax(
        logits.data_ptr(),
        *logits.shape,
        inverse_temperatures.data_ptr(),
        keys.ctypes.data,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
