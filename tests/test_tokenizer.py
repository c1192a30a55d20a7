"""tokenizer.py and lib/pieces.py against ids of the `tokenizers` library
(tests/fixtures/tokenizer), hand-worked ids and a brute-force BPE."""
import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizer_toys import (
    BYTE_LEVEL, BYTES, DIGITS, IM, added_token, chain, ids_of, open_toy, spec, user, write)

import lib.pieces
from lib.arithmetic import write_byte_tokenizer
from tokenizer import Tokenizer

FIXTURES = Path(__file__).parent / "fixtures" / "tokenizer"
GOLDEN = json.loads((FIXTURES / "hf_ids.json").read_text(encoding="utf-8"))
CHAINS = json.loads((FIXTURES / "hf_chains.json").read_text(encoding="utf-8"))


# ---- ids -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("case", GOLDEN["tokenizers"], ids=lambda c: c["name"])
def test_ids_are_those_of_hf(case, tmp_path):
    """GPT-2, Qwen and Llama kinds; merges as strings and as pairs (who splits pairs on a space
    gets single bytes); toys with shuffled merges, shuffled ids, tokens that nothing builds."""
    tok = Tokenizer.from_pretrained(write(tmp_path, case["tokenizer"]))
    for text, ids in case["cases"]:
        assert tok.encode(text, allow_special=True) == ids, text
        assert tok.decode(ids) == tok._normalize(text)


def chain_vocab():
    vocab = dict(BYTES)
    for merge in CHAINS["merges"]:
        vocab.setdefault(merge.replace(" ", ""), len(vocab))
    return vocab


@pytest.mark.parametrize("case", CHAINS["chains"], ids=lambda c: c["name"])
def test_chains_of_cuts_are_those_of_hf(case, tmp_path):
    """Digits and then ByteLevel (SmolLM2), several Splits (DeepSeek), Split Removed and inverted
    (cl100k) were refused. The last text has characters that `regex` knows and HF does not."""
    pre_tokenizer = chain(*case["steps"])
    tok = open_toy(tmp_path, chain_vocab(), CHAINS["merges"], pre_tokenizer=pre_tokenizer)
    for text, ids in zip(CHAINS["texts"], case["ids"]):
        assert tok.encode(text) == ids, text


def test_a_chain_cuts_as_tiktoken_does(tmp_path):
    """The same cut twice, which runs in Python, and once, which tiktoken does. The last text has
    a digit of Unicode 17."""
    once = {"type": "Split", "pattern": {"Regex": r"\d+"}, "behavior": "Isolated"}
    toks = [open_toy(tmp_path, chain_vocab(), CHAINS["merges"], pre_tokenizer=chain(
        *[once] * n, BYTE_LEVEL | {"use_regex": False})) for n in (1, 2)]
    for text in CHAINS["texts"]:
        assert toks[0].encode(text) == toks[1].encode(text), text


def test_added_tokens_that_strip_are_those_of_hf(tmp_path):
    """lstrip and rstrip were refused. U+001C is white space for Python, not for HF."""
    tok = open_toy(tmp_path, chain_vocab(), CHAINS["merges"], CHAINS["added"],
                   pre_tokenizer=chain(DIGITS, BYTE_LEVEL))
    for text, ids in CHAINS["added_cases"]:
        assert tok.encode(text, allow_special=True) == ids, text
    assert tok.encode(" <l> ") == ids_of(" <l> ")


def brute_force(text, vocab, merges, ignore_merges):
    if ignore_merges and text in vocab:
        return [vocab[text]]
    parts = list(text)
    while pairs := [(merges.index(p), i) for i, p in enumerate(zip(parts, parts[1:]))
                    if p in merges]:
        i = min(pairs)[1]
        parts[i:i + 2] = ["".join(parts[i:i + 2])]
    return [vocab[p] for p in parts]


def random_bpe(rng):
    """(vocab, merges) over a, b, c, with a token that the merges may not build."""
    tokens, merges = list("abc"), []
    for _ in range(rng.randint(1, 12)):
        pair = rng.choice(tokens), rng.choice(tokens)
        if len("".join(pair)) < 9 and pair not in merges:
            merges.append(pair)
            tokens += [] if "".join(pair) in tokens else ["".join(pair)]
    extra = "".join(rng.choices("abc", k=rng.randint(3, 5)))
    tokens += [] if extra in tokens else [extra]
    if rng.random() < 0.5:
        rng.shuffle(merges)
    return dict(zip(tokens, rng.sample(range(len(tokens)), len(tokens)))), merges


def test_random_tokenizers_are_exact_or_refused(tmp_path):
    """Ids that differ from HF's in silence are the worst fault: a tokenizer is exact on every
    text, or it does not load. (tiktoken merges the lowest id first, HF the first merge.)"""
    rng, refused = random.Random(0), 0
    for _ in range(150):
        vocab, merges = random_bpe(rng)
        ignore = rng.random() < 0.5
        try:
            tok = open_toy(tmp_path, vocab, [list(p) for p in merges],
                           model={"ignore_merges": ignore})
        except ValueError as error:
            assert "is not built by the merges" in str(error)
            refused += 1
            continue
        texts = ["".join(rng.choices("abc", k=rng.randint(1, 30))) for _ in range(20)]
        for text in [*vocab, *texts]:
            want = brute_force(text, vocab, merges, ignore)
            assert tok.encode(text) == want, (text, vocab, merges, ignore)
    assert 5 < refused < 70


def bpe(**changes):
    return {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []} | changes}


def split(pattern, *before, behavior="Isolated"):
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior}
    return {"pre_tokenizer": chain(*before, step, BYTE_LEVEL | {"use_regex": False})}


SENTENCEPIECE = "SentencePiece.*Llama 2.*Mistral 7B.*take .*Llama 3.x, Qwen2.5"


@pytest.mark.parametrize("message, changes", [
    (SENTENCEPIECE, {"model": {"unk_id": 0, "vocab": [["a", 0.0]]}}),
    (SENTENCEPIECE, bpe(byte_fallback=True)),
    (SENTENCEPIECE, {"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581"}}),
    ("WordPiece", {"model": {"type": "WordPiece", "vocab": {"a": 0}}}),
    ("dropout", bpe(dropout=0.1)),
    ("structure", bpe(vocab=["a"])),
    ("ByteLevel as the last", {"pre_tokenizer": DIGITS}),
    ("ByteLevel as the last", {"pre_tokenizer": chain(BYTE_LEVEL, BYTE_LEVEL)}),
    ("'type': 'Whitespace'", {"pre_tokenizer": chain({"type": "Whitespace"}, BYTE_LEVEL)}),
    ("add_prefix_space", {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}}),
    ("MergedWithNext", split("a", behavior="MergedWithNext")),
    ("by Regex; Isolated", {"pre_tokenizer": chain(
        {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated"}, BYTE_LEVEL)}),
    ("pattern", split("(")),
    ("match between two", split(r"\s*(?=x)|a?+")),
    # Oniguruma: one or more groups; Rust: at most three digits
    ("read differently", split(r"\p{N}{1,3}+")),
    *(("read differently", split(p)) for p in (
        r"\w+", r"\<a", r"(?m).", "(?i:ss)", "[a&&b]", r"\p{Word}", "^a")),
    # U+0295 is Lo up to Unicode 16, Ll from 17 on
    ("not the same in all", split(r"\p{Ll}", DIGITS)),
    ("not the same in all", split(r"\P{L}", DIGITS)),
    ("Lowercase", {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}}),
    ("single_word", {"added_tokens": [added_token(1, "<s>", single_word=True)]}),
    ("has id 7, but HF gives it 1", {"added_tokens": [added_token(7, "<s>")]}),
])
def test_what_cannot_be_promised_is_refused(message, changes, tmp_path):
    with pytest.raises(ValueError, match=f"tokenizer.json: .*{message}"):
        Tokenizer.from_pretrained(write(tmp_path, spec({"a": 0}, []) | changes))


def test_an_old_regex_package_is_refused(tmp_path, monkeypatch):
    """Characters that HF knows and `regex` does not would be cut in another way."""
    monkeypatch.setattr(lib.pieces, "NEWEST", "\U000e0fff")
    with pytest.raises(ValueError, match="pip install --upgrade regex"):
        open_toy(tmp_path, BYTES, [], pre_tokenizer=chain(DIGITS, BYTE_LEVEL))
    open_toy(tmp_path, BYTES, [])


def test_folders_without_a_tokenizer(tmp_path):
    """A Hub id, an adapter, a SentencePiece model: the message says what to do."""
    write(tmp_path / "sp", None, tokenizer__model="")
    adapter = write(tmp_path / "adapter", spec(BYTES, []), adapter_config__json={"r": 8})
    for folder, message in (("Qwen/Qwen2.5-0.5B", "hf download"), (adapter, "--adapter"),
                            (tmp_path, "no tokenizer.json"),
                            (tmp_path / "sp", "only tokenizer.model; .* Qwen2.5"),
                            (write(tmp_path / "slow", None, vocab__json={}, merges__txt=""),
                             "only vocab.json and merges.txt .*AutoTokenizer.from_pretrained")):
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            Tokenizer.from_pretrained(folder)
    write(adapter, None, config__json={})  # a whole model with an adapter's file beside it
    assert Tokenizer.from_pretrained(adapter).vocab_size == 256


def test_normalization_is_that_of_hf(tmp_path):
    """NFC as in Qwen; U+0C3C is a mark since Unicode 14, HF (Unicode 9) does not move it before
    U+0E48, Python's unicodedata would."""
    tok = open_toy(tmp_path, BYTES, [], normalizer={"type": "NFC"})
    assert tok.encode("e\u0301") == [0xC3, 0xA9]
    assert tok.encode("U\u0e48\u0c3c") == ids_of("U\u0e48\u0c3c")
    assert tok.encode("q\u0301\u0323") == ids_of("q\u0323\u0301")


def test_texts_that_have_no_ids(tmp_path):
    tok = open_toy(tmp_path, {"x": 0, "y": 1, "xy": 2}, ["x y"])
    with pytest.raises(ValueError, match="no tokens for the bytes b'!\\?'"):  # HF drops them
        tok.encode("x?y!")
    with pytest.raises(ValueError, match=r"text has a lone surrogate '\\ud800' at position 1"):
        open_toy(tmp_path, BYTES, []).encode("x\ud800")


# ---- added tokens, decode ------------------------------------------------------------------------

def test_added_tokens_only_when_allowed(tmp_path):
    """A person's "<|im_end|>" must not end the turn; so for tokens that are not special."""
    added = [added_token(256, "<tool>", special=False), added_token(257, "<|im_end|>"),
             added_token(258, "<|im_end|>>")]
    tok = open_toy(tmp_path, BYTES | {"<tool>": 256}, [], added, model={"ignore_merges": True},
                   pre_tokenizer=BYTE_LEVEL | {"use_regex": False})
    for text in ("<tool>", "a<|im_end|>"):
        assert tok.encode(text) == ids_of(text)
    ids = tok.encode("a<|im_end|>>b<tool><|im_end", allow_special=True)
    assert ids == ids_of("a", 258, "b", 256, "<|im_end")


def test_normalized_added_tokens_are_found_in_normalized_text(tmp_path):
    added = [added_token(256, "e\u0301"), added_token(257, "\u1e43", normalized=True),
             added_token(258, "m\u0323m", normalized=True)]
    tok = open_toy(tmp_path, BYTES, [], added, normalizer={"type": "NFC"})
    for text, ids in (("e\u0301", [256]), ("\u00e9", [0xC3, 0xA9]), ("m\u0323", [257]),
                      ("\u1e43m", [258])):
        assert tok.encode(text, allow_special=True) == ids


def test_decode_never_fails(tmp_path):
    """Legal sampled ids without a token (padding rows of the head, gaps) and completions cut
    inside a character killed whole runs."""
    vocab = {c: i + (i > 200) for i, c in enumerate(BYTES)}
    tok = open_toy(tmp_path, vocab | {"\u2581x": 257}, [])
    # not written in the byte-level alphabet: HF gives it as it is
    assert tok.vocab_size == 258 and tok.decode([257]) == "\u2581x"
    ids = tok.encode("A\U0001f34e")
    assert tok.decode([*ids, 201, 258, 10**12, -1]) == "A\U0001f34e"
    assert tok.decode(ids[:3]) == "A\ufffd" and tok.decode([]) == ""
    assert tok.decode(np.array(ids)) == tok.decode(torch.tensor(ids)) == "A\U0001f34e"


# ---- long runs -----------------------------------------------------------------------------------

@pytest.mark.parametrize("pre_tokenizer", [
    BYTE_LEVEL, GOLDEN["tokenizers"][1]["tokenizer"]["pre_tokenizer"],
    *(chain(*CHAINS["chains"][i]["steps"]) for i in (0, 2))],
    ids=["gpt2", "qwen", "smollm", "deepseek"])
def test_long_runs_are_quick(pre_tokenizer, tmp_path):
    """One odd row must not hang the run: old BPE loops are quadratic, split patterns backtrack,
    a chain of cuts looks at 300,000 pieces."""
    vocab, merges = dict(BYTES), []
    for c in ("a", "\u0120", "="):
        for n in (1, 2, 4, 8):
            merges.append([c * n, c * n])
            vocab[c * n * 2] = len(vocab)
    added = [added_token(len(vocab), "<s>"), added_token(len(vocab) + 1, "<|im_end|>")]
    tok = open_toy(tmp_path, vocab, merges, added, pre_tokenizer=pre_tokenizer)
    for text in (" " * 299_999 + "x", "a" * 300_000, "\n " * 150_000, "<|im_end|>" * 30_000,
                 "a1" * 150_000):
        start = time.process_time()
        ids = tok.encode(text, allow_special=text[0] == "<")
        assert time.process_time() - start < 2
        assert tok.decode(ids) == text


@pytest.mark.parametrize("steps", [
    [BYTE_LEVEL], [split(r"\s+$")["pre_tokenizer"]["pretokenizers"][0], DIGITS, BYTE_LEVEL]])
def test_a_text_that_takes_too_long_is_a_value_error(steps, tmp_path, capfd):
    """pyo3's PanicException is no Exception: it would pass every handler. \\s+$ is quadratic."""
    with pytest.raises(ValueError, match="too long a run"):
        open_toy(tmp_path, BYTES, [], pre_tokenizer=chain(*steps)).encode(" " * 3_000_000 + "x")


# ---- eos, pad, an adapter ------------------------------------------------------------------------

def test_eos_and_pad_ids(tmp_path):
    """A model closes turns with several ids; honouring one of them lets generation run on."""
    content = spec(BYTES, [], [added_token(256 + i, t) for i, t in enumerate(IM)])
    as_dict = {"eos_token": added_token(0, "<|im_end|>"), "pad_token": "<|endoftext|>"}
    cases = [
        (({"eos_token": "<|im_end|>"}, {"eos_token_id": [256, 258]},
          {"eos_token_id": 257, "pad_token_id": 7}), (256, 258, 257), 258, 7),
        ((as_dict, {}, {"eos_token_id": 11, "pad_token_id": 7}), (11, 258), 258, 256),
        (({}, {"eos_token_id": None}, {}), (), None, 0),
        (({"eos_token": None}, {"eos_token_id": [9]}, {"pad_token_id": None}), (9,), 9, 9)]
    for i, ((config, generation, model), eos, end, pad) in enumerate(cases):
        folder = write(tmp_path / str(i), content, config, config__json=model,
                       generation_config__json=generation)
        tok = Tokenizer.from_pretrained(folder)
        assert (tok.eos_ids, tok.eos_id, tok.pad_id) == (eos, end, pad)
        assert (tok.bos_ids, tok.vocab_size) == ((), 259)
    old = write(tmp_path / "old", content, special_tokens_map__json=as_dict)
    assert Tokenizer.from_pretrained(old).eos_ids == (258,)


@pytest.mark.parametrize("config, message", [
    ({"eos_token": "<|nope|>"}, "eos_token is .*, which is no token"),
    ({"pad_token": 0.5}, "pad_token is .*, which is no token"),
    *(({"eos_token_id": bad}, "eos_token_id is .*: expected an id") for bad in ("2", [1.5], -1))])
def test_bad_eos_and_pad(config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_pretrained(write(tmp_path, spec(BYTES, []), config,
                                        generation_config__json=config))


def test_files_of_an_adapter_count(tmp_path):
    """An adapter that was trained with its own template and tokens was used without them."""
    base = write(tmp_path / "base", spec(BYTES, []), {"chat_template": "base"},
                 generation_config__json={"eos_token_id": [7]}, chat_template__jinja="base file")
    plain = write(tmp_path / "plain", None, adapter_config__json={"r": 8})
    own = write(tmp_path / "own", spec(BYTES, [], [added_token(256, "<end>")]),
                {"chat_template": "own", "eos_token": "<end>"}, adapter_config__json={"r": 8})
    template = write(tmp_path / "template", None, chat_template__jinja="template")
    for adapter, folder, text, eos in ((None, base, "base file", (7,)),
                                       (plain, base, "base file", (7,)),
                                       (own, own, "own", (7, 256)),
                                       (template, template, "template", (7,))):
        tok = Tokenizer.from_pretrained(base, adapter)
        assert (tok.folder, tok.chat(user("x")), tok.eos_ids) == (folder, text, eos)
        assert tok.of_adapter == (folder != base)


def test_byte_tokenizer(tmp_path):
    """The tokenizer of the default run has the ids and chats of HF."""
    write_byte_tokenizer(tmp_path)
    tok = Tokenizer.from_pretrained(tmp_path)
    for text, ids in GOLDEN["byte"]["cases"]:
        assert tok.encode(text, allow_special=True) == ids
    for messages, generate, text, ids in GOLDEN["byte"]["chats"]:
        assert tok.chat(messages, generate) == text and tok.chat_ids(messages, generate) == ids
    with pytest.raises(ValueError, match="system message only at its start"):
        tok.chat([*user("x"), {"role": "system", "content": "y"}])
