"""Rewards: format, extraction, and the equality of answers, against hand-worked verdicts and brute force."""
import cmath
import gc
import random
import time
from fractions import Fraction

import pytest

from lib.hard_cases import HARD_CASES
from rewards import accuracy_reward, answers_equal, extract_answer, format_reward

FULL = "<reasoning>\n2+2=4\n</reasoning>\n<answer>{}</answer>"


def equal(a, b):
    """answers_equal, which must be symmetric and give a bool."""
    verdict = answers_equal(a, b)
    assert type(verdict) is bool and verdict is answers_equal(b, a)
    return verdict


# format ---------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, reward", [
    ("<reasoning>a</reasoning><answer>4</answer>", 10),
    ("\n <reasoning>\n3 bags\nof 4\n</reasoning>\n<answer>\n12\n</answer>\n", 10),       # line breaks inside: `.` does not match them
    ("Let us see.\n<reasoning>a</reasoning>\nSo:\n<answer>4</answer>", 10),              # text before and between is paid
    ("<reasoning>a</reasoning><answer></answer>", 10),                                   # an empty answer is a matter of accuracy
    ("<reasoning>a</reasoning><answer>4</answer> That is all.", 1.5),                    # text after the end
    ("<answer>4</answer><reasoning>a</reasoning>", 1.5),                                 # wrong order
    ("<reasoning>a<answer>4</reasoning></answer>", 1.5),                                 # crossed
    ("<reasoning}a</reasoning><answer>4</answer>", 1.5),                                 # one broken tag
    ("<reasoning>a</reasoning><answer>4", 1.5),                                          # cut off
    ("<reasoning>a</reasoning> 4", 1),
    ("a <answer>4</answer>", 1),
    ("<reasoning}a<answer>4</answer>", 1),
    ("<reasoning}a<answer>4</answer> feet", 0),
    ("<reasoning>a", 0),
    ("</reasoning>a<reasoning>", 0),
    ("<Reasoning>a</Reasoning><Answer>4</Answer>", 0),
    ("(reasoning) a (answer) 4", 0),
    ("", 0),
])
def test_format_reward(text, reward):
    assert format_reward(text) == reward and isinstance(format_reward(text), float)


def test_repeated_blocks_are_not_the_full_format():
    """Guards: a lazy wildcard in an anchored pattern stretches over inner tags, so that repeated blocks earn everything."""
    assert format_reward("<reasoning>a</reasoning><reasoning>b</reasoning><answer>4</answer><answer>9</answer>") == 0
    assert format_reward("<reasoning>a</reasoning><answer>4</answer><answer>9</answer>") == 1.5
    assert format_reward("<reasoning>a</reasoning><reasoning>b</reasoning><answer>4</answer>") == 1.5
    assert accuracy_reward("<reasoning>a</reasoning><answer>4</answer><answer>9</answer>", "9") == 0


# accuracy -------------------------------------------------------------------------------------------------------------------------

def test_accuracy_needs_the_format_and_the_answer():
    assert accuracy_reward(FULL.format("4"), "4") == 10.0
    assert accuracy_reward(FULL.format("14"), "4") == 0.0
    assert accuracy_reward("<answer>4</answer>", "4") == 0.0
    assert accuracy_reward(FULL.format(r"The answer is \boxed{\frac{5}{6}}."), r"\frac{5}{6}") == 10.0
    assert accuracy_reward(FULL.format(r"\frac{5}{7}"), r"\frac{5}{6}") == 0.0


def test_a_number_in_the_reasoning_is_never_paid():
    """Guards: a search over the whole text pays numbers that the model only thought of."""
    assert accuracy_reward("<reasoning>maybe 7</reasoning><answer>9</answer>", "7") == 0
    assert accuracy_reward(r"<reasoning>so \boxed{7}", "7") == 0 and extract_answer(r"<reasoning>so \boxed{7}") is None
    assert extract_answer(r"<think>so \boxed{7}</think> I give up") is None
    assert accuracy_reward(r"<reasoning>\boxed{7}</reasoning><answer></answer>", "7") == 0


@pytest.mark.parametrize("gold", [
    "", "  ", "see figure", "See solution.", "<answer></answer>", r"\boxed{}", "$$", "\\text{}", "?", "nan", "N/A", "3/0"])
def test_an_unreadable_gold_pays_nobody(gold):
    """Guards: a default reward of 1 when the gold answer cannot be read."""
    for answer in ("5", "", gold):
        assert accuracy_reward(FULL.format(answer), gold) == 0
        assert not equal(answer, gold)


def test_none_is_no_answer():
    assert not equal(None, "4") and not equal(None, None)


# extraction -----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, answer", [
    ("<answer>4</answer>", "4"),
    ("<answer>\n 4 \n</answer> and <answer>5</answer> and <answer>6", "5"),              # the last complete block
    ("<answer>4</answer> stray </answer>", "4"),
    ("<answer>3<answer>4</answer>", "4"),
    (r"<answer>\boxed{5}</answer>", "5"),
    (r"\boxed{3} <answer>4</answer> \boxed{5}", "4"),                                    # the block wins
    ("<answer> </answer>", None),
    (r"so \boxed{\frac{5}{6}}.", r"\frac{5}{6}"),                                        # not up to the first closing brace
    (r"\boxed{3}, no, \boxed{4}", "4"),
    (r"\boxed{x = \boxed{4}}", "4"),
    (r"\fbox{4}", "4"), (r"\boxed 2$.", "2"), (r"\boxed {4}", "4"), ("\\boxed\n{4}", "4"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"), (r"\boxed{(0,1]}", "(0,1]"),
    (r"\boxed{4} and then \boxed{\frac{1}", "4"),                                        # cut off: the last complete one
    (r"a stray { and \boxed{4}", "4"), (r"a stray } and \boxed{4}", "4"),
    (r"\boxed{4} or \boxed{}", "4"), (r"\boxed{}", None),
    (r"\boxed{1},\boxed{2}, \boxed{3}", "1, 2, 3"), (r"\boxed{1} papers and \boxed{2} bins", "1, 2"), (r"\boxed{1} or $\boxed{2}$", "1 or 2"),
    (r"$$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$$", "(2, 2), (6, 2)"), (r"x = \boxed{1}, y = \boxed{2}", "1, 2"),
    (r"\boxed{1}\boxed{2}", "1, 2"), (r"\boxed{4} \boxed{4}", "4"), (r"\boxed{3}. Then \boxed{4}", "4"), ("\\boxed{3}\n\\boxed{4}", "4"),
    (r"<think>\boxed{3}</think> \boxed{4}", "4"),
    (r"<reasoning>\boxed{3}</reasoning> \boxed{4}", "4"),
    ("the answer is 42", None), ("#### 42", None), ("", None),
])
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


# equality: verdicts by hand -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("pred, gold, verdict, why", HARD_CASES,
                         ids=[f"{row[0]} for {row[1]}".encode("ascii", "replace").decode() for row in HARD_CASES])
def test_hard_cases(pred, gold, verdict, why):
    assert equal(pred, gold) is verdict, why


EQUAL = r"""
2,125 ; $2,125 ; 2125 ; 2{,}125 ; 2,\!125 ; 2\,125 ; \$2,125.00 ; 2,125 dollars
$2,125 and $3,000 , 5 ; 2125, 3000, 5 ; 2,125, 3,000 and 5
45 ; $45.00 ; \$45 ; 45. ; 45.0 ; +45 ; (45) ; {45} ; $$45$$ ; \(45\) ; \[ 45 \] ; **45** ; \boxed{45} ; <answer>45</answer> ; - (-45)
45 ; The answer is 45. ; **Answer:** 45 ; the final answer is $45$ ; Therefore, the answer is \(45\)
-10 ; - 10 ; –10 ; $-10 ; -$10
\frac{3}{4} ; \dfrac{3}{4} ; \tfrac34 ; \cfrac{3}{4} ; \frac34 ; \frac 3 4 ; \frac{3}4 ; \frac3{4} ; 3/4 ; 0.75 ; .75
0.75 ; 6/8 ; ¾ ; -3/-4 ; \\frac{3}{4} ; \displaystyle\frac{3}{4}
3.5 ; 3 1/2 ; 3\text{ 1/2} ; 3\frac12 ; 3 \frac{1}{2} ; 7/2 ; 3½
-\frac{1}{3} ; \frac{-1}{3} ; -1/3
0 ; 000 ; -0 ; \frac{0}{5}
1500 ; 1.5e3 ; 1.5E+3 ; 1.5 \times 10^3 ; 1.5 \cdot 10^{3} ; 1.5·10^3
1000 ; 10^3 ; 10^{3} = 1000
5 ; 5 cm ; 5cm ; 5\text{ cm} ; 5 \mbox{ cm}^2 ; 5\mathrm{~m/s}
5 ; 5 apples ; 5 apples left ; 5 \text{ right triangles} ; 5 square feet ; 5 miles per hour ; 5\% ; 5% ; 5 percent ; 5^\circ ; 5°
5 ; 5^{\circ}\text{C} ; 5 \text{ sq. ft.} ; 5\ \text{USD} ; 5 feet of snow ; €5 ; 5 \; \; \text {square cm} ; 5\text{}
\frac{1}{3} ; \frac{1}{3} \textbf{meters} ; 1/3 cup
5 ; Therefore, the value of the expression is $5$. ; Step 1: add.\nFinal Answer: The final answer is $5$. I hope it is correct. ; So we get \(5\)
5 ; \angle ABC = 5^\circ ; m\angle ABC = 5 ; \overline{AB} = 5 ; AB/CD = 5 ; \frac{AB}{CD} = 5 ; P(A) = 5
5 ; x = 5 ; x=5 ; 5 = x ; \theta = 5 ; x_1 = 5 ; f(2) = 5 ; AB = 5
5 ; x \approx 5 ; \approx 5 ; = 5 ; x = 2 + 3 = 5 ; 2+3=5 ; |2-7| = 5 ; \text{Area} = 5
x = 1/3 \approx 0.33 ; 1/3
2x+3 ; y = 2x + 3 ; 3+2x ; 3 + 2\cdot x ; 2*x + 3 ; +3+2x ; f(x) = 2x+3
x^{10} ; x^10 ; $x^{10}$
\frac{x+1}{2} ; \frac12 x + \frac12 ; (x+1)/2 ; 0.5x + 0.5 ; \frac{1+x}{2}
\frac{\sqrt{3}}{2} ; \frac{\sqrt3}2 ; \sqrt{3}/2 ; \frac12\sqrt 3 ; sqrt(3)/2 ; √3/2 ; 0.5\sqrt{3}
\frac{9\pi}{4} ; \frac94 π ; 9\pi/4 ; 2.25\pi
\frac{1+\sqrt{5}}{2} ; \frac{\sqrt5+1}{2} ; (1+\sqrt{5})/2 ; (1+sqrt(5))/2
-1+i\sqrt{3} ; \sqrt{3}i - 1
3(x-2)(x+1)^2 ; 3(1+x)^{2}(x-2)
\frac{1}{2}\sin x ; 0.5 \sin x
\{1,2\} ; \left\{ 2, 1 \right\} ; \lbrace 1,2 \rbrace
1,2 ; 1, 2 ; 1 and 2 ; 1 \text{ and } 2 ; x=1, x=2 ; x=1 or x=2 ; 1;2 ; \{1,2\}
19, 46, 82 ; 19, 46, and 82 ; 19, 46 \text{, and } 82
(1,\frac12) ; \left( 1, 0.5 \right) ; (x,y) = (1, 1/2)
(1,2) ; x=1, y=2 ; (x,y)=(1,2) ; y=2, x=1 ; (y,x)=(2,1) ; x = 1 and y = 2 ; (x=1,y=2)
(5,8),(8,5) ; (x, y) = (5, 8) \quad \text{and} \quad (8, 5) ; (8,5) or (5,8) ; 5,8;8,5 ; x=5,y=8 or x=8,y=5
2, -2 ; \pm 2 ; -2 or 2 ; x = \pm 2 ; x=2, x=-2 ; x = -2 \text{ or } x = 2 ; x = 2,-2
2+\sqrt3, 2-\sqrt3 ; 2\pm\sqrt{3} ; x=2 \pm \sqrt 3
(5,\infty) ; x>5 ; 5 < x ; -x < -5 ; 2x > 10
(-\infty,1]\cup(3,\infty) ; x \le 1 or x>3 ; x>3 \text{ or } x \leq 1 ; 3<x \text{ or } 1 \ge x
\mathbb{R} ; (-\infty,\infty) ; all real numbers
10 ; 10th ; 10^{\text{th}}
2/3 ; 0.\overline{6} ; \frac{2}{3} ; .\overline{66}
\frac{1}{x+1} ; \frac{1}{1+x} ; 1/(x+1)
\frac{-2}{x} ; -\frac{2}{x} ; -2\frac{1}{x}
2^{n+1}-1 ; 2^{1+n} - 1 ; -1+2^{n+1}
10^{\frac{\sqrt{13} - 5}{6}} ; 10^{\frac{-5+\sqrt{13}}{6}}
B ; (B) ; (B) 27 ; \textbf{(B) } 27 ; B. 27 ; B) 27
e^{i\pi} = -1 ; -1
\begin{pmatrix}1\\2\end{pmatrix} ; \left(\begin{array}{c} 1 \\ 2 \end{array}\right)
(-2,7] ; \left(-2,7\right] ; x \in (-2, 7] ; -2 < x \le 7 ; 7 \geq x > -2
(-\infty,2) ; (-∞, 2)
x > 5 ; 5 < x ; -x < -5 ; x \gt 5
x \leq 5 ; x<=5 ; x ≤ 5 ; 5 >= x ; 5 \geqslant x ; 2x \le 10
x \neq 3 ; x != 3 ; x\ne 3
x^2+y^2=13 ; y^2+x^2=13 ; 13 = x^2+y^2 ; x^2 + y^2 - 13 = 0 ; -x^2-y^2+13=0 ; \frac{x^2}{13}+\frac{y^2}{13}=1
(-\infty,2)\cup(3,5] ; (3,5] \cup (-\infty,2)
\begin{pmatrix} 1 & 2 \\ 3 & 0.5 \end{pmatrix} ; \begin{pmatrix}1&2\\3&1/2\\\end{pmatrix}
\begin{pmatrix}1&2\\3&1/2\end{pmatrix} ; \begin{bmatrix} 1 & 2 \\ 3 & \frac12 \end{bmatrix}
\begin{pmatrix}1&2\\3&1/2\end{pmatrix} ; A = \begin{pmatrix} 1 & 2 \\ 3 & 0.5 \end{pmatrix}
A ; (A) ; \text{A} ; \text{(A)} ; \textbf{(A)} ; (\text{A}) ; $A$ ; \mathrm{A}
Even ; \text{even} ; \text{Even} ; even. ; EVEN
\text{1:03 PM} ; 1:03 p.m. ; 1:03pm ; $1:03$ P.M.
1011_2 ; 1011_{2} ; $1011_2$
\sqrt{21} ; \!\sqrt{21}
\log_2 3 ; \log_{2}3
1:2 ; 1 : 2
\emptyset ; \varnothing ; ∅
12^{1/7} ; 12^{1/7}
9^{9^{9}} ; 9^{9^9}
"""


@pytest.mark.parametrize("row", EQUAL.strip().split("\n"))
def test_spellings_of_one_answer(row):
    spellings = [s.strip() for s in row.split(" ; ")]
    for s in spellings:
        assert equal(s, spellings[0]), f"{s!r} for {spellings[0]!r}"


DIFFERENT = r"""
2,125 ; 2,12 ; 21,25 ; 2, 125 ; (2,125) ; 2125.5 ; 2 125
45 ; 45.01 ; 4.5 ; 4 5 ; -45 ; 45x ; 45i ; 45\mathrm{i} ; 45\text{e}
45 ; 45\pi ; 45 pi ; 45! ; 45^2 ; 45_6 ; 45' ; [45] ; 45 thousand
45 ; 45\text{ million} ; 45 dozen ; 45 or more ; 45\text{ pens, 46 pins} ; 45 am ; 45, 46
6 ; 36 ; 16/6 ; 6 or 8 ; not 6 ; 6 is wrong ; 6 thirds ; 6 miles north
6 ; 6 + 0 ; 3+3 ; 5 to 6 ; 6 7 ; less than 6 ; \pm 6 ; 6 feet 5 inches ; \sqrt{36} ; 6 \cos x ; 6 cos x
-10 ; 10 ; 5-15 ; 10-
0.35 ; 35\% ; 35
1/3 ; 0.333 ; 0.3333333333 ; 1:3 ; 3 ; 1\frac{}{3} ; \frac{}{3} ; \frac{1]}{3}
3\frac12 ; \frac{3}{2} ; \frac{31}{2} ; 3\frac52 ; 3,\frac12
18 ; nan ; inf ; 1_8 ; 0x12 ; ١٨ ; 18e1 ; 18 - 0
1e5 ; 1e6 ; 1e-5
4 ; 1e999999999 ; 9^{9^{9^{9}}} ; 1/(1-1) ; (4).__class__ ; 2**2
x = 3 ; y = 3 ; x = -3 ; x > 3 ; x^2 = 3
x=1, y=2 ; y=1, x=2 ; 2, 1 ; x=1
7 = 11a + c ; 11a + c ; 7
(1,2) ; y=1, x=2 ; (y,x)=(1,2) ; x=2, y=1
1, 2 ; y=1, x=2
\pm 2 ; 2 ; -2 ; \pm 3
5 ; The answer is 5. No, 6. ; The answer is not 5 ; the answer is 5 if x=2 ; Half of it is $5$ ; Twice the answer is $5$ ; It is at most $5$
5 ; The cost is not $5 ; not $5$ ; $5$ or so ; Is it $5$? $6$
6 ; The answer is 5. No, it is 6.
x<1 or x>3 ; (1,3) ; x<1 ; x<1, x>3 ; y<1 or y>3
1 \le x \le 2 ; 1 \le y \le 2
(-\infty,\infty) ; all real numbers except 0 ; \mathbb{R}\setminus\{0\}
x>1 or x<3 ; x>1 and x<3 ; x>1, x<3 ; (1,3)
x^2/(x+1) ; x/(x+1) ; a+x^2/(x+1)
C ; (B) 27 ; C, D ; (C) or (D) ; (C) wrong, (D) ; (C) 1 (D) 2 ; not (C)
\frac{1}{x+1} ; \frac{1}{x-1} ; \frac{1}{x}+1 ; 1/x+1
2^{n+1} ; 2^n+1 ; 2^{n-1} ; x^{n+1}
x^2/(x+1) ; x^{\frac{2}{x+1}}
1,2;3,4 ; (1,3),(2,4) ; 1,2,3,4
(x+y)^2 = 81 ; 81
x > 3 ; x < 3 ; x \ge 3 ; -x > 3
(1,2) ; (2,1) ; [1,2] ; (1,2] ; \{1,2\} ; 1,2 ; (1,2,3)
\{1,2\} ; \{1,3\} ; \{1,2,3\} ; 2,1
(0,1)\cup(2,3) ; (0,1) ; (0,1)\cup(2,4) ; (0,1),(2,3)
\begin{pmatrix}1\\2\end{pmatrix} ; \begin{pmatrix}1&2\end{pmatrix} ; \begin{pmatrix}2\\1\end{pmatrix} ; (1,2)
\begin{vmatrix}1&2\\3&4\end{vmatrix} ; \begin{pmatrix}1&2\\3&4\end{pmatrix}
\frac{1\pm\sqrt5}{2} ; \frac12\pm\sqrt5 ; \frac{1+\sqrt5}{2}
\frac42(1+\pi)(3^3+2x) ; \frac42(1+\pi)(3^3+2y)
1/2x ; \frac{1}{2x} ; \frac12 x
x/2y ; \frac{x}{2}y
1011_2 ; 1011_3 ; 1011
1:1 ; :1 ; 1
|x-2|+1 ; |x+1-2|
\sin x\cos y ; \sin y\cos x
f(x+1)(x-1) ; f(x-1)(x+1)
x^{10} ; x^1 0 ; 10^x
\sqrt[3]{8} ; \sqrt{8} ; 2
CBAD ; ABCD ; CBA
9 a.m. ; 9 p.m. ; 9
E ; e ; 2E ; \text{E}\text{meters}
< ; >
5+1 ; 5+
\frac{3}{16} ; \frac{3]{16} ; \frac{3}{16]
"""


@pytest.mark.parametrize("row", DIFFERENT.strip().split("\n"))
def test_answers_that_differ(row):
    gold, *others = row.split(" ; ")
    for s in others:
        assert not equal(s, gold), f"{s!r} for {gold!r}"


def test_lists_and_thousands_do_not_mix():
    """Guards: `32, 349` read as 32349 once blanks are gone; and blanks between digits that vanish when there are several."""
    for pred, gold in (("32, 349", "32349"), ("2   5", "25"), (r"2 \, 5", "25"), ("2%7", "27"), (r"2\text{3}", "23")):
        assert not equal(pred, gold)


# equality: brute force ------------------------------------------------------------------------------------------------------------

def test_rational_numbers_against_fraction():
    """All pairs of spellings of small fractions: equal exactly when fractions.Fraction says so."""
    spellings = []
    for a in range(-3, 4):
        for b in (1, 2, 4, 5):
            q = Fraction(a, b)
            sign, n = ("-" if a < 0 else ""), abs(a)
            spellings += [(f"{a}/{b}", q), (f"\\frac{{{a}}}{{{b}}}", q), (f"{sign}\\dfrac {n}{b}", q),
                          (str(float(q)), q), (f"${sign}{n}e0/{b}.0$", q)]
    for s, p in spellings:
        for t, q in spellings[::3]:
            assert answers_equal(s, t) == (p == q), (s, t)


def random_tree(rng, depth):
    kind = rng.choice("nnvvp" if depth == 0 else "nvp++--**//rse")
    if kind == "n": return kind, rng.randint(1, 4)
    if kind == "v": return kind, rng.choice("xyi")
    if kind == "p": return (kind,)
    if kind == "r": return kind, random_tree(rng, depth - 1)
    if kind == "e": return kind, random_tree(rng, depth - 1), rng.choice("23x")
    if kind == "s": return kind, random_tree(rng, depth - 1), rng.randint(2, 3)
    return kind, random_tree(rng, depth - 1), random_tree(rng, depth - 1)


def neighbour(rng, t):
    """The same tree with two operands swapped or one leaf changed."""
    if t[0] in "nvp" or (t[0] in "+-*/" and rng.random() < 0.35):
        return (t[0], t[2], t[1]) if len(t) == 3 else random_tree(rng, 0)
    i = rng.choice([i for i in (1, 2) if i < len(t) and isinstance(t[i], tuple)])
    return t[:i] + (neighbour(rng, t[i]),) + t[i + 1:]


def tex(t):
    kind, *parts = t
    if kind in "nv": return str(parts[0])
    if kind == "p": return "\\pi"
    if kind == "s": return f"({tex(parts[0])})^{parts[1]}"
    if kind == "r": return f"\\sqrt{{{tex(parts[0])}}}"
    if kind == "e": return f"({parts[1]}^{{{tex(parts[0])}}})" if parts[1] == "x" else f"({parts[1]})^{{{tex(parts[0])}}}"
    a, b = map(tex, parts)
    if kind == "/": return f"{a}/{b}" if parts[0][0] in "nr" and parts[1][0] == "n" else f"\\frac{{{a}}}{{{b}}}"
    if kind == "+": return f"{a} + {b}"
    bracket = lambda part, s: f"({s})" if part[0] in "+-" else s
    if kind == "-": return f"{a}-{bracket(parts[1], b)}"
    a, b = bracket(parts[0], a), bracket(parts[1], b)
    return f"{a} {b}" if b[0] in "(xyi" or b.startswith(("\\pi", "\\sqrt")) else f"{a}\\cdot {b}"


def number(t, at):
    kind, *parts = t
    if kind == "n": return parts[0]
    if kind == "v": return at[parts[0]]
    if kind == "p": return cmath.pi
    if kind == "r": return cmath.sqrt(number(parts[0], at))
    if kind == "e": return complex(at.get(parts[1]) or int(parts[1])) ** number(parts[0], at)
    if kind == "s": return number(parts[0], at) ** parts[1]
    a, b = number(parts[0], at), number(parts[1], at)
    return a + b if kind == "+" else a - b if kind == "-" else a * b if kind == "*" else a / b


def test_no_two_different_expressions_are_equal():
    """Random expressions and near copies of them, compared numerically at two points: what is called equal is equal.
    Guards, among others: products of brackets deep inside that all became the same text."""
    rng, accepted, same = random.Random(0), 0, 0
    points = [dict(x=1.37, y=-0.61, i=2.23), dict(x=-0.83, y=1.91, i=0.39)]
    for _ in range(4000):
        t = random_tree(rng, 3)
        u = neighbour(rng, t)
        try: truth = all(abs(number(t, p) - number(u, p)) < 1e-9 for p in points)
        except (ZeroDivisionError, OverflowError): continue
        verdict = answers_equal(tex(t), tex(u))
        assert truth or not verdict, (tex(t), tex(u))
        accepted += verdict; same += truth
    assert accepted > 0.5 * same > 300            # and it does see through many of them


def test_inequalities_against_brute_force():
    """Random statements on x as inequalities, chains, intervals, unions: what is called equal has the same solutions on a grid."""
    rng, statements = random.Random(0), []
    grid = [Fraction(i, 2) for i in range(-9, 10)]
    for _ in range(40):
        a, b, c = rng.choice((-2, -1, 1, 2)), rng.randint(-4, 4), rng.randint(-4, 4)
        low, high = min(b, c), max(b, c) + 1
        op, sign = rng.choice((("<", "<"), (r"\le", "<="), (">", ">"), (r"\geq", ">=")))
        holds = {"<": lambda p, q: p < q, "<=": lambda p, q: p <= q, ">": lambda p, q: p > q, ">=": lambda p, q: p >= q}[sign]
        left, right = rng.choice("(["), rng.choice(")]")
        inside = lambda x: (low < x or left == "[" and x == low) and (x < high or right == "]" and x == high)
        chain = f"{low} {'<' if left == '(' else 'le'} x {'<' if right == ')' else 'le'} {high}".replace("le", r"\le")
        statements += [(f"{a}x {op} {2 * b}", [holds(a * x, 2 * b) for x in grid]), (f"{b} {op} x", [holds(b, x) for x in grid]),
                       (rng.choice((chain, f"{left}{low},{high}{right}", rf"x \in {left}{low}, {high}{right}")), [inside(x) for x in grid]),
                       (rng.choice((f"(-\\infty,{b})", f"x<{b}")), [x < b for x in grid]), (f"(-\\infty,{b}]", [x <= b for x in grid]),
                       (f"[{b},\\infty)", [x >= b for x in grid]),
                       (f"x < {low} or x {op} {high}", [x < low or holds(x, high) for x in grid]),
                       (rf"(-\infty,{low})\cup({high},\infty)", [x < low or x > high for x in grid])]
    accepted = 0
    for s, p in statements:
        for t, q in rng.sample(statements, 20):
            verdict = answers_equal(s, t)
            assert not verdict or p == q, (s, t)
            accepted += verdict and s != t
    assert accepted > 20


# hostile text ---------------------------------------------------------------------------------------------------------------------

PIECES = [
    "{", "}", "(", ")", "[", "\\{", "\\frac", "\\frac{", "\\frac{1+", "}{2}", "\\sqrt", "\\sqrt[", "\\text{", "\\text{ and",
    "\\boxed{", "\\boxed ", "-", "+", "1,", "111,", "1 ", " ", "\n", "x", "x^", "_", "\\", "\\\\", "\\begin{pmatrix}", "&", "=",
    "<", "\\approx", "\\cup", "1/", "/1", "x=", "sqrt(", "(x+1)", "\\pi", "1e", "1e5", "e+5", "9^{", "and ", "answer is ", "see ",
    " the", "1 cm", " pm", "|", ".", ",", ",\\!000", "<answer>", "</answer>", "<reasoning>", "</reasoning>", "<think>", "-(-",
    "10^{", " 1/2", "٣", "½", "$", "%", "\\ ", "\\left(", "0"]


@pytest.fixture
def no_collection():
    """Python's garbage collector walks all that earlier tests left, which takes longer than what is timed here."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("text", [
    "<answer>" + " " * 4000 + "5", "<reasoning>" + "</reasoning><answer>" * 1000, "9^{9^{9^{9}}}", "1e999999999",
    "\\frac{" * 60 + "1" + "}{x}" * 60, "x^{1+" * 190 + "}" * 190, "1 or " * 199 + "2", "\\boxed{1}, " * 3000, "\\boxed{1}, " * 80,
    "-1e-999999999", "9" * 6000, "9**9**9",
    "1/(1-1)", "{" * 5000, "{" * 499 + "5" + "}" * 499, "()",
     "\\frac{" * 150 + "1" + "}{2}" * 150, "0." + "0" * 900 + "1", " " * 997 + "5", "1" + "," * 900])
def test_hostile_answers_are_wrong_and_fast(text, no_collection):
    """Guards: nested lazy or white space quantifiers (a minute for 4,000 blanks), int() of huge exponents, eval, deep recursion."""
    begin = time.process_time()
    if " 5" not in text: assert not answers_equal(text, "4")
    assert accuracy_reward(text, "4") == 0 and accuracy_reward(FULL.format(text), "4") == 0 and format_reward(text) == 0
    extract_answer(text)
    assert time.process_time() - begin < 0.2


def test_any_text_is_read_in_time(no_collection):
    """Repeated and shuffled pieces of TeX, of 1,000 characters (parsed) and of 100,000 (compared as they stand): no exception, no delay."""
    rng, slowest = random.Random(0), 0.0
    texts = [(piece * 1000)[:n] for piece in PIECES for n in (999, 100_000)]
    texts += ["".join(rng.choices(PIECES, k=rng.choice((4, 12, 200))))[:999] for _ in range(250)]
    for text in texts:
        begin = time.process_time()
        answers_equal(text, "4"); accuracy_reward(FULL.format(text), "4"); extract_answer(text); format_reward(text)
        slowest = max(slowest, time.process_time() - begin)
        assert equal(text, "4") in (True, False)
    assert slowest < 0.5


def test_the_table_prints(capsys):
    import runpy
    import rewards
    runpy.run_path(rewards.__file__, run_name="__main__")
    out = capsys.readouterr().out
    assert len(out.splitlines()) == len(HARD_CASES) + 1 and "WRONG" not in out
