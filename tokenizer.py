"""A Hugging Face tokenizer folder as a tiktoken Encoding, and its chat template.

    tokenizer = Tokenizer.from_pretrained("Qwen2.5-3B-Instruct")     # tokenizer.json, tokenizer_config.json
    ids = tokenizer.chat_ids([{"role": "user", "content": "What is 6*7?"}])
    text = tokenizer.decode(ids)

tokenizer.json must hold a byte-level BPE (GPT-2, Llama 3, Qwen, Mistral Nemo ...); the ids are those of the `tokenizers` library, and a file
for which that cannot be promised is refused. Text from data never becomes a control token: only the chat template puts those.
"""
import datetime
import functools
import itertools
import json
import re
import shutil
import sys
import unicodedata
from pathlib import Path

import jinja2
import numpy as np
import tiktoken
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"     # what ByteLevel(use_regex=true) splits with
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json", "vocab.json",
         "merges.txt", "added_tokens.json")
LONGEST_RUN = 400_000       # characters; the regex engine's stack ends at about a million
TEMPLATE_STEPS = 3_000_000  # executed lines; a long chat takes some thousands

# The byte-level alphabet: each byte is written as one printable character, itself where it is one, else chr(256), chr(257), ...
_VISIBLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
ALPHABET = {b: chr(b) for b in _VISIBLE} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in _VISIBLE)}
_TO_BYTE = dict.fromkeys(range(256), 0xFFFF) | {ord(c): b for b, c in ALPHABET.items()}     # 0xFFFF: not a character of the alphabet


def read_json(path, default=None):
    """The object of a JSON file; default when the file is missing. ValueError names a broken file."""
    if not path.exists():
        return default
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:         # also covers bytes that are not UTF-8
        raise ValueError(f"{path}: broken JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value


def steps(node, key):
    """The steps of a normalizer, pre-tokenizer or post-processor: none, one, or those of a Sequence."""
    if node is None:
        return []
    return [s for child in node[key] for s in steps(child, key)] if node["type"] == "Sequence" else [node]


# ----------------------------------------------------------------------------------------------------------------------------------------
# tokenizer.json -> tiktoken

def split_pattern(pre_tokenizer):
    """The regex that cuts text into pieces before BPE, as tiktoken's engine reads it. ValueError for a pre-tokenizer that is not one regex."""
    found = steps(pre_tokenizer, "pretokenizers")
    names = [s["type"] for s in found]
    if names not in (["ByteLevel"], ["Split", "ByteLevel"]):
        raise ValueError(f"pre_tokenizer steps {names}: only ByteLevel, or one Split and then ByteLevel, can be one tiktoken pattern")
    if found[-1].get("add_prefix_space"):
        raise ValueError("pre_tokenizer ByteLevel with add_prefix_space: not supported, text would not decode to itself")
    if names == ["ByteLevel"]:
        return GPT2_PATTERN if found[0].get("use_regex", True) else r"[\s\S]+"
    split = found[0]
    if found[1].get("use_regex", True) or split["behavior"] != "Isolated" or split.get("invert") or "Regex" not in split["pattern"]:
        raise ValueError("pre_tokenizer: only a Split by Regex, Isolated and not inverted, and then ByteLevel with use_regex false is supported")
    pattern = split["pattern"]["Regex"]
    # HF's engine is Oniguruma (Ruby syntax), tiktoken's is Rust's. Take only what both read alike: {1,3}+ $ ^ \w \b (?m) and others they do not.
    rest = re.sub(r"\\(?:[pP]\{\w+\}|[sSdDnrtf]|u[0-9A-Fa-f]{4}|[^\w\s])", "a", pattern)
    odd = re.search(r"&&|--|~~|\}\+|\{,", rest)
    rest = re.sub(r"\(\?(?:i:|:|>|=|!|<=|<!)", "(", re.sub(r"\[\^?[^\[\]]+\]", "a", rest))
    if odd or re.search(r"[\\\[\]^$]|\(\?", rest):
        raise ValueError(f"pre_tokenizer pattern {pattern!r}: has a part that tiktoken's regex engine may read differently")
    return rf"(?:{pattern})|(?:(?!{pattern})[\s\S])+"       # HF keeps text between two matches as a piece, tiktoken would drop it


def run_merges(tokens, byte_ids, merges):
    """Runs the merges on the bytes of every token, as HF does: again and again the adjacent pair of lowest merge index, leftmost first.

    tokens: list of N byte strings; byte_ids (256,) id of each byte, -1 for none; merges (M, 3) ids left, right, product.
    Returns (N,) the index of the last merge and (N,) the number of parts left: 1 for a token that the merges build.
    """
    base = int(merges.max(initial=0)) + 2
    keys = merges[:, 0] * base + merges[:, 1]  # (M,)
    order = np.argsort(keys, kind="stable")
    keys = np.append(keys[order], -1)          # the sentinel at index -1 answers for keys below the first
    order = np.append(order, len(merges))

    def index_of(left, right):
        at = np.searchsorted(keys[:-1], left * base + right, side="right") - 1      # of a pair listed twice HF takes the last
        return np.where((keys[at] == left * base + right) & (left >= 0) & (right >= 0), order[at], len(merges))

    lengths = np.array([len(t) for t in tokens])                            # (N,)
    last, left_over = np.full(len(tokens), -1), lengths.copy()
    parts = byte_ids[np.frombuffer(b"".join(tokens), np.uint8)]             # (P,) of all tokens, one after the other
    owner = np.repeat(np.arange(len(tokens)), lengths)                      # (P,)
    merge = index_of(parts, np.roll(parts, -1))                             # (P,) merge of a part with its right neighbour
    while len(parts):
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        merge[np.append(starts[1:], len(parts)) - 1] = len(merges)          # a token's last part has no right neighbour
        best = np.minimum.reduceat(merge, starts)                           # (active tokens,)
        sizes = np.diff(np.append(starts, len(parts)))
        hit = np.flatnonzero((merge == np.repeat(best, sizes)) & (merge < len(merges)))
        hit = hit[np.diff(owner[hit], prepend=-1) != 0]                     # the leftmost of each token
        last[owner[hit]] = merge[hit]
        left_over[owner[hit]] -= 1
        parts[hit] = merges[merge[hit], 2]
        keep = np.repeat(best < len(merges), sizes)                         # tokens with nothing left to merge are done
        keep[hit + 1] = False
        changed = np.zeros(len(parts), bool)
        changed[hit] = changed[hit - 1] = True
        parts, owner, merge, changed = parts[keep], owner[keep], merge[keep], np.flatnonzero(changed[keep])
        merge[changed] = index_of(parts[changed], parts[(changed + 1) % max(len(parts), 1)])
    return last, left_over


def to_bytes(name):
    """The bytes that a token of the vocabulary stands for, None when it is not written in the byte-level alphabet."""
    try:
        return name.translate(_TO_BYTE).encode("latin-1")
    except UnicodeEncodeError:
        return None


def read_bpe(spec, token_bytes, added):
    """tokenizer.json's byte-level BPE as (tiktoken.Encoding, ids): HF's id of the Encoding's rank r is ids[r], None for a missing byte.

    HF merges by index of the merge, tiktoken by rank of the merged bytes. Both do the same when the rank of a token is the index of the merge
    that completes it, and the tokens that merging never builds have no rank: while no merge has crossed the borders of a stretch, the merges
    inside are those of the stretch alone, so a token is always completed by the same merge, the last one of its own bytes.
    With ignore_merges a piece that is a token is looked up whole (tiktoken always does), so the others need a rank too; this is
    exact unless two parts of such a token can stand side by side, where tiktoken would join them. Added tokens get none: they are not text.
    """
    model = spec["model"]
    if model.get("type", "BPE") != "BPE" or not isinstance(model["vocab"], dict):
        raise ValueError(f"model type {model.get('type')!r}: only byte-level BPE can be a tiktoken Encoding")
    for option in ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise ValueError(f"model.{option} is {model[option]!r}: tiktoken has no such thing")
    if any(s["type"] != "ByteLevel" for s in steps(spec.get("decoder"), "decoders")):
        raise ValueError(f"decoder {spec['decoder']['type']}: not the one of a byte-level BPE")
    pattern = split_pattern(spec.get("pre_tokenizer"))
    vocab = model["vocab"]
    if not all(type(i) is int and i >= 0 for i in vocab.values()) or len(set(vocab.values())) < len(vocab):
        raise ValueError("model.vocab: every token needs an id of its own, a whole number from 0")

    merges = []
    for i, pair in enumerate(model["merges"]):
        try:
            left, right = pair.split(" ") if isinstance(pair, str) else pair
            merges.append((vocab[left], vocab[right], vocab[left + right]))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"model.merges[{i}] is {pair!r}: expected 'LEFT RIGHT' or [LEFT, RIGHT], with both and LEFT+RIGHT in the vocabulary") from None
    merges = np.array(merges, np.int64).reshape(-1, 3)

    names = [name for name in vocab if len(name) > 1 and name not in added and name in token_bytes]
    tokens = [token_bytes[name] for name in names]
    byte_ids = np.array([vocab.get(ALPHABET[b], -1) for b in range(256)])
    last, left_over = run_merges(tokens, byte_ids, merges)
    ranked = [i for i in np.argsort(last, kind="stable") if left_over[i] == 1]
    if model.get("ignore_merges"):
        ranked += (rest := [i for i in range(len(tokens)) if left_over[i] > 1])
        if joined := [names[i] for i in rest if left_over[i] == 2]:
            raise ValueError(f"token {joined[0]!r} and {len(joined) - 1} others are not built by the merges, but tiktoken would join their two parts")
    ids = [None if i < 0 else int(i) for i in byte_ids] + [vocab[names[i]] for i in ranked]
    ranks = {bytes([b]): b for b in range(256)} | {tokens[i]: 256 + r for r, i in enumerate(ranked)}
    try:
        return tiktoken.Encoding("hf", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}), ids
    except ValueError as error:
        raise ValueError(f"pre_tokenizer pattern {pattern!r}: {error}") from None


def read_added(spec, config):
    """The added tokens as {content: (id, normalized)}, from tokenizer.json and, where it lacks them, tokenizer_config.json."""
    listed = list(spec.get("added_tokens") or [])
    known = {t["content"] for t in listed}
    decoder = config.get("added_tokens_decoder") or {}
    listed += [t | {"id": int(i)} for i, t in sorted(decoder.items(), key=lambda item: int(item[0])) if t["content"] not in known]
    vocab, added = spec["model"]["vocab"], {}
    for token in listed:
        for flag in ("lstrip", "rstrip", "single_word"):
            if token.get(flag):
                raise ValueError(f"added token {token['content']!r} has {flag}: not supported")
        # HF gives ids itself, in this order, whatever the file says
        after = max([len(vocab) - 1] + [i for i, _ in added.values()]) + 1
        expected = vocab[token["content"]] if token["content"] in vocab else after
        if token["content"] in added or token["id"] != expected or not token["content"]:
            raise ValueError(f"added token {token['content']!r} has id {token['id']}, but a reader of the file in order would give it {expected}")
        added[token["content"]] = token["id"], bool(token.get("normalized"))
    return added


# ----------------------------------------------------------------------------------------------------------------------------------------
# chat templates

class Generation(Extension):
    """The {% generation %} block that marks assistant text in some templates: here just its content."""
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context, operator, left, right):
        """9**9**9 and 'x' * 10**10 would keep the machine busy for good, out of reach of the step limit."""
        size = max([len(x) for x in (left, right) if hasattr(x, "__len__")] or [0])
        if operator == "**" or size and size * max(x for x in (left, right, 1) if isinstance(x, int)) > 10**7:
            raise SecurityError(f"the template computes {operator} with a huge or unbounded result")
        return super().call_binop(context, operator, left, right)


def compile_template(source):
    """A jinja2 template set up as transformers does, except that the date is a constant: ids must not depend on the day."""
    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):     # jinja's own filter escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = datetime.datetime(2024, 7, 26).strftime      # "26 Jul 2024", the default date in Llama 3's template
    return env.from_string(source)


def run_limited(function):
    """Calls function; ValueError after TEMPLATE_STEPS lines of Python, so that nested loops cannot run for ever."""
    left = TEMPLATE_STEPS

    def count(frame, event, arg):
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"stopped after {TEMPLATE_STEPS} steps: the template is endless or far too slow")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        return function()
    finally:
        sys.settrace(before)


def map_text(value, change, key=None):
    """A copy of nested messages with every string changed, except roles and types: those belong to the caller, not to the data."""
    if isinstance(value, dict):
        return {k: map_text(v, change, k) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_text(v, change, key) for v in value]
    return change(value) if isinstance(value, str) and key not in ("role", "type") else value


# ----------------------------------------------------------------------------------------------------------------------------------------

class Tokenizer:
    """A tokenizer folder. Attributes: eos_ids (all ids that end a turn), pad_id, bos_ids (what HF puts in front of a text that is not a chat),
    vocab_size (highest id + 1), has_chat_template, folder, encoding (the tiktoken Encoding; its ranks are not always the ids)."""

    @classmethod
    def from_pretrained(cls, folder):
        """Opens a folder with tokenizer.json. FileNotFoundError when there is none, ValueError when tiktoken cannot give HF's ids."""
        return cls(folder)

    def __init__(self, folder):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        spec = read_json(path)
        if spec is None:
            raise FileNotFoundError(f"{self.folder}: no tokenizer.json there; give a folder in Hugging Face format")
        config = read_json(self.folder / "tokenizer_config.json", {})
        try:
            self.added = read_added(spec, config)
            token_bytes = {name: raw for name in spec["model"]["vocab"] if (raw := to_bytes(name)) is not None}
            self.encoding, self._ids = read_bpe(spec, token_bytes, self.added)
            self._bytes = {i: token_bytes.get(name) or name.encode() for name, i in spec["model"]["vocab"].items()}
            self._forms = [s["type"] for s in steps(spec.get("normalizer"), "normalizers")]
            if set(self._forms) - {"NFC", "NFD", "NFKC", "NFKD"}:
                raise ValueError(f"normalizer {self._forms}: only Unicode normal forms such as NFC are supported")
            first = [s for s in steps(spec.get("post_processor"), "processors") if s["type"] == "TemplateProcessing"][:1]
            front = itertools.takewhile(lambda item: "SpecialToken" in item, first[0]["single"] if first else [])
            self.bos_ids = tuple(i for item in front for i in first[0]["special_tokens"][item["SpecialToken"]["id"]]["ids"])
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path}: not the structure of a tokenizer.json: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        self._bytes |= {i: content.encode() for content, (i, _) in self.added.items()}
        self.vocab_size = max(self._bytes, default=-1) + 1
        # HF looks for added tokens twice: first for those that are not normalized, in the text as it is, then for the others, in normalized text
        self._finders = []
        for normalized in (False, True):
            ids = {self._normalize(c) if normalized else c: i for c, (i, n) in self.added.items() if n == normalized}
            longest_first = sorted(ids, key=len, reverse=True)
            self._finders.append((ids, re.compile(f"({'|'.join(map(re.escape, longest_first))})") if ids else None))
        self._read_named_tokens(config)

    def _read_named_tokens(self, config):
        generation, model = (read_json(self.folder / f, {}) for f in ("generation_config.json", "config.json"))
        named = {**(read_json(self.folder / "special_tokens_map.json", {})), **config}
        self._named = {n: t["content"] if isinstance(t, dict) else t for n in NAMED if (t := named.get(n)) is not None}
        contents = {token: i for i, token in self._bytes.items()}

        def ids(file, key, value):
            """The ids of a token name, an id, a list of ids, or None."""
            if isinstance(value, str):
                value = contents.get(value.encode(), value)
            for i in (found := [] if value is None else value if isinstance(value, list) else [value]):
                if type(i) is not int or i < 0:
                    raise ValueError(f"{self.folder / file}: {key} is {value!r}: not a token of tokenizer.json, an id, or a list of ids")
            return found

        named_id = functools.partial(ids, "tokenizer_config.json")
        self.eos_ids = tuple(dict.fromkeys(ids("generation_config.json", "eos_token_id", generation.get("eos_token_id"))
                                           + ids("config.json", "eos_token_id", model.get("eos_token_id"))
                                           + named_id("eos_token", self._named.get("eos_token"))))
        self.pad_id = (named_id("pad_token", self._named.get("pad_token"))
                       + ids("config.json", "pad_token_id", model.get("pad_token_id")) + [*self.eos_ids, 0])[0]
        template = config.get("chat_template") or read_json(self.folder / "chat_template.json", {}).get("chat_template")
        if (file := self.folder / "chat_template.jinja").exists():
            template = file.read_text(encoding="utf-8")
        self._templates = {"default": template} if isinstance(template, str) else {t["name"]: t["template"] for t in template or []}
        self.has_chat_template = bool(self._templates)

    def _normalize(self, text):
        for form in self._forms:
            text = unicodedata.normalize(form, text)
        return text

    def _plain(self, text):
        """Ids of text in which nothing is a control token. A run of more than LONGEST_RUN characters without, or of nothing but, white space
        is cut there: the only texts whose ids can differ from HF's."""
        text = self._normalize(text)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text has a lone surrogate at position {error.start}: {text[error.start]!r} is not a character") from None
        cuts = [0, len(text)]
        if len(text) > LONGEST_RUN:
            cuts[1:1] = [i for m in re.finditer(r"\s+|\S+", text) for i in range(m.start() + LONGEST_RUN, m.end(), LONGEST_RUN)]
        ids = [self._ids[rank] for start, end in itertools.pairwise(cuts) for rank in self.encoding.encode_ordinary(text[start:end])]
        if None in ids:
            missing = sorted({b for b in text.encode() if self._ids[b] is None})
            raise ValueError(f"the vocabulary of {self.folder} has no token for the bytes {bytes(missing)!r} of the text")
        return ids

    def _split(self, text):
        """Text as a list of stretches (str) and the ids of the added tokens between them."""
        parts = [text]
        for ids, pattern in self._finders:
            if pattern:
                found = [[p] if isinstance(p, int) else pattern.split(p if ids is self._finders[0][0] else self._normalize(p)) for p in parts]
                parts = [ids[p] if i % 2 else p for pieces in found for i, p in enumerate(pieces)]     # odd pieces are the tokens
        return parts

    def encode(self, text, allow_special=False):
        """Ids of text, without BOS. allow_special: added tokens written in the text become their ids, as in HF; else they are plain text.
        ValueError for text that is not Unicode or has a byte that the vocabulary lacks."""
        return [i for p in (self._split(text) if allow_special else [text]) for i in ([p] if isinstance(p, int) else self._plain(p))]

    def decode(self, ids):
        """Text of ids, control tokens included. Ids without a token are empty, a character cut in the middle is U+FFFD. Decode whole
        completions, not one id after the other."""
        return b"".join(self._bytes.get(int(i), b"") for i in ids).decode("utf-8", errors="replace")

    def chat(self, messages, add_generation_prompt=True, **template_variables):
        """messages (dicts with "role" and "content") as text, by the folder's chat template; template_variables such as date_string,
        enable_thinking or tools go to the template. ValueError when there is no template, or when it refuses the messages or fails."""
        if not self.has_chat_template:
            raise ValueError(f"{self.folder}: no chat template (chat_template in tokenizer_config.json, or chat_template.jinja)")
        if not isinstance(messages, (list, tuple)) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise ValueError(f"chat messages must be a list of dicts with a role and a content, got {messages!r:.200}")
        name = "tool_use" if template_variables.get("tools") and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ValueError(f"{self.folder}: chat templates are {sorted(self._templates)}, but none is called default")
        messages = [{k: v for k, v in m.items() if v is not None} for m in messages]     # as transformers: content None is no content
        variables = {"tools": None, "documents": None, **self._named, **template_variables}
        try:
            if name not in self.__dict__.setdefault("_compiled", {}):
                self._compiled[name] = compile_template(self._templates[name])
            template = self._compiled[name]
            return run_limited(lambda: template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables))
        except Exception as error:      # a template is a program: it can fail in any way
            raise ValueError(f"{self.folder}: chat template: {error or type(error).__name__}") from error

    def chat_ids(self, messages, add_generation_prompt=True, **template_variables):
        """Ids of chat(...), with added tokens only where the template puts them: such a token in the text of a message, or formed
        by the edges of two texts, stays plain text. BOS is there when the template writes it, once.

        How: the template is run again on messages whose characters are replaced, one for one, by private ones that occur nowhere. When that gives
        the same text but for the replacement, what is private came from the messages. A template that trims gives the same text only if white
        space is left; one that looks for a token in the messages (Qwen3 cuts at </think>) only if that token is left, or marked at one side.
        """
        def render(change):
            number = itertools.count()
            return self.chat(map_text(messages, lambda s: change(next(number), s)), add_generation_prompt, **template_variables)

        texts = []
        plain = render(lambda n, s: texts.append(s) or s)
        used = set().union(plain, *texts, *self.added)
        private = (chr(c) for c in itertools.chain(range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)) if chr(c) not in used)
        mark = next(private, "")
        hidden = {ord(c): p for c, p in zip(sorted(set().union(*texts)), private)}
        if len(hidden) < len(set().union(*texts)):
            raise ValueError("the messages use up all private characters of Unicode")
        back = {ord(p): c for c, p in hidden.items()}

        def try_hiding(change, tokens=()):
            """The text with private characters, or None when the template's decisions changed."""
            try:
                text = render(change)
            except ValueError:
                return None
            for t in tokens:
                text = text.replace(t + mark, t.translate(hidden)).replace(mark + t, t.translate(hidden))
            text = text.replace(mark, "")
            return text if text.translate(back) == plain else None

        visible = {c: p for c, p in hidden.items() if not chr(c).isspace()}
        masked = try_hiding(lambda n, s: s.translate(hidden)) or try_hiding(lambda n, s: s.translate(visible))
        if masked is None:
            masked, forms = plain, {}
            any_token = re.compile("|".join(map(re.escape, sorted(self.added, key=len, reverse=True))) or r"(?!)")
            for place in dict.fromkeys((n, t) for n, s in enumerate(texts) for t in any_token.findall(s)):
                for form in (place[1].translate(hidden), place[1] + mark, mark + place[1]):
                    trial = forms | {place: form}
                    text = try_hiding(lambda n, s: any_token.sub(lambda m: trial.get((n, m[0]), m[0]), s), [t for _, t in trial])
                    if text is not None:
                        masked, forms = text, trial
                        break
        return [i for p in self._split(masked) for i in ([p] if isinstance(p, int) else self._plain(p.translate(back)))]

    def save_pretrained(self, folder):
        """Copies the tokenizer's files, byte for byte, and generation_config.json (it holds end-of-turn ids) if the folder has none."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in FILES + ("generation_config.json",):
            source, target = self.folder / name, Path(folder) / name
            if source.exists() and not (target.exists() and (target.samefile(source) or name == "generation_config.json")):
                shutil.copyfile(source, target)


# ----------------------------------------------------------------------------------------------------------------------------------------
# the tokenizer of the default run

BYTE_MERGES = "r e|a s|o n|re as|reas on|i n|in g|a n|s w|e r|an sw|answ er|< /".split("|")
BYTE_SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
BYTE_TEMPLATE = """{%- for message in messages -%}
    {%- if message.role == 'user' -%}{{ '<|user|>' + message.content }}
    {%- elif message.role == 'assistant' -%}{{ '<|assistant|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'system' and loop.first -%}{{ message.content }}
    {%- else -%}{{ raise_exception('a chat has user and assistant messages, and a system message only at its start') }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"""


def write_byte_tokenizer(folder):
    """Writes the tokenizer of the default run as a Hugging Face folder: ids 0-255 are the bytes, then come the pieces `reason`, `ing`, `answer`
    and `</` with what they are built of, then <|end|> (ends a turn, pads), <|user|> and <|assistant|>: 272 ids."""
    vocab = {ALPHABET[b]: b for b in range(256)} | {m.replace(" ", ""): 256 + i for i, m in enumerate(BYTE_MERGES)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    spec = {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": len(vocab) + i, "content": token, **flags} for i, token in enumerate(BYTE_SPECIAL)],
            "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": BYTE_MERGES}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>", "clean_up_tokenization_spaces": False,
              "model_max_length": 10**9, "chat_template": BYTE_TEMPLATE}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, value in (("tokenizer.json", spec), ("tokenizer_config.json", config)):
        (Path(folder) / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
