"""How much KV cache fits, and the forward that is run before the first request."""

import os

import torch

from specserve.models.causal_lm import CausalLM
from specserve.models.forward_batch import ForwardBatch
from specserve.models.hub import ModelError
from specserve.models.kv_cache import KVCache

# On a CPU the cache shares the memory with everything else, so that the automatic size is modest.
CPU_KV_BYTES = 2 << 30
CPU_KV_FRACTION = 0.25
GPU_MEMORY_FRACTION = 0.9


def num_kv_blocks(
    model: CausalLM,
    *,
    device: torch.device,
    block_size: int,
    kv_cache_memory: int | None,
    max_tokens_needed: int,
    max_batch_tokens: int,
    draft_bytes_per_token: int = 0,
) -> int:
    """Blocks that fit kv_cache_memory bytes, or, if that is None, what is free and useful.

    More than max_tokens_needed (all rows at their longest) is never useful. ModelError if not one block fits.
    """
    draft_bytes = draft_bytes_per_token * block_size
    block_bytes = KVCache.bytes_per_block(block_size=block_size, **model.kv_geometry) + draft_bytes
    if kv_cache_memory is not None:
        budget, what = kv_cache_memory, f"--kv-cache-memory is {kv_cache_memory} bytes"
        num_blocks = budget // block_bytes
    else:
        budget = _gpu_budget(model, device, max_batch_tokens) if device.type == "cuda" else _cpu_budget()
        what = f"{budget} bytes of memory are free for the KV cache"
        num_blocks = min(budget // block_bytes, -(-max_tokens_needed // block_size))
    if num_blocks < 1:
        raise ModelError(
            f"{what}, but one block of {block_size} tokens takes {block_bytes} bytes"
            f"{f', {draft_bytes} of them for the draft model' if draft_bytes else ''}; "
            "give it more memory, or choose a smaller --block-size or --dtype"
        )
    return num_blocks


def _cpu_budget() -> int:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(CPU_KV_BYTES, int(available * CPU_KV_FRACTION))


def _gpu_budget(model: CausalLM, device: torch.device, max_batch_tokens: int) -> int:
    """What the weights and the largest forward, run once to see, leave of the GPU."""
    block_size = 256
    num_blocks = -(-max_batch_tokens // block_size)
    scratch = KVCache.allocate(num_blocks=num_blocks, block_size=block_size, device=device, **model.kv_geometry)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    warm_up(model, scratch, max_batch_tokens)
    activations = torch.cuda.max_memory_allocated(device) - before
    del scratch
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free - activations - total * (1 - GPU_MEMORY_FRACTION))


@torch.inference_mode()
def warm_up(model: CausalLM, kv_cache: KVCache, num_tokens: int) -> None:
    """Run a forward over a made-up prompt of num_tokens, or as many as the cache holds."""
    device = kv_cache.keys[0].device
    num_tokens = min(num_tokens, kv_cache.num_blocks * kv_cache.block_size)
    num_blocks = -(-num_tokens // kv_cache.block_size)
    positions = torch.arange(num_tokens, device=device)
    batch = ForwardBatch(
        input_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=positions,
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        max_seqlen_q=num_tokens,
        max_seqlen_k=num_tokens,
        logits_indices=positions[-1:],
    )
    model.compute_logits(model(batch, kv_cache)[batch.logits_indices])
