"""`specserve train` as its users run it, on tiny random models, and what it trains in `specserve serve`."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specserve.router_client.client import Client
from specserve.server.config import ModelOptions, SchedulerOptions, ServerConfig
from specserve.server.launch import build
from specserve.server.self_distillation import PromptSource, SelfDistillation
from specserve.speculators.training.dataset import Dataset, DatasetWriter, Record
from specserve.speculators.training.recorder import HiddenRecorder

PROMPTS = ["A robot may not injure a human being", "1\n2\n3\n4", "🤗 안녕 naïve", "def f(x):\n    return", "the end of"]
LOCAL = ("--hostname", "127.0.0.1", "--port", "0", "--drain-timeout", "5")
SMALL = (
    "--num-tokens",
    "1500",
    "--max-new-tokens",
    "32",
    "--num-threads",
    "1",
    "--max-batch-size",
    "8",
    "--kv-cache-memory",
    "16MiB",
)
RECIPE = ("--draft-vocab-size", "2000", "--batch-size", "64", "--num-heads", "3", "--learning-rate", "4e-3")
WIDTH = {"mlp": ("--inner-dim", "96"), "medusa": ()}


def command(kind, model, output, *flags):
    return [
        sys.executable,
        "-m",
        "specserve.server",
        "train",
        kind,
        "--model-id",
        str(model),
        "--output",
        str(output),
    ] + [str(flag) for flag in flags]


def train(kind, model, output, *flags, code=0):
    run = subprocess.run(command(kind, model, output, *flags), capture_output=True, text=True, timeout=280)
    assert run.returncode == code, run.stderr
    return run.stderr


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    """200 prompts, some of them chats; all different."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": f"{PROMPTS[n % 5]} {n}"} for n in range(150)]
    lines += [{"messages": [{"role": "user", "content": f"{PROMPTS[n % 5]} {n}"}]} for n in range(50)]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data") / "shared"


def last_evaluation(folder: Path) -> dict:
    return json.loads((folder / "training.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(("kind", "least"), [("mlp", 3.0), ("medusa", 2.0)])
def test_a_tiny_target_is_learnt_and_its_speculator_serves(
    kind, least, tiny_model, prompt_file, data, tmp_path, start_server, plain_tiny
):
    """Trained on few different answers, seen many times over, it knows them; the answers don't change."""
    flags = ("--prompts", prompt_file, "--data-dir", data, *SMALL, *RECIPE, *WIDTH[kind], "--num-epochs", "40")
    flags += () if kind == "mlp" else ("--soft-label-share", "0")  # both kinds of labels
    log = train(kind, tiny_model, tmp_path / "s", *flags)
    assert "draft vocabulary: " in log and "saved " in log
    assert last_evaluation(tmp_path / "s")["length"] > 1
    assert (tmp_path / "s" / "training.png").read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in (data / "records.jsonl").read_text().splitlines()]
    trained = [record["index"] for record in records if record["index"] % 2 == 0 and not Record(**record).is_held_out]
    template = [[{"role": "user", "content": f"{PROMPTS[n % 5]} {n}"}] for n in trained[:12]]
    plain = [plain_tiny.generate(prompt, max_new_tokens=32) for prompt in template]
    flags = ("--speculator", kind, "--speculator-id", str(tmp_path / "s"))
    server = start_server(
        "--model-id", str(tiny_model), *flags, "--draft-length", "fixed", *LOCAL, "--max-total-tokens", "512"
    )
    with Client(server.wait_ready(), timeout_s=60) as client:
        got = [client.generate(prompt, max_new_tokens=32) for prompt in template]
        assert [answer.token_ids for answer in got] == [answer.token_ids for answer in plain]
        assert client.info().speculator.mean_acceptance_length > least


def test_states_are_those_that_the_tokens_were_drawn_from(tiny_model, prompt_file, data, tmp_path):
    """Against transformers: state i of an answer is the final norm's output one place before its token i."""
    train("mlp", tiny_model, tmp_path / "s", "--prompts", prompt_file, "--data-dir", data, *SMALL, *RECIPE)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    dataset, first = Dataset(data, 1), 0
    for line in (data / "records.jsonl").read_text().splitlines()[:6]:
        record = Record(**json.loads(line))
        prompt = tokenizer.encode(record.prompt, add_special_tokens=False)
        with torch.no_grad():
            result = model(torch.tensor([prompt + record.token_ids]), output_hidden_states=True)
        states, tokens, _ = dataset.batch(np.arange(first, first + record.num_states))
        expected = result.hidden_states[-1][0, len(prompt) - 1 :][: record.num_states]
        assert record.num_states > 20 and tokens.tolist() == record.token_ids[: record.num_states]
        torch.testing.assert_close(states, expected, rtol=0.01, atol=0.01)
        first += record.num_states


def test_answers_that_end_with_their_first_token(tiny, make_tiny_model, tmp_path):
    """Their states stay with them, and are not taken for those of whoever gets their place."""
    prompts = tuple(f"{PROMPTS[n % 5]} {n}" for n in range(12))
    first = tiny.generate([{"role": "user", "content": prompts[0]}], max_new_tokens=1).token_ids[0]
    model = make_tiny_model(tmp_path / "model", eos_token_id=first)
    config = ServerConfig(ModelOptions(str(model)), scheduler=SchedulerOptions(max_batch_size=1, max_total_tokens=256))
    recorder = HiddenRecorder()
    serving = build(config, recorder)
    source = PromptSource(tmp_path, prompts[:1] + prompts)
    distillation = SelfDistillation(serving, serving.engine.engine, recorder, source, seed=0, length=16)
    writer = DatasetWriter(tmp_path / "data", {"hidden_size": 32})
    distillation.run(writer, 10**6, lambda done: None)
    writer.close()
    records = [json.loads(line) for line in (tmp_path / "data" / "records.jsonl").read_text().splitlines()]
    assert len(records) == 13 and records[0]["token_ids"] == [first]
    assert sum(record["num_states"] for record in records) > 40


def test_turns_that_the_model_writes_begin_in_many_ways(plain_tiny, tiny_model, tmp_path):
    """Each is a first token of a flattened law and what the model goes on with, as generate would give it."""
    config = ServerConfig(
        ModelOptions(str(tiny_model)), scheduler=SchedulerOptions(max_batch_size=4, max_total_tokens=512)
    )
    recorder = HiddenRecorder()
    serving = build(config, recorder)
    source = PromptSource.read(None)
    distillation = SelfDistillation(serving, serving.engine.engine, recorder, source, seed=5, length=16)
    writer = DatasetWriter(tmp_path / "data", {"hidden_size": 32})
    distillation.run(writer, 300, lambda done: None)
    writer.close()
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "data" / "records.jsonl").read_text().splitlines()]
    header = serving.tokenizer.encode(serving.chat_template.user_header(), add_special_tokens=False)
    expected = []
    for seed in range(5, 5 + len(prompts)):
        first = plain_tiny.generate(header, max_new_tokens=1, temperature=2.0, top_k=200, seed=seed).token_ids
        rest = plain_tiny.generate([*header, *first], max_new_tokens=96, temperature=0.8, seed=seed).token_ids
        turn = serving.tokenizer.decode([*first, *rest]).strip()
        expected.append(serving.chat_template.render([{"role": "user", "content": turn}]))
    assert prompts == expected and len(set(prompts)) > 10


def test_a_run_continues_after_a_kill_as_if_there_had_been_none(tiny_model, prompt_file, tmp_path):
    """Killed while it generates and again while it trains; the same data and weights in the end."""
    flags = ("--prompts", prompt_file, *SMALL, *RECIPE, "--num-epochs", "20")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train("mlp", tiny_model, whole, *flags)
    marks = [broken / "data" / "records.jsonl", broken / "checkpoint.pt"]
    for mark in marks:
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command("mlp", tiny_model, broken, *flags), stdout=log, stderr=log)
        end = time.monotonic() + 120
        while not (mark.exists() and mark.stat().st_size) and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (broken / "model.safetensors").exists(), "killed too late to show anything"
    with (broken / "data" / "records.jsonl").open("a") as records:
        records.write('{"index": ')  # a line that the kill left unfinished
    train("mlp", tiny_model, broken, *flags)
    for name in ("hidden.bin", "records.jsonl"):
        assert (whole / "data" / name).read_bytes() == (broken / "data" / name).read_bytes()
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, broken))
    assert first.keys() == second.keys() and all(bool((first[name] == second[name]).all()) for name in first)
    assert len((broken / "training.jsonl").read_text().splitlines()) == 10


def test_two_processes_train_what_one_does(tiny_model, prompt_file, data, tmp_path):
    """torchrun, gloo: each takes half of every batch; the weights agree up to rounding."""
    flags = (
        "--prompts",
        prompt_file,
        "--data-dir",
        data,
        *SMALL,
        *RECIPE,
        "--num-epochs",
        "2",
        "--save-dtype",
        "float32",
        "--compute-dtype",
        "float32",
    )
    train("mlp", tiny_model, tmp_path / "one", *flags)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "127.0.0.1:0", "-m"]
    arguments = command("mlp", tiny_model, tmp_path / "two", *flags)[2:]
    run = subprocess.run(
        launcher + arguments, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stderr
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in one:
        scale = one[name].float().abs().max()
        assert float((one[name].float() - two[name].float()).abs().max() / scale) < 0.05, name


def test_bad_input_is_one_line_before_any_work(tiny_model, make_tiny_model, prompt_file, tmp_path):
    bare = make_tiny_model(tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "config.json").write_text("{}")
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.json").write_text(json.dumps({"kind": "mlp", "model_id": "another"}))
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    new = tmp_path / "new"
    cases = [
        ((bare, new), (), 1, "has no chat template, so it can't write prompts itself; give --prompts"),
        ((tiny_model, taken), (), 1, "holds another model's files"),
        ((tiny_model, other), (), 1, "holds a run with model_id 'another'"),
        ((tiny_model, new), ("--num-tokens", 10**13, "--cache-size", "1000000GiB"), 1, "bytes are needed"),
        ((tiny_model, new), ("--num-tokens", 10**9, "--cache-size", "1GiB"), 1, "--cache-size is 1,073,741,824"),
        ((tiny_model, new), ("--prompts", tmp_path / "none.txt"), 1, "can't be read"),
        ((tiny_model, new), ("--prompts", tmp_path / "empty.txt"), 1, "holds no prompt"),
        ((tiny_model, new), ("--prompts", tmp_path / "bad.jsonl"), 1, "line 2 has neither"),
        ((tiny_model, new), ("--max-new-tokens", 3000), 1, "--max-new-tokens is 3000"),
        (("/no/such", new), (), 1, "/no/such"),
        ((tiny_model, new), ("--cache-size", "many"), 2, "--cache-size is 'many'"),
    ]
    with ThreadPoolExecutor(2) as pool:
        logs = list(pool.map(lambda case: train("mlp", *case[0], *case[1], code=case[2]), cases))
    for log, (*_, message) in zip(logs, cases, strict=True):
        errors = [line for line in log.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and message in errors[0] and "Traceback" not in log, log
    assert "--inner-dim is 8" in train("medusa", tiny_model, new, "--inner-dim", 8, code=2)


def test_data_of_another_making_is_not_continued(tiny_model, prompt_file, data, tmp_path):
    flags = ("--prompts", prompt_file, "--data-dir", data, *SMALL, *RECIPE)
    train("mlp", tiny_model, tmp_path / "a", *flags, "--num-epochs", "0.1")
    log = train("mlp", tiny_model, tmp_path / "b", *flags, "--seed", "1", code=1)
    assert "its data was made with seed 0, now it is 1" in log
    log = train("mlp", tiny_model, tmp_path / "a", *flags, "--num-epochs", "0.2", code=1)
    assert "checkpoint.pt is of a run with other options or other data" in log
