"""Mistral."""

from specserve.models.llama import Llama


class Mistral(Llama):
    """Llama's decoder with a sliding window in every layer (ModelConfig.sliding_windows)."""
