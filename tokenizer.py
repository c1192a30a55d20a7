"""A Hugging Face tokenizer folder as a tiktoken Encoding, and its chat template.

    tokenizer = Tokenizer.from_pretrained("Qwen2.5-3B-Instruct")        # a folder with tokenizer.json and tokenizer_config.json
    ids = tokenizer.chat_ids([{"role": "user", "content": "What is 6*7?"}])
    text = tokenizer.decode(ids)

tokenizer.json must be a byte-level BPE (GPT-2, Llama 3, Qwen, Mistral Nemo ...). The ids are exactly those of HF's `tokenizers`; a file
for which that cannot be promised is refused. Text from data never becomes a control token: only the chat template puts those.
"""
import itertools
import json
import re
import unicodedata
from pathlib import Path

import numpy as np
import tiktoken

from lib.chat import ChatTemplate, any_of, hide_text
from lib.files import read_json

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"     # of ByteLevel with use_regex

# The byte-level alphabet (GPT-2): every byte is written as one visible character, itself or else chr(256), chr(257), ...
VISIBLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
ALPHABET = {b: chr(b) for b in VISIBLE} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in VISIBLE)}
BYTE_OF = dict.fromkeys(range(256), 0xFFFF) | {ord(c): b for b, c in ALPHABET.items()}      # 0xFFFF: not in the alphabet

# HF normalizes by Unicode 9, in which these newer marks and compositions do nothing.
NEWER = re.compile("([\u05c8\u05c9\u07fd\u0897-\u08d3\u09fe\u0c3c\u0d3b\u0d3c\u0eba\u1715\u1abf-\u1af0\u1df6-\u1dfa\ua82c"
                   "\U000105c9-\U000105e4\U00010d24-\U00010f85\U00011070\U0001133b\U00011380-\U000113d0\U0001145e\U00011839-\U00011a99"
                   "\U00011d42-\U00011f42\U00016121-\U0001612f\U00016d63-\U00016ff1\U0001d127\U0001d128\U0001d250-\U0001d281"
                   "\U0001e08f-\U0001e6f5]+)")


def steps(node, key):
    """The steps of a normalizer, pre-tokenizer, post-processor or decoder: none, one, or those of a Sequence."""
    if node is None:
        return []
    return [s for child in node[key] for s in steps(child, key)] if node["type"] == "Sequence" else [node]


def to_bytes(name):
    """The bytes that a token of the vocabulary stands for; None when it is not written in the byte-level alphabet."""
    try:
        return name.translate(BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:
        return None


# ----------------------------------------------------------------------------------------------------------------------------------------
# tokenizer.json -> tiktoken. Errors are ValueErrors; Tokenizer puts the file's name in front.

def split_pattern(pre_tokenizer):
    """The regex that cuts text into pieces before BPE, for tiktoken."""
    found = steps(pre_tokenizer, "pretokenizers")
    names = [s["type"] for s in found]
    if names not in (["ByteLevel"], ["Split", "ByteLevel"]) or found[-1].get("add_prefix_space"):
        raise ValueError(f"pre_tokenizer steps {names}: supported are ByteLevel, or one Split and then ByteLevel, without add_prefix_space")
    if names == ["ByteLevel"]:
        return GPT2_PATTERN if found[0].get("use_regex", True) else r"[\s\S]+"
    split, pattern = found[0], found[0]["pattern"].get("Regex")
    if found[1].get("use_regex", True) or split["behavior"] != "Isolated" or split.get("invert") or not pattern:
        raise ValueError("pre_tokenizer: Split must be by Regex, Isolated, not inverted, and ByteLevel after it must have use_regex false")
    # HF's regex engine is Oniguruma, tiktoken's is Rust's: take only what both read alike. {1,3}+ $ ^ \w \b (?m) and others they do not.
    rest = re.sub(r"\\(?:[pP]\{\w+\}|[sSdDnrtf]|u[0-9A-Fa-f]{4}|[^\w\s])", "a", pattern)
    odd = re.search(r"&&|--|~~|\}\+|\{,", rest)
    rest = re.sub(r"\(\?(?:i:|:|>|=|!|<=|<!)", "(", re.sub(r"\[\^?[^\[\]]+\]", "a", rest))
    if odd or re.search(r"[\\\[\]^$]|\(\?", rest):
        raise ValueError(f"pre_tokenizer pattern {pattern!r} has a part that tiktoken's regex engine may read differently")
    return rf"(?:{pattern})|(?:(?!{pattern})[\s\S])+"       # text between two matches is a piece too; tiktoken would drop it


def run_merges(tokens, byte_ids, merges):
    """Runs the merges on the bytes of every token as HF does: the adjacent pair of lowest merge index first, then the leftmost.

    tokens: N byte strings; byte_ids (256,): id of each byte, -1 for none; merges (M, 3): ids left, right, product.
    Returns (N,) the index of the last merge, and (N,) the number of parts that are left: 1 for a token that the merges build.
    """
    none, base = len(merges), int(merges.max(initial=0)) + 1
    keys = merges[:, 0] * base + merges[:, 1]                               # (M,)
    order = np.argsort(keys, kind="stable")                                 # of a pair that is listed twice HF takes the last
    keys, order = np.append(keys[order], -1), np.append(order, none)        # index -1 answers for keys below the first
    lengths = np.array([len(t) for t in tokens], int)                       # (N,)
    last, left_over = np.full(len(tokens), -1), lengths.copy()              # (N,)
    parts = byte_ids[np.frombuffer(b"".join(tokens), np.uint8)]             # (P,) parts of all tokens, one after the other
    owner = np.repeat(np.arange(len(tokens)), lengths)                      # (P,) their tokens
    while len(parts):
        right, same = np.append(parts[1:], -1), owner == np.append(owner[1:], -1)
        key = np.where(same & (parts >= 0) & (right >= 0), parts * base + right, -2)        # (P,)
        at = np.searchsorted(keys[:-1], key, side="right") - 1
        merge = np.where(keys[at] == key, order[at], none)                  # (P,) the merge of a part with its right neighbour
        best = np.full(len(tokens), none)                                   # (N,)
        np.minimum.at(best, owner, merge)
        hit = np.flatnonzero((merge == best[owner]) & (merge < none))
        hit = hit[np.diff(owner[hit], prepend=-1) != 0]                     # the leftmost of each token
        last[owner[hit]] = merge[hit]
        left_over[owner[hit]] -= 1
        parts[hit] = merges[merge[hit], 2]
        keep = best[owner] < none                                           # the other tokens have nothing left to merge
        keep[hit + 1] = False
        parts, owner = parts[keep], owner[keep]
    return last, left_over


def read_bpe(spec, token_bytes, added):
    """The BPE of tokenizer.json as (tiktoken.Encoding, ids): ids[r] is HF's id of the Encoding's rank r, None for a byte without a token.

    HF merges by index of the merge, tiktoken by rank of the merged bytes. As long as no merge has crossed the edges of a stretch of text,
    the merges inside it are those of the stretch alone; so a token, wherever it stands, is completed by one and the same merge, the last
    one of its own bytes. The index of that merge is its rank, and tokens that the merges do not build have none: then both do the same.
    With ignore_merges a piece that is a token as a whole is looked up (tiktoken always does that), so those tokens need a rank too. That
    is right unless merging leaves such a token in two parts, which tiktoken would join. Added tokens have no rank: they are not text.
    """
    model, vocab = spec["model"], spec["model"]["vocab"]
    for option in ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise ValueError(f"model.{option} is {model[option]!r}: tiktoken has no such thing")
    if any(s["type"] != "ByteLevel" for s in steps(spec.get("decoder"), "decoders")):
        raise ValueError(f"decoder {spec['decoder']['type']}: not that of a byte-level BPE")
    pattern = split_pattern(spec.get("pre_tokenizer"))
    if not all(type(i) is int and 0 <= i < 2**31 for i in vocab.values()) or len(set(vocab.values())) < len(vocab):
        raise ValueError("model.vocab: every token needs an id of its own, a whole number from 0")
    merges = []
    for i, pair in enumerate(model["merges"]):
        try:
            left, right = pair.split(" ") if isinstance(pair, str) else pair
            merges.append((vocab[left], vocab[right], vocab[left + right]))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"model.merges[{i}] is {pair!r}: expected 'A B' or ['A', 'B'], with A, B and AB in the vocabulary") from None

    names = [name for name in vocab if len(name) > 1 and name not in added and name in token_bytes]
    tokens = [token_bytes[name] for name in names]
    byte_ids = np.array([vocab.get(ALPHABET[b], -1) for b in range(256)])
    last, left_over = run_merges(tokens, byte_ids, np.array(merges, np.int64).reshape(-1, 3))
    ranked = [i for i in np.argsort(last, kind="stable") if left_over[i] == 1]
    if model.get("ignore_merges"):
        if len(bad := np.flatnonzero(left_over == 2)):
            raise ValueError(f"{len(bad)} tokens such as {names[bad[0]]!r} are not built by the merges, but tiktoken would build them")
        ranked += list(np.flatnonzero(left_over > 2))
    ranks = {bytes([b]): b for b in range(256)} | {tokens[i]: 256 + r for r, i in enumerate(ranked)}
    ids = [None if i < 0 else int(i) for i in byte_ids] + [vocab[names[i]] for i in ranked]
    try:
        return tiktoken.Encoding("hf", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}), ids
    except ValueError as error:
        raise ValueError(f"pre_tokenizer pattern {pattern!r}: {error}") from None


def read_added(spec):
    """The added tokens, special or not, as {content: (id, normalized)}."""
    vocab, added = spec["model"]["vocab"], {}
    for token in spec.get("added_tokens") or []:
        content = token["content"]
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word") or not content:
            raise ValueError(f"added token {token}: lstrip, rstrip, single_word and empty tokens are not supported")
        expected = vocab.get(content, max([len(vocab) - 1] + [i for i, _ in added.values()]) + 1)
        if token["id"] != expected or content in added:         # HF numbers them itself, in this order, whatever the file says
            raise ValueError(f"added token {content!r} has id {token['id']}, but HF gives it {expected}")
        added[content] = expected, bool(token.get("normalized"))
    return added


# --------------------------------------------------------------------------------------------------

class Tokenizer:
    """A tokenizer folder. eos_ids: all ids that end a turn; eos_id: the one of them to write; pad_id; bos_ids: what HF puts in front of a
    text that is not a chat (a chat template writes BOS itself); vocab_size: highest id + 1; has_chat_template; folder; encoding:
    tiktoken's, whose ranks are not the ids."""

    @classmethod
    def from_pretrained(cls, folder):
        """Opens a folder. FileNotFoundError without tokenizer.json; ValueError when a file is broken or tiktoken cannot give HF's ids."""
        return cls(folder)

    def __init__(self, folder):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        spec = read_json(path, None)
        if spec is None:
            raise FileNotFoundError(f"{self.folder}: no tokenizer.json there; give a folder in Hugging Face format")
        try:
            if spec["model"].get("type", "BPE") != "BPE":
                raise ValueError(f"model type {spec['model']['type']}: only byte-level BPE can be a tiktoken Encoding")
            vocab = spec["model"]["vocab"]
            token_bytes = {name: raw for name in vocab if (raw := to_bytes(name)) is not None}
            self.added = read_added(spec)
            self.encoding, self._ids = read_bpe(spec, token_bytes, self.added)
            self._forms = [s["type"] for s in steps(spec.get("normalizer"), "normalizers")]
            if set(self._forms) - {"NFC", "NFD", "NFKC", "NFKD"}:
                raise ValueError(f"normalizer {self._forms}: only Unicode normal forms such as NFC are supported")
            first = [s for s in steps(spec.get("post_processor"), "processors") if s["type"] == "TemplateProcessing"][:1]
            front = itertools.takewhile(lambda item: "SpecialToken" in item, first[0]["single"] if first else [])
            self.bos_ids = tuple(i for item in front for i in first[0]["special_tokens"][item["SpecialToken"]["id"]]["ids"])
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path}: not the structure of a byte-level BPE: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        self._bytes = {i: token_bytes.get(name) or name.encode() for name, i in vocab.items()}
        self._bytes |= {i: content.encode() for content, (i, _) in self.added.items()}
        self.vocab_size = max(self._bytes, default=-1) + 1
        # HF looks for added tokens twice: for those not "normalized" in the text as it is, then for the others in the normalized text.
        self._finders = []
        for normalized, prepare in ((False, str), (True, self._normalize)):
            if ids := {prepare(content): i for content, (i, n) in self.added.items() if n == normalized}:
                self._finders.append((prepare, ids, any_of(ids)))
        self._read_config()

    def _read_config(self):
        """The named tokens, eos_ids, pad_id and chat templates, from the other files of the folder."""
        names = ("special_tokens_map.json", "tokenizer_config.json", "generation_config.json", "config.json")
        old, config, generation, model = (read_json(self.folder / name, {}) for name in names)
        named = {n: t.get("content") if isinstance(t, dict) else t for n, t in {**old, **config}.items() if n in NAMED}
        self._named = {n: t for n, t in named.items() if t is not None}
        for name, token in self._named.items():
            if not isinstance(token, str):
                raise ValueError(f"{self.folder}: {name} is {token!r}: expected the text of a token")
        id_of = {token: i for i, token in self._bytes.items()}
        eos_token, pad_token = (id_of.get(t.encode(), t) if (t := self._named.get(n)) else None for n in ("eos_token", "pad_token"))

        def ids(key, value):
            """A list of ids from an id, a list of ids, or None."""
            found = [] if value is None else value if isinstance(value, list) else [value]
            if any(type(i) is not int or i < 0 for i in found):
                raise ValueError(f"{self.folder}: {key} is {value!r}: expected an id, a list of ids, or a token of tokenizer.json")
            return found

        eos = [ids("eos_token_id", c.get("eos_token_id")) for c in (generation, model)] + [ids("eos_token", eos_token)]
        self.eos_ids = tuple(dict.fromkeys(sum(eos, [])))
        self.eos_id = [*eos[2], *self.eos_ids, None][0]         # the one that a demonstration ends with
        self.pad_id = [*ids("pad_token", pad_token), *ids("pad_token_id", model.get("pad_token_id")), *self.eos_ids, 0][0]
        self._template = ChatTemplate(self.folder, self._named)
        self.has_chat_template = bool(self._template)

    def _normalize(self, text):
        for form in self._forms:
            text = "".join(p if i % 2 else unicodedata.normalize(form, p) for i, p in enumerate(NEWER.split(text)))     # odd: newer
        return text

    def _plain(self, text):
        """Ids of text in which nothing is a control token."""
        text = self._normalize(text)
        try:
            text.encode()
            ids = [self._ids[rank] for rank in self.encoding.encode_ordinary(text)]
        except UnicodeEncodeError as error:
            raise ValueError(f"text has a lone surrogate {text[error.start]!r} at position {error.start}: not a character") from None
        except BaseException as error:      # the regex engine panics (not an Exception) at runs of more than about a million spaces
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"tiktoken cannot split this text of {len(text)} characters: too long a run of one kind") from None
        if None in ids:
            missing = bytes(sorted({b for b in text.encode() if self._ids[b] is None}))
            raise ValueError(f"{self.folder}: the vocabulary has no tokens for the bytes {missing!r} of the text")
        return ids

    def _split(self, text):
        """Text as a list of stretches (str) and ids of the added tokens between them."""
        parts = [text]
        for prepare, ids, pattern in self._finders:
            split = [[p] if isinstance(p, int) else pattern.split(prepare(p)) for p in parts]
            parts = [ids[p] if i % 2 else p for pieces in split for i, p in enumerate(pieces)]      # odd pieces are tokens
        return parts

    def encode(self, text, allow_special=False):
        """Ids of text, without BOS. Added tokens written in the text become their ids only if allow_special (as in HF), else they are plain
        text. ValueError for text that is not Unicode or has a byte that the vocabulary lacks."""
        return [i for p in (self._split(text) if allow_special else [text]) for i in ([p] if isinstance(p, int) else self._plain(p))]

    def decode(self, ids):
        """Text of ids, control tokens included. Ids without a token are empty text, a cut character is U+FFFD. Decode a completion as a
        whole: characters can be split over tokens."""
        return b"".join(self._bytes.get(int(i), b"") for i in ids).decode("utf-8", errors="replace")

    def chat(self, messages, add_generation_prompt=True, **template_variables):
        """messages (dicts with "role" and "content") rendered by the folder's chat template, which
        also gets template_variables such as date_string, enable_thinking, tools. ValueError when
        there is no template, or when it refuses the messages or fails."""
        return self._template.render(messages, add_generation_prompt, **template_variables)

    def chat_ids(self, messages, add_generation_prompt=True, **template_variables):
        """Ids of chat(...) with added tokens only where the template puts them: such a token
        written in a message, or formed where two texts meet, stays plain text. BOS is there once,
        if the template writes it."""
        masked, back = hide_text(
            lambda m: self.chat(m, add_generation_prompt, **template_variables),
            messages, self.added)
        return [i for p in self._split(masked)
                for i in ([p] if isinstance(p, int) else self._plain(p.translate(back)))]
