"""Linear layers that load their own slice of the weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from specserve.models.hub import ModelError
from specserve.models.layers.matrix import Matrix
from specserve.models.parallel import TensorParallel
from specserve.models.weights import WeightReader


@dataclass(frozen=True, slots=True)
class Projection:
    """A tensor of the checkpoint whose outputs are `num_units` (heads, say) of `unit_size` features.

    `replicates` lets several ranks hold the same unit where there are fewer units than ranks.
    """

    name: str
    num_units: int
    unit_size: int = 1
    replicates: bool = False


def shard_units(what: Projection, parallel: TensorParallel) -> tuple[int, int]:
    """First unit and number of units on this rank; ModelError if they can't be divided among the ranks."""
    if what.num_units % parallel.size == 0:
        count = what.num_units // parallel.size
        return parallel.rank * count, count
    if what.replicates and parallel.size % what.num_units == 0:
        return parallel.rank * what.num_units // parallel.size, 1
    raise ModelError(f"num_shard is {parallel.size}, which can't divide the {what.num_units} units of {what.name}")


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
        shards = [shard_units(projection, parallel) for projection in projections]
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
        first, count = shard_units(projection, parallel)
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
