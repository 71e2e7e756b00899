"""Training: the formulas against those that serve, the data on disk, the loop."""

import json

import numpy as np
import pytest
import torch

from specserve.models.hub import ModelError
from specserve.models.hub import ModelFiles as Files
from specserve.models.parallel import TensorParallel
from specserve.speculators.base import ProposalInput, SpeculatorType
from specserve.speculators.checkpoint import Base
from specserve.speculators.registry import load_speculator
from specserve.speculators.training import output, trainer
from specserve.speculators.training.dataset import Dataset, DatasetWriter, Record
from specserve.speculators.training.heads import TrainableMedusa, TrainableMLP
from specserve.speculators.vocabulary_mapping import VocabularyMapping

E, V = 24, 67
META = {"hidden_size": E, "model_id": "m", "seed": 0}


class Model:
    """As much of a target as a speculator looks at."""

    class config:
        hidden_size, vocab_size = E, V

    dtype = torch.float32

    def parameters(self):
        return iter([torch.zeros(1)])


def make(kind, ids):
    torch.manual_seed(1)
    sizes = {"hidden_size": E, "num_drafted": len(ids), "num_heads": 3}
    if kind == "medusa":
        model = TrainableMedusa(**sizes)
        with torch.no_grad():
            model.weights.normal_(), model.biases.normal_()
        return model
    model = TrainableMLP(**sizes, vocab_size=V, inner_dim=20, has_unknown=len(ids) < V)
    with torch.no_grad():
        model.norm_weight.normal_(), model.norm_bias.normal_()
    return model


@pytest.mark.parametrize("kind", ["mlp", "medusa"])
@pytest.mark.parametrize("ids", [list(range(V)), list(range(0, V, 3))], ids=["whole", "draft vocabulary"])
def test_what_is_trained_is_what_is_served(kind, ids, tmp_path):
    """The saved file, loaded as any other, drafts what the trainable form says."""
    model, is_part = make(kind, ids), len(ids) < V
    target_ids = torch.tensor(ids) if is_part else None
    output.save_speculator(model, target_ids, None, torch.float32, tmp_path)
    files = Files("s", None, tmp_path, "hub")
    base = Base(Model(), Files("m", None, tmp_path, "hub"), None)
    speculator = load_speculator(SpeculatorType(kind), files, base, parallel=TensorParallel(), num_tokens=None)
    states, tokens = torch.randn(9, E), torch.tensor([0, 3, 4, 66, 65, 12, 1, 30, 33])
    rows = ProposalInput(
        row_slots=list(range(9)),
        token_ids=tokens,
        hidden=states,
        max_lengths=[3] * 9,
        choose=lambda logits, step, target_ids, head: logits.argmax(dim=1),
    )
    own = tokens
    if is_part:
        own = VocabularyMapping.of_subset(target_ids).to_draft(tokens, missing=len(ids))
        assert len(ids) in own
    drafted = model.draft(states, own)
    assert torch.equal(speculator.propose(rows).token_ids, torch.tensor(ids)[drafted])
    # Fed with its own drafts, the form for training says the same.
    logits = model(states, own, drafted)
    assert torch.equal(torch.stack([scores.argmax(dim=1) for scores in logits], dim=1), drafted)
    assert len({tuple(row) for row in drafted.tolist()}) > 4


def write_records(folder, count, start=0, length=6):
    writer = DatasetWriter(folder, META)
    for index in range(start, count):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(V, (length,), generator=generator).tolist()
        states = torch.randn(length - index % 2, E, generator=generator).bfloat16()
        writer.add(Record(index, f"prompt {index % 40}", tokens, len(states)), states)
    writer.close()


@pytest.mark.parametrize(("num_drafted", "inner_dim"), [(6, 20), (40, 10), (40, 30)])
def test_an_mlp_starts_from_the_principal_directions_of_the_target(num_drafted, inner_dim):
    """Also with fewer drafted tokens than dimensions: what lies between the rows is kept, to a common factor."""
    model = TrainableMLP(
        hidden_size=E, vocab_size=V, num_drafted=num_drafted, inner_dim=inner_dim, num_heads=2, has_unknown=True
    )
    embedding, head = torch.randn(num_drafted, E), torch.randn(num_drafted, E)
    model.start_from(embedding, head)
    for parameter, rows in ((model.embedding[:num_drafted], embedding), (model.head, head)):
        centred = rows - rows.mean(dim=0)
        values, vectors = torch.linalg.eigh(centred @ centred.T)
        size = min(inner_dim, E, num_drafted)
        gram = vectors[:, -size:] * values[-size:] @ vectors[:, -size:].T
        started = parameter[:, :size] @ parameter[:, :size].T
        torch.testing.assert_close(started / started.trace(), gram / gram.trace(), atol=1e-5, rtol=1e-4)


def test_examples_of_a_dataset(tmp_path):
    write_records(tmp_path, 80)
    dataset = Dataset(tmp_path, 3)
    assert len(dataset.train_indices) + len(dataset.held_out_indices) == 80 * 5
    assert not set(dataset.train_indices) & set(dataset.held_out_indices)
    records = [Record(**json.loads(line)) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    sides: dict[str, set] = {}
    first = 0
    for record in records:
        sides.setdefault(record.prompt, set()).add(record.is_held_out)
        states, tokens, following = dataset.batch(np.arange(first, first + record.num_states))
        generator = torch.Generator().manual_seed(record.index)
        torch.randint(V, (6,), generator=generator)
        assert torch.equal(states, torch.randn(record.num_states, E, generator=generator).bfloat16().float())
        assert tokens.tolist() == record.token_ids[: record.num_states]
        padded = [*record.token_ids, -1, -1, -1]
        assert following.tolist() == [padded[i + 1 : i + 4] for i in range(record.num_states)]
        after, known = dataset.following_states(np.arange(first, first + record.num_states))
        for place in range(record.num_states):
            assert known[place].tolist() == [place + step < record.num_states for step in (1, 2, 3)]
            for step in range(int(known[place].sum())):
                assert torch.equal(after[place, step].float(), states[place + 1 + step])
        first += record.num_states
    assert all(len(side) == 1 for side in sides.values()) and {True, False} == set.union(*sides.values())
    ids, share = dataset.frequent_tokens(10)
    counts = np.bincount(dataset.batch(dataset.train_indices)[1], minlength=V)
    assert ids == sorted(ids) and len(ids) == 10
    assert counts[ids].min() >= np.delete(counts, ids).max() and share == counts[ids].sum() / counts.sum()


def test_a_broken_end_is_cut_off(tmp_path):
    write_records(tmp_path / "whole", 8)
    write_records(tmp_path / "broken", 5)
    with (tmp_path / "broken" / "records.jsonl").open("ab") as file:
        file.write(b'{"index": 5, "pro')
    with (tmp_path / "broken" / "hidden.bin").open("ab") as file:
        file.write(b"1234567")
    write_records(tmp_path / "broken", 8, start=5)
    for name in ("records.jsonl", "hidden.bin"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "broken" / name).read_bytes()
    with pytest.raises(ModelError, match="made with seed 0, now it is 1"):
        DatasetWriter(tmp_path / "whole", META | {"seed": 1})
    (tmp_path / "whole" / "meta.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        DatasetWriter(tmp_path / "whole", META)


def run(folder, data, num_evaluations=4, vocabulary=None, head=None, **options):
    """By emitted tokens, unless there is a head of the target."""
    options = {"soft_label_share": 0.0 if head is None else 1.0, **options}
    head = torch.zeros(V if vocabulary is None else len(vocabulary.target_ids), E) if head is None else head
    torch.manual_seed(0)
    model = make("mlp", list(range(V if vocabulary is None else len(vocabulary.target_ids))))
    options = trainer.TrainingOptions(batch_size=16, num_evaluations=num_evaluations, **options)
    folder.mkdir(exist_ok=True)
    loop = trainer.Trainer(model, data, vocabulary, head, options, folder, torch.device("cpu"))
    loop.run(lambda step, loss: None, lambda evaluation: None)
    return loop


def test_the_loop_learns_and_counts_acceptance(tmp_path):
    """Answers that go on in one way only: 7, 8, 9, …, wherever they begin."""
    writer = DatasetWriter(tmp_path / "data", META)
    table = torch.randn(V, E, generator=torch.Generator().manual_seed(0)).bfloat16()
    for index in range(200):
        tokens = [(index * 7 + place) % V for place in range(8)]
        writer.add(Record(index, f"p{index}", tokens, 8), table[tokens])
    writer.close()
    data = Dataset(tmp_path / "data", 3)
    loop = run(tmp_path / "run", data, num_epochs=15.0, learning_rate=2e-2)
    first, last = loop.evaluations[0], loop.evaluations[-1]
    assert last.loss < first.loss and last.step == loop.num_steps
    assert min(last.top1) > 0.98
    # Of 7 examples an answer, 7, 6 and 5 have a first, second and third token to follow.
    assert last.acceptance == pytest.approx([1, 6 / 7, 5 / 7], abs=0.03)
    assert last.length == pytest.approx(1 + sum(last.acceptance))
    lines = (tmp_path / "run" / trainer.LOG_FILE).read_text().splitlines()
    assert len(lines) == len(loop.evaluations) == 4
    assert output.draw_curves(loop.evaluations, tmp_path / "curves.png")
    # A draft vocabulary without the token 20: nothing behind it counts, and nothing that comes after it.
    ids = torch.tensor([token for token in range(V) if token != 20])
    part = run(
        tmp_path / "part", data, vocabulary=VocabularyMapping.of_subset(ids), num_epochs=15.0, learning_rate=2e-2
    )
    assert last.acceptance[2] - 0.15 < part.evaluations[-1].acceptance[2] < last.acceptance[2]
    with pytest.raises(ModelError, match="other options"):
        run(tmp_path / "run", data, num_epochs=31.0, learning_rate=1e-2)
    with pytest.raises(ModelError, match=r"the loss is .* lower --learning-rate"):
        run(tmp_path / "wild", data, num_epochs=30.0, learning_rate=1e38)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_law_of_the_target_teaches_what_its_draws_hide(dtype, tmp_path):
    """States go 7, 8, 9, …; the target's head says so, but the tokens that were emitted are noise."""
    writer = DatasetWriter(tmp_path / "data", META)
    generator = torch.Generator().manual_seed(0)
    table = torch.nn.functional.normalize(torch.randn(V, E, generator=generator), dim=1).bfloat16()
    for index in range(200):
        noise = torch.randint(V, (8,), generator=generator).tolist()
        writer.add(Record(index, f"p{index}", noise, 8), table[[(index * 7 + place) % V for place in range(8)]])
    writer.close()
    data = Dataset(tmp_path / "data", 3)
    right = {}
    for share in (1.0, 0.0):
        loop = run(
            tmp_path / f"run-{share}",
            data,
            head=20 * table.float(),
            num_epochs=15.0,
            learning_rate=2e-2,
            soft_label_share=share,
            compute_dtype=dtype,
        )
        with torch.no_grad():
            drafted = loop.model.draft(table.float(), torch.zeros(V, dtype=torch.int64))
        right[share] = [float((drafted[:, i] == (torch.arange(V) + 1 + i) % V).float().mean()) for i in range(3)]
    assert right[1.0][0] > 0.9 and right[0.0][0] < 0.2, right


def test_soft_labels_end_where_the_states_do(tmp_path):
    """The last token of an answer has no state, so its label is itself; the loss is that of the formula."""
    write_records(tmp_path, 40)
    data = Dataset(tmp_path, 3)
    model, head = make("mlp", list(range(V))), torch.randn(V, E)
    options = trainer.TrainingOptions(batch_size=16, soft_label_share=0.6, label_temperature=0.5)
    loop = trainer.Trainer(model, data, None, head, options, tmp_path / "run", torch.device("cpu"))
    indices = data.train_indices[:30]
    states, tokens, following = data.batch(indices)
    after, known = data.following_states(indices)
    assert 0 < int(known.sum()) < int((following >= 0).sum())
    expected = 0.0
    for head_index, scores in enumerate(model(states, tokens, following)):
        for row in range(len(indices)):
            token = int(following[row, head_index])
            if token < 0:
                continue
            label = torch.nn.functional.one_hot(torch.tensor(token), V).double()
            if known[row, head_index]:
                law = torch.softmax((head.double() @ after[row, head_index].double()) / 0.5, 0)
                label = 0.4 * label + 0.6 * law
            expected -= float((label * torch.log_softmax(scores[row].double(), 0)).sum()) / len(indices)
    got = trainer._loss(model(states, tokens, following), following, loop._soft_labels(indices))
    assert float(got) == pytest.approx(expected, rel=1e-5)


def test_weights_that_do_not_fit_their_dtype(tmp_path):
    model = make("mlp", list(range(V)))
    with torch.no_grad():
        model.head[0, 0] = 1e6
    with pytest.raises(ModelError, match=r"head\.0\.weight does not fit .*float16; choose --save-dtype float32"):
        output.save_speculator(model, None, None, torch.float16, tmp_path)
