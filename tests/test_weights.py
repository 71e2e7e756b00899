"""Reading weights: the account of tensors, damaged files, memory."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specserve.models.hub import ModelError, ModelFiles
from specserve.models.weights import WeightReader, open_weights

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROMPTS = [[5, 9, 33, 2], [71, 8], [1, 2, 3, 4, 5, 6, 96]]
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def save(directory: Path, *, seed: int = 0, shard_size: str = "5GB", **variant) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **variant)).eval()
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


def edit(directory: Path, change) -> None:
    """Let `change` alter the tensors of the single weight file."""
    path = directory / SINGLE
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def logits(model_helpers):
    def run(directory: Path) -> torch.Tensor:
        return torch.cat(model_helpers.paged_logits(model_helpers.load(directory), PROMPTS, num_decoded=1))

    return run


@torch.no_grad()
def expected(model) -> torch.Tensor:
    return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])


# Shards


def test_shards_equal_one_file(tmp_path, logits):
    model = save(tmp_path, shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) >= 3
    torch.testing.assert_close(logits(tmp_path), expected(model), rtol=1e-4, atol=1e-5)


def test_stray_files_beside_an_index_are_not_read(tmp_path, logits):
    model = save(tmp_path, shard_size="20KB")
    other = tmp_path / "other"
    save(other, seed=1)
    (other / SINGLE).rename(tmp_path / SINGLE)
    save_file({"surplus": torch.zeros(3)}, tmp_path / "model-00009-of-00009.safetensors")
    torch.testing.assert_close(logits(tmp_path), expected(model), rtol=1e-4, atol=1e-5)


def test_absent_shards_are_named(tmp_path, logits):
    save(tmp_path, shard_size="20KB")
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1:3]
    for path in gone:
        path.unlink()
    with pytest.raises(ModelError, match=f"{gone[0].name}, {gone[1].name}, which are not there"):
        logits(tmp_path)


def change_index(directory: Path, change) -> None:
    path = directory / INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_a_tensor_in_another_shard_than_the_index_says_is_named(tmp_path, logits):
    save(tmp_path, shard_size="20KB")
    name, shards = "model.norm.weight", sorted(path.name for path in tmp_path.glob("model-*"))
    wrong = {}

    def move(weight_map):
        wrong["shard"] = weight_map[name] = next(shard for shard in shards if shard != weight_map[name])

    change_index(tmp_path, move)
    with pytest.raises(ModelError, match=rf"index\.json: places tensor '{name}' in {wrong['shard']}, which doesn't"):
        logits(tmp_path)


def test_a_tensor_that_the_index_does_not_know_is_surplus(tmp_path, logits):
    save(tmp_path, shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*"))[0]
    save_file({**load_file(shard), "model.layers.7.extra": torch.zeros(2)}, shard)
    with pytest.raises(ModelError, match=r"not known in this architecture model\.layers\.7\.extra \(in .*model-00001"):
        logits(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds a list instead of an object"),
        ("{}", "weight_map is missing or empty"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "must lie beside the index"),
        ('{"weight_map": {"a": 3}}', "names the file 3, which"),
    ],
)
def test_damaged_indexes_are_refused(tmp_path, logits, content, message):
    save(tmp_path, shard_size="20KB")
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ModelError, match=rf"index\.json: .*{message}"):
        logits(tmp_path)


# Damaged files


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_pointer(path: Path) -> None:
    size = path.stat().st_size
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize {size}\n")


DAMAGES = {
    "truncated": (truncate, r"is truncated or not a safetensors file \(.+\); it has \d+ bytes"),
    "cut in the header": (lambda path: path.write_bytes(path.read_bytes()[:40]), "is truncated or not a safetensors"),
    "pointer": (replace_by_pointer, "is a Git-LFS pointer, not the weights; fetch them with: git lfs pull"),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "random": (
        lambda path: path.write_bytes(bytes((7 * i * i) % 251 for i in range(5000))),
        "is truncated or not a safetensors",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("shard_size", ["20KB", "5GB"])
def test_damaged_files_are_named_with_the_cause(tmp_path, logits, damage, shard_size):
    save(tmp_path, shard_size=shard_size)
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    change, message = DAMAGES[damage]
    change(path)
    with pytest.raises(ModelError, match=f"{path.name}: {message}") as caught:
        logits(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", None])
def test_pickled_weights_are_refused_with_the_way_out(tmp_path, logits, name):
    save(tmp_path)
    (tmp_path / SINGLE).unlink()
    if name:
        (tmp_path / name).write_bytes(b"not even a pickle")
    message = f"only {name}; pickled" if name else "; pickled"
    with pytest.raises(ModelError, match=rf"{message}.*can run any code.*save_pretrained"):
        logits(tmp_path)


# The account


def test_missing_surplus_and_misshaped_tensors_are_all_named(tmp_path, logits):
    save(tmp_path)

    def damage(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(8, 32)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(48, 32)

    edit(tmp_path, damage)
    with pytest.raises(ModelError) as caught:
        logits(tmp_path)
    message = str(caught.value)
    assert "missing model.layers.1.mlp.up_proj.weight, model.norm.weight;" in message
    assert "of a wrong shape model.layers.0.self_attn.k_proj.weight is 8×32 instead of 16×32;" in message
    assert "model.layers.0.self_attn.q_proj.bias, model.layers.2.mlp.up_proj.weight (in " in message
    assert "\n" not in message


def test_a_transposed_tensor_is_refused(tmp_path, logits):
    save(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    edit(tmp_path, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    with pytest.raises(ModelError, match=rf"{name} is 48×32 instead of 32×48"):
        logits(tmp_path)


def test_long_lists_are_cut(tmp_path, logits):
    save(tmp_path)
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name])
    with pytest.raises(ModelError, match=r"missing model\.layers\.1(\S+, ){4}\S+ and 4 more"):
        logits(tmp_path)


def test_old_rotary_buffers_are_harmless(tmp_path, logits):
    model = save(tmp_path)
    edit(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    torch.testing.assert_close(logits(tmp_path), expected(model), rtol=1e-4, atol=1e-5)


def test_integer_tensors_are_refused_by_name(tmp_path, logits):
    save(tmp_path)
    edit(tmp_path, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight' has the dtype I8; supported are BF16, F16, F32, F64"):
        logits(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_converted(tmp_path, logits, dtype):
    model = save(tmp_path).to(dtype)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(tmp_path), expected(model.float()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_prefix_may_be_absent(tmp_path, logits, tied):
    """As in checkpoints of the bare decoder."""
    model = save(tmp_path, tie_word_embeddings=tied)

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit(tmp_path, strip)
    torch.testing.assert_close(logits(tmp_path), expected(model), rtol=1e-4, atol=1e-5)


# Tied and untied heads


def test_an_untied_head_that_is_absent_is_named(tmp_path, logits):
    save(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"missing lm_head\.weight"):
        logits(tmp_path)


@pytest.mark.parametrize("kept", ["neither", "equal", "different", "head only"])
def test_tied_heads_are_as_in_transformers(tmp_path, logits, model_helpers, kept):
    """Both there: tied only if they are equal. One there: it stands for both."""
    save(tmp_path, tie_word_embeddings=True)

    def change(tensors):
        rows = tensors["model.embed_tokens.weight"]
        if kept != "neither":
            tensors["lm_head.weight"] = rows.clone() if kept != "different" else rows.flip(0).contiguous()
        if kept == "head only":
            del tensors["model.embed_tokens.weight"]

    edit(tmp_path, change)
    reference = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(tmp_path), expected(reference), rtol=1e-4, atol=1e-5)
    model = model_helpers.load(tmp_path)
    shares = model.head.matrix is model.embed_tokens.matrix
    assert shares is (kept != "different")


# Parts of tensors, and memory


def test_a_part_of_a_tensor_is_copied(tmp_path):
    whole = torch.arange(60.0).view(6, 10)
    save_file({"a.weight": whole, "a.bias": torch.arange(6.0)}, tmp_path / SINGLE)
    source = open_weights(ModelFiles("x", None, tmp_path, "hub"))
    reader = WeightReader(source, dtype=torch.bfloat16, device=torch.device("cpu")).scope("model.a")
    out = reader.allocate(2, 3)
    reader.copy("weight", out, shape=(6, 10), offset=(3, 5))
    assert out.dtype is torch.bfloat16 and not out.requires_grad
    assert out.tolist() == whole[3:5, 5:8].tolist()
    bias = reader.allocate(6)
    reader.copy("bias", bias)
    assert bias.tolist() == list(range(6))
    reader.finish()


def test_peak_memory(tmp_path, peak_growth):
    """Files are mapped; were all their pages kept, loading would take twice the weights (half of it file-backed)."""
    sizes = {"vocab_size": 20_000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=12))
    model.to_empty(device="cpu").save_pretrained(tmp_path)
    growth, weights = peak_growth(tmp_path, "hub", "float32")
    assert weights > 250e6
    assert growth < 1.3 * weights
