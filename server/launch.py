"""From a configuration to a loaded, warmed-up model behind an engine."""

from collections.abc import Callable

import torch

from specserve.models.attention.base import AttentionBackend
from specserve.models.attention.registry import attention_backend
from specserve.models.block_manager import BlockManager
from specserve.models.causal_lm import CausalLM
from specserve.models.config import ModelConfig, load_config
from specserve.models.hub import DEMO, ModelError, ModelFiles, find_model, resolve_model
from specserve.models.kv_cache import KVCache
from specserve.models.parallel import TensorParallel
from specserve.models.registry import load_model
from specserve.models.tokenizer import Tokenizer, load_tokenizer
from specserve.server.chat import ChatTemplate
from specserve.server.config import (
    ConfigError,
    Device,
    DraftLengthRule,
    DType,
    SchedulerOptions,
    ServerConfig,
    SpeculatorDType,
    Verification,
)
from specserve.server.engine.async_engine import AsyncEngine
from specserve.server.engine.engine import Engine
from specserve.server.engine.scheduler import Scheduler
from specserve.server.serving import ModelDescription, Serving, SpeculatorDescription
from specserve.server.worker.memory import num_kv_blocks, warm_up
from specserve.server.worker.model_runner import ModelRunner
from specserve.speculators.base import RowsRoom, Speculator, SpeculatorType
from specserve.speculators.checkpoint import Base
from specserve.speculators.draft_length import DraftLength
from specserve.speculators.registry import demo_files, load_speculator, weight_files
from specserve.speculators.usd_loader import UsdOptions


def check(config: ServerConfig) -> None:
    """Hold the configurations and the headers of the weights against each other, where the files are here already.

    Raises as `build`, which finds the rest. Nothing is loaded but tokenizers.
    """
    options = config.model
    files = find_model(options.model_id, revision=options.revision)
    speculator_files = _speculator_files(config, find_model)
    if files is None or (speculator_files is None and config.speculator.id is not None):
        return  # to be downloaded
    device, dtype = _device_and_dtype(config)
    attention, _ = _attention(config, device, dtype)
    _load(config, files, speculator_files, torch.device("meta"), dtype, attention)


def build(config: ServerConfig, speculator: Speculator | None = None) -> Serving:
    """Load everything and run the model once. Raises ModelError or ConfigError for what a user can put right.

    A given speculator takes the place of the one that the configuration names.
    """
    if config.parallel.num_threads is not None:
        torch.set_num_threads(config.parallel.num_threads)
    device, dtype = _device_and_dtype(config)
    attention, block_size = _attention(config, device, dtype)
    options = config.model
    files = resolve_model(options.model_id, revision=options.revision, token=options.hub_token, offline=options.offline)
    speculator_files = _speculator_files(config, resolve_model)
    base, loaded = _load(config, files, speculator_files, device, dtype, attention)
    speculator = speculator or loaded
    model, tokenizer = base.model, base.tokenizer
    max_total_tokens = _max_total_tokens(config.scheduler, model.config)
    num_blocks = num_kv_blocks(
        model,
        device=device,
        block_size=block_size,
        kv_cache_memory=config.cache.kv_cache_memory,
        max_tokens_needed=max_total_tokens * config.scheduler.max_batch_size,
        max_batch_tokens=config.scheduler.max_batch_tokens,
        draft_bytes_per_token=speculator.kv_bytes_per_token(),
    )
    max_total_tokens = _fit_total_tokens(config.scheduler, max_total_tokens, num_blocks * block_size)
    engine = _engine(config, model, speculator, num_blocks, block_size, max_total_tokens, device)
    return Serving(
        engine=engine,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens),
        description=_describe(config, files, model, speculator, tokenizer, max_total_tokens, dtype, device),
    )


def _load(
    config: ServerConfig,
    files: ModelFiles,
    speculator_files: ModelFiles | None,
    device: torch.device,
    dtype: torch.dtype,
    attention: AttentionBackend,
) -> tuple[Base, Speculator]:
    """The model and its speculator; on the device meta without their weights."""
    model_config = load_config(files)
    _max_total_tokens(config.scheduler, model_config)
    tokenizer = load_tokenizer(files, model_config.vocab_size)
    model = load_model(files, model_config, dtype=dtype, device=device, parallel=TensorParallel(), attention=attention)
    base = Base(model, files, tokenizer)
    return base, _speculator(config, speculator_files, base)


def _attention(config: ServerConfig, device: torch.device, dtype: torch.dtype) -> tuple[AttentionBackend, int]:
    try:
        return attention_backend(
            config.model.attention_backend, device=device, dtype=dtype, block_size=config.cache.block_size
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _device_and_dtype(config: ServerConfig) -> tuple[torch.device, torch.dtype]:
    """What --device and --dtype mean here; auto is float32 on CPUs and bfloat16 on GPUs."""
    requested = config.model.device
    if requested is Device.CUDA and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no GPU; choose cpu, or install a CUDA build of torch")
    is_cuda = requested is Device.CUDA or (requested is Device.AUTO and torch.cuda.is_available())
    dtype = config.model.dtype
    if dtype is DType.AUTO:
        dtype = DType.BFLOAT16 if is_cuda else DType.FLOAT32
    return torch.device("cuda" if is_cuda else "cpu"), getattr(torch, dtype.value)


def _max_total_tokens(options: SchedulerOptions, model_config: ModelConfig) -> int:
    limit = model_config.context_length
    if options.max_total_tokens is None:
        return limit
    if options.max_total_tokens > limit:
        raise ConfigError(
            f"--max-total-tokens is {options.max_total_tokens}; the model was made for {limit} positions at most"
        )
    return options.max_total_tokens


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


def _speculator_files(config: ServerConfig, find: Callable[..., ModelFiles | None]) -> ModelFiles | None:
    """The files of the speculator, by resolve_model or find_model; None if there are none."""
    options = config.speculator
    if options.id is None:
        return None
    if options.id == DEMO and options.type is not SpeculatorType.USD:
        return demo_files(options.type)
    files = find(
        options.id,
        token=config.model.hub_token,
        offline=config.model.offline,
        weight_files=weight_files(options.type),
        flag="--speculator-id",
    )
    if files is not None and files.kind == "gguf" and options.type is not SpeculatorType.USD:
        raise ModelError(f"--speculator-id {options.id}: is a .gguf file; {options.type} needs a directory or a Hub id")
    return files


def _speculator(config: ServerConfig, files: ModelFiles | None, base: Base) -> Speculator:
    options = config.speculator
    is_quantized = options.dtype is SpeculatorDType.INT8
    if options.dtype is SpeculatorDType.AUTO:
        is_quantized = _device_and_dtype(config)[0].type == "cpu"
    dtype = None if options.dtype in ("auto", "int8") else getattr(torch, options.dtype.value)
    return load_speculator(
        options.type,
        files,
        base,
        parallel=TensorParallel(),
        num_tokens=options.num_speculative_tokens,
        usd=UsdOptions(options.usd_method, dtype, is_quantized),
    )


def _engine(
    config: ServerConfig,
    model: CausalLM,
    speculator: Speculator,
    num_blocks: int,
    block_size: int,
    max_total_tokens: int,
    device: torch.device,
) -> AsyncEngine:
    options = config.scheduler
    kv_cache = KVCache.allocate(num_blocks=num_blocks, block_size=block_size, device=device, **model.kv_geometry)
    for num_tokens in (min(options.max_batch_tokens, max_total_tokens), 1):
        warm_up(model, kv_cache, num_tokens)
    speculator.allocate(
        RowsRoom(num_blocks, block_size, options.max_batch_size, max_total_tokens, options.max_batch_tokens)
    )
    runner = ModelRunner(
        model,
        kv_cache,
        speculator,
        max_rows=options.max_batch_size,
        max_total_tokens=max_total_tokens,
        rejects=config.speculator.verification is Verification.REJECTION,
    )
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size, prefix_caching=config.cache.prefix_caching),
        max_batch_tokens=options.max_batch_tokens,
        max_batch_size=options.max_batch_size,
        draft_length=DraftLength(
            speculator.max_draft_tokens, adapts=config.speculator.draft_length is DraftLengthRule.ADAPTIVE
        ),
    )
    return AsyncEngine(Engine(scheduler, runner), max_concurrent_requests=options.max_concurrent_requests)


def _describe(
    config: ServerConfig,
    files: ModelFiles,
    model: CausalLM,
    speculator: Speculator,
    tokenizer: Tokenizer,
    max_total_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ModelDescription:
    max_input_tokens = config.scheduler.max_input_tokens or max_total_tokens - 1
    if not 0 < max_input_tokens < max_total_tokens:
        raise ConfigError(
            f"--max-input-tokens is {max_input_tokens}; it must be at least 1 and less than the total limit of "
            f"{max_total_tokens} tokens"
        )
    vocab_size = model.config.vocab_size
    eos_token_ids = {*model.config.eos_token_ids, *tokenizer.eos_token_ids}
    if any(not 0 <= token_id < vocab_size for token_id in eos_token_ids):
        raise ModelError(f"{files.path}: EOS ids {sorted(eos_token_ids)} must all be below vocab_size {vocab_size}")
    return ModelDescription(
        model_id=files.model_id,
        revision=files.revision or "",
        model_type=model.config.model_type,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        attention_backend=model.attention.name,
        num_shard=config.parallel.num_shard,
        vocab_size=vocab_size,
        eos_token_ids=tuple(sorted(eos_token_ids)),
        max_input_tokens=max_input_tokens,
        max_total_tokens=max_total_tokens,
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
