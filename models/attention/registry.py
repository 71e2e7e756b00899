"""Chooses the attention backend."""

import importlib.util

import torch

from specserve.models.attention.base import AttentionBackend
from specserve.models.cpu_kernels import binding

NAMES = ("auto", "torch", "cpu", "flash")
FLASH_BLOCK_MULTIPLE = 256


def attention_backend(
    name: str, *, device: torch.device, dtype: torch.dtype, block_size: int | None
) -> tuple[AttentionBackend, int]:
    """The backend and the block size to use with it (16 or what flash wants, if block_size is None).

    `auto` is the C kernel for float32 on CPUs and flash on GPUs where it is installed, else torch; the backend's
    name is reported at start and by Info. Raises ValueError for what the name can't do.
    """
    if name not in NAMES:
        raise ValueError(f"--attention-backend is {name!r}; choose one of {', '.join(NAMES)}")
    if name == "auto":
        name = _automatic(device, dtype, block_size)
    if name == "flash":
        return _flash(device, dtype, block_size)
    if name == "cpu":
        if device.type != "cpu" or dtype is not torch.float32:
            raise ValueError(
                f"--attention-backend cpu needs --device cpu and --dtype float32, not {device.type} and "
                f"{str(dtype).removeprefix('torch.')}; choose torch or auto"
            )
        from specserve.models.attention.cpu import CpuAttention

        return CpuAttention(), block_size or 16
    from specserve.models.attention.torch import TorchAttention

    return TorchAttention(), block_size or 16


def _automatic(device: torch.device, dtype: torch.dtype, block_size: int | None) -> str:
    if device.type == "cpu":
        return "cpu" if dtype is torch.float32 and binding.are_built() else "torch"
    if device.type != "cuda":
        return "torch"
    fits = block_size is None or block_size % FLASH_BLOCK_MULTIPLE == 0
    is_installed = importlib.util.find_spec("flash_attn") is not None
    return "flash" if is_installed and fits and dtype in (torch.float16, torch.bfloat16) else "torch"


def _flash(device: torch.device, dtype: torch.dtype, block_size: int | None) -> tuple[AttentionBackend, int]:
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            "--attention-backend flash needs a GPU and --dtype float16 or bfloat16, not "
            f"{device.type} and {str(dtype).removeprefix('torch.')}; choose torch or auto"
        )
    if importlib.util.find_spec("flash_attn") is None:
        raise ValueError("--attention-backend flash needs the package flash-attn: `pip install flash-attn`")
    if block_size is not None and block_size % FLASH_BLOCK_MULTIPLE:
        raise ValueError(
            f"--block-size is {block_size}; --attention-backend flash needs a multiple of {FLASH_BLOCK_MULTIPLE}"
        )
    from specserve.models.attention.flash import FlashAttention

    return FlashAttention(), block_size or FLASH_BLOCK_MULTIPLE
