"""Records the kernel calls of a forward once, and replays them in C: what CUDA graphs are on a GPU.

In a step of few rows Python would take a third of the time. A tape holds addresses: whatever the recorded calls read
must stay where it was, and what isn't a call of a kernel (or a view) is not replayed.
"""

import ctypes
import math
import threading
import weakref

import numpy as np
import torch

# In the order of the cases in tape.c.
KERNELS = ("rms_norm", "head_norm", "rotate", "gated_activation", "linear", "paged_attention", "all_reduce")
MAX_ARGUMENTS = 12


class Argument(ctypes.Union):
    """An argument of a call."""

    _fields_ = (("p", ctypes.c_void_p), ("i", ctypes.c_int64), ("f", ctypes.c_double))


class Call(ctypes.Structure):
    """The struct of the same name in tape.c."""

    _fields_ = (("kernel", ctypes.c_int64), ("arguments", Argument * MAX_ARGUMENTS))


class Tape:
    """The calls made inside `with tape:`, by this thread, over max_rows rows; later replayed over as many or fewer."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._calls: list[Call] = []
        self._buffers: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def __enter__(self) -> "Tape":
        assert not self._calls, "a tape is recorded once"
        _recorder.tape = self
        return self

    def __exit__(self, *_: object) -> None:
        _recorder.tape = None
        self._array = (Call * len(self._calls))(*self._calls)

    def add(self, name: str, types: tuple[object, ...], arguments: tuple[object, ...]) -> None:
        """A call; without the number of rows, which a replay gives."""
        call = Call(KERNELS.index(name))
        for slot, kind, value in zip(call.arguments, types, arguments, strict=False):
            setattr(slot, {ctypes.c_int64: "i", ctypes.c_float: "f"}.get(kind, "p"), value)  # type: ignore[call-overload]
        self._calls.append(call)

    def empty(self, *shape: int) -> torch.Tensor:
        """Memory of the tape's own, used again once every tensor and view on it is gone."""
        size = math.prod(shape)
        free = (i for i, (memory, user) in enumerate(self._buffers) if memory.size == size and user() is None)
        index = next(free, None)
        memory = np.empty(size, dtype=np.float32) if index is None else self._buffers.pop(index)[0]
        view = memory[:]  # the tensor's storage keeps this object, not only its memory
        self._buffers.append((memory, weakref.ref(view)))
        return torch.from_numpy(view).view(shape)

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def array(self) -> "ctypes.Array[Call]":
        """The calls, for C."""
        return self._array


class _Recorder(threading.local):
    tape: Tape | None = None


_recorder = _Recorder()


def recording() -> Tape | None:
    """The tape that this thread is recording, if any."""
    return _recorder.tape
