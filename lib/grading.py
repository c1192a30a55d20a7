r"""
When are two answers equal? Exactly: as normalised text, or as rational numbers.

    answers_equal(pred, gold)    True or False
    is_placeholder(text)         is it no answer at all: empty, proof, unknown, see figure, 3/0?
    last_boxed(text)             the content of the last \boxed{...}, or None

No text is ever evaluated: digits are read into fractions.Fraction; nothing is summed, multiplied
out or solved. Time is linear in the length of the text. A doubtful answer is refused: paying for
wrong answers does more harm than missing an odd spelling of a right one.

    clean   wrappers, units, currency and spacing go, each thing gets one spelling: the same rules
            for prediction and gold
    parse   into lists, alternatives, tuples, intervals, sets, unions, matrices, relations; at the
            bottom sums of terms (text, Fraction)
    same    compares the two trees
"""
import re
from fractions import Fraction
from functools import lru_cache, partial

LONGEST = 1000  # characters; a longer answer is compared as it stands (MATH's longest gold has 159)
DEEPEST = 12    # nested brackets; what lies deeper is compared as text


# ---- find the boxed answer -----------------------------------------------------------------------

# group 1: the brace of \boxed{, group 2: the 2 of `\boxed 2`
BOX = re.compile(r"\\?\\(?:boxed|fbox)(?![a-zA-Z])(?:\s*(\{)|\s+([^\s{}$\\]+))?")
# what may stand between two boxes of one answer, e.g. `, and x = `
BETWEEN = re.compile(r"(?:[a-z]+ )?(?:[,;]|,? ?(?:and|or)(?![a-z]))? ?"
                     r"(?:[a-zA-Z](?:_\{?[0-9]\}?)? ?= ?)?")


def last_boxed(text):
    """Content of the last \\boxed{...} or \\fbox{...} with balanced braces (or `\\boxed 2`), the
    inner one of nested ones. None if there is none, or if the last one is not finished: no earlier
    one is taken instead. Boxes side by side, with a comma, `and` or `or` between them, are one
    answer: \\boxed{1} and \\boxed{2} is `1, 2`."""
    opened, closes = [], {}  # where open braces begin; where they close
    for m in re.finditer(r"\\.|[{}]", text, re.S):
        if m[0] == "{":
            opened.append(m.end())
        elif m[0] == "}" and opened:
            closes[opened.pop()] = m.start()
    contents, word, behind = [], ", ", len(text)
    for m in reversed(list(BOX.finditer(text))):
        end = closes.get(m.end()) if m[1] else m.end() if m[2] else None
        if end is None and not contents:
            return None  # not finished
        if end is None or contents and end > behind:
            continue
        content = m[2].rstrip(".,;") if m[2] else text[m.end():end].strip()
        if not content:
            continue
        if contents:
            gap = text[end + bool(m[1]):behind]
            words = re.sub(r"\\q?quad|\\[,;: ()]|\\text|[{}$ ]+", " ", gap).split()
            if len(gap) >= 60 or "\n" in gap or not BETWEEN.fullmatch(" ".join(words)):
                break
            word = " or " if "or" in words else word
        contents.append(content)
        behind = m.start()
    if not contents:
        return None
    return word.join(contents[::-1]) if len(set(contents)) > 1 else contents[0]


def unboxed(text):
    """The answer in a text that is nothing but an answer: what its last box holds, all of it when
    it has no box. None: an empty text, an empty or unfinished box."""
    return last_boxed(text) if BOX.search(text) else text.strip() or None


# ---- clean: one spelling for everything ----------------------------------------------------------

UNICODE = str.maketrans({
    "−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "√": "\\sqrt ", "²": "^2", "³": "^3",
    "½": "\\frac12", "¼": "\\frac14", "¾": "\\frac34", "𝜋": "π", "°": " ", "º": " ", "℃": " C",
    "℉": " F", **dict.fromkeys("€£¥₹₩₽₫₪₦₱₺฿", "$")})
CURRENCIES = """USD EUR GBP JPY INR CNY RMB CAD AUD CHF NZD SGD HKD MXN BRL KRW RUB SEK NOK DKK PLN
    CZK ZAR PHP THB IDR MYR VND TWD AED SAR ILS EGP NGN KES PKR BDT LKR"""
CURRENCY = rf"(?:(?i:{'|'.join(CURRENCIES.split())})|Rs\.?|(?:US|CA|AU|NZ|HK)(?=\\?\$))"
COMMANDS = {
    "pi": "π", "infty": "∞", "cup": "∪", "in": "∈", "lt": "<", "gt": ">", "ne": "≠", "neq": "≠",
    "le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥", "approx": "≈",
    "pm": "±", "mp": "∓", "cdot": "*", "times": "*", "lbrace": "⦃", "rbrace": "⦄",
    "varnothing": "∅", "emptyset": "∅", "dfrac": "\\frac", "tfrac": "\\frac", "cfrac": "\\frac",
    **dict.fromkeys("left right big Big bigg Bigg bigl bigr Bigl Bigr displaystyle textstyle "
                    "degree".split(), ""),
    **dict.fromkeys("textbf textit textrm textnormal texttt textsf mathrm mathbf mathit mathsf "
                    "mbox operatorname".split(), "\\text")}
THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
# short units that may follow a number at once, as in 5cm; those that need a blank before them;
# what may follow a slash
GLUED = set("""L cm mm km kg mg ml mL ft in yd mi lb lbs oz hr hrs mph kph kmh sq gm st nd rd th
    min mins sec secs kWh""".split() + CURRENCIES.split())
SPACED = set("m g s h l C F dm nm cc yr yrs wk mo qt pt ha ms Hz Pa kW MW kJ KB MB GB TB".split())
PER = set("""sec second min minute hr hour day night week month yr year person people student child
    unit item piece each pc kg lb pound oz ounce ton mile km gallon liter litre foot ft yard meter
    metre cup box bag ticket share""".split())
# words that change the value
NO_UNITS = set("""am pm hundred thousand million billion trillion dozen half halve third quarter
    fourth fifth sixth seventh eighth ninth tenth hundredth thousandth millionth squared cubed
    factorial mil bil lakh crore gross not no nor or and than more less least most to if is are
    was mod base remainder plus minus over above below north south east west up down loss debt
    negative wrong incorrect sqrt root sin cos tan cot csc log ln exp""".split())


def drop_unit(m, taken):
    """A unit behind a number goes; what else stands there stays, words of NO_UNITS as written.
    taken: the short words of the other side."""
    link, marked, plain, power = m.groups()
    before = m.string[max(0, m.start() - 60):m.start()]
    words = re.findall("[A-Za-z]+", (plain or marked or "").replace(".", ""))
    changed = any({w.lower(), w.lower().removesuffix("s")} & NO_UNITS for w in words)
    if changed or "sec" in words[:-1]:  # 2 sec x is no time
        return m[0].replace("\\text{", "\\word{")
    odd = re.search(r"[^A-Za-z ./-]", marked or "") or re.search(r"\\text\{[^{}]*\}$", before)
    if not words or odd:
        return m[0]
    first = words[0]
    named = first in GLUED | SPACED or len(first) > 2
    if "/" in link:  # $5/day
        per = first.lower().removesuffix("s") in PER
        unit = len(words) == 1 and (per or marked and named)
    elif marked:
        unit = named
    elif first in SPACED or first == "L":
        # A short plain unit may be a variable. Not when the number before it stands by itself, all
        # are known units, joined by a slash if there are two, none is squared but m (4 s^2), and
        # none is taken.
        alone = re.search(r"(?:^|[,;∨=≈]) ?[-+]? ?[0-9][0-9.,/ ]*$", before)
        known = all(word in GLUED | SPACED or len(word) > 2 for word in words)
        one = re.fullmatch(r"[A-Za-z]+(/[A-Za-z]+)?[. ]*", plain)
        squared = power and plain.strip() != "m" and not (one and one[1])
        unit = ((link or first == "L") and alone and known and one and not squared
                and not taken & set(words))
    else:
        unit = first in GLUED or link and len(first) > 2 and len(words) < 6
    return "" if unit else m[0]


# The rules go in this order; white space has become single blanks.
RULES = (
    (r"</?answer>", ""),
    (r"^[ *`\"#]+|[ *`\"]+$", ""),  # **5** -> 5
    (r"\\q?quad", " "),
    # \le -> ≤, \dfrac -> \frac, \left( -> (, \mbox -> \text
    (r"\\([a-zA-Z]+)", lambda m: COMMANDS.get(m[1], m[0])),
    # braces of a set, apart from those of TeX
    (r"\\\{", "⦃"), (r"\\\}", "⦄"),
    (r"<=", "≤"), (r">=", "≥"), (r"(?<![0-9])!=", "≠"),
    # 10,\!000 and 10{,}000 and 10\,000 -> 10000
    (r"(?<=[0-9])(?:, ?\\!|\\[!, ]|\{,\}) ?(?=[0-9]{3}(?![0-9]))", ""),
    # USD 5 -> 5, pi/3 -> π/3
    (rf"(?<![A-Za-z\\])(?:\\text ?\{{ ?{CURRENCY} ?\}}|{CURRENCY})[ ~]?"
     r"(?=\\?\$? ?[-+]?[.0-9])", ""),
    (r"(?<![A-Za-z\\])[pP]i(?![A-Za-z])", "π"), (r"(?<![A-Za-z\\])infinity(?![A-Za-z])", "∞"),
    # spacing, then $..$, \(..\), \[..\], $5 and \$5
    (r"\\!", ""), (r"\\[,;: ]|~", " "), (r"\\?\$|\\[()\[\]]", " "),
    # 5\%, 5^\circ, 5^{\text{th}} -> 5
    (r"\\?%|\^ ?\{? ?(?:\\circ|\\text ?\{(?:st|nd|rd|th)\}) ?\}?", " "),
    (r" +", " "), (r"\\text \{", r"\\text{"),
    # 1:03 P.M. -> 1:03pm
    (r"(?i)(?<=[0-9])( ?\\text\{)? ?([ap])\.?m\b\.?",
     lambda m: (m[1] or "") + m[2].lower() + "m"),
    (r"[ .,;:\\]+$", ""),  # 45. -> 45
    (r"^([A-J])\)$", r"\1"),  # B) -> B
    # 1 and 2 -> 1, 2
    (r" ?,? ?(?:\\text\{[ ,]*(and|or) ?\}|(?<![A-Za-z\\])(and|or)(?![A-Za-z])) ?",
     lambda m: "∨" if "or" in m.groups() else ", "),
    # 5 cm, $5/day, 5 \text{ apples}, each where an element of the answer ends
    (r"(?<=[0-9}π])( ?/? ?)(?:\\text\{([^{}]*)\}|([A-Za-z][A-Za-z./ -]*))( ?\^ ?\{?[23]\}?)?"
     r"(?= ?(?:[,;∨)\]⦄=<>≤≥≈]|$))", drop_unit),
    (r"\\text\{([^{}]*)\}", r" \1 "),  # \text{Even} -> Even
    # sqrt(3) -> \sqrt{3}
    (r"(?<![A-Za-z\\])sqrt", r"\\sqrt "), (r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    # 2,125 -> 2125, but (2,125) is a pair
    (r"^[^(\[⦃{][^(\[⦃]*$", lambda m: THOUSANDS.sub(lambda n: n[0].replace(",", ""), m[0])),
    # no blanks, except between two digits
    (r" +", " "), (r"(?<![0-9.]) | (?![0-9.])", ""),
    (r"(?<=[0-9A-Za-zπ)}])\*(?=[A-Za-zπ(]|\\(?!frac))(?![eE][0-9])", ""),  # 2*x -> 2x
    (r"-\(-([0-9.]+)\)", r"+\1"),  # - (-1) -> +1
    # x/(x+1) -> \frac{x}{x+1}
    (r"(?<![\w^_})!.\\])(?:([0-9A-Za-zπ]+)|\(([^()]*)\))/\(([^()]*)\)(?![\w^!({\\])",
     r"\\frac{\1\2}{\3}"),
    (r"[(\[]\\begin\{array\}\{[clr|]*\}(.*?)\\end\{array\}[)\]]",
     r"\\begin{pmatrix}\1\\end{pmatrix}"),
    (r"\\mathbb\{?R\}?|ℝ|(?i:^allreal(?:s|numbers)$)", "(-∞,∞)"),
    # 0.1\overline{6} -> \frac{16 - 1}{90}
    (r"(?<![0-9.])([0-9]{0,50})\.([0-9]{0,50})\\overline\{([0-9]{1,50})\}(?![0-9.])",
     lambda m: f"\\frac{{{int(m[1] + m[2] + m[3]) - int(m[1] + m[2] or 0)}}}"
               f"{{{'9' * len(m[3])}{'0' * len(m[2])}}}"),
)

STATED = re.compile(r"(?i)(?:^|[.:!?\n])[\s*]*(?:(?:(?:so|thus|hence|therefore),? )?(?:the )?"
                    r"(?:final )?(?:answer|solution)\b(?: is\b)?:?[\s*]*)+|(?:^|\n)[\s*]*####")
LINKING = set("""so thus hence therefore then finally we find get have obtain see conclude that this
    it here it is are be the a an our my to of final answer solution result value set interval
    inequality equation zero identity matrix vector number total expression probability""".split())


def stated(text):
    """The answer that a sentence states: what follows the last `The answer is` at the start of a
    sentence, or the last `####` of a line; then, what stands between dollar signs when they occur
    once and all other words are harmless. Any other sentence stays as it is, and will equal
    nothing."""
    text = re.sub(r"\s*I hope it is correct\.?\s*$", "", text)
    text = text[max((m.end() for m in STATED.finditer(text)), default=0):]
    dollars = re.sub(r"\$\$|\\[()\[\]]", "$", text)
    m = re.fullmatch(r"([^$0-9]*)\$([^$]+)\$([^$0-9]*)", dollars)
    harmless = m and set(re.findall(r"[^\s.,:;!]+", (m[1] + m[3]).lower())) <= LINKING
    return m[2] if harmless else text


@lru_cache(4096)
def clean(text, other=""):
    """The answer without wrappers and units, each thing in one spelling, each argument in braces.
    ¶ ends the row of a matrix; elsewhere a doubled backslash is one. other: what it is compared
    with, whose short words are no units here: 5 g is 5, but not beside 5g or g = 5."""
    text = " ".join(stated(unboxed(text) or "").split()).translate(UNICODE)
    if "\\begin" in text:
        text = text.replace("\\\\", "¶")
    else:
        text = re.sub(r"\\\\(?=[a-zA-Z{}])", r"\\", text)
    outside = re.sub(r"\\[a-zA-Z]+ ?(?:\{[^{}]*\})?", " ", other)
    taken = {c for w in re.findall("[A-Za-z]+", outside) if len(w) < 3 for c in (w, *w)}
    for pattern, to in RULES:
        if to is drop_unit:  # the one rule that knows of the other side
            to = partial(drop_unit, taken=taken)
        text = re.sub(pattern, to, text)
    return braced(text)


TOKEN = re.compile(r"(?<=[\^_])[+-]?[0-9]+|\\sqrt ?\[[^\[\]]*\]|\\[a-zA-Z]+|.", re.S)


def braced(text):
    """Arguments in braces: \\frac12 -> \\frac{1}{2}, \\sqrt3 -> \\sqrt{3}, x^10 -> x^{10}."""
    out = []
    due = [0]  # how many arguments are still to come, for each open brace
    for token in TOKEN.findall(text):
        if token == "{":
            due.append(0)
        elif token == "}":
            if len(due) > 1:
                due.pop()
            due[-1] = max(0, due[-1] - 1)
        elif token.startswith("\\sqrt") or token in ("^", "_"):
            due[-1] = 1
        elif token == "\\frac":
            due[-1] = 2
        elif due[-1] and token == " ":
            token = ""
        elif due[-1]:
            due[-1] -= 1
            token = "{" + token + "}"
        out.append(token)
    return "".join(out).replace("} ", "}")


# ---- parse: a tree of (kind, children) -----------------------------------------------------------

# what may stand before `=`: x, x_{1}, f(x), AB, area, \theta, (x,y), AB/CD
NAME = re.compile(
    r"(?:[A-Za-z]|[A-Z]{2,3}|[A-Za-z]{4,}"
    r"|m?\\(?!sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|frac)[a-zA-Z]+)(?:_\{\w+\})?'*(?:\([\w,]*\))?"
    r"|\([A-Za-z,]+\)|[A-Z]{2}[/:][A-Z]{2}|\\frac\{[A-Z]{2}\}\{[A-Z]{2}\}|\\overline\{[A-Z]{2}\}")
NUMBER = re.compile(r"10\^\{([+-]?[0-9]+)\}"
                    r"|([0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE]([+-]?[0-9]+)|\*10\^\{([+-]?[0-9]+)\})?")
# no rule for terms in these: compared as text
OPAQUE = re.compile(r"[|±∓¶&]|\\(?:begin|[lr]floor|[lr]ceil|sum|int|lim|p?mod)(?![a-zA-Z])")
# a number before this multiplies it; not so in 2^{9}, 101_{2}, 5!, 1:2
MULTIPLE = re.compile(r"[A-Za-zπ∞(]|\\(?!frac)")
FACTOR = r"(?:\\sqrt(?:\[[^\[\]]*\])?\{[^{}]*\}|[a-zA-Zπ](?:\^\{[^{}]*\})?)"
GROUP = r"(?:\(([^(),;]*)\)(\^\{[^{}]*\})?)"


def split(text, separators):
    """Parts of text between the separators that stand outside all brackets; those separators."""
    parts, found, depth, begin = [], [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{⦃") - (c in ")]}⦄")
        if depth == 0 and c in separators:
            parts.append(text[begin:i])
            found.append(c)
            begin = i + 1
    return parts + [text[begin:]], found


def closing(text, begin=0):
    """Position of the bracket that closes the one at begin, or -1. Any kind closes any, as in a
    half-open interval."""
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] in "([{⦃") - (text[i] in ")]}⦄")
        if depth == 0:
            return i
    return -1


def parse(s, depth=0):
    """The tree of a cleaned answer."""
    def children(parts):
        return [parse(p, depth + 1) for p in parts]

    if depth > DEEPEST or not s:
        return "text", s
    parts, found = split(s, "∪")
    if found:
        return ("∪", children(parts)) if all(parts) else ("text", s)
    parts, found = split(s, ",;∨")
    if found and not all(parts):
        return "text", s
    if found:
        items = children(grouped(s, parts, found))
        if "∨" in found and all(same(items[0], item) for item in items[1:]):  # x+1 or 1+x
            return items[0]
        return listed("or" if "∨" in found else "list", items)
    parts, found = split(s, "=<>≤≥≠∈≈")
    if found:
        return relation(parts, found, depth + 1)
    if s[0] in "([{⦃" and closing(s) == len(s) - 1:
        kind = s[0] + s[-1]
        parts, found = split(s[1:-1], ",;")
        if kind == "{}" or kind == "()" and not found:  # (5) is 5
            return parse(s[1:-1], depth + 1)
        if kind == "⦃⦄":
            return "set", children(parts)
        return listed(kind, children(parts)) if all(parts) else ("text", s)
    m = re.fullmatch(r"\\begin\{([pbvBV]?)matrix\}(.*)\\end\{\1matrix\}", s)
    if m and "\\begin" not in m[2]:
        rows = [("row", children(split(row, "&")[0])) for row in m[2].strip("¶").split("¶")]
        return "determinant" if m[1] in ("v", "V") else "matrix", rows
    if s.count("±") == 1 and "∓" not in s:
        return "or", children([s.replace("±", sign) for sign in "+-"])
    return "sum", sorted(terms(s, depth))


def grouped(s, parts, found):
    """Parts of a list; 1,2;3,4 and 1,2∨3,4 are lists of pairs."""
    groups = split(s, ";∨")[0]
    sizes = {len(split(group, ",")[0]) for group in groups}
    if "," in found and len(groups) > 1 and len(sizes) == 1:
        return [f"({group})" for group in groups]
    return parts


def listed(kind, items):
    """A list or tuple. x=1, x=2 and x=1, 2 are alternatives for x, in any order; y=2, x=1 goes by
    the order of the names: x=1, y=2."""
    names = [item[0] if item[0].startswith("name ") else "" for item in items]
    ranges = any(item[1][0][0][0] in "([" for name, item in zip(names, items) if name)
    one_name = names[0] and set(names[1:]) <= {names[0], ""}
    if one_name and (kind == "or" or kind == "list" and not ranges):
        values = [item[1][0] if name else item for name, item in zip(names, items)]
        return names[0], [("or", values)]
    if all(names) and len(set(names)) == len(names):
        items = sorted(items, key=lambda item: item[0])
    return kind, items


def relation(parts, ops, depth):
    """x = 5 is 5 with a name; (x,y) = (1,2) is (x = 1, y = 2); x > 5 is (5,∞), a < x < b is (a,b);
    x = 1/3 ≈ 0.33 is x = 1/3; 2+3 = 5 is 5."""
    if "≈" in ops:
        i = ops.index("≈")
        if i == 0 and (not parts[0] or NAME.fullmatch(parts[0])):  # x ≈ 5, ≈ 5
            ops[0] = "="
        else:  # the exact value counts
            parts, ops = parts[:i + 1], ops[:i]
    if parts[0] == "" and ops[:1] == ["="]:
        parts, ops = parts[1:], ops[1:]
    if not ops:
        return parse(parts[0], depth)
    if not all(parts):
        return "text", "".join(p + o for p, o in zip(parts, ops + [""]))
    if set(ops) == {"="} and len(ops) > 1 and value(parts[-1]) is not None:  # x = 2+3 = 5
        parts, ops = [parts[0], parts[-1]], ["="]
    tree = equation(parts, depth) if ops in (["="], ["∈"]) else None
    if tree:
        return tree
    if set(ops) <= set(">≥"):
        parts, ops = parts[::-1], ["<" if op == ">" else "≤" for op in ops[::-1]]
    if len(ops) == 1 and ops[0] in "=<≤≠":
        return one_sided(*parts, ops[0])
    if len(ops) == 2 and set(ops) <= set("<≤") and NAME.fullmatch(parts[1]):
        kind = ("(" if ops[0] == "<" else "[") + (")" if ops[1] == "<" else "]")
        return "name " + parts[1], [(kind, [parse(parts[0], depth), parse(parts[2], depth)])]
    return "".join(ops), [parse(p, depth) for p in parts]


def equation(parts, depth):
    """The tree of `name = something` or of `2+3 = 5`, which is 5; None for any other equation."""
    left, right = parts
    if not NAME.fullmatch(left) and NAME.fullmatch(right):
        left, right = right, left
    tree, names = parse(right, depth), re.findall("[A-Za-z]+", left)
    pair = re.fullmatch(r"\([A-Za-z]+(,[A-Za-z]+)+\)", left)
    if pair and tree[0] == "()" and len(tree[1]) == len(names):
        return listed("()", [("name " + name, [child]) for name, child in zip(names, tree[1])])
    if NAME.fullmatch(left):
        return "name " + left, [tree]
    result = value(right)
    if result is None or value(left) not in (None, result):
        return None
    bare = re.sub(r"\\[a-zA-Z]+|e(?=\^)|i(?=π)", "", left)
    is_number = re.search("[0-9π]", bare) and not re.search("[A-Za-z]", bare)  # not so 7 = x+2
    return tree if is_number else None


def one_sided(left, right, op):
    """An equation or inequality with all on one side and first coefficient 1 (or -1 for <);
    x < 5 is (-∞,5)."""
    side = terms(left) + [(text, -c) for text, c in terms(right)]
    side = sorted((text, c) for text, c in side if c)
    if not side:
        return "sum" + op, []
    name, c = side[-1]
    unknowns = [text for text, _ in side if text]
    if op in "<≤" and unknowns == [name] and len(side) < 3 and NAME.fullmatch(name):
        end = "sum", [("", -side[0][1] / c)] if len(side) == 2 else terms("0")
        kind = "()" if op == "<" else "(]" if c > 0 else "[)"
        return "name " + name, [(kind, [parse("-∞"), end] if c > 0 else [end, parse("∞")])]
    scale = side[0][1] if op in "=≠" else abs(side[0][1])
    return "sum" + op, [(text, c / scale) for text, c in side]


def number(s):
    """The number at the start of s and the rest: (Fraction, rest), or (None, s). ASCII digits;
    5 .5 5. 5e3 5*10^{3} 10^{3}, none huge."""
    m = NUMBER.match(s)
    exponent = m and (m[1] or m[3] or m[4]) or "0"
    if not m or m.end() > 400 or len(exponent) > 4 or abs(int(exponent)) > 400:
        return None, s
    return Fraction(m[2] or "1") * Fraction(10) ** int(exponent), s[m.end():]


def value(s, depth=0):
    """The rational number that s spells, or None."""
    found = terms(s, depth)
    return found[0][1] if len(found) == 1 and found[0][0] == "" else None


@lru_cache(4096)  # the same part is asked for again and again: nesting would cost 2^depth
def terms(s, depth=0):
    """The terms of a sum, (text, coefficient) each: 2x-\\frac{3π}{4} is ("x", 2), ("π", -3/4).
    A number has the text "". Nothing is added up."""
    text = s.lower() if s.isalpha() and len(s) > 2 else s or "nothing"  # Even is even
    whole = [(text, Fraction(1))]
    if not s or s.isalpha() or depth > DEEPEST or OPAQUE.search(s):
        return whole
    parts, signs = split(s, "+-")
    pieces = parts[:1]
    for sign, part in zip(signs, parts[1:]):
        before = pieces[-1]
        exponent = re.search("[0-9.][eE]$", before) and re.match("[0-9]", part)
        if not before or before[-1] in "*/^_+-" or exponent:
            pieces[-1] += sign + part
        else:
            pieces.append(sign + part)
    found = []
    for piece in pieces:
        body = piece[piece[0] in "+-":]
        if not body:
            return whole
        sign = -1 if piece[0] == "-" else 1
        found += [(text, sign * c) for text, c in term(body, depth + 1)]
    return found


def term(s, depth):
    """The terms of one unsigned term: a number, a fraction, a mixed number, a number times text,
    or a sum over a number. What no rule reads is text."""
    as_text = [(arguments(s, depth), Fraction(1))]
    c, rest = number(s)
    k = Fraction(1) if c is None else c
    if c is not None and not rest:
        return [("", c)]
    if c is not None and (m := re.fullmatch(r" ([0-9]{1,99}/[0-9]{1,99})|(\\frac.*)", rest)):
        part = value(m[1] or m[2], depth)
        if part is not None:  # 3 1/2, 3\frac{1}{2}
            return [("", c + part)] if c.denominator == 1 and 0 < part < 1 else as_text
    if rest.startswith("\\frac{"):
        found = fraction(c, rest, depth)
        if found is not None:
            return found or as_text
    elif c is not None and not MULTIPLE.match(rest):
        m = re.fullmatch(r"/(-?)(.+)", rest)  # 3/4, 3/-4
        d, tail = number(m[2]) if m else (None, "")
        return [("", c / (-d if m[1] else d))] if d and not tail else as_text
    m = re.fullmatch(r"([^/]+)/([0-9]{1,99})", rest)
    if m and int(m[2]) and not re.search(r"\\(?!sqrt|frac)", m[1]):  # \sqrt{2}/2, (1+\sqrt{5})/2
        top = [(factors(m[1], depth), Fraction(1))]
        if m[1][0] == "(" and closing(m[1]) == len(m[1]) - 1:
            top = terms(m[1][1:-1], depth)
        return [(text, k * a / int(m[2])) for text, a in top]
    return [(factors(rest, depth), k)]


def fraction(c, s, depth):
    """The terms of the number c (or None) times s, which begins with \\frac{; [] if they are no
    such thing, None if they are those of any factor."""
    i = closing(s, 5)
    j = closing(s, i + 1) if s[i + 1:i + 2] == "{" else -1
    if j < 0 or s[i] + s[j] != "}}":
        return []
    k = Fraction(1) if c is None else c
    top, d, tail = terms(s[6:i], depth), value(s[i + 2:j], depth), s[j + 1:]
    if d and len(top) == 1 and top[0][0] == "":  # \frac{3}{4}π
        fine = c is None and (not tail or MULTIPLE.match(tail))
        return [(factors(tail, depth), top[0][1] / d)] if fine else []
    if d and not tail:  # \frac{1+\sqrt{5}}{2}
        return [(text, k * a / d) for text, a in top]
    if len(top) == 1 and top[0][1] != 1 and not tail:  # \frac{-2x}{y}
        text, a = top[0]
        return [(factors(f"\\frac{{{text or '1'}}}{s[i + 1:]}", depth), k * a)]
    return None


def written(s, depth):
    """One spelling of a sum inside a root, an exponent or a bracket: its terms in order. What is no
    sum stays."""
    found = sorted(terms(s, depth))
    if len(found) == 1 and found[0][1] == 1:
        return found[0][0] if s and not s.isalpha() else s
    return "+".join(f"{c}·{text}" for text, c in found)


def arguments(s, depth):
    """s with the sum in each pair of braces written in one way."""
    out, i = "", 0
    while (j := s.find("{", i)) >= 0 and (k := closing(s, j)) > 0 and s[k] == "}":
        out += s[i:j + 1] + written(s[j + 1:k], depth + 1) + "}"
        i = k + 1
    return out + s[i:]


def factors(s, depth):
    """One order for a product of roots, π and powers of letters, or of sums in brackets:
    i\\sqrt{3}, \\sqrt{3}i; (x+2)(x-2), (x-2)(2+x)."""
    s = arguments(s, depth)
    if re.search(r"\\sqrt|π|\^", s) and re.fullmatch(FACTOR + "{2,}", s):
        return "".join(sorted(re.findall(FACTOR, s)))
    groups = re.findall(GROUP, s) if re.fullmatch(GROUP + "+", s) else []
    if not groups or not all(re.search(r".[+-]", inner) for inner, _ in groups):
        return s
    return "".join(sorted(f"({written(inner, depth + 1)}){power}" for inner, power in groups))


# ---- compare -------------------------------------------------------------------------------------

def same(a, b):
    """Are two trees equal? Child by child; sets, unions and alternatives in any order. A name
    (`x =`) on one side is dropped, two names must agree. A list is a tuple when its parts have
    names: x=1, y=2 is (1,2)."""
    if a[0].startswith("name ") and b[0].startswith("name ") and a[0] != b[0]:
        return False
    a, b = (t[1][0] if t[0].startswith("name ") else t for t in (a, b))
    if a == b:
        return True
    kinds = {a[0], b[0]}
    named = any(t[0] in ("list", "()") and all(part[0].startswith("name ") for part in t[1])
                for t in (a, b))
    choice = "or" in kinds and kinds <= {"or", "list", "set"} and not named
    if kinds == {"set"} or kinds <= {"or", "∪"} or choice:
        return all(any(same(x, y) for y in others)
                   for some, others in ((a[1], b[1]), (b[1], a[1])) for x in some)
    if a[0].startswith("sum") or a[0] == "text" or isinstance(b[1], str):
        return False
    if a[0] != b[0] and kinds != {"set", "list"} and not (named and kinds == {"list", "()"}):
        return False
    return len(a[1]) == len(b[1]) and all(same(x, y) for x, y in zip(a[1], b[1]))


# What rows and models write where there is no answer. Not among them is what answers a question:
# `no solution`, `does not exist`, `neither`, `empty`, `cannot be determined`.
PLACEHOLDER = re.compile(
    "(no )?proof|proof (required|needed|omitted|problem)|prove[dn]|qed|q e d|null|nan|inf"
    "|none( given| provided)?|un(known|defined|specified|available|answered)|missing( answer)?"
    "|(answer )?not found|notfound|not (available|applicable|given|provided|specified|stated)"
    "|not (known|defined|extracted)|no ?answer|no answer (found|given|provided|available)"
    "|no final answer|tbd|tba|todo|pending|placeholder|to be (proved|determined|added)|idk"
    "|(i )?don t know|i do not know|(see|refer to)( .*)?")
NOT_APPLICABLE = re.compile(r"[\W_]*(?:[nN] ?[/.] ?[aA]|NA)[\W_]*")
SOMETHING = re.compile(r"[^\W_]|[∞∅<>=≤≥]")


def is_empty(text):
    """Does an answer hold nothing: only white space, punctuation, wrappers such as $$, or a box
    that is empty or not finished?"""
    return not SOMETHING.search(text if len(text) > LONGEST else clean(text))


def is_placeholder(text):
    """Is an answer none, so that nothing equals it? None, an empty one, a word such as proof,
    unknown, N/A or nan, a note such as `see figure`, a division by zero."""
    if text is None or is_empty(text):
        return True
    head = stated(unboxed(text[:LONGEST]) or "")
    words = " ".join(re.findall("[a-z0-9]+", re.sub(r"\\[a-zA-Z]+", " ", head).lower()))
    by_zero = len(text) <= LONGEST and re.search(r"/0+(?![0-9.])|\}\{0+\}", clean(text))
    return bool(by_zero or PLACEHOLDER.fullmatch(words) or NOT_APPLICABLE.fullmatch(head))


def answers_equal(pred, gold):
    """Is the answer pred equal to gold? Exact and symmetric, always a bool. What is no answer
    equals nothing, not even itself."""
    if is_placeholder(pred) or is_placeholder(gold):
        return False
    if max(len(pred), len(gold)) > LONGEST:
        return pred.strip() == gold.strip()
    pred, gold = clean(pred, gold), clean(gold, pred)
    for a, b in ((pred, gold), (gold, pred)):  # (C) 27 is the choice (C)
        choice = re.fullmatch(r"\(?([A-J])[).:] ?\(?-?[0-9.][^A-Za-z]*", a)
        if choice and re.fullmatch(r"\(?[A-J]\)?", b):
            return choice[1] == b.strip("()")
    return pred == gold or same(parse(pred), parse(gold))


# ---- a table of hard cases: python rewards.py ----------------------------------------------------

HARD_CASES = (  # prediction, gold, equal?, why
    ("2{,}125", "2,125", True, "thousands separators are dropped on both sides"),
    ("32, 349", "32349", False, "a comma and a blank make a list, no thousands"),
    ("45.01", "45", False, "no tolerance"),
    ("5-15", "-10", False, "nothing is computed"),
    ("6 or 8", "6", False, "one answer, not a choice"),
    (r"-\frac{3}{-4}", ".75", True, "fractions and decimals are rational numbers"),
    ("33.3333", r"\frac{100}{3}", False, "a rounded decimal is another number"),
    ("0.35", "35%", False, "percent signs are dropped: this is 35"),
    (r"1.5 \times 10^{-3}", "0.0015", True, "scientific notation is read"),
    ("9**9**9", "387420489", False, "nothing is evaluated"),
    ("nan", "nan", False, "no number, and no answer"),
    ("10 square feet", r"10\text{ cm}^2", True, "units are dropped, whatever they are"),
    ("5 million", "5", False, "not a unit"),
    ("18 g", "g = 18", False, "nor is a letter that the other side has"),
    ("USD 18", "$18/day", True, "currency in front, and what it is paid for"),
    ("x = 5", "5", True, "a name in front is dropped"),
    ("y=1, x=2", "x=1, y=2", False, "each part keeps its name"),
    ("1, 2", "2, 1", False, "a list has an order, a set or alternatives have none"),
    (r"\boxed{1} and \boxed{2}", "1, 2", True, "boxes side by side are one answer"),
    (r"\boxed{4} or better \boxed{5", "4", False, "an unfinished last box is no answer"),
    ("[0,1)", "(0,1)", False, "closed and open ends differ"),
    (r"x < 1 or x > 3", r"(-\infty,1)\cup(3,\infty)", True, "inequalities are intervals"),
    (r"2^{1+n} - \frac{1}{1+x}", r"-\frac{1}{x+1} + 2^{n+1}", True, "terms in any order"),
    (r"2\sqrt{3}", r"\sqrt{12}", False, "roots are not simplified"),
    ("(B) 27", "B", True, "a choice with its text"),
    ("The answer is 5. No, 6.", "5", False, "nothing may follow the answer"),
    ("proof", "proof", False, "a placeholder pays nobody"),
)


def print_table():
    """Prints the hard cases with the verdicts of answers_equal."""
    print(f"{'prediction':31}{'gold':29}{'':7}why")
    for pred, gold, equal, why in HARD_CASES:
        verdict = answers_equal(pred, gold)
        wrong = "" if verdict == equal else "   <-- WRONG VERDICT"
        print(f"{pred:31}{gold:29}{'equal' if verdict else 'not':7}{why}{wrong}")
