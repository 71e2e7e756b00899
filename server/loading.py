"""From a configuration to a model and its speculator, or to what is wrong with them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specserve.models.attention.base import AttentionBackend
from specserve.models.attention.registry import attention_backend
from specserve.models.config import ModelConfig, load_config
from specserve.models.hub import DEMO, ModelError, ModelFiles, find_model, resolve_model
from specserve.models.parallel import TensorParallel
from specserve.models.registry import load_model
from specserve.models.tokenizer import Tokenizer, load_tokenizer
from specserve.server.config import ConfigError, Device, DType, SchedulerOptions, ServerConfig, SpeculatorDType
from specserve.server.environment import environment
from specserve.server.worker.ranks import Ranks, agree
from specserve.speculators.base import Speculator, SpeculatorType
from specserve.speculators.checkpoint import Base
from specserve.speculators.registry import demo_files, load_speculator, weight_files
from specserve.speculators.usd_loader import UsdOptions


@dataclass(frozen=True, slots=True)
class Loaded:
    """The part of one rank of a model and of its speculator."""

    base: Base
    speculator: Speculator
    device: torch.device
    dtype: torch.dtype
    block_size: int


def check(config: ServerConfig) -> None:
    """Hold the configurations and the headers of the weights against each other, where the files are here already.

    Raises as `load`, which finds the rest. Nothing is loaded but tokenizers.
    """
    options = config.model
    files = find_model(options.model_id, revision=options.revision)
    speculator_files = _speculator_files(config, find_model)
    if files is None or (speculator_files is None and config.speculator.id is not None):
        return  # to be downloaded
    device, dtype = _device_and_dtype(config, 0)
    attention, _ = _attention(config, device, dtype)
    parallel = TensorParallel(0, config.parallel.num_shard)
    _load(config, files, speculator_files, torch.device("meta"), dtype, attention, parallel)


def load(config: ServerConfig, ranks: Ranks) -> Loaded:
    """Load everything. Raises ModelError or ConfigError for what a user can put right; all ranks call it."""
    if config.parallel.num_threads is not None or ranks.place is not None:
        torch.set_num_threads(config.parallel.num_threads or ranks.num_threads())
    device, dtype = _device_and_dtype(config, 0 if ranks.place is None else ranks.place.local_rank)
    attention, block_size = _attention(config, device, dtype)
    options = config.model
    files = resolve_model(options.model_id, revision=options.revision, token=options.hub_token, offline=options.offline)
    speculator_files = _speculator_files(config, resolve_model)
    if ranks.place is not None:
        agree(ranks, environment(config, files, speculator_files, dtype, device.type), ConfigError)
    ranks.join(device)
    base, speculator = _load(config, files, speculator_files, device, dtype, attention, ranks.parallel)
    return Loaded(base, speculator, device, dtype, block_size)


def _load(
    config: ServerConfig,
    files: ModelFiles,
    speculator_files: ModelFiles | None,
    device: torch.device,
    dtype: torch.dtype,
    attention: AttentionBackend,
    parallel: TensorParallel,
) -> tuple[Base, Speculator]:
    """The model and its speculator; on the device meta without their weights."""
    model_config = load_config(files)
    max_total_tokens(config.scheduler, model_config)
    tokenizer = _tokenizer(files, model_config.vocab_size, files.path.stat().st_mtime_ns)
    model = load_model(files, model_config, dtype=dtype, device=device, parallel=parallel, attention=attention)
    base = Base(model, files, tokenizer)
    return base, _speculator(config, speculator_files, base, parallel)


@functools.lru_cache(maxsize=1)
def _tokenizer(files: ModelFiles, vocab_size: int, _changed: int) -> Tokenizer:
    """Kept from `check` for `load`: large ones take seconds and hundreds of megabytes."""
    return load_tokenizer(files, vocab_size)


def _attention(config: ServerConfig, device: torch.device, dtype: torch.dtype) -> tuple[AttentionBackend, int]:
    try:
        return attention_backend(
            config.model.attention_backend, device=device, dtype=dtype, block_size=config.cache.block_size
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _device_and_dtype(config: ServerConfig, local_rank: int) -> tuple[torch.device, torch.dtype]:
    """What --device and --dtype mean here; auto is float32 on CPUs and bfloat16 on GPUs."""
    requested = config.model.device
    if requested is Device.CUDA and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no GPU; choose cpu, or install a CUDA build of torch")
    is_cuda = requested is Device.CUDA or (requested is Device.AUTO and torch.cuda.is_available())
    if is_cuda and local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"--num-shard: this host has {torch.cuda.device_count()} GPUs, and more ranks than that were started on "
            "it; ask for fewer shards, or spread them over more hosts"
        )
    dtype = config.model.dtype
    if dtype is DType.AUTO:
        dtype = DType.BFLOAT16 if is_cuda else DType.FLOAT32
    return torch.device("cuda", local_rank) if is_cuda else torch.device("cpu"), getattr(torch, dtype.value)


def max_total_tokens(options: SchedulerOptions, model_config: ModelConfig) -> int:
    """The longest sequence, as far as the model decides it; ConfigError if more is asked for."""
    limit = model_config.context_length
    if options.max_total_tokens is None:
        return limit
    if options.max_total_tokens > limit:
        raise ConfigError(
            f"--max-total-tokens is {options.max_total_tokens}; the model was made for {limit} positions at most"
        )
    return options.max_total_tokens


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


def _speculator(config: ServerConfig, files: ModelFiles | None, base: Base, parallel: TensorParallel) -> Speculator:
    options = config.speculator
    is_quantized = options.dtype is SpeculatorDType.INT8
    if options.dtype is SpeculatorDType.AUTO:
        is_quantized = _device_and_dtype(config, 0)[0].type == "cpu"
    dtype = None if options.dtype in ("auto", "int8") else getattr(torch, options.dtype.value)
    return load_speculator(
        options.type,
        files,
        base,
        parallel=parallel,
        num_tokens=options.num_speculative_tokens,
        usd=UsdOptions(options.usd_method, dtype, is_quantized, options.num_shard),
    )
