"""From a configuration to a loaded, warmed-up model behind an engine."""

from dataclasses import dataclass

from specserve.models.block_manager import BlockManager
from specserve.models.hub import ModelError
from specserve.models.kv_cache import KVCache
from specserve.server.chat import ChatTemplate
from specserve.server.config import ConfigError, DraftLengthRule, SchedulerOptions, ServerConfig, Verification
from specserve.server.engine.async_engine import AsyncEngine
from specserve.server.engine.engine import Engine, Executor
from specserve.server.engine.scheduler import Scheduler
from specserve.server.loading import Loaded, load, max_total_tokens
from specserve.server.serving import ModelDescription, Serving, SpeculatorDescription
from specserve.server.worker.executor import ShardedExecutor
from specserve.server.worker.memory import num_kv_blocks, warm_up
from specserve.server.worker.model_runner import ModelRunner
from specserve.server.worker.ranks import Ranks
from specserve.speculators.base import RowsRoom, Speculator
from specserve.speculators.draft_length import DraftLength


@dataclass(frozen=True, slots=True)
class Built:
    """A rank that is ready for steps."""

    loaded: Loaded
    speculator: Speculator
    runner: ModelRunner
    num_blocks: int
    max_total_tokens: int


def build_runner(config: ServerConfig, ranks: Ranks, speculator: Speculator | None = None) -> Built:
    """Load everything and run the model once. Raises ModelError or ConfigError for what a user can put right.

    A given speculator takes the place of the one that the configuration names. All ranks call this.
    """
    options, loaded = config.scheduler, load(config, ranks)
    speculator, model = speculator or loaded.speculator, loaded.base.model
    longest = max_total_tokens(options, model.config)
    num_blocks = num_kv_blocks(
        model,
        device=loaded.device,
        block_size=loaded.block_size,
        kv_cache_memory=config.cache.kv_cache_memory,
        max_tokens_needed=longest * options.max_batch_size,
        max_batch_tokens=options.max_batch_tokens,
        draft_bytes_per_token=speculator.kv_bytes_per_token(),
    )
    num_blocks = min(map(int, ranks.all_gather(str(num_blocks))))
    longest = _fit_total_tokens(options, longest, num_blocks * loaded.block_size)
    kv_cache = KVCache.allocate(
        num_blocks=num_blocks, block_size=loaded.block_size, device=loaded.device, **model.kv_geometry
    )
    for num_tokens in (min(options.max_batch_tokens, longest), 1):
        warm_up(model, kv_cache, num_tokens)
    speculator.allocate(
        RowsRoom(num_blocks, loaded.block_size, options.max_batch_size, longest, options.max_batch_tokens)
    )
    runner = ModelRunner(
        model,
        kv_cache,
        speculator,
        max_rows=options.max_batch_size,
        max_total_tokens=longest,
        rejects=config.speculator.verification is Verification.REJECTION,
    )
    ranks.all_gather("ready")  # no step before all are
    return Built(loaded, speculator, runner, num_blocks, longest)


def build(config: ServerConfig, speculator: Speculator | None = None, ranks: Ranks | None = None) -> Serving:
    """As build_runner, with an engine around it; for rank 0."""
    ranks = ranks or Ranks()
    built = build_runner(config, ranks, speculator)
    tokenizer = built.loaded.base.tokenizer
    return Serving(
        engine=_engine(config, built, ranks),
        tokenizer=tokenizer,
        chat_template=ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens),
        description=_describe(config, built),
    )


def _fit_total_tokens(options: SchedulerOptions, max_total_tokens: int, num_kv_tokens: int) -> int:
    """One sequence of max_total_tokens must fit the cache: lower an automatic limit, refuse a given one."""
    if max_total_tokens <= num_kv_tokens:
        return max_total_tokens
    if options.max_total_tokens is not None:
        raise ConfigError(
            f"--max-total-tokens is {max_total_tokens}, but the KV cache holds {num_kv_tokens} tokens; "
            "raise --kv-cache-memory or lower --max-total-tokens"
        )
    return num_kv_tokens


def _engine(config: ServerConfig, built: Built, ranks: Ranks) -> AsyncEngine:
    options = config.scheduler
    executor: Executor = built.runner
    scheduler = Scheduler(
        BlockManager(built.num_blocks, built.loaded.block_size, prefix_caching=config.cache.prefix_caching),
        max_batch_tokens=options.max_batch_tokens,
        max_batch_size=options.max_batch_size,
        draft_length=DraftLength(
            built.speculator.max_draft_tokens, adapts=config.speculator.draft_length is DraftLengthRule.ADAPTIVE
        ),
    )
    if ranks.monitor is not None:
        executor = ShardedExecutor(built.runner, ranks.parallel.link, ranks.monitor)
    return AsyncEngine(Engine(scheduler, executor), max_concurrent_requests=options.max_concurrent_requests)


def _describe(config: ServerConfig, built: Built) -> ModelDescription:
    base, speculator, longest = built.loaded.base, built.speculator, built.max_total_tokens
    model, files, tokenizer = base.model, base.files, base.tokenizer
    max_input_tokens = config.scheduler.max_input_tokens or longest - 1
    if not 0 < max_input_tokens < longest:
        raise ConfigError(
            f"--max-input-tokens is {max_input_tokens}; it must be at least 1 and less than the total limit of "
            f"{longest} tokens"
        )
    vocab_size = model.config.vocab_size
    eos_token_ids = {*model.config.eos_token_ids, *tokenizer.eos_token_ids}
    if any(not 0 <= token_id < vocab_size for token_id in eos_token_ids):
        raise ModelError(f"{files.path}: EOS ids {sorted(eos_token_ids)} must all be below vocab_size {vocab_size}")
    return ModelDescription(
        model_id=files.model_id,
        revision=files.revision or "",
        model_type=model.config.model_type,
        dtype=str(built.loaded.dtype).removeprefix("torch."),
        device=built.loaded.device.type,
        attention_backend=model.attention.name,
        num_shard=config.parallel.num_shard,
        vocab_size=vocab_size,
        eos_token_ids=tuple(sorted(eos_token_ids)),
        max_input_tokens=max_input_tokens,
        max_total_tokens=longest,
        max_batch_tokens=config.scheduler.max_batch_tokens,
        max_batch_size=config.scheduler.max_batch_size,
        speculator=SpeculatorDescription(
            type=config.speculator.type,
            id=config.speculator.id or "",
            num_speculative_tokens=speculator.max_draft_tokens,
            num_parameters=speculator.num_parameters,
            usd_method=speculator.method or "",
        ),
    )
