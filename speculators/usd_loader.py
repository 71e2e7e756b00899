"""Loads a draft model, finds what its vocabulary shares with the target's, and chooses how to draft."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from loguru import logger

from specserve.models.attention.registry import attention_backend
from specserve.models.causal_lm import CausalLM
from specserve.models.config import ModelConfig, load_config
from specserve.models.hub import ModelError, ModelFiles
from specserve.models.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from specserve.models.layers.linear import can_share_heads
from specserve.models.layers.matrix import Matrix
from specserve.models.parallel import TensorParallel
from specserve.models.registry import load_model
from specserve.models.tokenizer import Tokenizer, load_tokenizer
from specserve.models.weights import open_weights
from specserve.speculators.base import NoSpeculator, Speculator, UsdMethod
from specserve.speculators.checkpoint import Base
from specserve.speculators.draft_model import DraftModel, FollowingDraftModel
from specserve.speculators.translator import Translator
from specserve.speculators.usd import UsdSpeculator
from specserve.speculators.vocabulary_mapping import VocabularyMapping

DEFAULT_NUM_TOKENS = 8
MIN_OVERLAP = 100  # tokens; with fewer, as good as nothing could be drafted
MIN_TLI_WEIGHT = 0.9  # of the sample below; TLI can't draft what the vocabularies don't share

# Weighs the tokens: prose, dialogue, lists, code, data and other scripts, as answers hold them.
SAMPLE = """The history of the bicycle begins in 1817, when Karl von Drais built a two-wheeled "running machine".
It wasn't until the 1860s that pedals were added; by 1890, most of today's parts – chain, brakes, tyres – were there.

**How to make bread**
1. Mix 500 g of flour, 10 g of salt and 7 g of yeast.
2. Add 320 ml of water (warm, not hot!) and knead for 10 minutes.
3. Let it rise, then bake at 220 °C for half an hour.

"What do you think?" she asked. "I'm not sure," he said, "but we'll see: it's only 3.5 km, isn't it?"

```python
def mean(values: list[float]) -> float:
    # the empty list has no mean
    if not values:
        raise ValueError(f"no values: {values!r}")
    return sum(values) / len(values)
```

| name | value |
| --- | --- |
| a_1 | {"id": 42, "ok": true, "tags": ["x", "y"]} |

To solve x² + 2x - 3 = 0, factor it: (x + 3)(x - 1) = 0, so x = -3 or x = 1.
La plupart des gens préfèrent le café. ¿Dónde está la biblioteca? Das Wetter ist schön. 今天天气很好。Спасибо!
"""


@dataclass(frozen=True, slots=True)
class UsdOptions:
    """How to load and use a draft model. dtype None: that of the target."""

    method: UsdMethod = UsdMethod.AUTO
    dtype: torch.dtype | None = None
    is_quantized: bool = False  # int8 weights
    num_shard: int | None = None  # 1: rank 0 has all of it; else as many as the target's. None: as suits the device


@torch.no_grad()
def load_usd(
    files: ModelFiles, base: Base, options: UsdOptions, *, parallel: TensorParallel, num_tokens: int | None
) -> Speculator:
    """The draft model in `files` for a loaded target. ModelError for what doesn't fit, in one line with the numbers."""
    try:
        config = load_config(files)
        is_split = _is_split(config, base, options, parallel)
        if parallel.rank > 0 and not is_split:
            return NoSpeculator()
        return _load(files, config, base, options, parallel if is_split else TensorParallel(), num_tokens)
    except ModelError as error:
        if "--speculator-" in str(error):
            raise
        raise ModelError(
            f"--speculator-id {files.model_id}: {error} (usd needs a language model with its tokenizer; for trained "
            "speculators there are --speculator mlp and medusa)"
        ) from error


def _is_split(config: ModelConfig, base: Base, options: UsdOptions, parallel: TensorParallel) -> bool:
    """Small models gain nothing from several GPUs; on CPUs one rank alone would leave the cores of the others idle."""
    if parallel.size == 1 or options.num_shard == 1 or (options.num_shard is None and base.device.type == "cuda"):
        return False
    heads = config.num_heads, config.num_kv_heads
    if can_share_heads(*heads, parallel):
        return True
    if options.num_shard is None:
        return False
    raise ModelError(
        f"--speculator-num-shard is {parallel.size}, but the draft model has {heads[0]} attention heads ({heads[1]} KV "
        "heads), which can't give each shard one; choose 1"
    )


def _load(
    files: ModelFiles,
    config: ModelConfig,
    base: Base,
    options: UsdOptions,
    parallel: TensorParallel,
    num_tokens: int | None,
) -> Speculator:
    draft = load_tokenizer(files, config.vocab_size)
    num_parameters = _check_sizes(files, base)
    translator = Translator(base.tokenizer, draft)
    mapping = None if translator.is_identity else vocabulary_mapping(translator, files)
    method, why = _method(options.method, mapping, base.tokenizer)
    is_check = base.device.type == "meta"
    if not is_check:
        where = "" if parallel.size == 1 else f"; the draft model is split over {parallel.size} shards"
        logger.info("usd: {}{}", why, where)
    dtype = options.dtype or base.dtype
    backend, _ = attention_backend(
        "auto" if dtype is not base.dtype or is_check else base.model.attention.name,
        device=base.device,
        dtype=dtype,
        block_size=None,
    )
    model = load_model(files, config, dtype=dtype, device=base.device, parallel=parallel, attention=backend)
    if mapping is not None:
        mapping = VocabularyMapping(mapping.draft_ids.to(base.device), mapping.target_ids.to(base.device))
    head = _cut_head(model, mapping, min(draft.size, config.vocab_size, base.vocab_size))
    if options.is_quantized:
        model.quantize()
        head.matrix.quantize()
    draft_model = DraftModel(model, [head, model.head])  # of METHODS
    if parallel.rank > 0:
        return FollowingDraftModel(draft_model, num_parameters)
    return UsdSpeculator(
        draft_model,
        mapping,
        translator,
        method=method,
        max_draft_tokens=num_tokens or DEFAULT_NUM_TOKENS,
        num_parameters=num_parameters,
    )


def vocabulary_mapping(translator: Translator, files: ModelFiles) -> VocabularyMapping:
    """What draft and target share: bytes, and the end of a text. ModelError if that is too little."""
    target, draft = translator.target, translator.draft
    ends = [(token_id, translator.roles[token_id]) for token_id in target.eos_token_ids if token_id in translator.roles]
    mapping = VocabularyMapping.of_bytes(target.ids_by_bytes, draft.ids_by_bytes, ends[:1])
    if len(mapping.target_ids) < MIN_OVERLAP:
        raise ModelError(
            f"--speculator-id {files.model_id}: only {len(mapping.target_ids)} of the {draft.size} tokens of its "
            f"vocabulary are among the {target.size} of the model's ({overlap_weight(mapping, target):.1%} by weight); "
            f"at least {MIN_OVERLAP} are needed, choose a draft model whose tokenizer is closer"
        )
    return mapping


def overlap_weight(mapping: VocabularyMapping, target: Tokenizer) -> float:
    """The part of the target's tokens of a sample text that the draft has too."""
    token_ids = torch.tensor(target.encode(SAMPLE, False, False))
    return float(torch.isin(token_ids, mapping.target_ids).double().mean())


def _method(asked: UsdMethod, mapping: VocabularyMapping | None, target: Tokenizer) -> tuple[UsdMethod, str]:
    """The method, and why."""
    if mapping is None:
        return UsdMethod.TLI, "the draft model has the same tokenizer; it drafts in the model's own tokens"
    weight = overlap_weight(mapping, target)
    chosen = asked
    if asked is UsdMethod.AUTO:
        chosen = UsdMethod.TLI if weight >= MIN_TLI_WEIGHT else UsdMethod.SLEM
    return chosen, (
        f"drafts by {chosen} ({'chosen' if asked is UsdMethod.AUTO else 'as asked'}); the vocabularies share "
        f"{len(mapping.target_ids)} tokens, {weight:.1%} by weight"
    )


def _check_sizes(files: ModelFiles, base: Base) -> int:
    """Parameters of the draft model, which must not have more than the target."""
    own, targets = (
        sum(math.prod(shape) for shape in open_weights(some).shapes().values()) for some in (files, base.files)
    )
    if own > targets:
        raise ModelError(
            f"--speculator-id {files.model_id}: the draft model has {own} parameters, more than the {targets} of the "
            f"model {base.files.model_id}; choose a smaller one"
        )
    return own


def _cut_head(model: CausalLM, mapping: VocabularyMapping | None, num_shared: int) -> VocabParallelHead:
    """The draft's head over the draft ids of the mapping, or over the ids that both have."""
    parallel = model.parallel
    if mapping is None:
        return VocabParallelHead(model.head.matrix, num_shared, parallel)
    whole = VocabParallelEmbedding(model.head.matrix, parallel)  # its rows
    num_rows = -(-len(mapping.draft_ids) // parallel.size)
    for rank, draft_ids in enumerate(torch.split(mapping.draft_ids, num_rows)):
        rows = whole(draft_ids)  # from the ranks that have them
        if rank == parallel.rank:
            own = F.pad(rows, (0, 0, 0, num_rows - len(rows)))
    return VocabParallelHead(Matrix(own.contiguous()), len(mapping.draft_ids), parallel)
