"""The rotary embedding of a model, as its configuration names it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specserve.models.hub import ModelError

# Fields without which a kind can't be computed.
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base frequency and scaling; the names are those of config.json's rope_scaling and rope_parameters."""

    theta: float = 10_000.0
    kind: str = "default"  # default | linear | dynamic | yarn | llama3
    factor: float = 1.0
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int = 2048
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: computed
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    frequency_factors: tuple[float, ...] | None = None  # [D/2] divisors of the frequencies, from a GGUF file


def read_rope(
    source: str, values: Mapping[str, Any], max_position_embeddings: int, *, default_theta: float = 10_000.0
) -> RopeConfig:
    """Read `rope_parameters` (newer) or `rope_scaling` and `rope_theta`; the kind is in `rope_type` or `type`.

    Raises ModelError for a kind that isn't known, naming it, and for fields that are missing or no numbers.
    """
    name = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    given = values.get(name) or {}
    if not isinstance(given, dict):
        raise ModelError(f"{source}: {name} is {given!r}; it must be an object")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _REQUIRED:
        raise ModelError(f"{source}: {name} has the type {kind!r}; supported are {', '.join(_REQUIRED)}")

    def number(field: str, default: float | None) -> float | None:
        value = given.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{source}: {name}.{field} is {value!r}; it must be a number")
        return float(value)

    for field in _REQUIRED[kind]:
        if given.get(field) is None:
            raise ModelError(f"{source}: {name} of type {kind!r} needs {field}")
    if (number("partial_rotary_factor", None) or values.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(f"{source}: partial_rotary_factor other than 1 is not supported")
    if (number("factor", None) or 1.0) < 1.0:
        raise ModelError(f"{source}: {name}.factor is {given['factor']!r}; it must be at least 1")
    theta = number("rope_theta", None) or values.get("rope_theta") or default_theta
    original = values.get("original_max_position_embeddings") or number("original_max_position_embeddings", None)
    return RopeConfig(
        theta=float(theta),
        kind=kind,
        factor=number("factor", None) or 1.0,
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=int(original or max_position_embeddings),
        low_freq_factor=number("low_freq_factor", None) or 1.0,
        high_freq_factor=number("high_freq_factor", None) or 4.0,
        beta_fast=number("beta_fast", None) or 32.0,
        beta_slow=number("beta_slow", None) or 1.0,
        attention_factor=number("attention_factor", None),
        mscale=number("mscale", None),
        mscale_all_dim=number("mscale_all_dim", None),
        truncate=bool(given.get("truncate", True)),
    )
