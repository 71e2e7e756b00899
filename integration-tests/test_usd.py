"""USD from outside: any draft model, whatever its tokenizer, changes nothing, and a good one is right."""

import json
import shutil
from pathlib import Path

import grpc
import pytest
import torch
from drafts import write_letters_tokenizer, write_shuffled_demo
from mixed import FIXED, LOCAL, PROMPTS, SMALL, answer_all, mixed_requests, outside, served
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specserve.models.hub import resolve_model
from specserve.models.tokenizer import load_tokenizer
from specserve.router_client.client import Client
from specserve.router_client.errors import SpecserveError
from specserve.speculators.base import SpeculatorType
from specserve.speculators.registry import demo_files

CASES = json.loads((Path(__file__).parent / "data" / "demo_greedy.json").read_text())
TEXTS = ["The history of the steam engine begins", "Here is a recipe for apple pie:\n", "import numpy as np\n"]


@pytest.fixture(scope="module")
def shuffled_demo(tmp_path_factory):
    return write_shuffled_demo(tmp_path_factory.mktemp("shuffled") / "model")


@pytest.fixture(scope="module")
def letters_model(tmp_path_factory):
    """A tiny random draft model with another kind of tokenizer, and rows of padding in its embedding."""
    path = tmp_path_factory.mktemp("letters")
    num_tokens = write_letters_tokenizer(path)
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=num_tokens + 13, initializer_range=0.5, max_position_embeddings=512, **sizes)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def usd(folder, *flags):
    return ("--speculator", "usd", "--speculator-id", str(folder), *flags)


def break_model(folder, path):
    """A copy with a NaN in a row of the head."""
    shutil.copytree(folder, path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][40, 3] = torch.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_a_shuffled_and_thinned_copy_of_the_target_is_right(demo, start_server, shuffled_demo):
    """Wherever the next token is one that it has: one wrong pair of ids, or logits in another order, would show."""
    folder, lost = shuffled_demo
    files = resolve_model("demo")
    tokenizer = load_tokenizer(files, 49152)
    options = {"max_new_tokens": 72, "ignore_eos": True}
    flags = usd(folder, "--num-speculative-tokens", "1", *FIXED, "--speculator-dtype", "float32")
    server = start_server("--model-id", "demo", *flags, *LOCAL)
    accepted = judged = 0
    with served(server) as client:
        assert client.info().speculator.usd_method == "tli"
        for text in TEXTS:
            events = [event.token_ids for event in client.stream(text, **options)]
            assert sum(events, ()) == demo.generate(text, **options).token_ids
            for ids in events[1:-1]:
                accepted += len(ids) == 2
                judged += len(ids) == 2 or tokenizer.token_bytes(ids[0]) not in lost
    assert judged > 75 and accepted / judged > 0.95, (accepted, judged)


def test_40_mixed_requests_are_identical(demo, start_server, shuffled_demo):
    """Greedy and coupled, by either method, in one batch; the int8 weights of the draft don't matter."""
    jobs = mixed_requests([case["prompt"] for case in CASES[:14]], 40, 28)
    plain = [outside(answer) for answer in answer_all(demo, jobs, 8)]
    jobs = [(text, {**options, **({"usd_method": "tli"} if n % 2 else {})}) for n, (text, options) in enumerate(jobs)]
    server = start_server("--model-id", "demo", *usd(shuffled_demo[0], "--usd-method", "slem", *FIXED), *LOCAL)
    with served(server) as client:
        answers = answer_all(client, jobs, 12)
        for job, answer, expected in zip(jobs, answers, plain, strict=True):
            assert outside(answer) == expected, job
        info = client.info().speculator
        assert info.usd_method == "slem" and info.mean_acceptance_length > 1.8


def test_a_request_chooses_its_method(demo, start_server, shuffled_demo):
    server = start_server("--model-id", "demo", *usd(shuffled_demo[0], *FIXED), *LOCAL)
    with served(server) as client:
        options = {"max_new_tokens": 32, "ignore_eos": True}
        jobs = [(text, {**options, "usd_method": method}) for text in TEXTS for method in ("tli", "slem")]
        answers = answer_all(client, jobs, 6)
        assert all(a.token_ids == b.token_ids for a, b in zip(answers[::2], answers[1::2], strict=True))
        assert all(answer.summary.accepted_tokens > 6 for answer in answers)
        for value, part in (("auto", "it must be tli or slem"), ("", "it must be tli or slem")):
            with pytest.raises(SpecserveError, match=part):
                client.generate("a", usd_method=value)
    with pytest.raises(SpecserveError, match="speculator of this server is none") as caught:
        demo.generate("a", usd_method="tli")
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_seed_is_kept_under_rejection(demo, start_server, shuffled_demo):
    """Requests that name a seed get its tokens; the others are draws, which the server counts as accepted or not."""
    flags = usd(shuffled_demo[0], "--verification", "rejection", *FIXED)
    server = start_server("--model-id", "demo", *flags, *LOCAL)
    options = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True}
    with served(server) as client:
        for seed, text in enumerate(TEXTS):
            expected = demo.generate(text, seed=seed, **options)
            assert client.generate(text, seed=seed, **options).token_ids == expected.token_ids
        free = answer_all(client, [(text, options) for text in TEXTS], 3)
        assert all(answer.summary.generated_tokens == 24 for answer in free)
        assert sum(answer.summary.accepted_tokens for answer in free) > 15
        again = demo.generate(TEXTS[0], seed=free[0].summary.seed, **options)
        assert again.token_ids != free[0].token_ids  # so this was the other rule


@pytest.mark.parametrize(("dtype", "is_broken"), [("float32", False), ("int8", False), ("float32", True)])
def test_drafts_of_another_tokenizer_under_preemption_change_nothing(
    dtype, is_broken, plain_tiny, tiny_model, letters_model, start_server, wait_until_idle, tmp_path
):
    """Hardly ever right, or no numbers at all; little KV for both models."""
    if is_broken:
        letters_model = break_model(letters_model, tmp_path / "broken")
    jobs = mixed_requests(PROMPTS, 60, 80)
    jobs = [(text, {**options, "usd_method": ("tli", "slem")[n % 2]}) for n, (text, options) in enumerate(jobs)]
    plain = [({k: v for k, v in options.items() if k != "usd_method"}, text) for text, options in jobs]
    expected = [outside(plain_tiny.generate(text, **options)) for options, text in plain]
    cache = ("--kv-cache-memory", "108KiB", "--block-size", "4", "--max-total-tokens", "256")
    server = start_server(
        "--model-id", str(tiny_model), *usd(letters_model, "--speculator-dtype", dtype, *FIXED), *SMALL, *cache, *LOCAL
    )
    with served(server) as client:
        answers = answer_all(client, jobs, 12)
        for job, answer, wanted in zip(jobs, answers, expected, strict=True):
            assert outside(answer) == wanted, job
        info = client.info()
        assert info.speculator.drafted_tokens > 0 and info.preemptions > 0
        wait_until_idle(client)


def test_the_same_tokenizer_needs_no_mapping(plain_tiny, tiny_model, make_tiny_model, start_server, tmp_path):
    """A copy of the target is the perfect draft: all is accepted, and drafts end where they have to."""
    folder = tmp_path / "copy"
    shutil.copytree(tiny_model, folder)
    flags = usd(folder, "--num-speculative-tokens", "3", "--speculator-dtype", "float32", *FIXED)
    server = start_server("--model-id", str(tiny_model), *flags, *SMALL, *LOCAL)
    with served(server) as client:
        assert "same tokenizer" in server.output
        jobs = mixed_requests(PROMPTS, 40, 60)
        for (text, options), answer in zip(jobs, answer_all(client, jobs, 4), strict=True):
            assert outside(answer) == outside(plain_tiny.generate(text, **options))
        for text in PROMPTS:
            for options in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "top_k": 1}, {"top_p": 0.9}):
                summary = client.generate(text, max_new_tokens=61, ignore_eos=True, **options).summary
                assert summary.accepted_tokens == summary.drafted_tokens, options
                assert summary.drafted_tokens == 45 or options, options  # a special token that is drawn ends a draft


def test_rows_of_padding_and_another_vocabulary_size_are_no_other_tokenizer(
    plain_tiny, tiny_model, make_tiny_model, start_server, tmp_path
):
    folder = make_tiny_model(tmp_path / "padded", seed=5, vocab_size=49152 + 128, hidden_size=16)
    server = start_server("--model-id", str(tiny_model), *usd(folder, *FIXED), *SMALL, *LOCAL)
    with served(server) as client:
        assert "same tokenizer" in server.output
        for text, options in mixed_requests(PROMPTS, 34, 30):
            assert outside(client.generate(text, **options)) == outside(plain_tiny.generate(text, **options))


def test_a_draft_context_that_is_full_ends_the_drafts_not_the_answer(
    plain_tiny, tiny_model, letters_model, start_server
):
    """The draft was made for 512 positions, and needs several tokens where the target needs one."""
    text = "Überraschung! " * 60
    server = start_server("--model-id", str(tiny_model), *usd(letters_model, *FIXED), *SMALL, *LOCAL)
    options = {"max_new_tokens": 30, "ignore_eos": True}
    with served(server) as client:
        answer = client.generate(text, **options)
        assert answer.token_ids == plain_tiny.generate(text, **options).token_ids
        assert answer.summary.drafted_tokens == 0
        options = {"max_new_tokens": 200, "ignore_eos": True}
        for text in ("a", "Überraschung! " * 12):  # in the middle of the answer
            answer = client.generate(text, **options)
            assert answer.token_ids == plain_tiny.generate(text, **options).token_ids
            assert 0 < answer.summary.drafted_tokens < 8 * 150


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--speculator-id", "{none}"), ["no tokenizer", "{none}"]),
        (("--speculator-id", "demo"), ["134515008 parameters", "more than the"]),
        (
            ("--speculator-id", "{letters}", "--kv-cache-memory", "100"),
            ["100 bytes", "one block of", "for the draft model"],
        ),
        (("--speculator-id", "{mlp}"), ["--speculator-id {mlp}", "mlp_speculator", "--speculator mlp and medusa"]),
        (("--speculator-id", "{gguf}", "--speculator", "mlp"), ["{gguf}: is a .gguf file", "needs a directory"]),
        (("--speculator-id", "{nowhere}"), ["--speculator-id '{nowhere}'", "no such file"]),
    ],
)
def test_a_draft_model_that_does_not_do_costs_one_line(flags, parts, tiny_model, letters_model, start_server, tmp_path):
    without = tmp_path / "none"
    shutil.copytree(letters_model, without)
    (without / "tokenizer.json").unlink()
    names = {"none": without, "letters": letters_model, "nowhere": tmp_path / "nowhere"}
    names |= {"mlp": demo_files(SpeculatorType.MLP).path, "gguf": resolve_model("demo").path}
    server = start_server(
        "--model-id", str(tiny_model), "--speculator", "usd", *(flag.format(**names) for flag in flags), *LOCAL
    )
    assert server.wait_exit() == 1
    (line,) = [line for line in server.lines if "ERROR" in line]
    assert all(part.format(**names) in line for part in parts), line
    assert "Traceback" not in server.output


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tli", "slem"])
def test_gemma3_with_smollm2_gives_what_gemma3_gives(method, gemma3_file, start_server):
    """The pair of the benchmark: 40 mixed requests, SentencePiece against byte-level BPE."""
    prompts = [case["prompt"] for case in CASES[:12]] + PROMPTS
    jobs = mixed_requests(prompts, 40, 40)
    limits = ("--max-total-tokens", "1024", *LOCAL)
    with served(start_server("--model-id", str(gemma3_file), *limits)) as client:
        plain = [outside(answer) for answer in answer_all(client, jobs, 8)]
    flags = usd("demo", "--usd-method", method, "--num-speculative-tokens", "4", *FIXED)
    server = start_server("--model-id", str(gemma3_file), *flags, *limits)
    with Client(server.wait_ready(), timeout_s=300) as client:
        assert [outside(answer) for answer in answer_all(client, jobs, 8)] == plain
        info = client.info().speculator
        assert info.accepted_tokens > 50
        assert "46146 tokens" in server.output
