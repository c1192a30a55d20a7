"""How a byte-level tokenizer cuts text into pieces before BPE: the pre_tokenizer of tokenizer.json.

Its steps run one after the other, each on the pieces of the one before. HF's regex engine is
Oniguruma; tiktoken's is Rust's, with the same version of Unicode. A pattern is taken only if both
read it alike. A single cut is left to tiktoken. A chain of cuts runs here, with Python's `regex`
(which comes with tiktoken), kept to the Unicode that tiktoken knows.
"""
import functools
import re

import regex
import tiktoken

SECONDS = 1.0  # that one pattern may take on one piece
WHOLE = r"[\s\S]+"
GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
        r"|\s+(?!\S)|\s+")

# HF's steps Digits and Punctuation do not use the regex engine: the first has the numbers of
# Unicode 17, the second the punctuation of Unicode 8.
NUMBER = "[\\p{N}\U00011de0-\U00011de9\U00016ff4-\U00016ff6]"
PUNCTUATION = (
    "[\\p{P}!-/:-@\\[-`{-~\u166d\U000111c9--[\u061d\u09fd-\u0a76\u0c77-\u0c84\u1b4e\u1b4f"
    "\u1b7d-\u1b7f\u2e43-\u2e63\U00010d6e-\U00010f89\U000113d4-\U0001145d\U00011660-\U000116b9"
    "\U0001183b-\U00011fff\U00012ff1\U00012ff2\U00016d6d-\U00016fe2\U0001e5ff-\U0001e95f]]")
SINGLE = {"Digits": NUMBER, "Punctuation": PUNCTUATION}

NEWEST = "\U0001fae9"  # a character of Unicode 16, the version of tiktoken and HF

# What may stand in a pattern: escapes and categories that all three engines read alike.
SCRIPTS = "Han|Hiragana|Katakana|Hangul|Latin|Greek|Cyrillic|Arabic|Hebrew|Thai|Devanagari"
ESCAPE = rf"\\(?:[pP]\{{(?:[CLMNPSZ][a-z]?|{SCRIPTS})\}}|[sSdDnrtf]|u[0-9A-Fa-f]{{4}}|[^\w\s<>])"
SET = r"\[\^?[^\[\]]+\]"
SHORT = r"'?(?:\[[dmst]+\]|[dmst]|ll|re|ve)"
CONTRACTIONS = rf"\(\?i:{SHORT}(?:\|{SHORT})*\)"
# {1,3}+ is possessive in one engine and a repeat of a repeat in the other, {2}? and {,2} too
ODD = r"[\\\[\]^]|\(\?|\}[?*+{]|[?*+]\{|[?*+]{3}|\{(?!\d+(?:,\d*)?\})"


def steps(node, key):
    """The steps of a normalizer, pre-tokenizer, post-processor or decoder: none, one, or those of
    a Sequence."""
    if node is None:
        return []
    if node["type"] != "Sequence":
        return [node]
    return [step for child in node[key] for step in steps(child, key)]


def read_cuts(pre_tokenizer):
    """(pattern, cuts) of a pre-tokenizer: the regex for tiktoken, and what `pieces` must do before
    it, [] where the regex does all. ValueError when it cannot be promised that the pieces are
    HF's."""
    cuts = list_cuts(pre_tokenizer)
    pattern, between, matches = cuts[0] if cuts else (WHOLE, False, True)
    if len(cuts) < 2 and matches:
        # text between two matches is a piece too; tiktoken would drop it
        return rf"(?:{pattern})|(?:(?!{pattern})[\s\S])+" if between else pattern, []
    if regex.match(r"\p{Cn}", NEWEST):
        raise ValueError("needs a newer regex package: pip install --upgrade regex")
    for pattern, *_ in cuts:
        if odd := re.search(r"\\(?:P|D|p\{(?:C\w?|Ll|Lo)\})", pattern):
            raise ValueError(f"pre_tokenizer pattern {pattern!r} in a chain of steps: "
                             f"{odd[0]} is not the same in all versions of Unicode")
    return WHOLE, cuts


def list_cuts(pre_tokenizer):
    """The steps of a pre-tokenizer as [(pattern, between, matches), ...]: whether the text between
    two matches is a piece, and whether a match is one."""
    found = steps(pre_tokenizer, "pretokenizers")
    names = [step["type"] for step in found]
    if names[-1:] != ["ByteLevel"] or "ByteLevel" in names[:-1]:
        raise ValueError(f"pre_tokenizer steps {names}: expected ByteLevel as the last one")
    cuts = []
    for step in found:
        kind, behavior = step["type"], step.get("behavior", "Isolated")
        if kind == "Split" and behavior in ("Isolated", "Removed") and "Regex" in step["pattern"]:
            both, invert = behavior == "Isolated", bool(step.get("invert"))
            pattern = split_pattern(step["pattern"]["Regex"])
            cuts.append((pattern, both or not invert, both or invert))
        elif kind in SINGLE and behavior in ("Isolated", "Contiguous"):
            together = behavior == "Contiguous" or not step.get("individual_digits", True)
            cuts.append((SINGLE[kind] + ("+" if together else ""), True, True))
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            cuts += [(GPT2, True, True)] if step.get("use_regex", True) else []
        else:
            raise ValueError(f"pre_tokenizer step {step}: supported are Split (by Regex; Isolated, "
                             "Removed), Digits, Punctuation, and then ByteLevel without "
                             "add_prefix_space")
    return cuts


def split_pattern(pattern):
    """The regex of a Split, with its $ written so that all engines read it alike.
    ValueError names one that they may read differently, or that may match nothing at all."""
    atoms = re.sub(ESCAPE, "a", re.sub(CONTRACTIONS, "(?:a)", pattern))
    sets = re.findall(SET, atoms)
    atoms = re.sub(SET, "a", atoms)
    groups = re.sub(r"\(\?(?::|>|=|!|<=|<!)", "(", atoms)
    if any(re.search(r"&&|--|~~|\|\|", s) for s in sets) or re.search(ODD, groups):
        raise ValueError(f"pre_tokenizer pattern {pattern!r} has a part that tiktoken's regex "
                         "engine may read differently")
    try:
        # every atom is one letter now; what stands in a lookaround need not be there
        empty = regex.fullmatch(re.sub(r"\(\?<?[=!]", "(?:|", atoms), "")
    except regex.error as error:
        raise ValueError(f"pre_tokenizer pattern {pattern!r}: {error}") from None
    if empty:
        raise ValueError(f"pre_tokenizer pattern {pattern!r} may match between two characters")
    # HF's $ also stands before a newline
    return re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]|\$",
                  lambda m: "(?!.)" if m[0] == "$" else m[0], pattern)


# ---- a chain of cuts -----------------------------------------------------------------------------

# gives the bytes of the characters that HF and tiktoken do not know
UNASSIGNED = tiktoken.Encoding("unassigned", pat_str=r"\p{Cn}+", special_tokens={},
                               mergeable_ranks={bytes([b]): b for b in range(256)})


@functools.lru_cache(maxsize=256)
def compiled(pattern, newer):
    """The pattern for `regex`, where the characters `newer` are in no category."""
    if newer:
        pattern = re.sub(r"\\p\{\w+\}|\\d", lambda m: f"[{m[0]}--[{newer}]]", pattern)
    return regex.compile(pattern, regex.V1)


def pieces(text, cuts):
    """The pieces of text, one cut after the other. ValueError where a pattern takes too long."""
    newer = ""
    if not text.isascii():
        unassigned = bytes(UNASSIGNED.encode_ordinary(text)).decode()
        newer = "".join(sorted({c for c in unassigned if not regex.match(r"\p{Cn}", c)}))
    found = [text]
    try:
        for pattern, between, matches in cuts:
            pattern = compiled(pattern, newer)
            done = {piece: cut(piece, pattern, between, matches) for piece in set(found)}
            found = [part for piece in found for part in done[piece]]
    except TimeoutError:
        raise ValueError(f"pre_tokenizer pattern {pattern.pattern!r} takes too long on this text "
                         f"of {len(text)} characters: too long a run of one kind") from None
    return found


def cut(text, pattern, between, matches):
    """The pieces of one cut: what lies between two matches of pattern, the matches, or both."""
    found, end = [], 0
    for match in pattern.finditer(text, timeout=SECONDS):
        found += [text[end:match.start()]] if between else []
        found += [match[0]] if matches else []
        end = match.end()
    found += [text[end:]] if between else []
    return [piece for piece in found if piece]
