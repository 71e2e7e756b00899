"""Streams weights from files into parameters, and accounts for every tensor."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from specserve.models.gguf import GGUFFile
from specserve.models.hub import INDEX_FILE, WEIGHTS_FILE, ModelError, ModelFiles, shard_names

_DTYPES = {"F64", "F32", "F16", "BF16"}
# Old checkpoints hold these buffers, which are computed from the configuration.
_HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)
_MAX_NAMED = 5


class WeightSource(Protocol):
    """Tensors in files, by Hub name."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor that is there."""

    def describe(self, name: str) -> str:
        """Where a tensor is, for error messages."""

    def copy(self, name: str, out: torch.Tensor, offset: tuple[int, ...]) -> None:
        """Fill `out` with the part of tensor `name` that begins at `offset`, converted to out's dtype."""


def open_weights(files: ModelFiles) -> WeightSource:
    """Open a model's weights; ModelError names the file that is missing or corrupt, and the cause."""
    return GGUFFile.open(files.path) if files.kind == "gguf" else SafetensorsFiles.open(files.path)


@dataclass(frozen=True, slots=True)
class SafetensorsFiles:
    """One safetensors file, or the shards that an index names; other files beside them are never read."""

    shards: Mapping[str, Path]  # by tensor name
    tensor_shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open_file(cls, path: Path, *, integers: Collection[str] = ()) -> "SafetensorsFiles":
        """One file, in which the tensors `integers` may hold int64."""
        found = _read_header(path, integers)
        return cls(dict.fromkeys(found, path), found)

    @classmethod
    def open(cls, directory: Path, *, integers: Collection[str] = ()) -> "SafetensorsFiles":
        """Read the headers of all files; errors name the file and what is wrong with it."""
        index = directory / INDEX_FILE
        if not index.is_file():
            single = directory / WEIGHTS_FILE
            if not single.is_file():
                raise ModelError(_no_weights(directory))
            return cls.open_file(single, integers=integers)
        weight_map = {name: directory / shard for name, shard in shard_names(index).items()}
        paths = sorted(set(weight_map.values()))
        if missing := [path.name for path in paths if not path.is_file()]:
            raise ModelError(f"{index}: names {_some(missing)}, which {_is_are(missing)} not there; download again")
        headers = {path: _read_header(path, integers) for path in paths}
        for name, path in weight_map.items():
            if name not in headers[path]:
                raise ModelError(f"{index}: places tensor {name!r} in {path.name}, which doesn't hold it")
        # A tensor that the index doesn't know stays in the account, so that it is reported as surplus.
        shards = {name: path for path, header in headers.items() for name in header} | weight_map
        return cls(shards, {name: headers[path][name] for name, path in shards.items()})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor."""
        return dict(self.tensor_shapes)

    def describe(self, name: str) -> str:
        """The file that holds a tensor."""
        return str(self.shards[name])

    def copy(self, name: str, out: torch.Tensor, offset: tuple[int, ...]) -> None:
        """Fill `out` from a tensor; its file is mapped only meanwhile, so its pages don't pile up in memory."""
        part = tuple(slice(start, start + size) for start, size in zip(offset, out.shape, strict=True))
        with safe_open(self.shards[name], framework="pt") as file:
            out.copy_(file.get_slice(name)[part])


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A file of torch.save, read by torch's weights-only loader, which runs no code of the file."""

    path: Path
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def open(cls, path: Path) -> "TorchFile":
        """Map the file; ModelError if it holds anything but tensors by name."""
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # the loader raises whatever its parser trips over
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelError(f"{path}: torch's weights-only loader refuses it: {reason}") from error
        if not isinstance(tensors, dict) or not all(
            isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in tensors.items()
        ):
            raise ModelError(f"{path}: must hold nothing but tensors by name")
        return cls(path, tensors)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def describe(self, name: str) -> str:
        """The file."""
        return str(self.path)

    def copy(self, name: str, out: torch.Tensor, offset: tuple[int, ...]) -> None:
        """Fill `out` from a tensor."""
        part = tuple(slice(start, start + size) for start, size in zip(offset, out.shape, strict=True))
        out.copy_(self.tensors[name][part])


def _read_header(path: Path, integers: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of one file."""
    with path.open("rb") as raw:
        start = raw.read(100)
    if not start:
        raise ModelError(f"{path}: is empty; download it again")
    if start.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path}: is a Git-LFS pointer, not the weights; fetch them with: git lfs pull")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it isn't a mapping)
            for name, part in slices.items():
                if part.get_dtype() not in ({"I64"} if name in integers else _DTYPES):
                    raise ModelError(
                        f"{path}: tensor {name!r} has the dtype {part.get_dtype()}; supported are "
                        f"{', '.join(sorted(_DTYPES))}"
                    )
            return {name: tuple(part.get_shape()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path}: is truncated or not a safetensors file ({error}); it has {path.stat().st_size} bytes, "
            "download it again"
        ) from error


def _no_weights(directory: Path) -> str:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    return (
        f"{directory}: has neither {WEIGHTS_FILE} nor {INDEX_FILE}"
        + (f", only {_some(pickles)}" if pickles else "")
        + "; pickled weights (.bin, .pt) are refused, since loading them can run any code they carry; convert once "
        "where they are trusted, with AutoModelForCausalLM.from_pretrained(...).save_pretrained(DIRECTORY)"
    )


@dataclass(slots=True)
class _Account:
    """What has been asked for so far, shared by all scopes of a reader."""

    source: WeightSource
    names: dict[str, str]  # name with the prefix -> name in the source
    shapes: dict[str, tuple[int, ...]]
    consumed: set[str] = field(default_factory=set)
    num_parameters: int = 0
    missing: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)


class WeightReader:
    """Gives layers their parameters: each allocates its own at its final size, and tensors are copied into it.

    A problem with a tensor is noted and its parameter left as it is; `finish` reports them all, so nothing may be
    computed before it has returned.
    """

    def __init__(
        self, source: WeightSource, *, dtype: torch.dtype, device: torch.device, prefix: str = "model."
    ) -> None:
        """Checkpoints of the bare decoder lack `prefix` in all names; they are asked for with it all the same."""
        shapes = source.shapes()
        bare = bool(prefix) and not any(name.startswith(prefix) for name in shapes)
        prefixed = {name: f"{prefix}{name}" if bare and not name.startswith("lm_head.") else name for name in shapes}
        self._account = _Account(source, {full: name for name, full in prefixed.items()}, shapes)
        self._prefix = ""
        self.dtype = dtype
        self.device = device

    def scope(self, name: str) -> "WeightReader":
        """The same reader, with names relative to `name` (dots separate several levels)."""
        inner = object.__new__(WeightReader)
        inner._account, inner.dtype, inner.device = self._account, self.dtype, self.device
        inner._prefix = f"{self._prefix}{name}."
        return inner

    def has(self, name: str) -> bool:
        """Whether the files hold a tensor."""
        return self._prefix + name in self._account.names

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor in the files, None if they don't hold it."""
        key = self._account.names.get(self._prefix + name)
        return None if key is None else self._account.shapes[key]

    def allocate(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """An uninitialised parameter without a gradient, of the serving dtype unless another is given."""
        return torch.nn.Parameter(
            torch.empty(shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False
        )

    def copy(
        self, name: str, out: torch.Tensor, *, shape: Sequence[int] | None = None, offset: Sequence[int] | None = None
    ) -> None:
        """Fill `out` with the part at `offset` of tensor `name`, which must have `shape` (default: all, out's)."""
        account, full = self._account, self._prefix + name
        key = account.names.get(full)
        if key is None:
            account.missing.append(full)
            return
        account.consumed.add(key)
        expected = tuple(out.shape if shape is None else shape)
        if account.shapes[key] != expected:
            account.misshaped.append(f"{full} is {_dims(account.shapes[key])} instead of {_dims(expected)}")
            return
        account.num_parameters += out.numel() * out.is_floating_point()
        if out.is_meta:  # only the account is wanted
            return
        try:
            account.source.copy(key, out, tuple(offset or (0,) * len(expected)))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{account.source.describe(key)}: can't be read: {error}") from error

    @property
    def num_parameters(self) -> int:
        """Numbers that were copied so far, on this rank."""
        return self._account.num_parameters

    def skip(self, name: str) -> None:
        """Count a tensor, which must be there, as known without reading it."""
        key = self._account.names.get(self._prefix + name)
        if key is None:
            self._account.missing.append(self._prefix + name)
        else:
            self._account.consumed.add(key)

    def finish(self) -> None:
        """Raise ModelError naming the tensors that were missing, have a wrong shape, or that nobody asked for."""
        account = self._account
        surplus = [n for n in account.shapes if n not in account.consumed and not n.endswith(_HARMLESS_SUFFIXES)]
        problems = []
        if account.missing:
            problems.append(f"missing {_some(account.missing)}")
        if account.misshaped:
            problems.append(f"of a wrong shape {_some(account.misshaped)}")
        if surplus:
            problems.append(
                f"not known in this architecture {_some(surplus)} (in {account.source.describe(surplus[0])})"
            )
        if problems:
            raise ModelError(f"weights don't fit the configuration: {'; '.join(problems)}")


def _dims(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape)) or "a scalar"


def _is_are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
