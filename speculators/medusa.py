"""Medusa (arXiv 2401.10774): heads on the target's hidden state, each for one token further ahead.

Head h predicts the token h + 2 places after the state's own, so the first of them follows the token just emitted; none
sees what another drafted. A head is num_layers blocks x + SiLU(W x + b) and then a vocabulary head: its own (files
in the first format) or the target's (the second, which hold blocks only).
"""

import torch
import torch.nn.functional as F
from torch import nn

from specserve.models.hub import ModelError, ModelFiles
from specserve.models.layers.embedding import VocabParallelHead, load_vocabulary_slice
from specserve.models.layers.matrix import Matrix
from specserve.models.parallel import TensorParallel
from specserve.models.weights import WeightReader
from specserve.speculators.base import Draft, ProposalInput, Speculator
from specserve.speculators.checkpoint import (
    Base,
    SpeculatorConfig,
    load_draft_vocabulary,
    open_speculator,
    resolve_num_tokens,
)
from specserve.speculators.vocabulary_mapping import VocabularyMapping

WEIGHT_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")
PREFIX = "medusa_head."


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, reader: WeightReader, size: int) -> None:
        super().__init__()
        weight, self.bias = reader.allocate(size, size), reader.allocate(size)
        reader.copy("linear.weight", weight)
        reader.copy("linear.bias", self.bias)
        self.matrix = Matrix(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, E] -> [B, E]."""
        return x + F.silu(self.matrix(x, self.bias))


class MedusaSpeculator(Speculator):
    """Drafts with the first max_draft_tokens heads."""

    def __init__(
        self,
        heads: list[tuple[list[ResidualBlock], VocabParallelHead]],
        vocabulary: VocabularyMapping | None,
        num_parameters: int,
    ) -> None:
        self.blocks = [blocks for blocks, _ in heads]
        self.heads = [head for _, head in heads]
        self.vocabulary = vocabulary
        self.max_draft_tokens = len(heads)
        self.num_parameters = num_parameters

    def propose(self, rows: ProposalInput) -> Draft:
        """See Speculator."""
        rows.check()
        num_drafts = min(max(rows.max_lengths), self.max_draft_tokens)
        target_ids = None if self.vocabulary is None else self.vocabulary.target_ids
        drafted = rows.token_ids.new_empty(len(rows.row_slots), num_drafts)
        for step in range(num_drafts):
            state = rows.hidden
            for block in self.blocks[step]:
                state = block(state)
            head = self.heads[step]
            tokens = rows.choose(head.local(state), step, target_ids, head=head)
            drafted[:, step] = tokens if self.vocabulary is None else self.vocabulary.to_target(tokens)
        return Draft(drafted, [min(length, num_drafts) for length in rows.max_lengths])


@torch.no_grad()
def load_medusa(files: ModelFiles, base: Base, *, parallel: TensorParallel, num_tokens: int | None) -> MedusaSpeculator:
    """Load a checkpoint for a target; it drafts num_tokens, or with all heads. ModelError for what doesn't fit."""
    config = SpeculatorConfig(files)
    if "medusa_num_heads" not in config.values:
        raise ModelError(
            f"{config.path}: is no Medusa: medusa_num_heads is missing; name another --speculator or --speculator-id"
        )
    config.check_base(base)
    num_layers = config.integer("medusa_num_layers", 1, at_least=0)
    source = open_speculator(files, WEIGHT_FILES)
    numbers = (name.removeprefix(PREFIX).partition(".")[0] for name in source.shapes())
    # Old configurations name fewer heads than their files hold.
    num_heads = max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)
    if num_heads < (named := config.integer("medusa_num_heads", None, at_least=1)):
        raise ModelError(
            f"--speculator-id {files.path}: {config.path.name} says medusa_num_heads is {named}, but the weights hold "
            f"{num_heads} heads; download it again"
        )
    kept = resolve_num_tokens(num_tokens, num_heads, f"the number of heads of {files.path}")
    reader = WeightReader(source, dtype=base.dtype, device=base.device, prefix=PREFIX)
    vocabulary = load_draft_vocabulary(reader.scope("medusa_head"), base.vocab_size)
    heads = [_load_head(reader, base, config, index, num_layers, vocabulary, parallel) for index in range(kept)]
    for index in range(kept, num_heads):
        scope = reader.scope(f"{PREFIX}{index}")
        names = [f"{layer}.linear.{part}" for layer in range(num_layers) for part in ("weight", "bias")]
        for name in (*names, *([f"{num_layers}.weight"] if scope.has(f"{num_layers}.weight") else [])):
            scope.skip(name)
    reader.finish()
    return MedusaSpeculator(heads, vocabulary, reader.num_parameters)


def _load_head(
    reader: WeightReader,
    base: Base,
    config: SpeculatorConfig,
    index: int,
    num_layers: int,
    vocabulary: VocabularyMapping | None,
    parallel: TensorParallel,
) -> tuple[list[ResidualBlock], VocabParallelHead]:
    """The format is told by the names: with an own head there is a weight behind the blocks."""
    scope = reader.scope(f"{PREFIX}{index}")
    shape = scope.shape("0.linear.weight")
    if shape is not None:
        config.check_size("the size of its heads", shape[-1], base.hidden_size, base, "hidden size")
    blocks = [ResidualBlock(scope.scope(str(layer)), base.hidden_size) for layer in range(num_layers)]
    name = f"{num_layers}.weight"
    if vocabulary is None and not scope.has(name):
        return blocks, base.model.head
    num_rows = base.vocab_size if vocabulary is None else len(vocabulary.target_ids)
    if (shape := scope.shape(name)) is not None:
        config.check_size("the vocabulary of its heads", shape[0], num_rows, base, "(draft) vocabulary")
    weight = load_vocabulary_slice(scope, name, num_rows, base.hidden_size, parallel)
    return blocks, VocabParallelHead(Matrix(weight), num_rows, parallel)
