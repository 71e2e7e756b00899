"""MLP and Medusa checkpoints: formulas in float64, formats, and what is refused."""

import pickle

import pytest
import torch
import transformers

from specserve.models.hub import ModelError, ModelFiles
from specserve.models.parallel import TensorParallel
from specserve.speculators.base import NoSpeculator, ProposalInput, SpeculatorType
from specserve.speculators.checkpoint import Base
from specserve.speculators.registry import load_speculator

V, E = 67, 24


@pytest.fixture(scope="module")
def base(tmp_path_factory, model_helpers):
    path = tmp_path_factory.mktemp("base")
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=E, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return Base(model_helpers.load(path), ModelFiles("org/target", None, path, "hub"), None)


@pytest.fixture(scope="module")
def base_head(base):
    reference = transformers.LlamaForCausalLM.from_pretrained(base.files.path)
    return reference.lm_head.weight.detach()


def load(kind, path, base, num_tokens=None):
    files = ModelFiles(str(path), None, path, "hub")
    return load_speculator(SpeculatorType(kind), files, base, parallel=TensorParallel(), num_tokens=num_tokens)


@torch.inference_mode()
def propose(speculator, hidden, tokens, lengths):
    """The draft, and the logits of every step."""
    seen = []

    def choose(logits, step, target_ids, head=None):
        assert step == len(seen)
        seen.append(logits)
        return logits.argmax(dim=1)

    rows = ProposalInput(list(range(len(tokens))), torch.tensor(tokens), hidden, lengths, choose)
    return speculator.propose(rows), seen


ROWS = torch.randn(5, E, generator=torch.Generator().manual_seed(1)) * 2
TOKENS = [3, 66, 0, 14, 14]


def assert_near(actual, expected):
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-5, f"relative error {error:.1e}"


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("inner", [E, 40, 17])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_mlp_is_its_formula(n, inner, tied, scaled, base, tmp_path, speculator_helpers):
    sizes = {"vocab": V, "emb": E, "inner": inner, "n": n, "tied": tied}
    tensors, config = (
        speculator_helpers.mlp_tensors(**sizes),
        speculator_helpers.mlp_config(**sizes, scaled=scaled),
    )
    speculator = load("mlp", speculator_helpers.write(tmp_path, config, tensors), base)
    assert speculator.max_draft_tokens == n
    assert speculator.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    lengths = [n, 1, n, max(1, n - 1), n]
    draft, seen = propose(speculator, ROWS, TOKENS, lengths)
    assert draft.probs is None and draft.lengths == lengths
    for row in range(5):
        expected = speculator_helpers.mlp_reference(tensors, ROWS[row], TOKENS[row], config)
        for step in range(n):
            assert_near(seen[step][row], expected[step])
        assert draft.rows()[row] == [int(logits.argmax()) for logits in expected][: lengths[row]]


def test_mlp_constants_are_those_of_the_checkpoint_when_fewer_tokens_are_drafted(base, tmp_path, speculator_helpers):
    sizes = {"vocab": V, "emb": E, "inner": E, "n": 4}
    tensors, config = speculator_helpers.mlp_tensors(**sizes), speculator_helpers.mlp_config(**sizes)
    speculator = load("mlp", speculator_helpers.write(tmp_path, config, tensors), base, num_tokens=2)
    assert speculator.max_draft_tokens == 2
    assert speculator.num_parameters < sum(tensor.numel() for tensor in tensors.values()) * 0.6
    draft, seen = propose(speculator, ROWS[:1], TOKENS[:1], [4])
    expected = speculator_helpers.mlp_reference(tensors, ROWS[0], TOKENS[0], config)
    assert draft.lengths == [2] and len(seen) == 2
    assert_near(seen[1][0], expected[1])


def test_mlp_defaults_of_missing_keys(base, tmp_path, speculator_helpers):
    """The first uploads have neither tie_weights nor scale_input, and inner_dim 0 stands for emb_dim."""
    sizes = {"vocab": V, "emb": E, "inner": E, "n": 3}
    tensors, config = speculator_helpers.mlp_tensors(**sizes), speculator_helpers.mlp_config(**sizes)
    short = {key: config[key] for key in ("architectures", "vocab_size", "emb_dim")} | {"inner_dim": 0}
    speculator = load("mlp", speculator_helpers.write(tmp_path, short, tensors), base)
    expected = speculator_helpers.mlp_reference(tensors, ROWS[0], TOKENS[0], config)
    assert propose(speculator, ROWS[:1], TOKENS[:1], [3])[0].rows() == [[int(x.argmax()) for x in expected]]


@pytest.mark.parametrize("form", ["no prefix", "duplicates", "bin", "shards", "model_type only"])
def test_mlp_files(form, base, tmp_path, speculator_helpers):
    """Every form in which the tensors are found gives the same drafts."""
    sizes = {"vocab": V, "emb": E, "inner": E, "n": 3, "tied": True}
    tensors, config = speculator_helpers.mlp_tensors(**sizes), speculator_helpers.mlp_config(**sizes)
    expected = speculator_helpers.mlp_reference(tensors, ROWS[0], TOKENS[0], config)
    name = "model.safetensors"
    if form == "no prefix":
        tensors = {key.removeprefix("speculator."): tensor for key, tensor in tensors.items()}
    if form in ("duplicates", "bin"):
        for kind in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias"):
            for index in (1, 2):
                tensors[f"speculator.{kind.format(index)}"] = tensors[f"speculator.{kind.format(0)}"].clone()
        tensors["speculator.proj.2.weight"] = tensors["speculator.proj.1.weight"].clone()
        name = "pytorch_model.bin" if form == "bin" else name
    if form == "model_type only":
        del config["architectures"]
    speculator_helpers.write(tmp_path, config, tensors, name)
    if form == "shards":
        speculator_helpers.shard(tmp_path)
    draft, _ = propose(load("mlp", tmp_path, base), ROWS[:1], TOKENS[:1], [3])
    assert draft.rows() == [[int(x.argmax()) for x in expected]]


@pytest.mark.parametrize(("layers", "own_head"), [(0, True), (1, True), (2, True), (1, False), (2, False)])
def test_medusa_is_its_formula(layers, own_head, base, base_head, tmp_path, speculator_helpers):
    tensors = speculator_helpers.medusa_tensors(vocab=V, size=E, heads=3, layers=layers, own_head=own_head)
    config = {"medusa_num_heads": 3, "medusa_num_layers": layers, "base_model_name_or_path": "org/target"}
    path = speculator_helpers.write(tmp_path, config, tensors, "medusa_lm_head.safetensors")
    speculator = load("medusa", path, base)
    draft, seen = propose(speculator, ROWS, TOKENS, [3, 2, 3, 1, 3])
    assert speculator.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    for head in range(3):
        for row in range(5):
            expected = speculator_helpers.medusa_reference(tensors, ROWS[row], head, layers, base_head)
            assert_near(seen[head][row], expected)
            assert draft.token_ids[row, head] == expected.argmax()
    assert draft.lengths == [3, 2, 3, 1, 3]


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "model.safetensors"])
def test_medusa_files_and_fewer_tokens_than_heads(name, base, base_head, tmp_path, speculator_helpers):
    """Also with the prefix of whole models, and with more heads than the configuration names."""
    tensors = speculator_helpers.medusa_tensors(vocab=V, size=E, heads=5, layers=1)
    stored = {f"medusa_head.{key}": tensor for key, tensor in tensors.items()} if "model" in name else tensors
    path = speculator_helpers.write(tmp_path, {"medusa_num_heads": 2, "medusa_num_layers": 1}, stored, name)
    assert load("medusa", path, base).max_draft_tokens == 5
    speculator = load("medusa", path, base, num_tokens=2)
    draft, _ = propose(speculator, ROWS[:2], TOKENS[:2], [9, 1])
    assert draft.lengths == [2, 1]
    for head in range(2):
        expected = speculator_helpers.medusa_reference(tensors, ROWS[0], head, 1, base_head)
        assert draft.token_ids[0, head] == expected.argmax()


@pytest.mark.parametrize("kind", ["mlp", "medusa"])
def test_a_draft_vocabulary(kind, base, tmp_path, speculator_helpers):
    """Heads over 20 of the 67 tokens; a token that they don't know has the embedding's last row."""
    target_ids = torch.tensor(sorted(range(1, V, 3)))[:20]
    sizes = {"vocab": 20, "emb": E, "inner": E, "n": 3}
    if kind == "mlp":
        tensors = speculator_helpers.mlp_tensors(**sizes, embeddings=21)
        config, name = speculator_helpers.mlp_config(**(sizes | {"vocab": V})), "model.safetensors"
        stored = {**tensors, "speculator.draft_vocabulary.target_ids": target_ids}
    else:
        tensors = speculator_helpers.medusa_tensors(vocab=20, size=E, heads=3, layers=1)
        config, name = {"medusa_num_heads": 3, "medusa_num_layers": 1}, "medusa_lm_head.safetensors"
        stored = {**tensors, "draft_vocabulary.target_ids": target_ids}
    speculator = load(kind, speculator_helpers.write(tmp_path, config, stored, name), base)
    draft, seen = propose(speculator, ROWS[:3], [1, 2, 58], [3, 3, 3])
    assert seen[0].shape == (3, 20)
    for row, own in enumerate((0, 20, 19)):  # of the tokens 1, 2, 58
        if kind == "mlp":
            expected = speculator_helpers.mlp_reference(tensors, ROWS[row], own, config)
        else:
            expected = [speculator_helpers.medusa_reference(tensors, ROWS[row], head, 1, None) for head in range(3)]
        assert draft.rows()[row] == [int(target_ids[logits.argmax()]) for logits in expected]


BAD_MLP = [
    ({"vocab_size": 99}, None, ["vocab_size is 99", "org/target", "67"]),
    ({"emb_dim": 32}, None, ["emb_dim is 32", "hidden size", "org/target", "24"]),
    ({"n_predict": 0}, None, ["n_predict is 0", "at least 1"]),
    ({"n_predict": "3"}, None, ["n_predict is '3'"]),
    ({"tie_weights": 1}, None, ["tie_weights is 1"]),
    ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, None, ["no MLP speculator", "'llama'"]),
    ({"base_model_name_or_path": "meta/other-7b"}, None, ["meta/other-7b", "org/target"]),
    ({"n_predict": 4}, None, ["missing speculator.emb.3.weight"]),
    ({"n_predict": 2}, None, ["not known in this architecture speculator."]),
    ({"inner_dim": 23}, None, ["of a wrong shape speculator.emb.0.weight is 67×24 instead of 67×23"]),
    ({}, 4, ["--num-speculative-tokens is 4", "n_predict is 3"]),
]


@pytest.mark.parametrize(("change", "num_tokens", "parts"), BAD_MLP)
def test_mlp_checkpoints_that_do_not_fit(change, num_tokens, parts, base, tmp_path, speculator_helpers):
    sizes = {"vocab": V, "emb": E, "inner": E, "n": 3}
    config = speculator_helpers.mlp_config(**sizes) | change
    path = speculator_helpers.write(tmp_path, config, speculator_helpers.mlp_tensors(**sizes))
    with pytest.raises(ModelError) as error:
        load("mlp", path, base, num_tokens)
    assert all(part in str(error.value) for part in parts) and "\n" not in str(error.value)


def test_the_base_model_may_have_moved_to_another_owner(base, tmp_path, speculator_helpers):
    sizes = {"vocab": V, "emb": E, "inner": E, "n": 1}
    config = speculator_helpers.mlp_config(**sizes) | {"base_model_name_or_path": "old-org/Target"}
    load("mlp", speculator_helpers.write(tmp_path, config, speculator_helpers.mlp_tensors(**sizes)), base)


BAD_MEDUSA = [
    ({"medusa_num_heads": 4}, {}, None, ["medusa_num_heads is 4", "hold 3 heads"]),
    ({}, {"size": 16}, None, ["is 16", "hidden size", "24"]),
    ({}, {"vocab": 50}, None, ["is 50", "vocabulary", "67"]),
    ({"medusa_num_layers": -1}, {}, None, ["medusa_num_layers is -1"]),
    ({}, {}, 4, ["--num-speculative-tokens is 4", "is 3"]),
    ({"base_model_name_or_path": "a/b"}, {}, None, ["a/b", "org/target"]),
    ({"medusa_num_layers": 2}, {}, None, ["missing medusa_head.0.1.linear.weight"]),
]


@pytest.mark.parametrize(("change", "sizes", "num_tokens", "parts"), BAD_MEDUSA)
def test_medusa_checkpoints_that_do_not_fit(change, sizes, num_tokens, parts, base, tmp_path, speculator_helpers):
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1} | change
    tensors = speculator_helpers.medusa_tensors(**({"vocab": V, "size": E, "heads": 3, "layers": 1} | sizes))
    path = speculator_helpers.write(tmp_path, config, tensors, "medusa_lm_head.safetensors")
    with pytest.raises(ModelError) as error:
        load("medusa", path, base, num_tokens)
    assert all(part in str(error.value) for part in parts) and "\n" not in str(error.value)


@pytest.mark.parametrize("ids", [[3, 2], [1, 1], [0, V], [], [-1, 2]])
def test_draft_vocabularies_that_are_none(ids, base, tmp_path, speculator_helpers):
    tensors = speculator_helpers.medusa_tensors(vocab=max(1, len(ids)), size=E, heads=1, layers=1)
    tensors["draft_vocabulary.target_ids"] = torch.tensor(ids, dtype=torch.int64)
    path = speculator_helpers.write(
        tmp_path, {"medusa_num_heads": 1, "medusa_num_layers": 1}, tensors, "medusa_lm_head.safetensors"
    )
    with pytest.raises(ModelError, match=r"draft_vocabulary\.target_ids .* ascending ids in 0\.\.66"):
        load("medusa", path, base)


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_pickles_are_read_by_the_weights_only_loader(base, tmp_path, capfd, speculator_helpers):
    path = speculator_helpers.write(tmp_path, {"medusa_num_heads": 1}, {"0.0.linear.bias": Evil()}, "medusa_lm_head.pt")
    with pytest.raises(ModelError, match=r"medusa_lm_head\.pt: torch's weights-only loader refuses it"):
        load("medusa", path, base)
    assert "executed" not in capfd.readouterr().out
    (path / "medusa_lm_head.pt").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(ModelError, match=r"medusa_lm_head\.pt"):
        load("medusa", path, base)


@pytest.mark.parametrize(("kind", "names"), [("mlp", "pytorch_model.bin"), ("medusa", "medusa_lm_head.safetensors")])
def test_no_weights(kind, names, base, tmp_path, speculator_helpers):
    sizes = {"vocab": V, "emb": E, "inner": E, "n": 1}
    config = speculator_helpers.mlp_config(**sizes) | {"medusa_num_heads": 1}
    path = speculator_helpers.write(tmp_path, config, {}, "other.safetensors")
    with pytest.raises(ModelError, match=rf"--speculator-id .* has none of .*{names}"):
        load(kind, path, base)


def test_one_kind_is_not_taken_for_another(base, tmp_path, speculator_helpers):
    sizes = {"vocab": V, "emb": E, "inner": E, "n": 1}
    path = speculator_helpers.write(
        tmp_path, speculator_helpers.mlp_config(**sizes), speculator_helpers.mlp_tensors(**sizes)
    )
    with pytest.raises(ModelError, match="no Medusa: medusa_num_heads is missing"):
        load("medusa", path, base)


def test_none_drafts_nothing():
    draft, _ = propose(NoSpeculator(), ROWS, TOKENS, [1] * 5)
    assert draft.rows() == [[]] * 5
