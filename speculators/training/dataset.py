"""Generated answers and their hidden states, on disk.

A folder with `meta.json` (how it was made), `records.jsonl` (a line an answer) and `hidden.bin` (their states,
bfloat16, [n, E], in the order of the lines). A line is written after the states that it speaks of, so a folder that
was cut off by a kill goes on where its last whole line ends.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specserve.models.hub import ModelError

HELD_OUT_SHARE = 16  # one prompt in so many is never trained on


@dataclass(frozen=True, slots=True)
class Record:
    """One answer. The first num_states of its tokens have a hidden state."""

    index: int
    prompt: str
    token_ids: list[int]
    num_states: int

    @property
    def is_held_out(self) -> bool:
        """By the prompt alone, so that one prompt is never on both sides."""
        return zlib.crc32(self.prompt.encode("utf-8", "surrogatepass")) % HELD_OUT_SHARE == 0


class DatasetWriter:
    """Appends records in the order of their index; made anew or continued."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        """Raises ModelError if the folder holds data that was made in another way."""
        folder.mkdir(parents=True, exist_ok=True)
        meta_file = folder / "meta.json"
        if meta_file.exists():
            _check_meta(meta_file, meta)
        else:
            meta_file.write_text(json.dumps(meta, indent=1) + "\n")
        records, length = _read_records(folder / "records.jsonl")
        self.num_records = len(records)
        self.num_tokens = sum(record.num_states for record in records)
        self._records = (folder / "records.jsonl").open("ab")
        self._records.truncate(length)
        self._hidden = (folder / "hidden.bin").open("ab")
        self._hidden.truncate(self.num_tokens * meta["hidden_size"] * 2)

    def add(self, record: Record, states: torch.Tensor) -> None:
        """Append an answer with its states [num_states, E] bfloat16."""
        assert record.index == self.num_records and states.shape[0] == record.num_states
        self._hidden.write(states.contiguous().view(torch.int16).numpy().tobytes())
        self._hidden.flush()
        self._records.write(json.dumps(asdict(record)).encode() + b"\n")
        self._records.flush()
        self.num_records += 1
        self.num_tokens += record.num_states

    def close(self) -> None:
        """Close the files."""
        self._records.close()
        self._hidden.close()


def _check_meta(path: Path, meta: dict[str, Any]) -> None:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); name another --data-dir or remove it") from error
    for name, value in meta.items():
        if found.get(name) != value:
            raise ModelError(
                f"--data-dir {path.parent}: its data was made with {name} {found.get(name)!r}, now it is {value!r}; "
                "name another --data-dir, or remove this one"
            )


def _read_records(path: Path) -> tuple[list[Record], int]:
    """The whole lines, and their length in bytes."""
    records: list[Record] = []
    length = 0
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            records.append(Record(**json.loads(line)))
            length += len(line)
    return records, length


class Dataset:
    """The examples of a folder: a state, the token drawn from it, and the tokens after that one."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        """num_steps: how many following tokens an example has; those past an answer's end are -1."""
        records, _ = _read_records(folder / "records.jsonl")
        hidden_size = json.loads((folder / "meta.json").read_text())["hidden_size"]
        num_states = sum(record.num_states for record in records)
        raw = np.memmap(folder / "hidden.bin", dtype=np.int16, mode="r", shape=(num_states, hidden_size))
        self._states = raw
        self._steps = np.full((num_states, 1 + num_steps), -1, dtype=np.int64)
        self._last = np.empty(num_states, dtype=np.int64)  # the last state of each one's answer
        sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        first = 0
        for record in records:
            tokens = np.array(record.token_ids)
            for step in range(1 + num_steps):
                shifted = tokens[step : step + record.num_states]
                self._steps[first : first + len(shifted), step] = shifted
            self._last[first : first + record.num_states] = first + record.num_states - 1
            usable = min(record.num_states, len(tokens) - 1)
            sides[record.is_held_out].append(np.arange(first, first + usable))
            first += record.num_states
        empty = np.empty(0, dtype=np.int64)
        self.train_indices, self.held_out_indices = (np.concatenate([empty, *side]) for side in sides)

    def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States [B, E] float32, tokens [B], the tokens after [B, num_steps]."""
        states = self._read(indices).float()
        steps = torch.from_numpy(self._steps[indices])
        return states, steps[:, 0].contiguous(), steps[:, 1:].contiguous()

    def following_states(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """States that the tokens after were drawn from [B, num_steps, E] bfloat16; which of them there are."""
        wanted = indices[:, None] + np.arange(1, self._steps.shape[1])
        last = self._last[indices][:, None]
        return self._read(np.minimum(wanted, last)), torch.from_numpy(wanted <= last)

    def _read(self, indices: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self._states[indices]).view(torch.bfloat16)

    def frequent_tokens(self, count: int) -> tuple[list[int], float]:
        """The `count` most frequent generated tokens of the training side, ascending; their share of all."""
        tokens, counts = np.unique(self._steps[self.train_indices, 0], return_counts=True)
        best = np.argsort(-counts, kind="stable")[:count]
        return sorted(tokens[best].tolist()), float(counts[best].sum() / max(1, counts.sum()))

    def held_out_batches(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """All held-out examples."""
        for start in range(0, len(self.held_out_indices), size):
            yield self.batch(self.held_out_indices[start : start + size])
