"""Metadata and tensor directory of a GGUF file as plain Python values."""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.models.hub import ModelError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies in its file: `shape` is row-major, `kind` a number of gguf.GGMLQuantizationType."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int  # bytes from the start of the file


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Read the key-value section of a GGUF file (versions 2 and 3, little-endian); tensors are not touched.

    `gguf.GGUFReader` makes a NumPy array of each string, which takes seconds with a vocabulary of 262,144 tokens;
    this takes a fraction of one. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

    Raises ModelError if the file is missing, isn't GGUF, or is cut short within its metadata.
    """
    return read_gguf_header(path)[0]


def read_gguf_header(path: Path) -> tuple[dict[str, Any], list[GGUFTensor]]:
    """Read the key-value section and the tensor directory that follows it; errors as of `read_gguf_metadata`."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).read()
    except OSError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror or error}") from error
    except (struct.error, ValueError, KeyError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path}: not a readable GGUF file: {error}") from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def read(self) -> tuple[dict[str, Any], list[GGUFTensor]]:
        magic, version = self._unpack("4sI")
        if magic == b"vers" and self.data[:22] == b"version https://git-lf":
            raise ValueError("it is a Git-LFS pointer; fetch the file itself with: git lfs pull")
        if magic != b"GGUF":
            raise ValueError(f"it starts with {magic!r} instead of b'GGUF'")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}; 2 and 3 in little-endian byte order can be read")
        num_tensors, num_entries = self._unpack("QQ")
        metadata = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._unpack("I")[0])
        if num_tensors > len(self.data):  # every entry of the directory takes more than a byte
            raise ValueError(f"a directory of {num_tensors} tensors is larger than the file")
        directory = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        data_start = -(-self.offset // alignment) * alignment
        return metadata, [GGUFTensor(name, shape, kind, data_start + at) for name, shape, kind, at in directory]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._unpack("I")
        dims = self._unpack(f"{num_dims}Q")  # the innermost comes first
        kind, offset = self._unpack("IQ")
        return name, dims[::-1], kind, offset

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        item_kind, length = self._unpack("IQ")
        if item_kind in (_STRING, _ARRAY):
            return [self._value(item_kind) for _ in range(length)]
        return list(self._unpack(f"{length}{_SCALARS[item_kind]}"))

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        end = self.offset + length
        if end > len(self.data):
            raise ValueError(f"a string of {length} bytes reaches past the end of the file")
        text = self.data[self.offset : end].decode()
        self.offset = end
        return text

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.offset)
        self.offset += struct.calcsize("<" + layout)
        return values
