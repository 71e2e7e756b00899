"""From the flags of `specserve serve` to its configuration, and the one place that reads the environment for it.

The flags (cli_options.py) carry their environment variables; what they bring is checked together here.
"""

import math
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specserve.server.config import (
    DEFAULT_HOSTNAME,
    DEFAULT_PORT,
    CacheOptions,
    ConfigError,
    ListenOptions,
    LogOptions,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    ServerConfig,
    SpeculatorOptions,
    Verification,
)
from specserve.server.place import rank_place
from specserve.speculators.base import SpeculatorType

MAX_GRPC_MESSAGE_BYTES = 2**31 - 1
MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux, less the final zero

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{infix}b": base**exponent
    for exponent, prefix in enumerate("kmgt", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}


def parse_size(flag: str, text: str) -> int:
    """Bytes of a size like "2GiB", "512MB" or "1048576"; ConfigError names the flag."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{flag} is {text!r}; it must be a size like 2GiB, 512MB or 1048576 (bytes)")
    return int(float(match[1]) * unit)


def hub_token() -> str | None:
    """The token of the Hugging Face Hub in HF_TOKEN (or TGI's HUGGING_FACE_HUB_TOKEN), if any."""
    return os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or None


def resolve(flags: Mapping[str, Any]) -> ServerConfig:
    """The configuration that the flags of `specserve serve` ask for, by their Python names.

    Raises ConfigError for values that are wrong, or wrong together.
    """
    parallel = _parallel(flags)
    config = ServerConfig(
        model=ModelOptions(
            model_id=required(flags, "model_id"),
            revision=flags["revision"],
            dtype=flags["dtype"],
            device=flags["device"],
            attention_backend=flags["attention_backend"],
            offline=flags["offline"],
            hub_token=hub_token(),
        ),
        cache=CacheOptions(
            kv_cache_memory=parse_kv_cache_memory(flags["kv_cache_memory"]),
            block_size=flags["block_size"],
            prefix_caching=flags["prefix_caching"],
        ),
        scheduler=SchedulerOptions(
            max_input_tokens=flags["max_input_tokens"],
            max_total_tokens=flags["max_total_tokens"],
            max_batch_tokens=flags["max_batch_tokens"],
            max_batch_size=flags["max_batch_size"],
            max_concurrent_requests=flags["max_concurrent_requests"],
        ),
        speculator=_speculator(flags, parallel.num_shard),
        parallel=parallel,
        server=_listen(flags),
        log=LogOptions(level=flags["log_level"], json=flags["json_logs"]),
    )
    _check_limits(config.scheduler)
    return config


def _parallel(flags: Mapping[str, Any]) -> ParallelOptions:
    place, num_shard, timeout_s = rank_place(), flags["num_shard"], flags["rank_timeout"]
    if place is not None and num_shard not in (None, place.size):
        raise ConfigError(f"--num-shard is {num_shard}, but {place.size} processes were started; leave it out")
    if not (math.isfinite(timeout_s) and timeout_s >= 1):
        raise ConfigError(f"--rank-timeout is {timeout_s:g}; it must be 1 or more seconds")
    return ParallelOptions(place.size if place else num_shard or 1, flags["num_threads"], timeout_s, place)


def required(flags: Mapping[str, Any], name: str) -> str:
    """A flag that must be given, by its Python name; ConfigError if it isn't."""
    value = flags[name]
    if not value:
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} (or {name.upper()}) is not set; give a Hub id, a directory, a .gguf file, or 'demo'")
    return str(value)


def parse_kv_cache_memory(text: str | None) -> int | None:
    """Bytes of --kv-cache-memory; ConfigError for none at all."""
    if text is None:
        return None
    num_bytes = parse_size("--kv-cache-memory", text)
    if num_bytes < 1:
        raise ConfigError(f"--kv-cache-memory is {text!r}; it must be more than 0")
    return num_bytes


def _speculator(flags: Mapping[str, Any], num_model_shards: int) -> SpeculatorOptions:
    kind, speculator_id = flags["speculator"], flags["speculator_id"]
    num_tokens = flags["num_speculative_tokens"]
    dtype, method, num_shard = flags["speculator_dtype"], flags["usd_method"], flags["speculator_num_shard"]
    for flag, value in (
        ("--speculator-dtype", dtype),
        ("--usd-method", method),
        ("--speculator-num-shard", num_shard),
    ):
        if kind is not SpeculatorType.USD and value not in ("auto", None):
            raise ConfigError(f"{flag} is {value}, but --speculator is {kind}; it is for usd only, leave it out")
    if num_shard not in (None, 1, num_model_shards):
        raise ConfigError(
            f"--speculator-num-shard is {num_shard}; it must be 1 or the {num_model_shards} of --num-shard"
        )
    if kind is SpeculatorType.NONE:
        verification = None if flags["verification"] is Verification.MATCH else str(flags["verification"])
        for flag, value in (
            ("--speculator-id", speculator_id),
            ("--num-speculative-tokens", num_tokens),
            ("--verification", verification),
        ):
            if value is not None:
                raise ConfigError(f"{flag} is {value!r}, but --speculator is none; leave it out")
    elif not speculator_id and flags["model_id"] == "demo" and kind is not SpeculatorType.USD:
        speculator_id = "demo"  # the one that comes with this package
    elif not speculator_id:
        what = "the Hub id, directory or .gguf file of a smaller model, or 'demo'"
        what = what if kind is SpeculatorType.USD else "its Hub id or directory"
        raise ConfigError(f"--speculator is {kind}, but --speculator-id is missing; give {what}")
    return SpeculatorOptions(
        type=kind,
        id=speculator_id,
        num_speculative_tokens=num_tokens,
        draft_length=flags["draft_length"],
        dtype=dtype,
        usd_method=method,
        num_shard=num_shard,
        verification=flags["verification"],
    )


def _listen(flags: Mapping[str, Any]) -> ListenOptions:
    max_message_bytes = parse_size("--max-message-size", flags["max_message_size"])
    if not 1024 <= max_message_bytes <= MAX_GRPC_MESSAGE_BYTES:
        raise ConfigError(
            f"--max-message-size is {flags['max_message_size']!r}, {max_message_bytes} bytes; it must be in "
            f"1024..{MAX_GRPC_MESSAGE_BYTES}"
        )
    drain_timeout_s = flags["drain_timeout"]
    if not (math.isfinite(drain_timeout_s) and drain_timeout_s >= 0):
        raise ConfigError(f"--drain-timeout is {drain_timeout_s:g}; it must be 0 or more seconds")
    unix_socket, port = flags["unix_socket"], flags["port"]
    if unix_socket is not None and len(os.fsencode(Path(unix_socket).absolute())) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"--unix-socket is {str(unix_socket)!r}; its absolute path must have at most {MAX_SOCKET_PATH_BYTES} bytes"
        )
    if port is None and unix_socket is None:
        port = DEFAULT_PORT
    return ListenOptions(
        hostname=_hostname(flags["hostname"]),
        port=port,
        unix_socket=None if unix_socket is None else Path(unix_socket).absolute(),
        max_message_bytes=max_message_bytes,
        drain_timeout_s=drain_timeout_s,
        max_stop_sequences=flags["max_stop_sequences"],
        max_top_n_tokens=flags["max_top_n_tokens"],
    )


def _hostname(flag: str | None) -> str:
    """The flag, else HOSTNAME where somebody chose it.

    Docker, Kubernetes and shells set HOSTNAME to the machine's own name. Taken as an address to listen on, that
    would leave out localhost, or not resolve at all.
    """
    if flag is not None:
        if not flag:
            raise ConfigError("--hostname is empty; give an address to listen on, like 0.0.0.0 or 127.0.0.1")
        return flag
    chosen = os.environ.get("HOSTNAME")
    return DEFAULT_HOSTNAME if not chosen or chosen in _own_names() else chosen


def _own_names() -> tuple[str, ...]:
    name = socket.gethostname()
    return name, name.partition(".")[0]


def _check_limits(options: SchedulerOptions) -> None:
    max_input, max_total = options.max_input_tokens, options.max_total_tokens
    if max_input is not None and max_total is not None and max_input >= max_total:
        raise ConfigError(
            f"--max-input-tokens is {max_input}; it must be less than --max-total-tokens, which is {max_total}"
        )
    if options.max_batch_tokens < options.max_batch_size:
        raise ConfigError(
            f"--max-batch-tokens is {options.max_batch_tokens}; it must be at least --max-batch-size, which is "
            f"{options.max_batch_size}, as each running sequence takes a token a step"
        )
