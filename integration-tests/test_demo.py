"""The demo model, for real: the same tokens as transformers' generate, and text as people expect it."""

import concurrent.futures
import json
from pathlib import Path

import pytest

CASES = json.loads((Path(__file__).parent / "data" / "demo_greedy.json").read_text())


@pytest.mark.parametrize("num_at_once", [1, 16])
def test_greedy_tokens_are_those_of_transformers(demo, num_at_once):
    """30 prompts of 100 tokens, made by make_demo_greedy.py; one after the other, and many at once."""
    assert len(CASES) == 30

    def answer(case):
        return list(demo.generate(case["prompt"], max_new_tokens=100).token_ids)

    cases = CASES if num_at_once > 1 else CASES[::5]
    with concurrent.futures.ThreadPoolExecutor(num_at_once) as pool:
        answers = list(pool.map(answer, cases))
    for case, tokens in zip(cases, answers, strict=True):
        assert tokens == case["tokens"]


def test_chat_and_its_rendered_text_are_one_and_the_same(demo):
    messages = [{"role": "user", "content": "Why is the sky blue? Answer in three sentences."}]
    ids = demo.tokenize(messages).token_ids
    assert list(ids) == CASES[0]["prompt"]
    answer = demo.generate(messages, max_new_tokens=30)
    assert list(answer.token_ids) == CASES[0]["tokens"][:30]
    assert "sky" in answer.text or "light" in answer.text
    assert "\ufffd" not in answer.text


def test_prompt_logprobs_are_plausible_and_the_same_from_the_cache(demo):
    text = "The capital of France is Paris, and the capital of Germany is Berlin."
    first = demo.generate(text, max_new_tokens=1, logprobs=True, prompt_details=True)
    demo.generate(text, max_new_tokens=1)
    again = demo.generate(text, max_new_tokens=1, logprobs=True, prompt_details=True)
    berlin = next(token for token in first.prompt if token.text == " Berlin")
    assert berlin.logprob > -1 and berlin.rank == 1
    for token, same in zip(first.prompt[1:], again.prompt[1:], strict=True):
        assert token.logprob == pytest.approx(same.logprob, abs=1e-4)


def test_no_replacement_character_while_a_character_arrives(demo):
    prompt = "Repeat exactly: 🤗 안녕 👩‍👩‍👧 🤗 안녕 👩‍👩‍👧 🤗 안녕 👩‍👩‍👧 🤗 안녕"
    pieces = [event.text for event in demo.stream(prompt, max_new_tokens=48, ignore_eos=True)]
    whole = demo.generate(prompt, max_new_tokens=48, ignore_eos=True)
    assert "".join(pieces) == whole.text
    assert any(ord(character) > 0x2000 for character in whole.text)
    assert "\ufffd" not in whole.text[:-1]


def test_penalties_change_something_and_each_its_own(demo):
    prompt = "Repeat the word 'hello' multiple times: hello"
    options = {"max_new_tokens": 24, "ignore_eos": True}
    settings = [{}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.8}]
    answers = [demo.generate(prompt, **options, **setting).token_ids for setting in settings]
    assert len(set(answers)) == 4
