"""Reference-counted KV blocks with an exact prefix cache.

A full, computed block is cached under (id of its parent's cache entry, its tokens): the key is the tokens
themselves, not a hash, so that a collision can't hand one request the KV of another. Blocks that nobody
references stay cached until they are needed, least recently freed first.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

ROOT_ENTRY = 0


class BlockOwner(Protocol):
    """A sequence as far as its blocks are concerned; the manager keeps all but token_ids."""

    token_ids: list[int]
    block_table: list[int]
    num_computed_tokens: int
    num_cached_blocks: int  # leading blocks that the prefix cache knows
    prefix_entry: int  # prefix cache entry of the last of them


class BlockManager:
    """Hands out the blocks 0 .. num_blocks - 1, each of block_size tokens."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._entries: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # key -> (entry id, block)
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}  # block -> key
        self._next_entry = ROOT_ENTRY + 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody references, cached or not."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: BlockOwner) -> list[tuple[int, int]]:
        """(entry id, block) of each cached leading block; one token at least is left to compute."""
        if not self.prefix_caching:
            return []
        found: list[tuple[int, int]] = []
        parent = ROOT_ENTRY
        for index in range((len(seq.token_ids) - 1) // self.block_size):
            entry = self._entries.get((parent, self._block_tokens(seq, index)))
            if entry is None:
                break
            found.append(entry)
            parent = entry[0]
        return found

    def can_admit(self, seq: BlockOwner, prefix: list[tuple[int, int]]) -> bool:
        """Whether the whole sequence fits now, its cached prefix counted as it is."""
        idle_hits = sum(self._ref_counts[block] == 0 for _, block in prefix)
        needed = self.num_blocks_for(len(seq.token_ids)) - len(prefix)
        return needed <= self.num_free_blocks - idle_hits

    def adopt_prefix(self, seq: BlockOwner, prefix: list[tuple[int, int]]) -> None:
        """Give the sequence its cached leading blocks, computed already."""
        for entry, block in prefix:
            self._take(block)
            seq.block_table.append(block)
            seq.prefix_entry = entry
        seq.num_cached_blocks = len(prefix)
        seq.num_computed_tokens = len(prefix) * self.block_size

    def grow(self, seq: BlockOwner, num_tokens: int) -> list[int] | None:
        """Make room for num_tokens in all; the new blocks, or None (and no change) when there are too few."""
        missing = self.num_blocks_for(num_tokens) - len(seq.block_table)
        if missing > len(self._free):
            return None
        new_blocks = [self._take_oldest() for _ in range(missing)]
        seq.block_table.extend(new_blocks)
        return new_blocks

    def cache_computed(self, seq: BlockOwner, num_final: int | None = None) -> None:
        """Make the sequence's full, computed blocks findable, of the first num_final tokens (None: of all).

        Accepted drafts behind the end of the sequence are computed but no part of it.
        """
        if not self.prefix_caching:
            return
        num_tokens = min(seq.num_computed_tokens, len(seq.token_ids) if num_final is None else num_final)
        while (seq.num_cached_blocks + 1) * self.block_size <= num_tokens:
            index = seq.num_cached_blocks
            key = (seq.prefix_entry, self._block_tokens(seq, index))
            if key not in self._entries:
                self._entries[key] = (self._next_entry, seq.block_table[index])
                self._keys[seq.block_table[index]] = key
                self._next_entry += 1
            seq.prefix_entry = self._entries[key][0]
            seq.num_cached_blocks += 1

    def free(self, seq: BlockOwner) -> None:
        """Give all blocks back. The tail goes first, so that prefixes outlive what follows them."""
        for block in reversed(seq.block_table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._keys:  # holds nothing worth keeping: reuse it first
                    self._free.move_to_end(block, last=False)
        seq.block_table.clear()
        seq.num_computed_tokens = seq.num_cached_blocks = 0
        seq.prefix_entry = ROOT_ENTRY

    def check_integrity(self, sequences: Iterable[BlockOwner]) -> None:
        """Assert that reference counts, free list and cache agree with the tables of all live sequences."""
        counts = [0] * self.num_blocks
        for seq in sequences:
            assert len(set(seq.block_table)) == len(seq.block_table), "a block twice in one table"
            for block in seq.block_table:
                counts[block] += 1
        assert counts == self._ref_counts, "reference counts"
        assert set(self._free) == {block for block, count in enumerate(counts) if count == 0}, "free list"
        cached = {block: key for key, (_, block) in self._entries.items()}
        assert cached == self._keys, "cache keys"
        assert all(len(tokens) == self.block_size for _, tokens in self._entries), "only full blocks are cached"

    def _block_tokens(self, seq: BlockOwner, index: int) -> tuple[int, ...]:
        return tuple(seq.token_ids[index * self.block_size : (index + 1) * self.block_size])

    def _take(self, block: int) -> None:
        self._ref_counts[block] += 1
        self._free.pop(block, None)

    def _take_oldest(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._ref_counts[block] = 1
        key = self._keys.pop(block, None)
        if key is not None:
            del self._entries[key]
        return block
