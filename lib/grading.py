r"""
When are two answers equal? Exact: as normalised text, or as rational numbers.

    answers_equal(pred, gold)    True or False
    last_boxed(text)             the content of the last \boxed{...}, or None

No text is ever evaluated: digits are read into fractions.Fraction; nothing is summed, multiplied
out or solved. Time is linear in the length of the text (what is longer than LONGEST is not parsed).
A doubtful answer is refused: paying for wrong answers does more harm than missing an odd spelling
of a right one.

An answer goes through one pipeline:
    clean   wrappers, units, currency and spacing go, each thing gets one spelling: the same rules
            for prediction and gold
    parse   into lists, alternatives, tuples, intervals, sets, unions, matrices, relations; at the
            bottom sums of terms (text, Fraction)
    same    compares the two trees
"""
import re
from fractions import Fraction
from functools import lru_cache

LONGEST = 1000   # characters; a longer answer is compared as it stands (the longest gold answer of MATH has 159)
DEEPEST = 12     # nested brackets; what lies deeper is compared as text


# ------------------------------------------------------------------------------------------------------------------------------------
# find the answer

BETWEEN = re.compile(r"(?:[a-z]+ )?(?:[,;]|,? ?(?:and|or)(?![a-z]))? ?(?:[a-zA-Z](?:_\{?[0-9]\}?)? ?= ?)?")   # two boxes of one answer


def last_boxed(text):
    """Content of the last \\boxed{...} or \\fbox{...} with balanced braces (or `\\boxed 2`), the inner one of nested ones, or None.
    Boxes side by side, with a comma, `and` or `or` between them, are one answer: \\boxed{1} and \\boxed{2} is `1, 2`."""
    if "boxed" not in text and "fbox" not in text: return None
    found, opened = [], []                               # found: (begin, end, content); opened: where each open brace's box begins, or None
    for m in re.finditer(r"\\?\\(?:boxed|fbox)(?:\s*(\{)|\s+([^\s{}$\\]+)|(?=\W))|\\.|[{}]", text, re.S):
        if m[2]: found.append((m.start(), m.end(), m[2].rstrip(".,;")))
        elif m[1] or m[0] == "{": opened.append((m.start(), m.end()) if m[1] else None)
        elif m[0] == "}" and opened:
            box = opened.pop()
            if box and text[box[1]:m.start()].strip() and not (found and found[-1][0] > box[0]):
                found.append((box[0], m.end(), text[box[1]:m.start()].strip()))
    if not found: return None
    contents, word = [found[-1][2]], ", "
    for (_, end, content), (begin, _, _) in zip(found[-2::-1], found[:0:-1]):
        gap = re.sub(r"\\q?quad|\\[,;: ()]|\\text|[{}$ ]+", " ", text[end:begin]) if begin - end < 60 else "."
        if not BETWEEN.fullmatch(" ".join(gap.split())) or "\n" in gap: break
        contents.append(content)
        if re.search(r"\bor\b", gap): word = " or "
    return word.join(contents[::-1] if len(set(contents)) > 1 else contents[:1])


# ------------------------------------------------------------------------------------------------------------------------------------
# clean: one spelling for everything

UNICODE = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "√": "\\sqrt ", "°": "", "²": "^2", "³": "^3",
                         "½": "\\frac12", "¼": "\\frac14", "¾": "\\frac34", "€": "$", "£": "$", "¥": "$"})
COMMANDS = {
    "pi": "π", "infty": "∞", "cup": "∪", "in": "∈", "le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥",
    "lt": "<", "gt": ">", "ne": "≠", "neq": "≠", "approx": "≈", "pm": "±", "mp": "∓", "cdot": "*", "times": "*", "lbrace": "⦃",
    "rbrace": "⦄", "varnothing": "∅", "emptyset": "∅", "dfrac": "\\frac", "tfrac": "\\frac", "cfrac": "\\frac",
    **dict.fromkeys("left right big Big bigg Bigg bigl bigr Bigl Bigr displaystyle textstyle degree".split(), ""),
    **dict.fromkeys("textbf textit textrm textnormal texttt textsf mathrm mathbf mathit mathsf mbox operatorname".split(), "\\text")}
THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
END = r"(?= ?(?:[,;∨)\]⦄=<>≤≥≈]|$))"                                       # where an element of an answer ends
RULES = [(re.compile(pattern), to) for pattern, to in (                    # in this order; white space has become single blanks
    (r"</?answer>|\\(?:boxed|fbox)(?: ?\{ ?\})?(?![a-z])", ""),             # <answer>5</answer> -> 5; empty boxes
    (r"^[ *`\"]+|[ *`\"]+$", ""),                                          # **5** -> 5
    (r"\\q?quad", " "),
    (r"\\([a-zA-Z]+)", lambda m: COMMANDS.get(m[1], m[0])),                # \le -> ≤, \dfrac -> \frac, \left( -> (, \mbox -> \text
    (r"\\\{", "⦃"), (r"\\\}", "⦄"),                                        # braces of a set, apart from those of TeX
    (r"<=", "≤"), (r">=", "≥"), (r"(?<![0-9])!=", "≠"),
    (r"(?<=[0-9])(?:, ?\\!|\\[!, ]|\{,\}) ?(?=[0-9]{3}(?![0-9]))", ""),    # 10,\!000 and 10{,}000 and 10\,000 -> 10000
    (r"\\!", ""), (r"\\[,;: ]|~", " "),                                    # spacing
    (r"\\?\$|\\[()\[\]]", " "),                                            # $5 and \$5 -> 5; $..$, \(..\), \[..\]
    (r"\\?%|\^ ?\{? ?(?:\\circ|\\text ?\{(?:st|nd|rd|th)\}) ?\}?", " "),   # 5\%, 5^\circ, 5^{\text{th}} -> 5
    (r" +", " "), (r"\\text \{", r"\\text{"),
    (r"(?i)(?<=[0-9])( ?\\text\{)? ?([ap])\.?m\b\.?", lambda m: (m[1] or "") + m[2].lower() + "m"),           # 1:03 P.M. -> 1:03pm
    (r"[ .,;:\\]+$", ""),                                                  # 45. -> 45
    (r" ?,? ?(?:\\text\{[ ,]*(and|or) ?\}|(?<![A-Za-z\\])(and|or)(?![A-Za-z])) ?",
     lambda m: "∨" if "or" in m.groups() else ", "),                       # 1 and 2 -> 1, 2
    (r"(?<=[0-9}π])( ?)(?:\\text\{([^{}]*)\}|([A-Za-z][A-Za-z./ -]*))(?: ?\^ ?\{?[23]\}?)?" + END, lambda m: drop_unit(m)),
    (r"\\text\{([^{}]*)\}", r" \1 "),                                      # \text{Even} -> Even
    (r"(?<![A-Za-z\\])sqrt", r"\\sqrt "), (r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),                           # sqrt(3) -> \sqrt{3}
    (r"^[^(\[⦃{][^(\[⦃]*$", lambda m: THOUSANDS.sub(lambda n: n[0].replace(",", ""), m[0])),                  # 2,125 -> 2125, not (2,125)
    (r" +", " "), (r"(?<![0-9.]) | (?![0-9.])", ""),                       # no blanks, except between two digits
    (r"(?<=[0-9A-Za-zπ)}])\*(?=[A-Za-zπ(]|\\(?!frac))(?![eE][0-9])", ""),  # 2*x -> 2x
    (r"-\(-([0-9.]+)\)", r"+\1"),                                          # - (-1) -> +1
    (r"(?<![\w^_})!.\\])(?:([0-9A-Za-zπ]+)|\(([^()]*)\))/\(([^()]*)\)(?![\w^!({\\])", r"\\frac{\1\2}{\3}"),      # x/(x+1) -> \frac{x}{x+1}
    (r"[(\[]\\begin\{array\}\{[clr|]*\}(.*?)\\end\{array\}[)\]]", r"\\begin{pmatrix}\1\\end{pmatrix}"),
    (r"\\mathbb\{?R\}?|ℝ|(?i:^allreal(?:s|numbers)$)", "(-∞,∞)"),
    (r"(?<![0-9.])([0-9]{0,50})\.([0-9]{0,50})\\overline\{([0-9]{1,50})\}(?![0-9.])", lambda m: repeating(*m.groups())),
)]
SHORT_UNITS = set("m g s h L l C F cm mm km kg mg ml ft in yd mi lb lbs oz hr hrs mph kph sq gm st nd rd th".split())
NO_UNITS = set("""am pm hundred thousand million billion trillion dozen half halve third quarter fourth fifth sixth seventh eighth ninth
    tenth hundredth thousandth millionth squared cubed factorial not no nor or and than more less least most to if is are was mod base
    remainder plus minus over above below north south east west up down loss debt negative wrong incorrect
    pi sqrt root sin cos tan cot sec csc log ln exp infinity""".split())   # words that change the value


def repeating(whole, start, period):
    """0.1\\overline{6} is \\frac{15}{90}."""
    return f"\\frac{{{int(whole + start + period) - int(whole + start or 0)}}}{{{'9' * len(period)}{'0' * len(start)}}}"


def drop_unit(m):
    """A unit behind a number goes: \\text{ words }, plain words from three letters on, short units as in 5cm. Words of NO_UNITS stay."""
    space, marked, plain = m.groups()
    words = re.findall("[A-Za-z]+", (plain or marked or "").replace(".", ""))
    if any({w.lower(), w.lower().removesuffix("s")} & NO_UNITS for w in words): return m[0].replace("\\text{", "\\word{")   # as written
    if not words or re.search(r"[^A-Za-z ./-]", marked or "") or re.search(r"\\text\{[^{}]*\}$", m.string[:m.start()]): return m[0]
    short = words[0] in SHORT_UNITS and (marked or len(words[0]) > 1)
    return "" if short or len(words[0]) > 2 and (marked or space and len(words) < 6) else m[0]


STATED = re.compile(r"(?i)(?:^|[.:!?\n])[\s*]*(?:(?:(?:so|thus|hence|therefore),? )?(?:the )?(?:final )?(?:answer|solution)\b(?: is\b)?:?[\s*]*)+")
LINKING = set("""so thus hence therefore then finally we find get have obtain see conclude that this it here is are be the a an our my to of
    final answer solution result value set interval inequality equation zero identity matrix vector number total expression probability""".split())


def stated(text):
    """The answer that a sentence states: what follows the last `The answer is` at the start of a sentence; then, what stands between
    dollar signs when they occur once and all other words are harmless. Any other sentence stays as it is, and will equal nothing."""
    text = re.sub(r"\s*I hope it is correct\.?\s*$", "", text)
    text = text[max((m.end() for m in STATED.finditer(text)), default=0):]
    m = re.fullmatch(r"([^$0-9]*)\$([^$]+)\$([^$0-9]*)", re.sub(r"\$\$|\\[()\[\]]", "$", text))
    return m[2] if m and set(re.findall(r"[^\s.,:;!]+", (m[1] + m[3]).lower())) <= LINKING else text


def clean(text):
    """The answer without wrappers and units, each thing in one spelling, each argument in braces."""
    text = " ".join((last_boxed(text) or stated(text)).split()).translate(UNICODE)
    text = text.replace("\\\\", "¶") if "\\begin" in text else re.sub(r"\\\\(?=[a-zA-Z{}])", r"\\", text)   # row ends; doubled backslashes
    for pattern, to in RULES: text = pattern.sub(to, text)
    return braced(text)


def braced(text):
    """Arguments in braces: \\frac12 -> \\frac{1}{2}, \\sqrt3 -> \\sqrt{3}, x^2 -> x^{2}, x^10 -> x^{10}."""
    out, due = [], [0]                                   # due: how many arguments are still to come, for each open brace
    for token in re.findall(r"(?<=[\^_])[+-]?[0-9]+|\\sqrt ?\[[^\[\]]*\]|\\[a-zA-Z]+|.", text, re.S):
        if token == "{": due.append(0)
        elif token == "}":
            if len(due) > 1: due.pop()
            due[-1] = max(0, due[-1] - 1)
        elif token.startswith("\\sqrt") or token in ("^", "_"): due[-1] = 1
        elif token == "\\frac": due[-1] = 2
        elif due[-1] and token == " ": token = ""
        elif due[-1]: due[-1], token = due[-1] - 1, "{" + token + "}"
        out.append(token)
    return "".join(out).replace("} ", "}")


# ------------------------------------------------------------------------------------------------------------------------------------
# parse: a tree of (kind, children)

NAME = re.compile(r"(?:[A-Za-z]|[A-Z]{2,3}|[A-Za-z]{4,}|m?\\(?!sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|frac)[a-zA-Z]+)(?:_\{\w+\})?'*"
                  r"(?:\([\w,]*\))?|\([A-Za-z,]+\)|[A-Z]{2}[/:][A-Z]{2}|\\frac\{[A-Z]{2}\}\{[A-Z]{2}\}|\\overline\{[A-Z]{2}\}")
# what may stand before `=`: x, x_{1}, f(x), AB, area, \theta, (x,y), AB/CD
NUMBER = re.compile(r"10\^\{([+-]?[0-9]+)\}|([0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE]([+-]?[0-9]+)|\*10\^\{([+-]?[0-9]+)\})?")
OPAQUE = re.compile(r"[|±∓¶&]|\\(?:begin|[lr]floor|[lr]ceil|sum|int|lim|p?mod)(?![a-zA-Z])")   # no rule for terms here: compared as text
MULTIPLE = re.compile(r"[A-Za-zπ∞(]|\\(?!frac)")        # a number before this multiplies it; not so in 2^{9}, 101_{2}, 5!, 1:2
FACTOR = r"(?:\\sqrt(?:\[[^\[\]]*\])?\{[^{}]*\}|[a-zA-Zπ](?:\^\{[^{}]*\})?)"
GROUP = r"(?:\(([^(),;]*)\)(\^\{[^{}]*\})?)"


def split(text, separators):
    """Parts of text between the separators that stand outside all brackets, and those separators."""
    parts, found, depth, begin = [], [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{⦃") - (c in ")]}⦄")
        if depth == 0 and c in separators: parts.append(text[begin:i]); found.append(c); begin = i + 1
    return parts + [text[begin:]], found


def closing(text, begin=0):
    """Position of the bracket that closes the one at begin, or -1. Any kind closes any, as in a half-open interval."""
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] in "([{⦃") - (text[i] in ")]}⦄")
        if depth == 0: return i
    return -1


def parse(s, depth=0):
    """The tree of a cleaned answer."""
    if depth > DEEPEST or not s: return "text", s
    children = lambda parts: [parse(p, depth + 1) for p in parts]
    parts, found = split(s, "∪")
    if found: return ("∪", children(parts)) if all(parts) else ("text", s)
    parts, found = split(s, ",;∨")
    if found: return listed("or" if "∨" in found else "list", children(grouped(s, parts, found))) if all(parts) else ("text", s)
    parts, found = split(s, "=<>≤≥≠∈≈")
    if found: return relation(parts, found, depth + 1)
    if s[0] in "([{⦃" and closing(s) == len(s) - 1:
        parts, found = split(s[1:-1], ",;")
        if s[0] + s[-1] == "⦃⦄": return "set", children(parts)
        if s[0] + s[-1] == "{}" or s[0] + s[-1] == "()" and not found: return parse(s[1:-1], depth + 1)   # (5) is 5, (A) is A
        return listed(s[0] + s[-1], children(parts)) if all(parts) else ("text", s)                       # tuple or interval
    m = re.fullmatch(r"\\begin\{([pbvBV]?)matrix\}(.*)\\end\{\1matrix\}", s)
    if m and "\\begin" not in m[2]:
        rows = [("row", children(split(row, "&")[0])) for row in m[2].strip("¶").split("¶")]
        return "determinant" if m[1] in ("v", "V") else "matrix", rows
    if s.count("±") == 1 and "∓" not in s: return "or", children([s.replace("±", sign) for sign in "+-"])
    return "sum", sorted(terms(s, depth))


def grouped(s, parts, found):
    """Parts of a list; 1,2;3,4 and 1,2∨3,4 are lists of pairs."""
    groups = split(s, ";∨")[0]
    sizes = {len(split(group, ",")[0]) for group in groups}
    return [f"({group})" for group in groups] if "," in found and len(groups) > 1 and len(sizes) == 1 else parts


def listed(kind, items):
    """A list or tuple. x=1, x=2 and x=1, 2 are alternatives for x, in any order; y=2, x=1 goes by the order of the names: x=1, y=2."""
    names = [item[0] if item[0].startswith("name ") else "" for item in items]
    ranges = any(item[1][0][0][0] in "([" for name, item in zip(names, items) if name)
    if names[0] and set(names[1:]) <= {names[0], ""} and (kind == "or" or kind == "list" and not ranges):
        return names[0], [("or", [item[1][0] if name else item for name, item in zip(names, items)])]
    return kind, sorted(items, key=lambda item: item[0]) if all(names) and len(set(names)) == len(names) else items


def relation(parts, ops, depth):
    """x = 5 is 5 with a name; (x,y) = (1,2) is (x = 1, y = 2); x > 5 is (5,∞), a < x < b is (a,b); x = 1/3 ≈ 0.33 is x = 1/3; 2+3 = 5 is 5."""
    if "≈" in ops:
        i = ops.index("≈")
        if i == 0 and (not parts[0] or NAME.fullmatch(parts[0])): ops[0] = "="             # x ≈ 5, ≈ 5
        else: parts, ops = parts[:i + 1], ops[:i]                                          # the exact value counts
    if parts[0] == "" and ops[:1] == ["="]: parts, ops = parts[1:], ops[1:]
    if not ops: return parse(parts[0], depth)
    if not all(parts): return "text", "".join(p + o for p, o in zip(parts, ops + [""]))
    if set(ops) == {"="} and len(ops) > 1 and value(parts[-1]) is not None: parts, ops = [parts[0], parts[-1]], ["="]   # x = 2+3 = 5
    if ops in (["="], ["∈"]):
        left, right = parts if NAME.fullmatch(parts[0]) or not NAME.fullmatch(parts[1]) else parts[::-1]
        tree, names = parse(right, depth), re.findall("[A-Za-z]+", left)
        if re.fullmatch(r"\([A-Za-z]+(,[A-Za-z]+)+\)", left) and tree[0] == "()" and len(tree[1]) == len(names):
            return listed("()", [("name " + name, [child]) for name, child in zip(names, tree[1])])
        if NAME.fullmatch(left): return "name " + left, [tree]
        bare, result = re.sub(r"\\[a-zA-Z]+|e(?=\^)|i(?=π)", "", left), value(right)
        if result is not None and value(left) in (None, result) and re.search("[0-9π]", bare) and not re.search("[A-Za-z]", bare):
            return tree                                                                    # 2+3 = 5, but not 7 = x+2
    if set(ops) <= set(">≥"): parts, ops = parts[::-1], ["<" if op == ">" else "≤" for op in ops[::-1]]
    if len(ops) == 1 and ops[0] in "=<≤≠":                                                 # to one side, first coefficient 1 (or -1 for <)
        side = sorted((text, c) for text, c in terms(parts[0]) + [(text, -c) for text, c in terms(parts[1])] if c)
        scale = (side[0][1] if ops[0] in "=≠" else abs(side[0][1])) if side else 1
        name, c = side[-1] if side else ("", 0)
        if ops[0] in "<≤" and len(side) - (side[0][0] == "" if side else 0) == 1 and NAME.fullmatch(name):   # x < 5 is (-∞,5)
            end = "sum", [("", -side[0][1] / c)] if len(side) == 2 else terms("0")
            kind = "()" if ops[0] == "<" else "(]" if c > 0 else "[)"
            return "name " + name, [(kind, [parse("-∞"), end] if c > 0 else [end, parse("∞")])]
        return "sum" + ops[0], [(text, c / scale) for text, c in side]
    if len(ops) == 2 and set(ops) <= set("<≤") and NAME.fullmatch(parts[1]):
        kind = ("(" if ops[0] == "<" else "[") + (")" if ops[1] == "<" else "]")
        return "name " + parts[1], [(kind, [parse(parts[0], depth), parse(parts[2], depth)])]
    return "".join(ops), [parse(p, depth) for p in parts]


def number(s):
    """The number at the start of s and the rest: (Fraction, rest), or (None, s). ASCII digits; 5 .5 5. 5e3 5*10^{3} 10^{3}, none huge."""
    m = NUMBER.match(s)
    exponent = m and (m[1] or m[3] or m[4]) or "0"
    if not m or m.end() > 400 or len(exponent) > 4 or abs(int(exponent)) > 400: return None, s
    return Fraction(m[2] or "1") * Fraction(10) ** int(exponent), s[m.end():]


def value(s, depth=0):
    """The rational number that s spells, or None."""
    found = terms(s, depth)
    return found[0][1] if len(found) == 1 and found[0][0] == "" else None


@lru_cache(4096)                                          # the same part is asked for again and again: without this, nesting costs 2^depth
def terms(s, depth=0):
    """The terms of a sum, (text, coefficient) each: 2x-\\frac{3π}{4} is ("x", 2), ("π", -3/4). A number has the text "". No sums."""
    whole = [(s.lower() if s.isalpha() and len(s) > 2 else s or "nothing", Fraction(1))]   # Even is even
    if not s or s.isalpha() or depth > DEEPEST or OPAQUE.search(s): return whole
    pieces, level, begin = [], 0, 0
    for i, c in enumerate(s):
        level += (c in "([{⦃") - (c in ")]}⦄")
        if level or c not in "+-" or i == begin or s[i - 1] in "*/^_(+-" or re.match(r"[0-9.][eE][+-][0-9]", s[max(0, i - 2):]): continue
        pieces.append(s[begin:i]); begin = i
    found = []
    for piece in pieces + [s[begin:]]:
        body = piece[piece[0] in "+-":]
        if not body: return whole
        found += [(text, -c if piece[0] == "-" else c) for text, c in term(body, depth + 1)]
    return found


def term(s, depth):
    """The terms of one unsigned term: a number, a fraction, a mixed number, a number times text, or a sum over a number."""
    alone = lambda: [(arguments(s, depth), Fraction(1))]                                   # no rule holds: all of it is text
    c, rest = number(s)
    mixed = lambda part: [("", c + part)] if c.denominator == 1 and 0 < part < 1 else alone()
    if c is not None:
        if not rest: return [("", c)]
        m = re.fullmatch(r"( ?)([0-9]{1,99})/([0-9]{1,99})|/(-?)(.+)", rest)
        if m and m[1]: return mixed(Fraction(int(m[2]), int(m[3]))) if int(m[3]) else alone()                      # 3 1/2
        if m and m[5]:
            d, tail = number(m[5])
            return [("", c / (-d if m[4] else d))] if d and not tail else alone()                                  # 3/4
        if not MULTIPLE.match(rest) and not rest.startswith("\\frac{"): return alone()
    k = Fraction(1) if c is None else c
    if rest.startswith("\\frac{"):
        i = closing(rest, 5); j = closing(rest, i + 1) if rest[i + 1:i + 2] == "{" else -1
        if j < 0 or rest[i] + rest[j] != "}}": return alone()
        top, d, tail = terms(rest[6:i], depth), value(rest[i + 2:j], depth), rest[j + 1:]
        if d and len(top) == 1 and top[0][0] == "":
            if c is not None: return mixed(top[0][1] / d) if not tail else alone()                                 # 3\frac{1}{2}
            return [(factors(tail, depth), top[0][1] / d)] if not tail or MULTIPLE.match(tail) else alone()        # \frac{3}{4}, \frac{3}{4}π
        if d and not tail: return [(text, k * a / d) for text, a in top]                                         # \frac{1+\sqrt{5}}{2}
        if len(top) == 1 and top[0][1] != 1 and not tail:                                                        # \frac{-2x}{y}
            return [(factors(f"\\frac{{{top[0][0] or '1'}}}{rest[i + 1:]}", depth), k * top[0][1])]
    m = re.fullmatch(r"([^/]+)/([0-9]{1,99})", rest)
    if m and int(m[2]) and not re.search(r"\\(?!sqrt|frac)", m[1]):                                             # \sqrt{2}/2, (1+\sqrt{5})/2
        inside = terms(m[1][1:-1], depth) if m[1][0] == "(" and closing(m[1]) == len(m[1]) - 1 else [(factors(m[1], depth), Fraction(1))]
        return [(text, k * a / int(m[2])) for text, a in inside]
    return [(factors(rest, depth), k)]


def written(s, depth):
    """One spelling of a sum inside a root, an exponent or a bracket: its terms in order. What is no sum stays."""
    found = sorted(terms(s, depth))
    if len(found) == 1 and found[0][1] == 1: return found[0][0] if s and not s.isalpha() else s
    return "+".join(f"{c}·{text}" for text, c in found)


def arguments(s, depth):
    """s with the sum in each pair of braces written in one way."""
    out, i = "", 0
    while (j := s.find("{", i)) >= 0 and (k := closing(s, j)) > 0 and s[k] == "}":
        out, i = out + s[i:j + 1] + written(s[j + 1:k], depth + 1) + "}", k + 1
    return out + s[i:]


def factors(s, depth):
    """One order for a product of roots, π and powers of letters, or of sums in brackets: i\\sqrt{3}, \\sqrt{3}i; (x+2)(x-2), (x-2)(2+x)."""
    s = arguments(s, depth)
    if re.search(r"\\sqrt|π|\^", s) and re.fullmatch(FACTOR + "{2,}", s): return "".join(sorted(re.findall(FACTOR, s)))
    if not re.fullmatch(GROUP + "+", s) or not all(re.search(r".[+-]", inner) for inner, _ in re.findall(GROUP, s)): return s
    return "".join(sorted(f"({written(inner, depth + 1)}){power}" for inner, power in re.findall(GROUP, s)))


# ------------------------------------------------------------------------------------------------------------------------------------
# compare

def same(a, b):
    """Are two trees equal? Child by child; sets, unions and alternatives in any order. A name (`x =`) on one side is dropped, two names must
    agree. A list is a tuple when its parts have names: x=1, y=2 is (1,2)."""
    if a[0].startswith("name ") and b[0].startswith("name ") and a[0] != b[0]: return False
    a, b = (t[1][0] if t[0].startswith("name ") else t for t in (a, b))
    if a == b: return True
    kinds = {a[0], b[0]}
    named = [all(part[0].startswith("name ") for part in t[1]) if t[0] in ("list", "()") else False for t in (a, b)]
    if kinds == {"set"} or kinds <= {"or", "∪"} or "or" in kinds and kinds <= {"or", "list", "set"} and not any(named):
        return all(any(same(x, y) for y in q) for p, q in ((a[1], b[1]), (b[1], a[1])) for x in p)
    if a[0].startswith("sum") or a[0] == "text" or isinstance(b[1], str): return False
    if a[0] != b[0] and kinds != {"set", "list"} and not (any(named) and kinds == {"list", "()"}): return False
    return len(a[1]) == len(b[1]) and all(same(x, y) for x, y in zip(a[1], b[1]))


def answers_equal(pred, gold):
    """Is the answer pred equal to gold? Exact and symmetric, always a bool.

    What is no answer equals nothing, not even itself: None, empty wrappers, nan, inf, a division by zero, a note such as `see figure`."""
    if pred is None or gold is None: return False
    if any(re.fullmatch(r"(?is)see\s.*|[+-]?(?:nan|inf)|n/a|null|", s.strip()[:LONGEST]) for s in (pred, gold)): return False
    if max(len(pred), len(gold)) > LONGEST: return pred.strip() == gold.strip()
    pred, gold = clean(pred), clean(gold)
    if any(not re.search(r"[\w∞∅<>=≤≥]", s) or re.search(r"/0+(?![0-9.])|\}\{0+\}", s) for s in (pred, gold)): return False
    for a, b in ((pred, gold), (gold, pred)):                                              # (C) 27 is the choice (C)
        choice = re.fullmatch(r"\(?([A-J])[).:] ?\(?-?[0-9.][^A-Za-z]*", a)
        if choice and re.fullmatch(r"\(?[A-J]\)?", b): return choice[1] == b.strip("()")
    return pred == gold or same(parse(pred), parse(gold))
