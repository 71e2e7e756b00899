"""Builds the model that a configuration names."""

from collections.abc import Mapping

import torch

from specserve.models.attention.base import AttentionBackend
from specserve.models.causal_lm import CausalLM
from specserve.models.config import ModelConfig
from specserve.models.gemma3 import Gemma3
from specserve.models.hub import ModelFiles
from specserve.models.llama import Llama
from specserve.models.mistral import Mistral
from specserve.models.parallel import TensorParallel
from specserve.models.qwen2 import Qwen2
from specserve.models.qwen3 import Qwen3
from specserve.models.weights import WeightReader, open_weights

# The keys are those of config.FAMILIES.
MODELS: Mapping[str, type[CausalLM]] = {
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "gemma3_text": Gemma3,
}


@torch.no_grad()
def load_model(
    files: ModelFiles,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    parallel: TensorParallel,
    attention: AttentionBackend,
) -> CausalLM:
    """Load this rank's part of a model, one tensor after the other; parameters have no gradients.

    On the device meta nothing is read but the headers of the files, and all is checked as ever.
    Raises ModelError for weights that are missing, corrupt, or don't fit the configuration exactly.
    """
    reader = WeightReader(open_weights(files), dtype=dtype, device=device)
    model = MODELS[config.model_type](config, reader, parallel, attention)
    reader.finish()
    return model.eval()
