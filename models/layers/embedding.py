"""Token embedding and output head; the vocabulary is padded to a multiple of the ranks and sliced."""

import torch
import torch.nn.functional as F
from torch import nn

from specserve.models.layers.matrix import Matrix
from specserve.models.parallel import TensorParallel
from specserve.models.weights import WeightReader


def load_vocabulary_slice(
    reader: WeightReader, name: str, vocab_size: int, hidden_size: int, parallel: TensorParallel
) -> nn.Parameter:
    """The rows of this rank, [ceil(V / ranks), E] of a [V, E] tensor; rows past V are zero."""
    num_rows = -(-vocab_size // parallel.size)
    first = min(parallel.rank * num_rows, vocab_size)
    num_real = min(num_rows, vocab_size - first)
    weight = reader.allocate(num_rows, hidden_size)
    weight[num_real:].zero_()
    reader.copy(name, weight[:num_real], shape=(vocab_size, hidden_size), offset=(first, 0))
    return weight


class VocabParallelEmbedding(nn.Module):
    """Embedding whose rows are split over the ranks; `matrix` holds those of load_vocabulary_slice."""

    def __init__(self, matrix: Matrix, parallel: TensorParallel) -> None:
        super().__init__()
        self.matrix = matrix
        self.parallel = parallel

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[N] -> [N, E], on all ranks."""
        if self.parallel.size == 1:
            return self.matrix.rows(input_ids)
        num_rows = self.matrix.shape[0]
        local = input_ids - self.parallel.rank * num_rows
        absent = (local < 0) | (local >= num_rows)
        rows = self.matrix.rows(local.masked_fill(absent, 0))
        return self.parallel.all_reduce(rows.masked_fill_(absent.unsqueeze(-1), 0))


class VocabParallelHead(nn.Module):
    """Output head whose rows are split over the ranks; `matrix` holds those of load_vocabulary_slice."""

    def __init__(self, matrix: Matrix, vocab_size: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.matrix = matrix
        self.vocab_size = vocab_size
        self.parallel = parallel

    @property
    def first(self) -> int:
        """The column of this rank's first logit."""
        return min(self.parallel.rank * self.matrix.shape[0], self.vocab_size)

    def local(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, E] -> this rank's columns of the logits [R, n], float32; n may be 0."""
        logits: torch.Tensor = self.matrix(hidden)
        return logits[:, : self.vocab_size - self.first].float()

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """What `local` gave on each rank -> [R, V], on all ranks."""
        padded = F.pad(logits, (0, self.matrix.shape[0] - logits.shape[1]))
        return self.parallel.all_gather_last_dim(padded)[:, : self.vocab_size]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, E] -> [R, V] float32, on all ranks."""
        logits = self.parallel.all_gather_last_dim(self.matrix(hidden))
        return logits[:, : self.vocab_size].float()
