"""A tokenizer made by hand."""

import random

import tokenizers


def sentencepiece_backend(*, is_shuffled: bool = False) -> tokenizers.Tokenizer:
    """A small tokenizer in the manner of Llama 2: ▁ for spaces, byte fallback, BOS added, less than 300 entries.

    Shuffled, all but the special tokens have other ids.
    """
    specials = ["<unk>", "<s>", "</s>"]
    letters = ["▁", *"etaoinshrdlu.,é"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("▁", "a"), ("e", "r"), ("o", "u"), ("▁", "▁")]
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *(a + b for a, b in merges)]
    if is_shuffled:
        pieces[len(specials) :] = random.Random(0).sample(pieces[len(specials) :], len(pieces) - len(specials))
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    d = tokenizers.decoders
    backend.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    backend.add_special_tokens(specials)
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend
