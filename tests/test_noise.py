"""The noise: uniform, uncorrelated, keyed by all of its inputs, the same in C and in torch."""

import math

import numpy as np
import pytest
import torch

from specserve.models.cpu_kernels import binding
from specserve.models.sampling import row_ops
from specserve.models.sampling.noise import Purpose, exponentials, gumbel_scores, row_keys

V = 5000


def uniforms(rows, purpose=Purpose.TARGET, num_tokens=V):
    """[R, num_tokens]: u of each row and token."""
    keys = row_keys(rows, purpose)
    return torch.exp(-exponentials(keys, torch.arange(num_tokens).expand(len(keys), -1)))


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("axis", ["tokens", "positions", "seeds"])
def test_uniform_along_every_axis(axis):
    if axis == "tokens":
        u = uniforms([(123, 7)], num_tokens=200_000)
    elif axis == "positions":
        u = uniforms([(5, position) for position in range(4000)], num_tokens=50)
    else:
        u = uniforms([(seed, 0) for seed in range(4000)], num_tokens=50)
    counts = torch.histc(u.flatten(), bins=100, min=0, max=1)
    assert chi_square(counts, u.numel() / 100) < 99 + 6 * math.sqrt(2 * 99)
    assert float(u.min()) > 0 and float(u.max()) < 1


@pytest.mark.parametrize("neighbour", ["token", "position", "seed", "purpose", "high seed bit"])
def test_neighbours_are_uncorrelated(neighbour):
    first = uniforms([(1000, position) for position in range(0, 400, 2)])
    second = {
        "token": lambda: first.roll(1, dims=1),
        "position": lambda: uniforms([(1000, position + 1) for position in range(0, 400, 2)]),
        "seed": lambda: uniforms([(1001, position) for position in range(0, 400, 2)]),
        "purpose": lambda: uniforms([(1000, position) for position in range(0, 400, 2)], Purpose.DRAFT),
        "high seed bit": lambda: uniforms([(1000 + 2**63, position) for position in range(0, 400, 2)]),
    }[neighbour]()
    correlation = float(((first - 0.5) * (second - 0.5)).mean() * 12)
    assert abs(correlation) < 6 / math.sqrt(first.numel())


def test_every_bit_of_seed_and_position_matters():
    base = row_keys([(0, 0)], Purpose.TARGET)
    keys = row_keys([(1 << bit, 0) for bit in range(64)] + [(0, 1 << bit) for bit in range(31)], Purpose.TARGET)
    assert len({key.tobytes() for key in (*base, *keys)}) == 1 + 64 + 31
    flipped = [bin(int(a) ^ int(b)).count("1") for key in keys for a, b in zip(key, base[0], strict=True)]
    assert 14 < np.mean(flipped) < 18  # half of 32 bits


def test_rare_tokens_keep_their_probability():
    # The smallest of E over many draws must behave like 1/n down to far below 2**-32.
    w = exponentials(row_keys([(seed, 1) for seed in range(200)], Purpose.TARGET), torch.arange(V).expand(200, V))
    assert float(w.min()) < 1e-5 and len(w.unique()) > 0.99999 * w.numel()


def test_kernel_and_torch_draw_the_same_tokens():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 3001, generator=generator) * torch.linspace(0.01, 12, 64)[:, None]
    logits[5, 100:] = -torch.inf
    logits[6] = 0.0
    logits[7, 1234] = 80.0
    logits[8, :3000] = -torch.inf
    logits[9, 3] = -torch.inf
    keys = row_keys([(seed * 77, 11) for seed in range(64)], Purpose.TARGET)
    token_ids = torch.arange(3001).expand(64, -1)
    for inverse in (torch.ones(64), torch.linspace(0.3, 3.0, 64), torch.full((64,), 1e5)):
        expected = gumbel_scores(row_ops.scale(logits, inverse), keys, token_ids).argmax(dim=1)
        assert torch.equal(binding.gumbel_argmax(logits, inverse, keys), expected)
        assert len(expected.unique()) > 20  # else this compares little
    for bad in (torch.full((1, 9), -torch.inf), torch.tensor([[0.0, torch.nan]]), torch.tensor([[0.0, torch.inf]])):
        assert int(binding.gumbel_argmax(bad, torch.ones(1), keys[:1])) == -1


def test_kernel_draws_are_the_same_alone_and_in_company():
    logits = torch.randn(16, 1500, generator=torch.Generator().manual_seed(1))
    keys = row_keys([(seed, 5) for seed in range(16)], Purpose.TARGET)
    one = torch.ones(16)
    together = binding.gumbel_argmax(logits, one, keys)
    alone = torch.cat([binding.gumbel_argmax(logits[row : row + 1], one, keys[row : row + 1]) for row in range(16)])
    assert torch.equal(together, alone)
