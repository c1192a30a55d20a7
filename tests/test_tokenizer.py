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
    BYTE_LEVEL, BYTES, IM, XYZ, added_token, chain, ids_of, open_toy, spec, split, user, write)

import lib.pieces
from tokenizer import Tokenizer, write_byte_tokenizer

FIXTURES = Path(__file__).parent / "fixtures" / "tokenizer"
GOLDEN = json.loads((FIXTURES / "hf_ids.json").read_text(encoding="utf-8"))
CHAINS = json.loads((FIXTURES / "hf_chains.json").read_text(encoding="utf-8"))
DIGITS = {"type": "Digits", "individual_digits": True}
NO_REGEX = BYTE_LEVEL | {"use_regex": False}


# ------------------------------------------------------------------------------------------- ids

@pytest.mark.parametrize("case", GOLDEN["tokenizers"], ids=lambda c: c["name"])
def test_ids_are_those_of_hf(case, tmp_path):
    """GPT-2, Qwen and Llama kinds; toys with shuffled merges, shuffled ids, several ways to build
    a token, tokens that nothing builds."""
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
    text, or it does not load."""
    rng, refused = random.Random(0), 0
    for _ in range(150):
        vocab, merges = random_bpe(rng)
        ignore = rng.random() < 0.5
        try:
            tok = open_toy(tmp_path, vocab, [list(p) for p in merges],
                           model={"ignore_merges": ignore})
        except ValueError as error:
            assert "are not built by the merges" in str(error)
            refused += 1
            continue
        texts = ["".join(rng.choices("abc", k=rng.randint(1, 30))) for _ in range(20)]
        for text in [*vocab, *texts]:
            want = brute_force(text, vocab, merges, ignore)
            assert tok.encode(text) == want, (text, vocab, merges, ignore)
    assert 5 < refused < 70


def test_merges_as_strings_and_as_pairs(tmp_path):
    """tokenizers >= 0.20 writes pairs; a reader that splits on a space skips them all and text
    falls into bytes."""
    for merges in (["x y", "xy z"], [["x", "y"], ["xy", "z"]]):
        assert open_toy(tmp_path, XYZ, merges).encode("xyz") == [4]
    for bad in ("x y z", "xy", ["x", "y", "z"], ["x"], {"x": "y"}, 7, None, ["x", 1], ["x", "q"],
                "x z"):
        with pytest.raises(ValueError, match=r"tokenizer\.json: model\.merges\[1\] is "):
            open_toy(tmp_path, XYZ, ["x y", bad])


def test_merge_order_counts_not_id_order(tmp_path):
    """tiktoken merges the lowest id first, HF the first merge in the list."""
    vocab = {"a": 0, "b": 1, "c": 2, "bc": 3, "ab": 4}
    assert open_toy(tmp_path, vocab, ["a b", "b c"]).encode("abc") == [4, 2]
    assert open_toy(tmp_path, vocab, ["b c", "a b"]).encode("abc") == [0, 3]


def test_token_that_no_merge_builds(tmp_path):
    vocab = {"a": 0, "b": 1, "c": 2, "abc": 3}
    assert open_toy(tmp_path, vocab, []).encode("abc") == [0, 1, 2]  # tiktoken would look it up
    tok = open_toy(tmp_path, vocab, [], model={"ignore_merges": True})
    assert tok.encode("abc") == [3] and tok.encode("abcc") == [0, 1, 2, 2]
    vocab |= {"ab": 4}
    # [ab][c] is no merge, tiktoken would join them
    with pytest.raises(ValueError, match="'abc' are not built by the merges"):
        open_toy(tmp_path, vocab, ["a b"], model={"ignore_merges": True})


def bpe(**changes):
    return {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []} | changes}


def pattern(regex, *before):
    return {"pre_tokenizer": chain(*before, *split(regex)["pretokenizers"])}


@pytest.mark.parametrize("wrong, changes", [
    ("WordPiece", {"model": {"type": "WordPiece", "vocab": {"a": 0}}}),
    ("dropout", bpe(dropout=0.1)),
    ("continuing_subword_prefix", bpe(continuing_subword_prefix="##")),
    ("end_of_word_suffix", bpe(end_of_word_suffix="</w>")),
    ("id of its own", bpe(vocab={"a": 0, "b": 0})),
    ("id of its own", bpe(vocab={"a": "0"})),
    ("structure", bpe(vocab=["a"])),
    ("structure", {"model": {"type": "BPE", "vocab": {"a": 0}}}),
    ("structure", {"model": None}),
    ("ByteLevel as the last", {"pre_tokenizer": None}),
    ("ByteLevel as the last", {"pre_tokenizer": DIGITS}),
    ("ByteLevel as the last", {"pre_tokenizer": chain(BYTE_LEVEL, BYTE_LEVEL)}),
    ("'type': 'Whitespace'", {"pre_tokenizer": chain({"type": "Whitespace"}, BYTE_LEVEL)}),
    ("add_prefix_space", {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}}),
    ("no such behavior: 'Odd'", {"pre_tokenizer": split("a", behavior="Odd")}),
    ("pattern", pattern("(")),
    ("pattern", pattern(r"[\p{L}-z]", DIGITS)),  # Python reads it, Rust does not
    ("match between two", pattern(r"\s*(?=x)|a?+")),
    # Oniguruma: one or more groups; Rust: at most three digits
    ("read differently", pattern(r"\p{N}{1,3}+")),
    *(("read differently", pattern(p)) for p in (
        r"\w+", r"\<a", r"(?m).", "(?i:ss)", "[a&&b]", r"\p{Word}", "^a")),
    # U+0295 is Lo up to Unicode 16, Ll from 17 on
    ("not the same in all", pattern(r"\p{Ll}", DIGITS)),
    ("not the same in all", pattern(r"\P{L}", DIGITS)),
    ("Lowercase", {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}}),
    ("WordPiece", {"decoder": {"type": "WordPiece"}}),
    ("white space in it", {"added_tokens": [added_token(1, "<s>", lstrip=True),
                                            added_token(2, " ")]}),
    ("NFKC", {"added_tokens": [added_token(1, "<s>", rstrip=True)],
              "normalizer": {"type": "NFKC"}}),
    ("single_word", {"added_tokens": [added_token(1, "<s>", single_word=True)]}),
    ("has id 7, but HF gives it 1", {"added_tokens": [added_token(7, "<s>")]}),
    ("has id 1, but HF gives it 0", {"added_tokens": [added_token(1, "a")]}),
])
def test_what_cannot_be_promised_is_refused(wrong, changes, tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json: ") as error:
        Tokenizer.from_pretrained(write(tmp_path, spec({"a": 0}, []) | changes))
    assert wrong in str(error.value)


@pytest.mark.parametrize("sign, changes", [
    ("Unigram", {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}),
    ("Unigram", {"model": {"unk_id": 0, "vocab": [["a", 0.0]]}}),
    ("byte_fallback", bpe(byte_fallback=True)),
    ("pre_tokenizer Metaspace", {"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581"}}),
    ("decoder Metaspace", {"decoder": {"type": "Metaspace"}}),
])
def test_sentencepiece_is_refused_with_what_to_take(sign, changes, tmp_path):
    message = f"SentencePiece.*{sign}.*Llama 2.*Mistral 7B.*take .*Llama 3.x, Qwen2.5"
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_pretrained(write(tmp_path, spec({"a": 0}, []) | changes))


def test_an_old_regex_package_is_refused(tmp_path, monkeypatch):
    """Characters that HF knows and `regex` does not would be cut in another way."""
    monkeypatch.setattr(lib.pieces, "NEWEST", "\U000e0fff")
    with pytest.raises(ValueError, match="pip install --upgrade regex"):
        open_toy(tmp_path, BYTES, [], pre_tokenizer=chain(DIGITS, BYTE_LEVEL))
    open_toy(tmp_path, BYTES, [])


def test_folders_that_are_no_model(tmp_path):
    """A Hub id, a wrong path, an adapter: the message says what to do."""
    hub = "hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B"
    (tmp_path / "x.gguf").write_text("GGUF")
    write(tmp_path / "sp", None, tokenizer__model="")
    adapter = write(tmp_path / "adapter", spec(XYZ, []), adapter_config__json={
        "base_model_name_or_path": "Qwen/Qwen2.5-3B"})
    for folder, message in (
            ("Qwen/Qwen2.5-0.5B", hub), (tmp_path / "nothing_here", "nothing_here: no such folder"),
            (tmp_path / "x.gguf", "a file; a model is a folder"), (tmp_path, "no tokenizer.json"),
            (tmp_path / "sp", "only tokenizer.model; .* Qwen2.5"),
            (adapter, r"an adapter.*\(Qwen/Qwen2.5-3B\) as --model and this folder as --adapter")):
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            Tokenizer.from_pretrained(folder)
    write(adapter, None, config__json={})  # a whole model with an adapter's file beside it
    assert Tokenizer.from_pretrained(adapter).vocab_size == 5


def test_broken_files(tmp_path):
    lfs = "version https://git-lfs.github.com/spec/v1\n"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        for text in (b"{", b"[1]", b"\xff", lfs.encode()):
            folder = write(tmp_path / name.split(".")[0], spec(XYZ, []))
            (folder / name).write_bytes(text)
            message = name.replace(".", r"\.") + (".*git lfs pull" if text[:1] == b"v" else "")
            with pytest.raises(ValueError, match=message):
                Tokenizer.from_pretrained(folder)


def test_normalization_is_that_of_hf(tmp_path):
    """NFC as in Qwen; U+0C3C is a mark since Unicode 14, HF (Unicode 9) does not move it before
    U+0E48, Python's unicodedata would."""
    tok = open_toy(tmp_path, BYTES, [], normalizer={"type": "NFC"})
    assert tok.encode("e\u0301") == [0xC3, 0xA9]
    assert tok.encode("U\u0e48\u0c3c") == ids_of("U\u0e48\u0c3c")
    assert tok.encode("q\u0301\u0323") == ids_of("q\u0323\u0301")
    assert open_toy(tmp_path, BYTES, []).encode("e\u0301") == [0x65, 0xCC, 0x81]


def test_texts_that_have_no_ids(tmp_path):
    tok = open_toy(tmp_path, XYZ, ["x y"])
    with pytest.raises(ValueError, match="no tokens for the bytes b'!\\?'"):  # HF drops them
        tok.encode("x?y!")
    with pytest.raises(ValueError, match="lone surrogate .* at position 1"):
        open_toy(tmp_path, BYTES, []).encode("x\ud800")


# ---------------------------------------------------------------------------------- added tokens

def test_added_tokens_only_when_allowed(tmp_path):
    """A person's "<|im_end|>" must not end the turn; so for tokens that are not special."""
    added = [added_token(256, "<tool>", special=False), added_token(257, "<|im_end|>"),
             added_token(258, "<|im_end|>>")]
    for model in ({}, {"ignore_merges": True}):
        tok = open_toy(tmp_path, BYTES | {"<tool>": 256}, [], added, model=model,
                       pre_tokenizer=NO_REGEX)
        for text in ("<tool>", "a<|im_end|>"):
            assert tok.encode(text) == ids_of(text)
        ids = tok.encode("a<|im_end|>>b<tool><|im_end", allow_special=True)
        assert ids == ids_of("a", 258, "b", 256, "<|im_end")
        assert tok.decode([97, 258, 256]) == "a<|im_end|>><tool>"


def test_normalized_added_tokens_are_found_in_normalized_text(tmp_path):
    added = [added_token(256, "e\u0301"), added_token(257, "\u1e43", normalized=True),
             added_token(258, "m\u0323m", normalized=True)]
    tok = open_toy(tmp_path, BYTES, [], added, normalizer={"type": "NFC"})
    for text, ids in (("e\u0301", [256]), ("\u00e9", [0xC3, 0xA9]), ("m\u0323", [257]),
                      ("\u1e43", [257]), ("\u1e43m", [258])):
        assert tok.encode(text, allow_special=True) == ids


# ---------------------------------------------------------------------------------------- decode

def test_decode_never_fails(tmp_path):
    """Legal sampled ids without a token (padding rows of the head, gaps) and completions cut
    inside a character killed whole runs."""
    vocab = {c: i + (i > 200) for i, c in enumerate(BYTES)}
    tok = open_toy(tmp_path, vocab | {"\u2581x": 257}, [])
    # not written in the byte-level alphabet: HF gives it as it is
    assert tok.vocab_size == 258 and tok.decode([257]) == "\u2581x"
    ids = tok.encode("A\U0001f34e")
    assert tok.decode([*ids, 201, 258, 151900, 10**12, -1]) == "A\U0001f34e"
    cut = ["A", "A\ufffd", "A\ufffd", "A\ufffd", "A\U0001f34e"]
    assert [tok.decode(ids[:n]) for n in range(1, 6)] == cut
    assert tok.decode([]) == ""
    assert tok.decode(np.array(ids)) == tok.decode(torch.tensor(ids)) == "A\U0001f34e"


# ------------------------------------------------------------------------------------- long runs

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
        assert not text.startswith("aa") or ids == [vocab["a" * 16]] * 18_750


@pytest.mark.parametrize("steps", [
    [BYTE_LEVEL], [*split(r"\s+$")["pretokenizers"][:1], DIGITS, BYTE_LEVEL]])
def test_a_text_that_takes_too_long_is_a_value_error(steps, tmp_path, capfd):
    """pyo3's PanicException is no Exception: it would pass every handler. \\s+$ is quadratic."""
    with pytest.raises(ValueError, match="too long a run"):
        open_toy(tmp_path, BYTES, [], pre_tokenizer=chain(*steps)).encode(" " * 3_000_000 + "x")


# ---------------------------------------------------------------------------------- eos, pad, files

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


@pytest.mark.parametrize("config, generation, message", [
    ({"eos_token": "<|nope|>"}, {}, "eos_token is .*: expected an id"),
    ({"pad_token": "<|nope|>"}, {}, "pad_token is .*: expected an id"),
    *(({}, {"eos_token_id": bad}, "eos_token_id is .*: expected an id")
      for bad in ("2", [1.5], True, -1)),
    # Regression: AttributeError: 'float' has no attribute 'encode'
    *(({"pad_token": bad}, {}, "pad_token is .*: expected the text of a token")
      for bad in (0.5, 10**20, ["<|end|>"])),
])
def test_bad_eos_and_pad(config, generation, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_pretrained(write(tmp_path, spec(BYTES, []), config,
                                        generation_config__json=generation))


def test_files_of_an_adapter_count(tmp_path):
    """An adapter that was trained with its own template and tokens was used without them."""
    base = write(tmp_path / "base", spec(BYTES, []), {"chat_template": "base"},
                 generation_config__json={"eos_token_id": [7]}, chat_template__jinja="base file")
    plain = write(tmp_path / "plain", None, adapter_config__json={})
    own = write(tmp_path / "own", spec(BYTES, [], [added_token(256, "<end>")]),
                {"chat_template": "own", "eos_token": "<end>"}, adapter_config__json={})
    template = write(tmp_path / "template", None, chat_template__jinja="template")
    for adapter, folder, text, eos in ((None, base, "base file", (7,)),
                                       (plain, base, "base file", (7,)),
                                       (own, own, "own", (7, 256)),
                                       (template, template, "template", (7,))):
        tok = Tokenizer.from_pretrained(base, adapter)
        assert (tok.folder, tok.chat(user("x")), tok.eos_ids) == (folder, text, eos)


# ---------------------------------------------------------------------------- the byte tokenizer

def test_byte_tokenizer(tmp_path):
    write_byte_tokenizer(tmp_path / "byte")
    tok = Tokenizer.from_pretrained(tmp_path / "byte")
    assert (tok.vocab_size, tok.eos_ids, tok.pad_id, tok.bos_ids) == (272, (269,), 269, ())
    parts = "< reason ing > 1 2 </ reason ing > < answer > 3 </ answer >".split()
    assert [tok.decode([i]) for i in tok.encode("".join(parts))] == parts
    everything = "".join(map(chr, [*range(0x250), 0x2211, 0x1F34E]))
    ids = tok.encode(everything)
    assert tok.decode(ids) == everything and "\ufffd" in "".join(tok.decode([i]) for i in ids)
    for text, ids in GOLDEN["byte"]["cases"]:
        assert tok.encode(text, allow_special=True) == ids
    for messages, generate, text, ids in GOLDEN["byte"]["chats"]:
        assert tok.chat(messages, generate) == text and tok.chat_ids(messages, generate) == ids
    assert tok.chat_ids(user("<|end|>")) == [270, *tok.encode("<|end|>"), 271]
    with pytest.raises(ValueError, match="system message only at its start"):
        tok.chat([*user("x"), {"role": "system", "content": "y"}])
