"""
Rewards by rule: is the completion in the format, and is its answer equal to the gold answer?

    format_reward(text)          0, 1, 1.5 or 10     the tags
    accuracy_reward(text, gold)  0 or 10             the answer, only in the right format
    extract_answer(text)         the answer as text, or None
    answers_equal(pred, gold)    True or False, exact: as normalised text, or as rational numbers

All are pure functions of strings. Pass the completion alone, never the prompt (its instructions name the tags). No text is ever evaluated:
numbers are read digit by digit into fractions.Fraction, nothing is summed, expanded or solved, and all runs in linear time on any text.
A doubtful answer is refused: a reward that pays for wrong answers does more harm than one that misses an odd spelling of a right one.

An answer goes through one pipeline:
    clean   wrappers, units, currency, spacing and spelling variants of LaTeX go, the same way for prediction and gold
    parse   into lists, tuples, intervals, sets, unions, matrices, relations; at the bottom sums of terms (Fraction, text)
    same    compare the two trees
Run this file for a table of hard cases: python rewards.py
"""
import re
from fractions import Fraction

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
LONGEST = 1000   # characters; a longer answer is compared as it stands (the longest gold answer of MATH has 159)
DEEPEST = 12     # nested brackets; what lies deeper is compared as text


def format_reward(text):
    """Reward for the format, as in the GTPO paper: 10.0, 1.5, 1.0 or 0.0.

    10.0  `<reasoning>..</reasoning>` and then `<answer>..</answer>`: each of the four tags exactly once, in this order, nothing but white
          space after the last. Text before and between the blocks is allowed (the authors' code pays it too).
    1.5   only one block is right, and a tag of the other one is present. Both blocks in the wrong order, or text after the end, also get this.
    1.0   only one block is right, with no tag of the other.
    0.0   neither block is right. A block is right when its two tags occur exactly once each, in order; the answer block must end the text.
    """
    start, end, answer_start, answer_end = (text.find(tag) if text.count(tag) == 1 else -1 for tag in TAGS)
    reasoning = 0 <= start < end
    answer = 0 <= answer_start < answer_end and not text[answer_end + len(TAGS[3]):].strip()
    if reasoning and answer and end < answer_start: return 10.0
    if not reasoning and not answer: return 0.0
    return 1.5 if any(tag in text for tag in (TAGS[2:] if reasoning else TAGS[:2])) else 1.0


def accuracy_reward(text, gold):
    """10.0 when the completion has the full format and the answer in its answer block equals gold, else 0.0. An unreadable gold pays nobody."""
    return 10.0 if format_reward(text) == 10.0 and answers_equal(extract_answer(text), gold) else 0.0


# ---------------------------------------------------------------------------------------------------------------------------------------
# find the answer

def last_boxed(text):
    """Content of the last \\boxed{...} or \\fbox{...} with balanced braces (or `\\boxed 2`), the innermost of nested ones; None if there is none."""
    best, at, opened = None, -1, []                      # opened: for each open brace, the start of a box's content, or None
    for m in re.finditer(r"\\?\\(?:boxed|fbox)(?:\s*(\{)|\s+([^\s{}$\\]+)|(?=\W))|\\.|[{}]", text, re.S):
        if m[2]: best, at = m[2].rstrip(".,;"), m.start()
        elif m[0][-1] == "{" and m[0] != "\\{": opened.append(m.end() if m[1] else None)
        elif m[0] == "}" and opened:
            begin = opened.pop()
            if begin is not None and begin > at and text[begin:m.start()].strip(): best, at = text[begin:m.start()].strip(), begin
    return best


def extract_answer(text):
    """The final answer of a completion, or None: the last complete <answer> block (or the \\boxed{} in it), else the last \\boxed{...}.

    A number elsewhere is never taken, and neither is a box in the reasoning (before </reasoning> or </think>, or in a block that never ends)."""
    block, begin = None, None
    for m in re.finditer("</?answer>", text):
        if m[0] == "<answer>": begin = m.end()
        elif begin is not None: block, begin = text[begin:m.start()], None
    if block is not None: return last_boxed(block) or block.strip() or None
    for name in ("reasoning", "think"):
        if text.rfind(f"<{name}>") > text.rfind(f"</{name}>"): return None
        text = text.rpartition(f"</{name}>")[2]
    return last_boxed(text)


# ---------------------------------------------------------------------------------------------------------------------------------------
# clean: one spelling for everything

UNICODE = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "√": "\\sqrt ", "°": "", "²": "^2", "³": "^3", "\u00a0": " ",
                         "½": "\\frac12", "¼": "\\frac14", "¾": "\\frac34", "€": "$", "£": "$", "¥": "$"})
NAMED = {"pi": "π", "infty": "∞", "cup": "∪", "in": "∈", "le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥",
         "lt": "<", "gt": ">", "ne": "≠", "neq": "≠", "approx": "≈", "pm": "±", "mp": "∓", "cdot": "*", "times": "*", "dfrac": "\\frac",
         "tfrac": "\\frac", "cfrac": "\\frac", "varnothing": "∅", "emptyset": "∅", "lbrace": "⦃", "rbrace": "⦄", "quad": " ", "qquad": " ",
         **dict.fromkeys("left right big Big bigg Bigg bigl bigr Bigl Bigr displaystyle textstyle degree".split(), ""),
         **dict.fromkeys("textbf textit textrm textnormal texttt textsf mathrm mathbf mathit mathsf mbox operatorname".split(), "\\text")}
END = r"(?=\s*(?:[,;)\]⦄=<>≤≥≈]|$))"                    # where an element of an answer ends
THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
RULES = [(re.compile(pattern), to) for pattern, to in (
    (r"</?answer>", ""),                                                   # <answer>5</answer> -> 5
    (r"(?i)^\s*(?:(?:so|thus|hence|therefore)\b,?\s*)?(?:the\s+)?(?:final\s+)?(?:answer|solution)\b(?:\s+is\b)?\s*:?", ""),  # the answer is 5 -> 5
    (r"\\([a-zA-Z]+)", lambda m: NAMED.get(m[1], m[0])),                   # \le -> ≤, \dfrac -> \frac, \left( -> (, \mbox -> \text
    (r"\\text\s+\{", r"\\text{"),
    (r"\\\{", "⦃"), (r"\\\}", "⦄"),                                        # braces of a set, apart from those of TeX
    (r"<=", "≤"), (r">=", "≥"), (r"(?<![0-9])!=", "≠"),
    (r"(?<=[0-9])(?:,\s*\\!|\\[!, ]|\{,\})\s*(?=[0-9]{3}(?![0-9]))", ""),  # 10,\!000 and 10{,}000 and 10\,000 -> 10000
    (r"\\!", ""), (r"\\[,;: ]|~", " "),                                    # spacing
    (r"\\?\$|\\[()\[\]]", " "),                                             # $5 and \$5 -> 5; $..$, \(..\), \[..\]
    (r"\\?%|\^\s*(?:\\circ|\{\s*\\circ\s*\})", " "),                        # 5\% and 5^\circ -> 5
    (r"(?i)(?<=[0-9])\s*([ap])\.?m\b\.?", lambda m: m[1].lower() + "m"),   # 1:03 P.M. -> 1:03pm
    (r"[\s.,;:\\]+$", ""),                                                 # 45. -> 45
    (r"\s*,?\s*(?:\\text\{[\s,]*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*", ","),  # 1 and 2 -> 1,2
    (r"(?<=[0-9}π])(\s*)(?:\\text\{([^{}]*)\}|([A-Za-z][A-Za-z./ -]*))(?:\^\s*\{?[23]\}?)?" + END, lambda m: drop_unit(m)),  # 10 feet -> 10
    (r"\\text\{([^{}]*)\}", r" \1 "),                                      # \text{Even} -> Even
    (r"(?<![A-Za-z\\])sqrt", r"\\sqrt "), (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),   # sqrt(3) -> \sqrt{3}
    (r"^[^(\[⦃{][^(\[⦃]*\Z", lambda m: THOUSANDS.sub(lambda n: n[0].replace(",", ""), m[0])),   # 2,125 -> 2125, but (2,125) is a pair, as is 2, 125
    (r"\s+", " "), (r"(?<![0-9.]) | (?![0-9.])", ""),                                   # spaces, but not those between two digits
    (r"(?<=[0-9A-Za-zπ)}])\*(?=[A-Za-zπ(]|\\(?!frac))(?![eE][0-9])", ""),  # 2*x -> 2x
    (r"-\(-([0-9.]+)\)", r"+\1"),                                          # - (-1) -> +1
)]
UNITS = set("m g s h L l N J W V K C F cm mm km kg mg ml ft in yd mi lb lbs oz hr hrs mph kph sq gm".split())   # those of one or two letters, and mph
NO_UNIT = set("""am pm hundred thousand million billion trillion dozen half halve third quarter fourth fifth sixth seventh eighth ninth tenth hundredth
    thousandth millionth squared cubed factorial not no nor or and than more less least most to if is are was mod base remainder plus minus over above
    below wrong incorrect pi sqrt root sin cos tan cot sec csc log ln exp infinity""".split())             # words that change the value


def drop_unit(m):
    """A unit behind a number goes: \\text{ words }, plain words from three letters on, a known short unit as in 5cm. Words of NO_UNIT stay as written."""
    marked, words = m[2] is not None, re.findall("[A-Za-z]+", (m[2] if m[2] is not None else m[3]).replace(".", ""))
    if any({w.lower(), w.lower().removesuffix("s")} & NO_UNIT for w in words): return m[0].replace("\\text{", "\\word{")
    if not words or re.search(r"[^A-Za-z\s./-]", m[2] or "") or re.search(r"\\text\{[^{}]*\}$", m.string[:m.start()]): return m[0]
    known = words[0] in UNITS and (marked or len(words[0]) > 1)
    return "" if known or (len(words[0]) > 2 and (marked or m[1] and len(words) < 6)) else m[0]


def clean(text):
    """The answer text without wrappers and units, each thing in one spelling, each argument in braces. Linear for texts up to LONGEST."""
    text = (last_boxed(text) or text).translate(UNICODE)
    text = text.replace("\\\\", "¶") if "\\begin" in text else re.sub(r"\\\\(?=[a-zA-Z{}])", r"\\", text)   # row ends; doubled backslashes
    for pattern, to in RULES: text = pattern.sub(to, text)
    return braced(text)


def braced(text):
    """Arguments in braces: \\frac12 -> \\frac{1}{2}, \\sqrt3 -> \\sqrt{3}, x^2 -> x^{2}."""
    out, due = [], [0]                                   # due: arguments still to come, for each open brace
    for token in re.findall(r"(?<=[\^_])[+-]?[0-9]+|\\sqrt\s*\[[^\[\]]*\]|\\[a-zA-Z]+|\s+|.", text, re.S):
        if token == "{": due.append(0)
        elif token == "}":
            if len(due) > 1: due.pop()
            due[-1] = max(0, due[-1] - 1)
        elif token.startswith("\\sqrt") or token in ("^", "_"): due[-1] = 1
        elif token == "\\frac": due[-1] = 2
        elif due[-1] and token.isspace(): token = ""
        elif due[-1]: due[-1], token = due[-1] - 1, "{" + token + "}"
        out.append(token)
    return "".join(out)


# ---------------------------------------------------------------------------------------------------------------------------------------
# parse: (kind, children)

PAIRS = {"(": ")", "[": "]", "{": "}", "⦃": "⦄"}
NAME = re.compile(r"(?:[A-Za-z]|[A-Z]{2,3}|[A-Za-z]{4,}|\\(?!sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|frac)[a-zA-Z]+)(?:_\{\w+\})?'*(?:\([\w,]*\))?"
                  r"|\([A-Za-z,]+\)")                    # x, x_{1}, f(x), AB, area, \theta, (x,y)
NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE]([+-]?[0-9]+)|\*10\^\{([+-]?[0-9]+)\})?")   # ASCII digits; 18e0, 1.5*10^{3}
FACTOR = r"(?:\\sqrt(?:\[[^\[\]]*\])?\{[^{}]*\}|[a-zA-Zπ](?:\^\{[^{}]*\})?)"
GROUP = r"(?:\(([^(),;]*)\)(\^\{[^{}]*\})?)"
OPAQUE = re.compile(r"[|±∓¶&]|\\(?:begin|[lr]floor|[lr]ceil|sum|int|lim|p?mod)(?![a-zA-Z])")      # no rule for terms here: text


def split(text, separators):
    """Parts of text between the separators that stand outside all brackets, and those separators."""
    parts, seps, depth, begin = [], [], 0, 0
    for i, c in enumerate(text):
        if c in "([{⦃": depth += 1
        elif c in ")]}⦄": depth -= 1
        elif depth == 0 and c in separators: parts.append(text[begin:i]); seps.append(c); begin = i + 1
    return parts + [text[begin:]], seps


def closing(text, begin=0):
    """Position of the bracket that closes the one at begin (any kind closes any: half-open intervals), or -1."""
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] in "([{⦃") - (text[i] in ")]}⦄")
        if depth == 0: return i
    return -1


def parse(s, depth=0):
    """The tree of a cleaned answer."""
    if depth > DEEPEST or not s: return "text", s
    sub = lambda parts: [parse(p, depth + 1) for p in parts]
    for kind, separators in (("∪", "∪"), ("list", ",;")):
        parts, seps = split(s, separators)
        if seps: return (kind, sub(parts)) if all(parts) else ("text", s)
    parts, ops = split(s, "=<>≤≥≠∈≈")
    if ops: return relation(parts, ops, depth + 1)
    if s[0] in PAIRS and closing(s) == len(s) - 1:
        inner, kind = s[1:-1], s[0] + s[-1]
        parts, seps = split(inner, ",;")
        if kind == "⦃⦄": return "set", sub(parts)
        if kind == "{}" or (kind == "()" and not seps): return parse(inner, depth + 1)      # (5) is 5, (A) is A
        return (kind, sub(parts)) if all(parts) else ("text", s)                             # tuple or interval
    m = re.fullmatch(r"\\begin\{([pbvBV]?)matrix\}(.*)\\end\{\1matrix\}", s)
    if m and "\\begin" not in m[2]:
        rows = [split(row, "&")[0] for row in m[2].strip("¶").split("¶")]
        return "det" if m[1] in ("v", "V") else "matrix", [("row", sub(row)) for row in rows]
    return "sum", sorted(terms(s, depth))


def relation(parts, ops, depth):
    """x = 5 is (name, 5); 5 ≤ x is x ≥ 5; a < x < b is (a,b); x = 1/3 ≈ 0.33 is x = 1/3; 2+3 = 5 is 5."""
    if "≈" in ops:
        i = ops.index("≈")
        if i == 0 and (not parts[0] or NAME.fullmatch(parts[0])): ops[0] = "="                     # x ≈ 5 and ≈ 5
        else: parts, ops = parts[:i + 1], ops[:i]                                                  # the exact value counts
    if parts[0] == "" and ops[:1] == ["="]: parts, ops = parts[1:], ops[1:]
    if not ops: return parse(parts[0], depth)
    if not all(parts): return "text", "".join(p + o for p, o in zip(parts, ops + [""]))
    if set(ops) == {"="} and len(ops) > 1 and value(parts[-1]) is not None: parts, ops = [parts[0], parts[-1]], ["="]   # x = 2+3 = 5
    if len(ops) == 1 and ops[0] in "=∈":
        left, right = parts if NAME.fullmatch(parts[0]) or not NAME.fullmatch(parts[1]) else parts[::-1]
        if NAME.fullmatch(left): return "name " + left, [parse(right, depth)]
        bare, result = re.sub(r"\\[a-zA-Z]+", "", left), value(right)
        if re.search("[0-9]", bare) and not re.search("[A-Za-z]", bare) and result is not None and value(left) in (None, result):
            return parse(right, depth)                                                             # 2+3 = 5, but not 7 = x+2
    if set(ops) <= set(">≥"): parts, ops = parts[::-1], ["<" if op == ">" else "≤" for op in ops[::-1]]
    if len(ops) == 1 and ops[0] in "=<≤≠":                                                         # all on one side, first coefficient 1 or -1
        left = sorted((text, c) for text, c in terms(parts[0]) + [(text, -c) for text, c in terms(parts[1])] if c)
        scale = (left[0][1] if ops[0] in "=≠" else abs(left[0][1])) if left else 1
        return ops[0] + "0", [(text, c / scale) for text, c in left]
    if len(ops) == 2 and set(ops) <= set("<≤") and NAME.fullmatch(parts[1]):
        return ("(" if ops[0] == "<" else "[") + (")" if ops[1] == "<" else "]"), [parse(parts[0], depth), parse(parts[2], depth)]
    return "".join(ops), [parse(p, depth) for p in parts]


def number(s):
    """Reads a number at the start of s: (Fraction, the rest), or (None, s)."""
    m = re.match(r"10\^\{([+-]?[0-9]+)\}()()", s)
    mantissa, exponent = ("1", m[1]) if m else ("", "0")
    if not m and (m := NUMBER.match(s)): mantissa, exponent = m[1], m[2] or m[3] or "0"
    if not m or m.end() > 400 or len(exponent) > 4 or abs(int(exponent)) > 400: return None, s      # huge: compared as text
    return Fraction(mantissa if mantissa[-1] != "." else mantissa[:-1]) * Fraction(10) ** int(exponent), s[m.end():]


def value(s, depth=0):
    """The rational number that s spells, or None."""
    found = terms(s, depth)
    return found[0][1] if len(found) == 1 and found[0][0] == "" else None


def terms(s, depth=0):
    """The terms of a sum as (text, coefficient): 2x-\\frac{3\\pi}{4} -> ("x", 2), ("π", -3/4). A number has the text "". Nothing is added up."""
    whole = [(s.lower() if s.isalpha() and len(s) > 2 else s or "nothing", Fraction(1))]                         # Even is even
    if not s or depth > DEEPEST or OPAQUE.search(s): return whole
    pieces, level, begin = [], 0, 0
    for i, c in enumerate(s):
        level += (c in "([{⦃") - (c in ")]}⦄")
        if level == 0 and c in "+-" and i > begin and s[i - 1] not in "*/^_(+-" and not re.search(r"[0-9.][eE][+-][0-9]", s[max(0, i - 2):i + 2]):
            pieces.append(s[begin:i]); begin = i
    found = []
    for piece in pieces + [s[begin:]]:
        sign = -1 if piece[0] == "-" else 1
        body = piece[piece[0] in "+-":]
        if not body: return whole
        found += [(text, sign * c) for text, c in term(body, depth + 1)]
    return found


def term(s, depth):
    """The terms of one unsigned term: a number, a fraction, a mixed number, number times text, or a sum over a number."""
    c, rest = number(s)
    if c is not None and not rest: return [("", c)]
    if c is not None and (m := re.fullmatch(r" ?([0-9]+)/([0-9]+)", rest)) and rest[0] == " " and len(rest) < 400:
        a, b = int(m[1]), int(m[2])
        return [("", c + Fraction(a, b))] if c.denominator == 1 and 0 < a < b else [(s, Fraction(1))]   # 3 1/2
    if c is not None and rest[0] == "/":
        d, tail = number(rest[1 + (rest[1:2] == "-"):])
        return [("", c / d * (-1 if rest[1] == "-" else 1))] if d and not tail else [(s, Fraction(1))]  # 3/4
    if c is not None and not re.match(r"[A-Za-zπ∞(\\]", rest): return [(s, Fraction(1))]            # 2^{9}, 101_{2}, 5!, 1:2 are no multiples
    coefficient = Fraction(1) if c is None else c
    if rest.startswith("\\frac{"):
        i = closing(rest, 5); j = closing(rest, i + 1) if rest[i + 1:i + 2] == "{" else -1
        if i < 0 or j < 0 or rest[i] + rest[j] != "}}": return [(s, Fraction(1))]
        top, d, tail = terms(rest[6:i], depth), value(rest[i + 2:j], depth), rest[j + 1:]
        a = top[0][1] if d and len(top) == 1 and top[0][0] == "" else None
        if a is not None and c is not None: return [("", c + a / d)] if c.denominator == 1 and 0 < a < d and not tail else [(s, Fraction(1))]
        if a is not None: return [(factors(tail, depth), a / d)] if tail[:1] not in tuple("0123456789.^_!'*/\\") or re.match(r"\\sqrt", tail) else [(s, Fraction(1))]
        if d and not tail and not OPAQUE.search(rest): return [(text, coefficient * k / d) for text, k in top]   # \frac{1+\sqrt{5}}{2}
    m = re.fullmatch(r"([^/]+)/([0-9]{1,99})", rest)                                                # \sqrt{2}/2, (1+\sqrt{5})/2
    if m and int(m[2]) and not re.search(r"\\(?!sqrt|frac)", m[1]):
        inside = terms(m[1][1:-1], depth) if m[1][0] == "(" and closing(m[1]) == len(m[1]) - 1 else [(factors(m[1], depth), Fraction(1))]
        return [(text, coefficient * k / int(m[2])) for text, k in inside]
    return [(factors(rest, depth), coefficient)]


def factors(s, depth):
    """Products of roots, π and powers of letters, or of sums in brackets, in one order: \\sqrt{3}i and i\\sqrt{3}, (x+2)(x-2) and (x-2)(2+x)."""
    if depth > DEEPEST: return s
    if re.search(r"\\sqrt|π|\^", s) and re.fullmatch(FACTOR + "{2,}", s): return "".join(sorted(re.findall(FACTOR, s)))
    if not re.fullmatch(GROUP + "+", s) or not all(re.search(r".[+-]", inner) for inner, _ in re.findall(GROUP, s)): return s
    return "".join(sorted(f"{sorted(terms(inner, depth + 1))}{power}" for inner, power in re.findall(GROUP, s)))


# ---------------------------------------------------------------------------------------------------------------------------------------
# compare

def same(a, b):
    """Are two trees equal? In order, but sets and unions in any order. A name (x =) on one side only is dropped."""
    if a[0].startswith("name ") and b[0].startswith("name ") and a[0] != b[0]: return False
    a, b = (t[1][0] if t[0].startswith("name ") else t for t in (a, b))
    if a[0] == b[0] and a[0] in ("set", "∪"): return set(map(repr, a[1])) == set(map(repr, b[1]))
    if a[0] != b[0] and {a[0], b[0]} != {"set", "list"}: return False
    if a[0] in ("sum", "text", "=0", "<0", "≤0", "≠0"): return a[1] == b[1]
    return len(a[1]) == len(b[1]) and all(same(x, y) for x, y in zip(a[1], b[1]))


def answers_equal(pred, gold):
    """Is the answer pred equal to gold? Exact, symmetric, always a bool. None, nothing, nan or inf, and a note such as `see figure` equal nothing."""
    if pred is None or gold is None: return False
    if any(re.fullmatch(r"(?is)see\s.*|[+-]?(?:nan|inf)|n/a|null|", s.strip()[:LONGEST]) for s in (pred, gold)): return False
    if max(len(pred), len(gold)) > LONGEST: return pred.strip() == gold.strip()
    pred, gold = clean(pred), clean(gold)
    return pred != "" and gold != "" and (pred == gold or same(parse(pred), parse(gold)))
