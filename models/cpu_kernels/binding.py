"""ctypes binding of the C kernels. All tensors are contiguous float32 on the CPU unless stated."""

import ctypes
import functools
import importlib.machinery
from pathlib import Path

import numpy as np
import torch

from specserve.models.cpu_kernels.tape import Tape, recording

PANEL = 16  # outputs that linear.c computes side by side

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class AttentionBatch(ctypes.Structure):
    """What all layers of one forward share (the struct of the same name in common.h)."""

    _fields_ = (
        *((name, _INT) for name in ("num_tokens", "num_seqs", "max_blocks", "block_size")),
        *((name, _INT) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, _POINTER) for name in ("slot_mapping", "block_tables", "cu_seqlens_q", "seq_lens")),
        ("num_threads", _INT),
    )


class SharedRanks(ctypes.Structure):
    """The processes of one machine that compute together (the struct of the same name in common.h)."""

    _fields_ = (
        *((name, _INT) for name in ("rank", "size", "slot_bytes")),
        ("base", _POINTER),
        ("count", ctypes.c_uint64),
    )


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "paged_attention": (ctypes.c_int, (_POINTER, *(_POINTER, _INT) * 3, _POINTER, _POINTER, _FLOAT, _INT, _POINTER)),
    "rms_norm": (None, (_INT, _POINTER, _POINTER, _POINTER, _FLOAT, _INT, _POINTER, _INT)),
    "head_norm": (None, (_INT, _POINTER, _INT, _POINTER, _FLOAT, *(_INT,) * 3)),
    "rotate": (None, (_INT, _POINTER, _INT, _POINTER, _POINTER, *(_INT,) * 3)),
    "gated_activation": (None, (_INT, _POINTER, _INT, _INT, _POINTER, _INT)),
    "linear": (ctypes.c_int, (_INT, *(_POINTER,) * 4, _INT, _INT, _POINTER, _INT)),
    "all_reduce": (None, (_INT, _POINTER, _INT, _POINTER)),
    "all_gather": (None, (_INT, _POINTER, _INT, _POINTER, _POINTER)),
    "argmax": (None, (_POINTER, _INT, _INT, _POINTER, _INT)),
    "row_mass": (None, (_POINTER, _INT, _INT, _POINTER, _INT)),
    "sorted_head": (ctypes.c_int, (_POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _INT)),
    "gumbel_argmax": (None, (_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT)),
    "limit_instructions": (None, (_INT,)),
    "replay": (ctypes.c_int, (_POINTER, _INT, _INT)),
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


def _call_rows(name: str, num_rows: int, *arguments: int | float | None) -> None:
    """Call a kernel that goes row by row, and record it."""
    tape = recording()
    if tape is not None:
        tape.add(name, _SIGNATURES[name][1][1:], arguments)
    if getattr(kernels(), name)(num_rows, *arguments):
        raise MemoryError(f"no memory for {name} of {num_rows} rows")


def _empty(like: torch.Tensor, *shape: int) -> torch.Tensor:
    tape = recording()
    return like.new_empty(shape) if tape is None else tape.empty(*shape)


def replay(tape: Tape, num_rows: int) -> None:
    """Make the calls of a tape again, over the first num_rows rows of its buffers."""
    assert num_rows <= tape.max_rows
    if kernels().replay(tape.array, len(tape), num_rows):
        raise MemoryError(f"no memory for a step of {num_rows} rows")


def paged_attention(
    batch: AttentionBatch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """See AttentionBackend."""
    out = _empty(q, *q.shape)
    arguments = (
        ctypes.addressof(batch),
        *(value for x in (q, k, v) for value in (x.data_ptr(), x.stride(0))),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        scale,
        sliding_window or 0,
        out.data_ptr(),
    )
    tape = recording()
    if tape is not None:
        tape.add("paged_attention", _SIGNATURES["paged_attention"][1], arguments)
    if kernels().paged_attention(*arguments):
        raise MemoryError("no memory for the partial results of the attention kernel")
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Root-mean-square norm of x [..., E] times weight [E]; with a residual, x += residual first, in place."""
    out = _empty(x, *x.shape)
    width = x.shape[-1]
    _call_rows(
        "rms_norm",
        x.numel() // width,
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        eps,
        width,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def takes_heads(x: torch.Tensor) -> bool:
    """Whether the kernels can go through float32 x [N, H, D] row by row, however far apart the rows are."""
    is_float = x.dtype is torch.float32 and x.device.type == "cpu"
    return is_float and x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of each head of x [N, H, D] (see takes_heads) times its weights [H, D], in place."""
    rows, heads, head_dim = x.shape
    _call_rows(
        *("head_norm", rows, x.data_ptr(), x.stride(0), weight.data_ptr(), eps, heads, head_dim),
        torch.get_num_threads(),
    )
    return x


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See rotary.apply_rotary; x [N, H, D] (see takes_heads) is changed in place."""
    rows, heads, head_dim = x.shape
    _call_rows(
        *("rotate", rows, x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), heads, head_dim),
        torch.get_num_threads(),
    )
    return x


def to_panels(weight: torch.Tensor) -> torch.Tensor:
    """A weight [n, k] as `linear` wants it, [ceil(n / 16), k, 16], padded with zeros."""
    n, k = weight.shape
    panels = weight.new_zeros(-(-n // PANEL), k, PANEL)
    whole = n // PANEL
    panels[:whole] = weight[: whole * PANEL].view(whole, PANEL, k).transpose(1, 2)
    if n % PANEL:
        panels[whole, :, : n % PANEL] = weight[whole * PANEL :].T
    return panels


def linear(
    x: torch.Tensor,
    panels: torch.Tensor,
    num_outputs: int,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """X [m, k] times the transpose of the weight [num_outputs, k] in `panels`, plus bias -> [m, num_outputs].

    With scales [num_outputs] the panels are int8, and the weight is their product. A row's result is the same bits
    whatever the other rows are.
    """
    rows, k = x.shape
    assert panels.shape[1] == k, "as many inputs as the weight has"
    assert panels.dtype is (torch.float32 if scales is None else torch.int8)
    out = _empty(x, rows, num_outputs)
    _call_rows(
        *("linear", rows, x.data_ptr(), panels.data_ptr()),
        *(None if optional is None else optional.data_ptr() for optional in (scales, bias)),
        *(num_outputs, k, out.data_ptr(), torch.get_num_threads()),
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
    out = _empty(gate_up, num_tokens, width)
    _call_rows(
        *("gated_activation", num_tokens, gate_up.data_ptr(), width, activation, out.data_ptr()),
        torch.get_num_threads(),
    )
    return out


def all_reduce(x: torch.Tensor, ranks: SharedRanks) -> torch.Tensor:
    """The sum of x [N, E] over the ranks, in their order, in place."""
    _call_rows("all_reduce", x.shape[0], x.data_ptr(), x.numel() // max(1, x.shape[0]), ctypes.addressof(ranks))
    return x


def all_gather(x: torch.Tensor, ranks: SharedRanks) -> torch.Tensor:
    """X [n, m], contiguous and of any dtype, of each rank -> [n, size, m]."""
    row_bytes = x.shape[1] * x.element_size()
    assert row_bytes <= ranks.slot_bytes and recording() is None
    out = x.new_empty(x.shape[0], ranks.size, x.shape[1])
    kernels().all_gather(x.shape[0], x.data_ptr(), row_bytes, out.data_ptr(), ctypes.addressof(ranks))
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
