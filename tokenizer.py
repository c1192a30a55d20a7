"""A Hugging Face tokenizer folder as a tiktoken Encoding, and its chat template.

    tokenizer = Tokenizer.from_pretrained("Qwen2.5-3B-Instruct")  # a folder
    ids = tokenizer.chat_ids([{"role": "user", "content": "What is 6*7?"}])
    text = tokenizer.decode(ids)

tokenizer.json must be a byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2, DeepSeek ...). The ids are
exactly those of HF's `tokenizers`; a file for which that cannot be promised is refused. Text from
data never becomes a control token: only the chat template puts those.
"""
import itertools
import re
import unicodedata
from pathlib import Path

import tiktoken

from lib.chat import ChatTemplate, any_of, hide_text, read_template, turn_end
from lib.files import check_model_folder, read_json
from lib.pieces import pieces, read_cuts, steps

# Files that make a tokenizer; an adapter's folder that has one of them brings its own tokenizer.
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
         "chat_template.jinja")
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# The byte-level alphabet (GPT-2): every byte is written as one visible character, itself or else
# chr(256), chr(257), ...
VISIBLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
HIDDEN = [b for b in range(256) if b not in VISIBLE]
ALPHABET = {b: chr(b) for b in VISIBLE} | {b: chr(256 + i) for i, b in enumerate(HIDDEN)}
BYTE_OF = {c: b for b, c in ALPHABET.items()}

# HF normalizes by Unicode 9, in which these newer marks and compositions do nothing.
NEWER_MARKS = re.compile(
    "([\u05c8\u05c9\u07fd\u0897-\u08d3\u09fe\u0c3c\u0d3b\u0d3c\u0eba\u1715\u1abf-\u1af0"
    "\u1df6-\u1dfa\ua82c\U000105c9-\U000105e4\U00010d24-\U00010f85\U00011070\U0001133b"
    "\U00011380-\U000113d0\U0001145e\U00011839-\U00011a99\U00011d42-\U00011f42"
    "\U00016121-\U0001612f\U00016d63-\U00016ff1\U0001d127\U0001d128\U0001d250-\U0001d281"
    "\U0001e08f-\U0001e6f5]+)")

# White space as HF's regexes have it: without U+001C to U+001F, which Python's str.strip takes.
SPACES = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and not "\x1c" <= c <= "\x1f")


# ---- tokenizer.json -> tiktoken ------------------------------------------------------------------
# Errors are ValueErrors; Tokenizer puts the file's name in front.

def refuse_other_kinds(spec):
    """ValueError for a model that is no byte-level BPE, with what to take instead."""
    model = spec["model"]
    kind = model.get("type", "BPE" if "merges" in model else "Unigram")
    cuts = [step["type"] for step in steps(spec.get("pre_tokenizer"), "pretokenizers")]
    if kind == "Unigram" or model.get("byte_fallback") or "Metaspace" in cuts:
        raise ValueError(
            "a SentencePiece tokenizer, like that of Llama 2, TinyLlama, Mistral 7B, Yi or Gemma: "
            "only byte-level BPE is read; take a model that has one, for example Llama 3.x, "
            "Qwen2.5, Qwen3 or SmolLM2")
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    odd = [f"{option} {model[option]!r}" for option in options if model.get(option)]
    if kind != "BPE" or odd:
        raise ValueError(f"model {', '.join([kind, *odd])}: only plain byte-level BPE is read")


def run_merges(name, merges):
    """Merges the characters of a token as HF does: the adjacent pair of lowest index first, then
    the leftmost. merges: {(left, right): index}. Returns the index of the last merge, and the
    number of parts that are left: 1 for a token that the merges build."""
    parts, last, none = list(name), -1, float("inf")
    while len(parts) > 1:
        found = [merges.get(pair, none) for pair in zip(parts, parts[1:])]
        first = min(found)
        if first == none:
            break
        last, i = first, found.index(first)
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return last, len(parts)


def read_bpe(spec, token_bytes, added, pattern):
    """The BPE of tokenizer.json as (tiktoken.Encoding, ids): ids[r] is HF's id of the Encoding's
    rank r, None for a byte without a token.

    HF merges by index of the merge, tiktoken by rank of the merged bytes. As long as no merge has
    crossed the edges of a stretch of text, the merges inside it are those of the stretch alone; so
    a token, wherever it stands, is completed by one and the same merge, the last one of its own
    bytes. The index of that merge is its rank, and tokens that the merges do not build have none:
    then both do the same. With ignore_merges a piece that is a token as a whole is looked up
    (tiktoken always does that), so those tokens need a rank too. That is right unless merging
    leaves such a token in two parts, which tiktoken would join. Added tokens have no rank: they
    are not text.
    """
    model, vocab = spec["model"], spec["model"]["vocab"]
    # written "A B" or ["A", "B"]; of a pair that is listed twice HF takes the last
    merges = {tuple(pair.split(" ") if isinstance(pair, str) else pair): i
              for i, pair in enumerate(model["merges"])}
    built, other = [], []
    for name in vocab:
        if len(name) > 1 and name not in added and name in token_bytes:
            last, parts = run_merges(name, merges)
            if parts == 2 and model.get("ignore_merges"):
                raise ValueError(f"the token {name!r} is not built by the merges, but tiktoken "
                                 "would build it")
            built += [(last, name)] if parts == 1 else []
            other += [name] if parts > 1 and model.get("ignore_merges") else []
    ranked = [name for _, name in sorted(built)] + other
    ranks = {bytes([b]): b for b in range(256)}
    ranks |= {token_bytes[name]: 256 + r for r, name in enumerate(ranked)}
    ids = [vocab.get(ALPHABET[b]) for b in range(256)] + [vocab[name] for name in ranked]
    try:
        encoding = tiktoken.Encoding("hf", pat_str=pattern, mergeable_ranks=ranks,
                                     special_tokens={})
    except ValueError as error:
        raise ValueError(f"pre_tokenizer pattern {pattern!r}: {error}") from None
    return encoding, ids


def read_added(spec):
    """The added tokens, special or not, as {content: entry of tokenizer.json}."""
    vocab, added = spec["model"]["vocab"], {}
    highest = len(vocab) - 1
    for token in spec.get("added_tokens") or []:
        content = token["content"]
        if token.get("single_word"):
            raise ValueError(f"added token {content!r}: single_word is not supported")
        # HF numbers them itself, in this order, whatever the file says
        expected = vocab.get(content, highest + 1)
        if token["id"] != expected:
            raise ValueError(f"added token {content!r} has id {token['id']}, "
                             f"but HF gives it {expected}")
        highest = max(highest, expected)
        added[content] = token
    return added


def read_bos(spec):
    """The ids that the post-processor puts in front of a text."""
    for step in steps(spec.get("post_processor"), "processors"):
        if step["type"] == "TemplateProcessing":
            front = itertools.takewhile(lambda item: "SpecialToken" in item, step["single"])
            tokens = [step["special_tokens"][item["SpecialToken"]["id"]] for item in front]
            return tuple(i for token in tokens for i in token["ids"])
    return ()


class Tokenizer:
    """A tokenizer folder.

    eos_ids: all ids that end a turn; eos_id: the one of them to write; pad_id; bos_ids: what HF
    puts in front of a text that is not a chat (a chat template writes BOS itself); vocab_size:
    highest id + 1; has_chat_template; folder: where its files are, the adapter's folder if that
    brings its own (of_adapter); encoding: tiktoken's, whose ranks are not the ids.
    """

    @classmethod
    def from_pretrained(cls, folder, adapter=None):
        """The tokenizer of a model's folder, or of its adapter's, as __init__ says."""
        return cls(folder, adapter)

    def __init__(self, folder, adapter=None):
        """Opens a model's folder; files of a tokenizer in the folder of an adapter take the place
        of the model's. FileNotFoundError or ValueError when there is none, a file is broken, or
        HF's ids cannot be promised."""
        check_model_folder(folder)
        self._folders = [Path(f) for f in (adapter, folder) if f]
        self.folder = next((f for f in self._folders if any((f / n).exists() for n in FILES)),
                           Path(folder))
        self.of_adapter = self.folder == self._folders[0] != self._folders[-1]
        path = self._find("tokenizer.json")
        if not path.exists():
            other = path.with_name("tokenizer.model")
            found = ", only tokenizer.model" if other.exists() else ""
            if path.with_name("vocab.json").exists() and path.with_name("merges.txt").exists():
                found = (", only vocab.json and merges.txt (transformers makes it: AutoTokenizer."
                         "from_pretrained(DIR).save_pretrained(DIR))")
            raise FileNotFoundError(f"{path.parent}: no tokenizer.json there{found}; give a folder "
                                    "in Hugging Face format with a byte-level BPE, for example of "
                                    "Llama 3.x, Qwen2.5, Qwen3 or SmolLM2")
        spec = read_json(path)
        try:
            self._read_spec(spec)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path}: not the structure of a byte-level BPE: "
                             f"{type(error).__name__}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        self._read_config()

    def _find(self, name):
        """The path of a file: the adapter's, else the model's."""
        return next((f / name for f in self._folders if (f / name).exists()),
                    self._folders[-1] / name)

    def _read_spec(self, spec):
        """Everything that tokenizer.json says."""
        refuse_other_kinds(spec)
        vocab = spec["model"]["vocab"]
        token_bytes = {name: bytes(BYTE_OF[c] for c in name) for name in vocab
                       if BYTE_OF.keys() >= set(name)}
        self.added = read_added(spec)
        pattern, self._cuts = read_cuts(spec.get("pre_tokenizer"))
        self.encoding, self._ids = read_bpe(spec, token_bytes, self.added, pattern)
        self.bos_ids = read_bos(spec)
        self._forms = [s["type"] for s in steps(spec.get("normalizer"), "normalizers")]
        if set(self._forms) - {"NFC", "NFD", "NFKC", "NFKD"}:
            raise ValueError(f"normalizer {self._forms}: only Unicode normal forms such as NFC "
                             "are supported")
        self._bytes = {i: token_bytes.get(name) or name.encode() for name, i in vocab.items()}
        self._bytes |= {t["id"]: content.encode() for content, t in self.added.items()}
        self._id_of = vocab | {content: t["id"] for content, t in self.added.items()}
        self.vocab_size = max(self._bytes, default=-1) + 1
        # HF looks for added tokens twice: for those not "normalized" in the text as it is, then
        # for the others in the normalized text.
        self._finders = []
        for normalized, prepare in ((False, str), (True, self._normalize)):
            ids = {prepare(content): t["id"] for content, t in self.added.items()
                   if bool(t.get("normalized")) == normalized}
            if ids:
                self._finders.append((prepare, ids, any_of(ids)))
        self._lstrip = {t["id"] for t in self.added.values() if t.get("lstrip")}
        self._rstrip = {t["id"] for t in self.added.values() if t.get("rstrip")}

    def _read_config(self):
        """The named tokens, eos_ids, pad_id and the chat template, from the other files."""
        names = ("special_tokens_map.json", "tokenizer_config.json", "generation_config.json",
                 "config.json")
        old, config, generation, model = (read_json(self._find(name), {}) for name in names)
        tokens = {name: token.get("content") if isinstance(token, dict) else token
                  for name, token in (old | config).items() if name in NAMED and token}

        def named(name):
            """The id of a named token, in a list; [] if there is none."""
            if name not in tokens:
                return []
            if not isinstance(tokens[name], str) or tokens[name] not in self._id_of:
                raise ValueError(f"{self.folder}: {name} is {tokens[name]!r}, which is no token of "
                                 "tokenizer.json")
            return [self._id_of[tokens[name]]]

        def listed(key, config):
            """The ids that a file gives: one, several, or none."""
            found = config.get(key)
            found = found if isinstance(found, list) else [] if found is None else [found]
            if not all(type(i) is int and i >= 0 for i in found):
                raise ValueError(f"{self.folder}: {key} is {config[key]!r}: expected an id or a "
                                 "list of ids")
            return found

        template = next((t for f in self._folders if (t := read_template(f))), None)
        self._template = ChatTemplate(self.folder, template, tokens)
        self.has_chat_template = bool(template)
        own = named("eos_token")
        eos = listed("eos_token_id", generation) + listed("eos_token_id", model) + own
        turn = turn_end(self._template, self._parts) if template else None
        special = {t["id"] for t in self.added.values() if t.get("special")}
        special -= {*self.bos_ids, self._id_of.get(tokens.get("bos_token"))}
        end = [turn] if turn in eos or turn in special else []
        self.eos_ids = tuple(dict.fromkeys(eos + end))
        self.eos_id = [*end, *own, *eos, None][0]  # the one that a demonstration ends with
        self.pad_id = [*named("pad_token"), *listed("pad_token_id", model), *self.eos_ids, 0][0]

    def _normalize(self, text):
        for form in self._forms:
            parts = NEWER_MARKS.split(text)  # odd parts are newer
            text = "".join(p if i % 2 else unicodedata.normalize(form, p)
                           for i, p in enumerate(parts))
        return text

    def _plain(self, text):
        """Ids of text in which nothing is a control token."""
        text = self._normalize(text)
        try:
            text.encode()  # tiktoken would replace a lone surrogate
            found = pieces(text, self._cuts) if self._cuts else [text]
            ranks = {piece: self.encoding.encode_ordinary(piece) for piece in set(found)}
            ids = [self._ids[rank] for piece in found for rank in ranks[piece]]
        except UnicodeEncodeError as error:
            raise ValueError(f"text has a lone surrogate {text[error.start]!r} at position "
                             f"{error.start}: not a character") from None
        except BaseException as error:
            # tiktoken's regex engine panics, which is no Exception, at a million spaces
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"tiktoken cannot split this text of {len(text)} characters: "
                             "too long a run of one kind") from None
        if None in ids:
            missing = bytes(sorted({b for b in text.encode() if self._ids[b] is None}))
            raise ValueError(f"{self.folder}: the vocabulary has no tokens for the bytes "
                             f"{missing!r} of the text")
        return ids

    def _parts(self, text, back=()):
        """Text as a list of stretches (str) and the ids of the added tokens between them. `back`
        is a table that the stretches are translated with after tokens were looked for."""
        parts = [text]
        for prepare, ids, pattern in self._finders:
            split = [[p] if isinstance(p, int) else pattern.split(prepare(p)) for p in parts]
            # odd pieces are tokens
            parts = [ids[p] if i % 2 else p for found in split for i, p in enumerate(found)]
        for i, part in enumerate(parts):
            if isinstance(part, str):
                part = part.translate(back) if back else part
                part = part.rstrip(SPACES) if {*parts[i + 1:i + 2]} & self._lstrip else part
                parts[i] = part.lstrip(SPACES) if i and parts[i - 1] in self._rstrip else part
        return parts

    def encode(self, text, allow_special=False):
        """Ids of text, without BOS. Added tokens written in the text become their ids only if
        allow_special (as in HF), else they are plain text. ValueError for text that is not Unicode
        or has a byte that the vocabulary lacks."""
        return self._join(self._parts(text) if allow_special else [text])

    def _join(self, parts):
        return [i for p in parts for i in ([p] if isinstance(p, int) else self._plain(p))]

    def decode(self, ids):
        """Text of ids, control tokens included. Ids without a token are empty text, a cut
        character is U+FFFD. Decode a completion as a whole: characters can be split over tokens."""
        text = b"".join(self._bytes.get(int(i), b"") for i in ids)
        return text.decode("utf-8", errors="replace")

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
        return self._join(self._parts(masked, back))
