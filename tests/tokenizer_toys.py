"""Toy tokenizer folders for tests."""
import json

from tokenizer import ALPHABET, Tokenizer

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
BYTES = {c: b for b, c in ALPHABET.items()}
IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 256, 257, 258 of `chat_folder`


def added_token(i, content, **flags):
    return {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True} | flags


def spec(vocab, merges, added=(), model=(), **changes):
    model = {"type": "BPE", "vocab": vocab, "merges": merges, **dict(model)}
    return {"version": "1.0", "added_tokens": list(added), "normalizer": None,
            "pre_tokenizer": BYTE_LEVEL, "post_processor": None, "decoder": BYTE_LEVEL,
            "model": model} | changes


def chain(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def write(folder, content, config=None, **others):
    """Writes tokenizer.json, tokenizer_config.json and others, named with __ for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"tokenizer.json": content, "tokenizer_config.json": config}
    for name, value in (files | {k.replace("__", "."): v for k, v in others.items()}).items():
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            (folder / name).write_text(text, encoding="utf-8")
    return folder


def open_toy(folder, *args, **kwargs):
    return Tokenizer.from_pretrained(write(folder, spec(*args, **kwargs)))


def chat_folder(folder, template, tokens=IM, **config):
    """256 bytes and the tokens as special ones; <tool> with id 256 + len(tokens) is an added
    token that is not special."""
    added = [added_token(256 + i, t) for i, t in enumerate(tokens)]
    added.append(added_token(256 + len(tokens), "<tool>", special=False))
    config = {"chat_template": template} | config
    return Tokenizer.from_pretrained(write(folder, spec(BYTES, [], added), config))


def user(text):
    return [{"role": "user", "content": text}]


def ids_of(*parts):
    """Hand-made ids for `chat_folder`: a text is its bytes, an int is itself."""
    return [i for p in parts for i in ([p] if isinstance(p, int) else p.encode())]
