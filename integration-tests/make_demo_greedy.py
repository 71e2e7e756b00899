"""Writes data/demo_greedy.json: what transformers' generate says to 30 prompts, greedy, fp32, 100 tokens each.

Run it again only if the prompts change: python integration-tests/make_demo_greedy.py. The prompts' token ids come
from this project's tokenizer, since transformers ignores the pre-tokenizer that the GGUF file names.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GgufConfig

from specserve.models.config import load_config
from specserve.models.hub import resolve_model
from specserve.models.tokenizer import load_tokenizer
from specserve.server.chat import ChatTemplate

NUM_TOKENS = 100
CHATS = [
    "Why is the sky blue? Answer in three sentences.",
    "Write a haiku about autumn rain.",
    "List five uses of a paper clip.",
    "What is 17 * 23? Think step by step.",
    "Translate 'good morning' into French, German and Spanish.",
    "Explain photosynthesis to a child.",
    "Write a Python function that reverses a string.",
    "Who wrote Faust, and what is it about?",
    "Give me a recipe for pancakes.",
    "¿Cuál es la capital de España?",
    "Summarise the causes of the First World War.",
    "Repeat the word 'hello' multiple times: hello",
    "Was ist der Unterschied zwischen Äpfeln und Birnen?",
    "🙂🙃 What do these emoji mean?",
    "Name three prime numbers between 100 and 120.",
]
TEXTS = [
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of motion are:\n1.",
    '{"name": "Ada", "born": 1815, "fields": [',
    "A B C D E F G",
    "SELECT name, price FROM products WHERE",
    "In 1969, humans first",
    "1\n2\n3\n4\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox",
    "import numpy as np\n\n",
    "Il était une fois",
    "Ingredients: 200 g flour, 2 eggs,",
    "Q: What is the boiling point of water?\nA:",
    "²³ ½ naïve café — “quotes”",
]


@torch.inference_mode()
def main() -> None:
    """Generate and write."""
    files = resolve_model("demo")
    tokenizer = load_tokenizer(files, load_config(files).vocab_size)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    # Any: transformers' from_pretrained is not typed.
    auto_model: Any = AutoModelForCausalLM
    model = auto_model.from_pretrained(
        files.path.parent,
        gguf_file=files.path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    rendered = [template.render([{"role": "user", "content": text}]) for text in CHATS]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in rendered]
    prompts += [tokenizer.encode(text) for text in TEXTS]
    cases = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        cases.append({"prompt": prompt, "tokens": out[0, len(prompt) :].tolist()})
    target = Path(__file__).parent / "data" / "demo_greedy.json"
    target.write_text(json.dumps(cases).replace('{"prompt"', '\n{"prompt"') + "\n")


if __name__ == "__main__":
    main()
