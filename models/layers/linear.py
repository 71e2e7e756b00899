"""Linear layers that load their own slice of the weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from specserve.models.hub import ModelError
from specserve.models.layers.matrix import Matrix
from specserve.models.parallel import TensorParallel
from specserve.models.weights import WeightReader

Share = tuple[int, int]  # first and number


@dataclass(frozen=True, slots=True)
class Projection:
    """A tensor of the checkpoint whose outputs are `num_units` (heads, say) of `unit_size` features.

    `share` are the units of this rank; None: an even part.
    """

    name: str
    num_units: int
    unit_size: int = 1
    share: Share | None = None


def share_heads(num_heads: int, num_kv_heads: int, parallel: TensorParallel) -> tuple[Share, Share]:
    """The query heads and the KV heads of this rank; ModelError if there are more ranks than heads to give them.

    KV heads go to the ranks with all query heads that use them. Where there are fewer than ranks, several ranks hold
    the same one, and share its query heads. Every KV head of a rank has equally many query heads there.
    """
    group = num_heads // num_kv_heads
    if parallel.size <= num_kv_heads:
        first, count = parallel.share(num_kv_heads)
        return (first * group, count * group), (first, count)
    if not can_share_heads(num_heads, num_kv_heads, parallel):
        raise ModelError(
            f"--num-shard is {parallel.size}, but the {num_heads} attention heads of the model ({num_kv_heads} KV "
            "heads) can't give each shard one; choose fewer shards"
        )
    owners = _kv_heads_of_ranks(num_kv_heads, parallel)
    mine = owners[parallel.rank]
    among = TensorParallel(parallel.rank - owners.index(mine), owners.count(mine))
    first, count = among.share(group)
    return (mine * group + first, count), (mine, 1)


def can_share_heads(num_heads: int, num_kv_heads: int, parallel: TensorParallel) -> bool:
    """Whether there is a query head for each rank, among those that use its KV head."""
    owners = _kv_heads_of_ranks(num_kv_heads, parallel)
    return parallel.size <= num_kv_heads or max(map(owners.count, owners)) <= num_heads // num_kv_heads


def _kv_heads_of_ranks(num_kv_heads: int, parallel: TensorParallel) -> list[int]:
    """Where several ranks hold the same one, or each its own."""
    return [rank * num_kv_heads // parallel.size for rank in range(parallel.size)]


def _units(what: Projection, parallel: TensorParallel) -> Share:
    first, count = what.share or parallel.share(what.num_units)
    if count == 0:
        raise ModelError(f"--num-shard is {parallel.size}, but {what.name} has {what.num_units} units; choose fewer")
    return first, count


class ColumnParallelLinear(nn.Module):
    """Several projections of one input, packed into one matmul; each rank computes some of their outputs.

    `num_units` lists, a projection, the units on this rank.
    """

    def __init__(
        self,
        reader: WeightReader,
        projections: Sequence[Projection],
        in_features: int,
        *,
        bias: bool,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        shards = [_units(projection, parallel) for projection in projections]
        self.num_units = [count for _, count in shards]
        sizes = [count * p.unit_size for p, count in zip(projections, self.num_units, strict=True)]
        weight = reader.allocate(sum(sizes), in_features)
        self.bias = reader.allocate(sum(sizes)) if bias else None
        row = 0
        for projection, (first, _), size in zip(projections, shards, sizes, strict=True):
            total, start = projection.num_units * projection.unit_size, first * projection.unit_size
            scope = reader.scope(projection.name)
            scope.copy("weight", weight[row : row + size], shape=(total, in_features), offset=(start, 0))
            if self.bias is not None:
                scope.copy("bias", self.bias[row : row + size], shape=(total,), offset=(start,))
            row += size
        self.matrix = Matrix(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in_features] -> [N, this rank's outputs of all projections, one after the other]."""
        out: torch.Tensor = self.matrix(x, self.bias)
        return out


class RowParallelLinear(nn.Module):
    """A projection whose input is split over the ranks; the results are summed."""

    def __init__(
        self,
        reader: WeightReader,
        projection: Projection,
        out_features: int,
        *,
        bias: bool,
        parallel: TensorParallel,
    ) -> None:
        """Here the units of `projection` are of its input."""
        super().__init__()
        self.parallel = parallel
        first, count = _units(projection, parallel)
        unit, scope = projection.unit_size, reader.scope(projection.name)
        weight = reader.allocate(out_features, count * unit)
        shape = (out_features, projection.num_units * unit)
        scope.copy("weight", weight, shape=shape, offset=(0, first * unit))
        self.matrix = Matrix(weight)
        self.bias = reader.allocate(out_features) if bias else None
        if self.bias is not None:
            scope.copy("bias", self.bias)
            if parallel.rank != 0:
                self.bias = None  # added once in the sum

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, this rank's inputs] -> [N, out_features], the same on all ranks."""
        return self.parallel.all_reduce(self.matrix(x, self.bias))
