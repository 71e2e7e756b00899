"""MLPSpeculator (arXiv 2404.19124): a chain of small networks, each fed with the token that the one before drafted.

Formats and constants are those of IBM's published accelerators. Stage i, from the state s (the target's hidden state
at first) and the last token t:

    s <- GELU(LN_i(a * P_i s + b * E_i[t])),  logits_i = H_i s,   a = 0.5^(0.5 / n),  b = sqrt((1 - a^2) * inner / 2)

with n the checkpoint's n_predict, whatever is drafted; LN divides by the root of the mean square (eps 1e-6), without
a mean. With scale_input, s is normalised so first, without weights, and divided by sqrt(2).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from specserve.models.hub import ModelError, ModelFiles
from specserve.models.layers.embedding import VocabParallelEmbedding, VocabParallelHead, load_vocabulary_slice
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

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
PREFIX = "speculator."
EPS = 1e-6

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """config.json of a checkpoint, with the defaults of the class it names."""

    vocab_size: int
    emb_dim: int
    inner_dim: int
    n_predict: int
    tie_weights: bool
    scale_input: bool

    @classmethod
    def read(cls, config: SpeculatorConfig, base: Base) -> "MLPConfig":
        """Read and check it against the target; ModelError names file, key and both values."""
        marks = (config.values.get("model_type"), *(config.values.get("architectures") or ()))
        if not {"mlp_speculator", "MLPSpeculatorPreTrainedModel"} & set(marks):
            raise ModelError(
                f"{config.path}: is no MLP speculator: model_type is {marks[0]!r} instead of 'mlp_speculator'; "
                "name another --speculator or --speculator-id"
            )
        emb_dim = config.integer("emb_dim", 4096, at_least=1)
        vocab_size = config.integer("vocab_size", 32000, at_least=1)
        config.check_size("emb_dim", emb_dim, base.hidden_size, base, "hidden size")
        config.check_size("vocab_size", vocab_size, base.vocab_size, base, "vocabulary")
        config.check_base(base)
        return cls(
            vocab_size=vocab_size,
            emb_dim=emb_dim,
            inner_dim=config.integer("inner_dim", 0, at_least=0) or emb_dim,
            n_predict=config.integer("n_predict", 3, at_least=1),
            tie_weights=config.flag("tie_weights"),
            scale_input=config.flag("scale_input"),
        )


class Stage(nn.Module):
    """One network of the chain."""

    def __init__(
        self,
        embedding: VocabParallelEmbedding,
        projection: Matrix,
        norm: tuple[torch.Tensor, torch.Tensor],
        head: VocabParallelHead,
        config: MLPConfig,
    ) -> None:
        super().__init__()
        self.embedding, self.projection, self.head = embedding, projection, head
        self.norm_weight, self.norm_bias = norm
        state_weight = 0.5 ** (0.5 / config.n_predict)
        embedding_weight = ((1 - state_weight**2) * config.inner_dim / 2) ** 0.5
        # The norm takes a common factor out, but for eps, which is scaled along: LN(a x + b y; eps) is
        # LN(a / b x + y; eps / b^2).
        self.ratio = state_weight / embedding_weight
        self.eps = EPS / embedding_weight**2

    def forward(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """State [B, E or inner], rows of the embedding [B] -> state [B, inner]."""
        mixed = torch.add(self.embedding(tokens), self.projection(state), alpha=self.ratio)
        normalized = F.rms_norm(mixed, mixed.shape[-1:], self.norm_weight, self.eps) + self.norm_bias
        return F.gelu(normalized)


class MLPSpeculator(Speculator):
    """Drafts a chain of up to max_draft_tokens tokens."""

    def __init__(
        self,
        config: MLPConfig,
        reader: WeightReader,
        vocabulary: VocabularyMapping | None,
        parallel: TensorParallel,
        max_draft_tokens: int,
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.max_draft_tokens = max_draft_tokens
        loader = _StageLoader(config, reader, vocabulary, parallel)
        self.stages = [loader.load(index) for index in range(max_draft_tokens)]
        for index in range(max_draft_tokens, config.n_predict):
            loader.skip(index)
        self.num_parameters = reader.num_parameters

    def propose(self, rows: ProposalInput) -> Draft:
        """See Speculator."""
        rows.check()
        state, tokens = rows.hidden, self._to_draft(rows.token_ids)
        if self.config.scale_input:
            state = F.rms_norm(state, state.shape[-1:], None, EPS) * 2**-0.5
        target_ids = None if self.vocabulary is None else self.vocabulary.target_ids
        num_drafts = min(max(rows.max_lengths), self.max_draft_tokens)
        drafted = rows.token_ids.new_empty(len(rows.row_slots), num_drafts)
        for step in range(num_drafts):
            stage = self.stages[step]
            state = stage(state, tokens)
            tokens = rows.choose(stage.head.local(state), step, target_ids, head=stage.head)
            drafted[:, step] = tokens if self.vocabulary is None else self.vocabulary.to_target(tokens)
        return Draft(drafted, [min(length, num_drafts) for length in rows.max_lengths])

    def _to_draft(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding; a token outside of the draft vocabulary has the last one."""
        if self.vocabulary is None:
            return token_ids
        return self.vocabulary.to_draft(token_ids, missing=len(self.vocabulary.target_ids))


class _StageLoader:
    """Reads the stages; with tied weights all have those of the first (of projections: two, the first one differs)."""

    def __init__(
        self, config: MLPConfig, reader: WeightReader, vocabulary: VocabularyMapping | None, parallel: TensorParallel
    ) -> None:
        self._config, self._reader, self._parallel = config, reader.scope("speculator"), parallel
        known = config.vocab_size if vocabulary is None else len(vocabulary.target_ids)
        self._num_heads_rows, self._num_embeddings = known, known + (vocabulary is not None)
        self._loaded: dict[str, Any] = {}

    def load(self, index: int) -> Stage:
        """Stage `index`."""
        return Stage(
            self._once("emb", index, self._embedding),
            self._once("proj", index, self._projection),
            self._once("ln", index, self._norm),
            self._once("head", index, self._head),
            self._config,
        )

    def skip(self, index: int) -> None:
        """Leave stage `index` in the file."""
        for name in ("emb.{}.weight", "proj.{}.weight", "ln.{}.weight", "ln.{}.bias", "head.{}.weight"):
            is_tied = self._owner(name.partition(".")[0], index) != index
            if not is_tied or self._reader.has(name.format(index)):
                self._reader.skip(name.format(index))

    def _owner(self, kind: str, index: int) -> int:
        """The stage whose parameters these are."""
        last_own = 1 if kind == "proj" else 0
        return min(index, last_own) if self._config.tie_weights else index

    def _once(self, kind: str, index: int, load: Callable[[str, int], T]) -> T:
        owner = self._owner(kind, index)
        for alias in (f"{kind}.{index}.weight", f"{kind}.{index}.bias"):
            if owner != index and self._reader.has(alias):
                self._reader.skip(alias)  # a tied tensor, saved once more
        name = f"{kind}.{owner}"
        if name not in self._loaded:
            self._loaded[name] = load(name, owner)
        loaded: T = self._loaded[name]
        return loaded

    def _embedding(self, name: str, index: int) -> VocabParallelEmbedding:
        weight = load_vocabulary_slice(
            self._reader, f"{name}.weight", self._num_embeddings, self._config.inner_dim, self._parallel
        )
        return VocabParallelEmbedding(Matrix(weight, multiplies=False), self._parallel)

    def _head(self, name: str, index: int) -> VocabParallelHead:
        weight = load_vocabulary_slice(
            self._reader, f"{name}.weight", self._num_heads_rows, self._config.inner_dim, self._parallel
        )
        return VocabParallelHead(Matrix(weight), self._num_heads_rows, self._parallel)

    def _projection(self, name: str, index: int) -> Matrix:
        weight = self._reader.allocate(
            self._config.inner_dim, self._config.emb_dim if index == 0 else self._config.inner_dim
        )
        self._reader.copy(f"{name}.weight", weight)
        return Matrix(weight)

    def _norm(self, name: str, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias = (self._reader.allocate(self._config.inner_dim) for _ in range(2))
        self._reader.copy(f"{name}.weight", weight)
        self._reader.copy(f"{name}.bias", bias)
        return weight, bias


@torch.no_grad()
def load_mlp(files: ModelFiles, base: Base, *, parallel: TensorParallel, num_tokens: int | None) -> MLPSpeculator:
    """Load a checkpoint for a target; it drafts num_tokens, or n_predict. ModelError for what doesn't fit."""
    config_file = SpeculatorConfig(files)
    config = MLPConfig.read(config_file, base)
    max_draft_tokens = resolve_num_tokens(num_tokens, config.n_predict, f"{config_file.path}: n_predict")
    source = open_speculator(files, WEIGHT_FILES)
    reader = WeightReader(source, dtype=base.dtype, device=base.device, prefix=PREFIX)
    vocabulary = load_draft_vocabulary(reader.scope("speculator"), base.vocab_size)
    speculator = MLPSpeculator(config, reader, vocabulary, parallel, max_draft_tokens)
    reader.finish()
    return speculator
