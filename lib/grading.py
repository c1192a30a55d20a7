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
from collections import namedtuple
from fractions import Fraction
from functools import lru_cache, partial

LONGEST = 1000  # characters; a longer answer is compared as it stands (MATH's longest gold has 159)
DEEPEST = 12    # nested brackets; what lies deeper is compared as text


# ---- find the boxed answer -----------------------------------------------------------------------

BOX = re.compile(r"\\?\\(?:boxed|fbox)(?![a-zA-Z])\s*\{?")
BARE_BOX = re.compile(r"\\?\\(?:boxed|fbox)\s+([^\s{}$\\]*[^\s{}$\\.,;])")  # \boxed 2
# what may stand between two boxes of one answer, e.g. `, and x = `
BETWEEN = re.compile(r"(?:[a-z]+ )?(?:[,;]|,? ?(?:and|or)(?![a-z]))? ?"
                     r"(?:[a-zA-Z](?:_\{?[0-9]\}?)? ?= ?)?")


def last_boxed(text):
    """Content of the last \\boxed{...} or \\fbox{...} with balanced braces (or `\\boxed 2`), the
    inner one of nested ones. None if there is none, or if the last one is not finished: no earlier
    one is taken instead. Boxes side by side, with a comma, `and` or `or` between them, are one
    answer: \\boxed{1} and \\boxed{2} is `1, 2`."""
    text = BARE_BOX.sub(r"\\boxed{\1}", text)
    opened, closes = [], {}  # where open braces begin; where they close
    for m in re.finditer(r"\\.|[{}]", text, re.S):
        if m[0] == "{":
            opened.append(m.end())
        elif m[0] == "}" and opened:
            closes[opened.pop()] = m.start()
    contents, word, behind = [], ", ", len(text)
    for m in reversed(list(BOX.finditer(text))):
        end = closes.get(m.end())
        if end is None and not contents:
            return None  # not finished
        content = text[m.end():end].strip()
        if end is None or end > behind or not content:
            continue
        if contents:
            gap = text[end + 1:behind]
            words = re.sub(r"\\q?quad|\\[,;: ()]|\\text|[{}$ ]+", " ", gap).split()
            if len(gap) >= 60 or "\n" in gap or not BETWEEN.fullmatch(" ".join(words)):
                break
            word = " or " if "or" in words else word
        contents.append(content)
        behind = m.start()
    if len(set(contents)) < 2:
        return contents[0] if contents else None
    return word.join(contents[::-1])


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
    "infinity": "∞", "Pi": "π", "pm": "±", "mp": "∓", "cdot": "*", "times": "*",
    "varnothing": "∅", "emptyset": "∅", "dfrac": "\\frac", "tfrac": "\\frac", "cfrac": "\\frac",
    # braces of a set, apart from those of TeX
    "{": "⦃", "}": "⦄", "lbrace": "⦃", "rbrace": "⦄",
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
    negative wrong incorrect root sin cos tan cot csc log ln exp""".split())


def drop_unit(m, taken):
    """A unit behind a number goes; what else stands there stays, marked words of NO_UNITS with
    their mark. taken: the short words of the other side."""
    link, marked, plain, power = m.groups()
    words = re.findall("[A-Za-z]+", (marked or plain or "").replace(".", ""))
    if any({w.lower(), w.lower().removesuffix("s")} & NO_UNITS for w in words):
        return m[0].replace("‹", "«")
    known = [word in GLUED | SPACED or len(word) > 2 for word in words]
    first = words[0] if words else ""
    if "/" in link:  # $5/day
        per = first.lower().removesuffix("s") in PER
        unit = len(words) == 1 and (per or marked and known[0])
    elif first in SPACED | {"L"} and not marked:
        # A short plain unit may be a variable. Not when the number before it stands by itself, all
        # are known units, joined by a slash if there are two, none is squared but m (4 s^2), and
        # none is taken.
        alone = re.search(r"(?:^|[,;∨=≈]) ?[-+]? ?[0-9][0-9.,/ ]*$", m.string[:m.start()])
        one = re.fullmatch(r"[A-Za-z]+(/[A-Za-z]+)?[. ]*", plain)
        may_be_squared = first == "m" or one and one[1]
        unit = (alone and all(known) and one and (link or first == "L")
                and (may_be_squared or not power) and not taken & set(words))
    elif words and (marked or link):  # not 6 sec x
        letters = [word for word in words if len(word) == 1 and word not in SPACED | {"a"}]
        unit = known[0] and (marked or len(words) < 6 and not letters)
    else:
        unit = first in GLUED
    return "" if unit else m[0]


# The rules go in this order; white space has become single blanks. ‹cm› is a \text{cm} on its way;
# «half› is one that drop_unit keeps, and its « stays: 5 \text{half} is not the product 5half.
RULES = (
    (r"</?answer>", ""),
    (r"^[ *`\"#]+|[ *`\"]+$", ""),  # **5** -> 5
    # pi -> \pi; \le -> ≤, \dfrac -> \frac, \left( -> (, \mbox -> \text, \{ -> ⦃
    (r"(?<![A-Za-z\\])([pP]i|infinity|sqrt)(?![A-Za-z])", r"\\\1 "), (r"\\q?quad", " "),
    (r"\\([a-zA-Z]+|[{}])", lambda m: COMMANDS.get(m[1], m[0])),
    (r"<=", "≤"), (r">=", "≥"), (r"(?<![0-9])!=", "≠"),
    # 10,\!000 and 10{,}000 and 10\,000 -> 10000
    (r"(?<=[0-9])(?:, ?\\!|\\[!, ]|\{,\}) ?(?=[0-9]{3}(?![0-9]))", ""),
    (r"\\text ?\{([^{}]*)\}", r"‹\1›"),  # \text{cm} -> ‹cm›
    # USD 5 -> 5
    (rf"(?<![A-Za-z\\])‹? ?{CURRENCY} ?›?[ ~]?(?=\\?\$? ?[-+]?[.0-9])", ""),
    # spacing, then $..$, \(..\), \[..\], $5 and \$5
    (r"\\!", ""), (r"\\[,;: ]|~", " "), (r"\\?\$|\\[()\[\]]", " "),
    # 5\%, 5^\circ, 5^{\text{th}} -> 5
    (r"\\?%|\^ ?\{? ?(?:\\circ|‹(?:st|nd|rd|th)›) ?\}?", " "),
    (r" +", " "),
    # 1:03 P.M. -> 1:03pm
    (r"(?i)(?<=[0-9])( ?‹)? ?([ap])\.?m\b\.?", lambda m: (m[1] or "") + m[2].lower() + "m"),
    (r"[ .,;:\\]+$", ""),  # 45. -> 45
    (r"^([A-J])\)$", r"\1"),  # B) -> B
    # 1 and 2 -> 1, 2
    (r" ?,? ?(?:‹[ ,]*(and|or) ?›|(?<![A-Za-z\\])(and|or)(?![A-Za-z])) ?",
     lambda m: "∨" if "or" in m.groups() else ", "),
    # 5 cm, $5/day, 5 \text{ apples}, each where an element of the answer ends
    (r"(?<=[0-9}π])( ?/? ?)(?:‹([A-Za-z ./^23-]*)›|([A-Za-z][A-Za-z./ -]*))( ?\^ ?\{?[23]\}?)?"
     r"(?= ?(?:[,;∨)\]⦄=<>≤≥≈]|$))", drop_unit),
    (r"\\text\{([^{}]*)\}|[‹›]", r" \1 "),  # ‹Even› -> Even; what is left of \text in \text
    (r"\\sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    # 2,125 -> 2125, but (2,125) is a pair
    (r"^[^(\[⦃{][^(\[⦃]*$", lambda m: THOUSANDS.sub(lambda n: n[0].replace(",", ""), m[0])),
    # no blanks, except between two digits
    (r" +", " "), (r"(?<![0-9.]) | (?![0-9.])", ""),
    (r"(?<![\w.])([0-9.]+)[eE]([+-]?[0-9]+)(?![\w.])", r"\1*10^{\2}"),  # 5e3
    (r"(?<=[0-9A-Za-zπ)}])\*(?=[A-Za-zπ(]|\\(?!frac))", ""),  # 2*x -> 2x
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


# ---- parse ---------------------------------------------------------------------------------------

# name: what stands before `=`, else "". children: trees; of a sum its terms, (text, Fraction) each
Tree = namedtuple("Tree", "name kind children")

# what may stand before `=`: x, x_{1}, f(x), AB, area, \theta, (x,y), AB/CD
NAME = (r"(?:(?:[A-Za-z]|[A-Z]{2,3}|[A-Za-z]{4,}"
        r"|m?\\(?!sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|frac)[a-zA-Z]+)(?:_\{\w+\})?'*"
        r"(?:\([\w,]*\))?|\([A-Za-z,]+\)|[A-Z]{2}[/:][A-Z]{2}|\\overline\{[A-Z]{2}\}"
        r"|\\frac\{[A-Z]{2}\}\{[A-Z]{2}\})")
DIGITS = r"[0-9]+\.?[0-9]*|\.[0-9]+"
NUMBER = re.compile(rf"(?:({DIGITS})\*)?10\^\{{([+-]?[0-9]+)\}}|({DIGITS})")
# no rule for terms in these: compared as text
OPAQUE = re.compile(r"[|±∓¶&]|\\(?:begin|[lr]floor|[lr]ceil|sum|int|lim|p?mod)(?![a-zA-Z])")
# a number before this multiplies it; not so in 2^{9}, 101_{2}, 5!, 1:2
MULTIPLE = re.compile(r"[A-Za-z«π∞(]|\\(?!frac)")
FACTOR = r"(?:\\sqrt(?:\[[^\[\]]*\])?\{[^{}]*\}|[a-zA-Zπ](?:\^\{[^{}]*\})?)"
GROUP = r"(?:\(([^(),;]*)\)(\^\{[^{}]*\})?)"


def split(text, separators):
    """Parts of text between the separators that stand outside all brackets; those separators. A
    sign at the beginning or behind an operator is none: -5, 3/-4."""
    parts, found, depth, begin = [], [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{⦃") - (c in ")]}⦄")
        sign = c in "+-" and (i == 0 or text[i - 1] in "*/^_+-")
        if depth == 0 and c in separators and not sign:
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

    if depth > DEEPEST:
        return leaf(s)
    parts, found = split(s, "∪")
    if found:
        return Tree("", "∪", children(parts)) if all(parts) else leaf(s)
    parts, found = split(s, ",;∨")
    if found and not all(parts):
        return leaf(s)
    if found:
        groups = split(s, ";∨")[0]
        if "," in found and len({len(split(group, ",")[0]) for group in groups}) == 1 < len(groups):
            parts = [f"({group})" for group in groups]  # 1,2;3,4 and 1,2∨3,4 are lists of pairs
        items = children(parts)
        if "∨" in found and all(same(items[0], item) for item in items[1:]):  # x+1 or 1+x
            return items[0]
        return listed("or" if "∨" in found else "list", items)
    exact, *rounded = split(s, "≈")[0]
    if rounded and not re.fullmatch(f"({NAME})?", exact):  # x=1/3≈0.33: the exact value counts
        s = exact
    elif rounded and rounded[0]:  # x≈5 is x=5
        s = f"{exact}={rounded[0]}"
    s = s.removeprefix("=") or s  # =5 is 5
    parts, found = split(s, "=<>≤≥≠∈")
    if found:
        return relation(parts, found, depth + 1) if all(parts) else leaf(s)
    if s and s[0] in "([{⦃" and closing(s) == len(s) - 1:
        kind = s[0] + s[-1]
        parts, found = split(s[1:-1], ",;")
        if kind == "{}" or kind == "()" and not found:  # (5) is 5
            return parse(s[1:-1], depth + 1)
        if kind == "⦃⦄":
            return Tree("", "set", children(parts))
        return listed(kind, children(parts)) if all(parts) else leaf(s)
    m = re.fullmatch(r"\\begin\{([pbvBV]?)matrix\}(.*)\\end\{\1matrix\}", s)
    if m and "\\begin" not in m[2]:
        rows = [Tree("", "row", children(split(row, "&")[0])) for row in m[2].strip("¶").split("¶")]
        return Tree("", "determinant" if m[1] in ("v", "V") else "matrix", rows)
    if s.count("±") == 1 and "∓" not in s:
        return Tree("", "or", children([s.replace("±", sign) for sign in "+-"]))
    if s.isalpha() and len(s) > 2:  # Even is even
        return leaf(s.lower())
    return Tree("", "sum", sorted(terms(s, depth)))


def leaf(text):
    return Tree("", "sum", [(text or "nothing", Fraction(1))])


def listed(kind, items):
    """A list or tuple. x=1, x=2 and x=1, 2 are alternatives for x, in any order; y=2, x=1 goes by
    the order of the names: x=1, y=2."""
    names = [item.name for item in items]
    ranges = any(item.name and item.kind[0] in "([" for item in items)
    one_name = names[0] and set(names[1:]) <= {names[0], ""}
    if one_name and (kind == "or" or kind == "list" and not ranges):
        return Tree(names[0], "or", [item._replace(name="") for item in items])
    if all(names) and len(set(names)) == len(names):
        items = sorted(items, key=lambda item: item.name)
    return Tree("", kind, items)


def relation(parts, ops, depth):
    """x = 5 is 5 with a name; (x,y) = (1,2) is (x = 1, y = 2); x > 5 is (5,∞), a < x < b is (a,b);
    2+3 = 5 is 5."""
    if set(ops) == {"="} and value(parts[-1]) is not None:  # x = 2+3 = 5
        parts, ops = [parts[0], parts[-1]], ["="]
    if set(ops) <= set(">≥"):
        parts, ops = parts[::-1], ["<" if op == ">" else "≤" for op in ops[::-1]]
    tree = equation(*parts, depth) if ops in (["="], ["∈"]) else None
    if tree:
        return tree
    if len(ops) == 1 and ops[0] in "=<≤≠":
        return one_sided(*parts, ops[0])
    if len(ops) == 2 and set(ops) <= set("<≤") and re.fullmatch(NAME, parts[1]):
        kind = ("(" if ops[0] == "<" else "[") + (")" if ops[1] == "<" else "]")
        return Tree(parts[1], kind, [parse(parts[0], depth), parse(parts[2], depth)])
    return Tree("", "".join(ops), [parse(p, depth) for p in parts])


def equation(left, right, depth):
    """The tree of `name = something` or of `2+3 = 5`, which is 5; None for any other equation."""
    if not re.fullmatch(NAME, left) and re.fullmatch(NAME, right):
        left, right = right, left
    tree = parse(right, depth)
    if re.fullmatch(NAME, left):
        names = left.strip("()").split(",")
        if left[0] != "(" or tree.kind != "()" or len(tree.children) != len(names):
            return tree._replace(name=left)
        parts = zip(tree.children, names)
        return listed("()", [child._replace(name=name) for child, name in parts])
    bare = re.sub(r"\\[a-zA-Z]+|e(?=\^)|i(?=π)", "", left)
    is_number = re.search("[0-9π]", bare) and not re.search("[A-Za-z]", bare)  # not so 7 = x+2
    result = value(right)
    if is_number and result is not None and value(left) in (None, result):
        return tree
    return None


def one_sided(left, right, op):
    """An equation or inequality with all on one side and first coefficient 1 (or -1 for <);
    x < 5 is (-∞,5)."""
    side = terms(left) + [(text, -c) for text, c in terms(right)]
    side = sorted((text, c) for text, c in side if c)
    if not side:
        return Tree("", "sum" + op, [])
    name, c = side[-1]
    unknowns = [text for text, _ in side if text]
    if op in "<≤" and unknowns == [name] and len(side) < 3 and re.fullmatch(NAME, name):
        end = Tree("", "sum", [("", -side[0][1] / c if len(side) == 2 else Fraction(0))])
        if c > 0:
            return Tree(name, "()" if op == "<" else "(]", [parse("-∞"), end])
        return Tree(name, "()" if op == "<" else "[)", [end, parse("∞")])
    scale = side[0][1] if op in "=≠" else abs(side[0][1])
    return Tree("", "sum" + op, [(text, c / scale) for text, c in side])


def number(s):
    """The number at the start of s and the rest: (Fraction, rest), or (None, s). ASCII digits;
    5 .5 5. 5*10^{3} 10^{3}, none huge."""
    m = NUMBER.match(s)
    exponent = m and m[2] or "0"
    if not m or m.end() > 400 or len(exponent) > 4 or abs(int(exponent)) > 400:
        return None, s
    return Fraction(m[1] or m[3] or 1) * Fraction(10) ** int(exponent), s[m.end():]


def value(s, depth=0):
    """The rational number that s spells, or None."""
    found = terms(s, depth)
    return found[0][1] if len(found) == 1 and found[0][0] == "" else None


@lru_cache(4096)  # the same part is asked for again and again: nesting would cost 2^depth
def terms(s, depth=0):
    """The terms of a sum, (text, coefficient) each: 2x-\\frac{3π}{4} is ("x", 2), ("π", -3/4).
    A number has the text "". Nothing is added up."""
    parts, signs = split(s, "+-")
    if s[:1] in ("+", "-"):
        parts[0], signs = parts[0][1:], [s[0], *signs]
    else:
        signs = ["+", *signs]
    if not all(parts) or depth > DEEPEST or OPAQUE.search(s):
        return [(s or "nothing", Fraction(1))]
    return [(text, -c if sign == "-" else c)
            for sign, part in zip(signs, parts) for text, c in term(part, depth + 1)]


def term(s, depth):
    """The terms of one unsigned term: a number, a mixed number, a number times text, or a sum over
    a number. What no rule reads is text."""
    m = re.fullmatch(r"([^/ ]+)/(-?[0-9.]{1,99})", s)
    if m and not re.search(r"\\(?!sqrt|frac)", m[1]):  # 3/4, \sqrt{2}/2, (1+\sqrt{5})/2
        bracket = m[1][0] == "(" and closing(m[1]) == len(m[1]) - 1
        s = f"\\frac{{{m[1][1:-1] if bracket else m[1]}}}{{{m[2]}}}"
    c, rest = number(s)
    if not rest:  # 3, 0.5, 5*10^{3}
        return [("", c)]
    k = Fraction(1) if c is None else c
    m = re.fullmatch(r" ([0-9]{1,99}/[0-9]{1,99})|(\\frac.*)", rest)
    part = value(m[1] or m[2], depth) if m and c is not None else None
    if part is not None and c.denominator == 1 and 0 < part < 1:  # 3 1/2, 3\frac{1}{2}
        return [("", c + part)]
    top, bottom, tail = fraction(rest, depth)
    d = value(bottom, depth) if top else None
    if d and len(top) == 1 and top[0][0] == "":
        if c is not None or tail and not MULTIPLE.match(tail):  # 3\frac{5}{4}, \frac{3}{4}^{2}
            return [(arguments(s, depth), Fraction(1))]
        return [(factors(tail, depth), top[0][1] / d)]  # \frac{3}{4}, \frac{3}{4}π
    if d and not tail:  # \frac{1+\sqrt{5}}{2}, 3\frac{x}{2}
        return [(text, k * a / d) for text, a in top]
    if top and not tail and len(top) == 1:  # \frac{-2x}{y}, 3\frac{1}{y}
        text, a = top[0]
        return [(factors(f"\\frac{{{text or 1}}}{{{bottom}}}", depth), k * a)]
    if c is None or top or MULTIPLE.match(rest):  # x, \frac{1+x}{y}z, 3x, 3\sqrt{2}
        return [(factors(rest, depth), k)]
    return [(arguments(s, depth), Fraction(1))]  # 5!, 2^{9}, 101_{2}


def fraction(s, depth):
    """Of \\frac{top}{bottom}tail the terms of the top, the bottom, the tail."""
    i = closing(s, 5) if s.startswith("\\frac{") else -1
    j = closing(s, i + 1) if s[i:i + 2] == "}{" else -1
    if j < 0 or s[j] != "}":
        return None, "", s
    return terms(s[6:i], depth), s[i + 2:j], s[j + 1:]


def written(s, depth):
    """One spelling of a sum inside a root, an exponent or a bracket: its terms in order. What is no
    sum stays."""
    found = sorted(terms(s, depth))
    if len(found) == 1 and found[0][1] == 1:
        return found[0][0] or "1"
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
    if a.name and b.name and a.name != b.name:
        return False
    if a[1:] == b[1:]:
        return True
    kinds = {a.kind, b.kind}
    if a.kind.startswith("sum") or b.kind.startswith("sum"):
        return False
    named = any(t.kind in ("list", "()") and all(part.name for part in t.children) for t in (a, b))
    choice = "or" in kinds and kinds <= {"or", "list", "set"} and not named
    if kinds == {"set"} or kinds <= {"or", "∪"} or choice:
        return all(any(same(x, y) for y in others)
                   for some, others in ((a.children, b.children), (b.children, a.children))
                   for x in some)
    if len(kinds) == 2 and kinds != {"set", "list"} and not (named and kinds == {"list", "()"}):
        return False
    return len(a.children) == len(b.children) and all(map(same, a.children, b.children))


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
    ("5-15", "-10", False, "nothing is computed"),
    (r"-\frac{3}{-4}", ".75", True, "fractions and decimals are rational numbers"),
    ("33.3333", r"\frac{100}{3}", False, "a rounded decimal is another number"),
    ("0.35", "35%", False, "percent signs are dropped: this is 35"),
    (r"1.5 \times 10^{-3}", "0.0015", True, "scientific notation is read"),
    ("10 square feet", r"10\text{ cm}^2", True, "units are dropped, whatever they are"),
    ("5 million", "5", False, "not a unit"),
    ("18 g", "g = 18", False, "nor is a letter that the other side has"),
    ("USD 18", "$18/day", True, "currency in front, and what it is paid for"),
    ("1, 2", "2, 1", False, "a list has an order, a set or alternatives have none"),
    (r"\boxed{1} and \boxed{2}", "1, 2", True, "boxes side by side are one answer"),
    (r"\boxed{4} or better \boxed{5", "4", False, "an unfinished last box is no answer"),
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
