"""Qwen2 and Qwen2.5."""

from specserve.models.llama import Llama


class Qwen2(Llama):
    """Llama's decoder with biases on q, k and v, and a window in the layers that ModelConfig.sliding_windows gives."""
