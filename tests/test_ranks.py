"""Between ranks: messages, the kernels of shared memory, signs of life, what must be the same everywhere."""

import dataclasses
import threading
import time
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from specserve.models.cpu_kernels import binding
from specserve.models.link import Link
from specserve.models.parallel import TensorParallel
from specserve.models.sampling.params import SamplingParams
from specserve.models.shared_memory import SharedMemory
from specserve.server.config import ConfigError
from specserve.server.engine.step import Admission, ScheduledBatch, ScheduledRow
from specserve.server.environment import fingerprint
from specserve.server.place import RankPlace
from specserve.server.worker.errors import RankError
from specserve.server.worker.messages import decode, encode
from specserve.server.worker.monitor import Monitor
from specserve.server.worker.ranks import Ranks, agree

# ---- messages

INTS = st.integers(0, 2**31 - 1)
ROWS = st.builds(
    ScheduledRow,
    row_slot=INTS,
    start=INTS,
    token_ids=st.lists(INTS, min_size=1, max_size=9),
    new_block_ids=st.lists(INTS, max_size=5),
    num_drafts=st.integers(0, 8),
    samples=st.booleans(),
    prompt_logprobs=st.booleans(),
    max_draft_tokens=st.integers(0, 9),
)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 9),
    top_k=INTS,
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    typical_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    is_seeded=st.booleans(),
)
ADMISSIONS = st.builds(
    Admission, st.integers(0, 99), SAMPLING, st.lists(INTS, max_size=9), st.lists(INTS, max_size=9), st.none()
)


@given(st.lists(INTS, max_size=4), st.lists(ADMISSIONS, max_size=3), st.lists(ROWS, max_size=4))
def test_a_step_arrives_as_it_was_sent(released, admissions, rows):
    """But for the tokens of a prompt, which come with the rows that compute them."""
    batch = ScheduledBatch(released, admissions, rows)
    got = decode(encode(batch))
    lengths = [
        dataclasses.replace(
            admission,
            prompt_token_ids=[0] * len(admission.prompt_token_ids),
            output_token_ids=[0] * len(admission.output_token_ids),
        )
        for admission in admissions
    ]
    assert got == ScheduledBatch(released, lengths, rows)


def test_the_size_of_a_message_does_not_grow_with_the_context():
    def size(start):
        row = ScheduledRow(0, start, [5], [], 0, True, False, 3)
        return encode(ScheduledBatch([], [], [row])).nbytes

    assert size(10) == size(100_000) < 100
    long = Admission(0, SamplingParams(), [1] * 100_000, [])
    assert encode(ScheduledBatch([], [long], [])).nbytes < 200


def test_alone_there_is_nobody_to_send_to():
    link = Link()
    assert link.share([3, 4]).tolist() == [3, 4] and link.num_bytes == 0


# ---- shared memory


def in_threads(size, function):
    """function(rank) on a thread each; their results. The kernels let other threads run."""
    results, threads = [None] * size, []
    for rank in range(size):

        def run(rank=rank):
            results[rank] = function(rank)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    return results


def join_all(size):
    """SharedMemory of each rank, by texts in a list."""
    barrier, texts = threading.Barrier(size), [""] * size

    def join(rank):
        def all_gather(text):
            barrier.wait()
            texts[rank] = text
            barrier.wait()
            return list(texts)

        return SharedMemory.join(rank, size, all_gather)

    return in_threads(size, join)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_and_gathers_over_shared_memory(size, monkeypatch):
    """Many in a row, of sizes around a slot's; sums in the order of the ranks, the same bits on all of them."""
    monkeypatch.setattr("specserve.models.shared_memory.SLOT_BYTES", 4096)
    memories = join_all(size)
    assert all(memory is not None for memory in memories)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 1), (3, 576), (1, 1024), (2, 1024), (7, 333), (0, 5), (40, 100)] * 6
    inputs = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(size)]

    def work(rank):
        ranks = memories[rank].ranks
        sums = [binding.all_reduce(x.clone(), ranks) for x in inputs[rank]]
        gathers = [binding.all_gather(x.double(), ranks) for x in inputs[rank] if x.shape[1] <= 512]
        return sums, gathers

    results = in_threads(size, work)
    for place in range(len(shapes)):
        expected = inputs[0][place].clone()
        for rank in range(1, size):
            expected += inputs[rank][place]
        for sums, _ in results:
            assert torch.equal(sums[place], expected)
    small = [place for place, shape in enumerate(shapes) if shape[1] <= 512]
    for number, place in enumerate(small):
        expected = torch.stack([inputs[rank][place].double() for rank in range(size)], dim=1)
        assert all(torch.equal(gathers[number], expected) for _, gathers in results)


def test_a_row_of_a_sum_is_the_same_bits_in_any_batch():
    memories = join_all(3)
    rows = [torch.randn(9, 64, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    whole = in_threads(3, lambda rank: binding.all_reduce(rows[rank].clone(), memories[rank].ranks))
    alone = in_threads(3, lambda rank: binding.all_reduce(rows[rank][4:5].clone(), memories[rank].ranks))
    assert torch.equal(whole[0][4:5], alone[0])


def test_ranks_of_several_machines_share_nothing(monkeypatch):
    names = iter(["here", "here", "there", "there"])
    monkeypatch.setattr("specserve.models.shared_memory._machine", lambda: next(names))
    assert join_all(2) == [None, None]


def test_even_shares():
    shares = [TensorParallel(rank, 4).share(10) for rank in range(4)]
    assert shares == [(0, 3), (3, 3), (6, 2), (8, 2)]


# ---- signs of life


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


def monitors(store, size, timeout_s=1.0):
    places = [RankPlace(rank, size, rank, size, "127.0.0.1", store.port) for rank in range(size)]
    return [Monitor(place, timeout_s) for place in places]


def failure(monitor, seconds=5.0):
    error = monitor.failure.result(seconds)
    assert isinstance(error, RankError)
    return str(error)


def test_a_rank_that_falls_silent_is_missed(store):
    first, second, third = monitors(store, 3)
    for monitor in (first, second, third):
        monitor.start(lambda: 0)
    time.sleep(1.5)
    assert not first.failure.done() and not third.failure.done()
    second._is_watching = False  # as if it were killed
    started = time.monotonic()
    assert "rank 1 gave no sign of life" in failure(first)
    assert time.monotonic() - started < 2.5
    assert "rank 1 gave no sign of life" in failure(third)


def test_an_error_of_a_rank_is_told_to_all(store):
    first, second = monitors(store, 2)
    first.start(lambda: 0)
    second.start(lambda: 0)
    second.report("RuntimeError: out of memory")
    assert failure(first) == "rank 1: RuntimeError: out of memory"


def test_a_step_without_progress_is_a_failure_and_names_who_is_behind(store):
    first, second = monitors(store, 2)
    counts = [7, 5]
    first.start(lambda: counts[0])
    second.start(lambda: counts[1])
    with first.step():
        for _ in range(8):  # a long step that gets on
            counts[0] += 1
            time.sleep(0.2)
        assert not first.failure.done()
        assert "rank 1 is behind" in failure(first)


def test_idle_ranks_and_an_end_are_no_failure(store):
    first, second = monitors(store, 2)
    ended = threading.Event()
    second.on_end = ended.set
    first.start(lambda: 0)
    second.start(lambda: 0)
    time.sleep(2)
    first.end()
    assert ended.wait(3) and second.has_ended()
    time.sleep(1.5)
    assert not first.failure.done() and not second.failure.done()


def test_the_end_of_the_launcher_is_noticed():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    (monitor,) = monitors(store, 1)
    monitor.start(lambda: 0)
    time.sleep(0.5)
    del store
    assert "launcher" in failure(monitor)


# ---- the same everywhere


def test_what_differs_is_refused_on_all_ranks_with_both_values():
    class Two(Ranks):
        def all_gather(self, text):
            return [text, text.replace("2.13", "2.12")]

    agree(Ranks(), {"the version of torch": "2.13"}, ConfigError)
    with pytest.raises(ConfigError, match=r"the version of torch is '2.13' on rank 0 and '2.12' on rank 1; start"):
        agree(Two(), {"--dtype": "float32", "the version of torch": "2.13"}, ConfigError)


def test_fingerprints_tell_contents_and_not_places(tmp_path):
    for name, byte in (("a", b"x"), ("b", b"x"), ("c", b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"0" * 300_000 + byte + b"0" * 300_000)
        (tmp_path / name / "config.json").write_text("{}")
    a, b, c = (fingerprint(tmp_path / name) for name in "abc")
    assert a == b != c
    (tmp_path / "b" / "config.json").write_text("{ }")
    assert fingerprint(tmp_path / "b") != a
    assert fingerprint(tmp_path / "a" / "model.safetensors") != fingerprint(tmp_path / "c" / "model.safetensors")
