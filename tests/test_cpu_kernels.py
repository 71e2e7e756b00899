"""The elementwise kernels against torch, and the choice of the library."""

import pytest
import torch
import torch.nn.functional as F

from specserve.models.cpu_kernels import binding
from specserve.models.cpu_kernels.tape import Tape

ROWS = [1, 2, 16, 300]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("width", [1, 7, 64, 576, 1001])
def test_rms_norm(num_rows, width):
    x, weight = torch.randn(num_rows, width) * 3, torch.randn(width)
    original = x.clone()
    torch.testing.assert_close(binding.rms_norm(x, weight, 1e-5), F.rms_norm(x, (width,), weight, 1e-5))
    assert torch.equal(x, original)


@pytest.mark.parametrize("num_rows", ROWS)
def test_rms_norm_with_a_residual_adds_in_place(num_rows):
    x, residual, weight = torch.randn(num_rows, 96), torch.randn(num_rows, 96), torch.randn(96)
    total, given = x + residual, residual.clone()
    torch.testing.assert_close(binding.rms_norm(x, weight, 1e-6, residual), F.rms_norm(total, (96,), weight, 1e-6))
    assert torch.equal(x, total) and torch.equal(residual, given)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("width", [1, 13, 1536])
def test_gated_activations(num_rows, width):
    gate_up = torch.randn(num_rows, 2 * width) * 4
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(binding.silu_mul(gate_up), F.silu(gate) * up)
    exact = F.gelu(gate.double(), approximate="tanh") * up.double()  # in float32 torch's own is less exact
    torch.testing.assert_close(binding.gelu_tanh_mul(gate_up).double(), exact, atol=1e-7, rtol=3e-6)


def test_activations_at_the_extremes():
    gate = torch.tensor([-1e30, -200.0, -90.0, -88.0, 0.0, 88.0, 200.0, 1e30, torch.nan])
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None]
    expected = F.silu(gate)[None]
    torch.testing.assert_close(binding.silu_mul(gate_up), expected, atol=1e-30, rtol=1e-6, equal_nan=True)
    gelu = F.gelu(gate, approximate="tanh")[None]
    finite = gate.abs() < 1e10  # beyond, g**3 overflows
    actual = binding.gelu_tanh_mul(gate_up)
    torch.testing.assert_close(actual[:, finite], gelu[:, finite], atol=1e-6, rtol=1e-6)
    assert actual[0, -1].isnan()


def test_rows_are_the_same_bits_alone_and_in_company():
    x, weight = torch.randn(50, 1024), torch.randn(1024)
    together = binding.rms_norm(x, weight, 1e-5)
    activated = binding.silu_mul(x)
    for row in (0, 17, 49):
        assert torch.equal(binding.rms_norm(x[row : row + 1], weight, 1e-5)[0], together[row])
        assert torch.equal(binding.silu_mul(x[row : row + 1])[0], activated[row])


@pytest.fixture(params=[0, 1, 2], ids=["plain", "avx2", "avx512"])
def level(request):
    binding.kernels().limit_instructions(request.param)
    yield request.param
    binding.kernels().limit_instructions(2)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (16, 8), (33, 64), (64, 17), (100, 576), (257, 40)])
def test_linear_for_every_number_of_rows(shape, level):
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    panels = binding.to_panels(weight)
    for num_rows in (*range(1, 15), 24, 37, 300):
        x = torch.randn(num_rows, shape[1])
        expected = F.linear(x.double(), weight.double(), bias.double())
        out = binding.linear(x, panels, shape[0], bias)
        torch.testing.assert_close(out.double(), expected, atol=4e-6 * shape[1] ** 0.5, rtol=1e-5)
        without = binding.linear(x, panels, shape[0])
        assert torch.equal(without + bias, binding.linear(x, panels, shape[0], bias))


def test_a_row_of_linear_is_the_same_bits_in_every_batch(level):
    weight, x = torch.randn(331, 96), torch.randn(40, 96)
    panels = binding.to_panels(weight)
    whole = binding.linear(x, panels, 331)
    threads = torch.get_num_threads()
    for num_rows in range(1, 40):
        torch.set_num_threads(1 + num_rows % 3)
        assert torch.equal(binding.linear(x[-num_rows:], panels, 331), whole[-num_rows:])
    torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (33, 64), (100, 576), (257, 40)])
def test_linear_of_int8_weights_is_that_of_what_they_stand_for(shape, level):
    """All of -127..127, both signs, and a factor for each output."""
    weight, bias = torch.randint(-127, 128, shape).float(), torch.randn(shape[0])
    scales = torch.rand(shape[0]) / 100
    panels = binding.to_panels(weight).to(torch.int8)
    for num_rows in (*range(1, 14), 24, 37):
        x = torch.randn(num_rows, shape[1])
        expected = F.linear(x.double(), weight.double() * scales.double()[:, None], bias.double())
        out = binding.linear(x, panels, shape[0], bias, scales)
        torch.testing.assert_close(out.double(), expected, atol=5e-6 * shape[1] ** 0.5, rtol=1e-5)
        row = num_rows - 1
        assert torch.equal(binding.linear(x[row:], panels, shape[0], bias, scales)[0], out[row])


@pytest.mark.parametrize("scales", [None, torch.full((21,), 0.5)])
def test_linear_stays_within_its_output(scales):
    """The last panel and the last tile are partial; what lies behind the result must not change."""
    weight, x = torch.randint(-100, 100, (21, 8)).float(), torch.randn(13, 8)
    panels, space = binding.to_panels(weight), torch.full((13 * 21 + 64,), 7.0)
    panels, factors = (panels, None) if scales is None else (panels.to(torch.int8), scales.data_ptr())
    binding.kernels().linear(13, x.data_ptr(), panels.data_ptr(), factors, None, 21, 8, space.data_ptr(), 2)
    expected = x @ weight.T * (1 if scales is None else 0.5)
    torch.testing.assert_close(space[: 13 * 21].view(13, 21), expected, atol=1e-3, rtol=1e-5)
    assert (space[13 * 21 :] == 7.0).all()


def test_nan_and_inf_stay_in_their_row():
    x = torch.randn(3, 32)
    x[1, 5], x[2, 0] = torch.nan, torch.inf
    out = binding.linear(x, binding.to_panels(torch.ones(20, 32)), 20)
    assert out[0].isfinite().all() and out[1].isnan().all() and (out[2] == torch.inf).all()


@pytest.mark.parametrize("num_rows", ROWS)
def test_rotation_and_head_norm_in_place_of_a_slice(num_rows):
    """X is the first heads of a wider projection; the others stay."""
    packed = torch.randn(num_rows, 7, 12)
    original, weight = packed.clone(), torch.randn(5, 12)
    angles = torch.rand(num_rows, 1, 6) * 6
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    heads = binding.head_norm(packed[:, :5], weight, 1e-3)
    expected = F.rms_norm(original[:, :5], (12,), None, 1e-3) * weight
    torch.testing.assert_close(heads, expected)
    torch.testing.assert_close(binding.rotate(heads, cos, sin), expected.roll(6, -1) * sin + expected * cos)
    assert torch.equal(packed[:, 5:], original[:, 5:])


def test_a_tape_replays_other_rows_than_it_was_recorded_with():
    """Memory is used again within the tape, views keep theirs, and fewer rows than recorded are replayed."""
    first, second = binding.to_panels(torch.randn(8, 6)), binding.to_panels(torch.randn(6, 8))
    weight = torch.rand(6)

    def compute(x):
        residual = x
        for _ in range(3):
            hidden = binding.linear(residual, first, 8).view(-1, 8)[:, :8]
            residual = binding.rms_norm(binding.linear(hidden, second, 6), weight, 1e-5, residual)
        return residual

    x, tape = torch.zeros(5, 6), Tape(5)
    with tape:
        out = compute(x)
    assert len(tape._buffers) < 9
    for num_rows in (1, 3, 5):
        given = torch.randn(num_rows, 6)
        x[:num_rows] = given
        binding.replay(tape, num_rows)
        assert torch.equal(out[:num_rows], compute(given))


def test_only_contiguous_float32_is_taken():
    x = torch.zeros(4, 8)
    assert binding.is_supported(x)
    assert not binding.is_supported(x.T) and not binding.is_supported(x.bfloat16()) and not binding.is_supported(x, x.T)


def test_a_missing_library_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setattr(binding, "__file__", str(tmp_path / "binding.py"))
    with pytest.raises(
        binding.KernelsMissingError, match=r"pip install -e \.`, or start with --attention-backend torch"
    ):
        binding.kernels.__wrapped__()
