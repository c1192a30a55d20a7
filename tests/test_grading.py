"""The equality of answers, against hand-worked verdicts and brute force; the boxed answer."""
import cmath
import gc
import random
import time
from fractions import Fraction

import pytest

from lib.grading import HARD_CASES, answers_equal, is_placeholder, last_boxed
from rewards import accuracy_reward, extract_answer, format_reward


def equal(a, b):
    """answers_equal, which must be symmetric and give a bool."""
    verdict = answers_equal(a, b)
    assert type(verdict) is bool and verdict is answers_equal(b, a)
    return verdict


@pytest.mark.parametrize("text, answer", [
    (r"so \boxed{\frac{5}{6}}.", r"\frac{5}{6}"),  # not up to the first closing brace
    (r"\boxed{3}, no, \boxed{4}", "4"), ("\\boxed{3}\n\\boxed{4}", "4"),
    (r"\boxed{x = \boxed{4}}", "4"), (r"\fbox{4}", "4"), (r"\boxed 2$.", "2"),
    ("\\boxed\n{4}", "4"), (r"\boxed{\{1,2\}}", r"\{1,2\}"), (r"a stray } and \boxed{4}", "4"),
    (r"\boxed{4} or \boxed{}", "4"), (r"\boxed{}", None), ("4", None),
    # the last one is not finished: an earlier one was once taken
    (r"\boxed{4} or better \boxed{5", None), (r"\boxed{4}, so \boxed", None),
    (r"\boxed{4} \boxed $5$", None), (r"\boxed{4 or \boxed{5}", "5"),
    # boxes side by side are one answer
    (r"\boxed{1},\boxed{2}, \boxed{3}", "1, 2, 3"), (r"\boxed{1} or $\boxed{2}$", "1 or 2"),
    (r"\boxed{1} papers and \boxed{2} bins", "1, 2"), (r"x = \boxed{1}, y = \boxed{2}", "1, 2"),
    (r"$$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$$", "(2, 2), (6, 2)"),
    (r"\boxed{4} \boxed{4}", "4"),
])
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize("text", r"""
-inf ; proof ; Proof. ; \text{(proof)} ; notfound ; Not Found ; not_found ; None ; $\text{none}$
**null** ; unknown ; undefined ; The answer is unknown. ; \boxed{None} ; N/A ; #N/A ; n.a. ; NA
nan ; see figure ; (See solution.) ; \text{see above} ; I don't know. ; TBD ; ? ; ...
___ ; $$ ; \text{} ; \boxed{} ; <answer></answer> ; \boxed{4} or \boxed{5 ; 3/0 ; \frac{1}{0}
""".strip().replace("\n", " ; ").split(" ; ") + ["", "  ", None])
def test_placeholders_equal_nothing(text):
    """Guards: `proof` was right where the gold was `proof`, one row in six of a known set."""
    assert is_placeholder(text)
    assert not equal(text, text) and not equal(text, "4")


@pytest.mark.parametrize("text", [
    "no solution", r"\text{neither}", r"\text{empty}", r"\infty", r"\emptyset", r"\pi", "0", "na",
    r"n\cdot a", ">", "=", "=≠", "DNE", "1/0.5", "none of these", "seed", "x" * 2000])
def test_answers_that_look_like_placeholders(text):
    assert not is_placeholder(text) and equal(text, text)


# ---- verdicts by hand ----------------------------------------------------------------------------

@pytest.mark.parametrize("pred, gold, verdict, why", HARD_CASES)
def test_hard_cases(pred, gold, verdict, why):
    assert equal(pred, gold) is verdict, why


# each line: spellings of one answer
EQUAL = r"""
2,125 ; $2,125 ; 2{,}125 ; 2,\!125 ; 2\,125 ; \$2,125.00 ; 2,125 dollars
$2,125 and $3,000 , 5 ; 2125, 3000, 5 ; 2,125, 3,000 and 5
45 ; $45.00 ; \$45 ; 45. ; +45 ; (45) ; {45} ; $$45$$ ; \(45\) ; \[ 45 \] ; **45** ; \boxed{45}
45 ; <answer>45</answer> ; - (-45) ; 42 + 3 = 45 ; 045 ; #### 45
45 ; The answer is 45. ; **Answer:** 45 ; the final answer is $45$ ; Therefore, the answer is \(45\)
45 ; The final answer is $45$. I hope it is correct. ; So we get \(45\)
-10 ; - 10 ; –10 ; −10 ; $-10 ; -$10
\frac{3}{4} ; \dfrac{3}{4} ; \tfrac34 ; \frac 3 4 ; \frac{3}4 ; \frac3{4} ; 3/4 ; .75 ; \\frac{3}{4}
0.75 ; 6/8 ; ¾ ; -3/-4 ; \displaystyle\frac{3}{4}
3.5 ; 3 1/2 ; 3\text{ 1/2} ; 3\frac12 ; 3 \frac{1}{2} ; 7/2 ; 3½
-\frac{1}{3} ; \frac{-1}{3} ; -1/3
0 ; 000 ; -0 ; \frac{0}{5}
1500 ; 1.5e3 ; 1.5E+3 ; 1.5 \times 10^3 ; 1.5·10^3
1000 ; 10^3 ; 10^{3} = 1000
5 ; 5 cm ; 5cm ; 5\text{ cm} ; 5 \mbox{ cm}^2 ; 5\mathrm{~m/s} ; 5 \; \; \text {square cm}
5 ; 5 apples left ; 5 \text{ right triangles} ; 5 miles per hour ; 5 feet of snow ; 5/1 cup
5 ; 5\% ; 5 percent ; 5^\circ ; 5° ; 5^{\circ}\text{C} ; 5\ \text{USD} ; €5 ; 5th ; 5^{\text{th}}
5 ; \angle ABC = 5^\circ ; m\angle ABC = 5 ; \overline{AB} = 5 ; AB/CD = 5 ; \frac{AB}{CD} = 5
5 ; x=5 ; 5 = x ; \theta = 5 ; x_1 = 5 ; f(2) = 5 ; P(A) = 5 ; AB = 5 ; \text{Area} = 5
5 ; x \approx 5 ; \approx 5 ; = 5 ; x = 2 + 3 = 5 ; |2-7| = 5
x = 1/3 \approx 0.33 ; 1/3 ; \frac{1}{3} \approx 3.3\times10^{-1} ; {x \approx \frac13}
5 ; 5 \approx \frac{10}{2} ; 5≈ (1,2) ; x \approx 5 \approx 4.9 ; (= 5)
10 ; 10 \approx \sqrt{99}
\{1,3\} ; \{1 \approx 0.9, 3 \approx \frac{31}{10}\}
2x+3 ; y = 2x + 3 ; 3+2x ; 3 + 2\cdot x ; 2*x + 3 ; f(x) = 2x+3
x^{10} ; x^10
\frac{x+1}{2} ; \frac12 x + \frac12 ; (x+1)/2 ; 0.5x + 0.5 ; \frac{1+x}{2}
\frac{\sqrt{3}}{2} ; \frac{\sqrt3}2 ; \sqrt{3}/2 ; \frac12\sqrt 3 ; sqrt(3)/2 ; √3/2 ; 0.5\sqrt{3}
\frac{9\pi}{4} ; \frac94 π ; 9\pi/4 ; 2.25\pi ; 2.25pi
\frac{1+\sqrt{5}}{2} ; \frac{\sqrt5+1}{2} ; (1+sqrt(5))/2
-1+i\sqrt{3} ; \sqrt{3}i - 1
3(x-2)(x+1)^2 ; 3(1+x)^{2}(x-2)
\{1,2\} ; \left\{ 2, 1 \right\} ; \lbrace 1,2 \rbrace
1,2 ; 1 and 2 ; 1 \text{ and } 2 ; x=1, x=2 ; x=1 or x=2 ; 1;2 ; \{1,2\}
a = 4, -8 ; -8, 4
(1,\frac12) ; \left( 1, 0.5 \right) ; (x,y) = (1, 1/2)
(1,2) ; x=1, y=2 ; (x,y)=(1,2) ; y=2, x=1 ; (y,x)=(2,1) ; x = 1 and y = 2 ; (x=1,y=2)
(5,8),(8,5) ; (x, y) = (5, 8) \quad \text{and} \quad (8, 5) ; (8,5) or (5,8) ; 5,8;8,5
(5,8),(8,5) ; x=5,y=8 or x=8,y=5
2, -2 ; \pm 2 ; -2 or 2 ; x = \pm 2 ; x = -2 \text{ or } x = 2 ; x = 2,-2
2+\sqrt3, 2-\sqrt3 ; 2\pm\sqrt{3}
(5,\infty) ; x>5 ; 5 < x ; -x < -5 ; 2x > 10 ; x \gt 5 ; (5, infinity)
(-\infty,1]\cup(3,\infty) ; x \le 1 or x>3 ; 3<x \text{ or } 1 \ge x ; (3,\infty) \cup (-\infty,1]
\mathbb{R} ; (-\infty,\infty) ; all real numbers
2/3 ; 0.\overline{6} ; .\overline{66}
\frac{1}{x+1} ; \frac{1}{1+x} ; 1/(x+1)
\frac{-2}{x} ; -\frac{2}{x} ; -2\frac{1}{x}
10^{\frac{\sqrt{13} - 5}{6}} ; 10^{\frac{-5+\sqrt{13}}{6}}
B ; (B) ; B) ; B. ; \text{(B)} ; \textbf{(B) } 27 ; B. 27 ; B) 27
\begin{pmatrix}1\\1/2\end{pmatrix} ; \left(\begin{array}{c} 1 \\ 0.5 \end{array}\right)
\begin{pmatrix}1&2\\3&1/2\\\end{pmatrix} ; A = \begin{bmatrix} 1 & 2 \\ 3 & \frac12 \end{bmatrix}
(-2,7] ; \left(-2,7\right] ; x \in (-2, 7] ; -2 < x \le 7 ; 7 \geq x > -2
x \leq 5 ; x<=5 ; x ≤ 5 ; 5 >= x ; 5 \geqslant x ; 2x \le 10
x \neq 3 ; x != 3
x^2+y^2=13 ; 13 = y^2+x^2 ; x^2 + y^2 - 13 = 0 ; -x^2-y^2+13=0 ; \frac{x^2}{13}+\frac{y^2}{13}=1
Even ; \text{even} ; EVEN
9\text{ a.m.} ; 9.0\text{ a.m.}
\text{1:03 PM} ; 1:03 p.m. ; 1:03pm ; $1:03$ P.M.
1011_2 ; 1011_{2}
\emptyset ; \varnothing ; ∅
-2\pi ; -2*pi ; -2pi ; -\frac{6}{3} \pi ; -2\pi \approx -2(3.14)
\pi ; \pi \approx \frac{22}{7}
18 ; 18 g ; 18 m/s ; 18 m/s^2 ; 18 g/mL ; 18 m² ; 18 °C ; 18°F ; 18 l. ; 18L ; 18 min ; x = 18 g
18 ; $18/day ; \$18 / hour ; \$18/\text{day} ; $18 per day ; 18 dollars/day
18 ; 18 USD ; 18USD ; eur 18 ; US$18 ; CAD $18 ; Rs. 18 ; ₹18 ; \text{USD}~18
-18 ; -USD 18 ; USD -18
18 m ; 18m ; 18 meters
11+x ; x+11 or 11+x
"""


@pytest.mark.parametrize("row", EQUAL.strip().split("\n"))
def test_spellings_of_one_answer(row):
    spellings = [s.strip() for s in row.split(" ; ")]
    for s in spellings:
        assert equal(s, spellings[0]), f"{s!r} for {spellings[0]!r}"


# each line: an answer, and what is not equal to it
DIFFERENT = r"""
2,125 ; 2,12 ; 21,25 ; 2, 125 ; (2,125) ; 2125.5 ; 2 125
25 ; 2   5 ; 2 \, 5 ; 2%5 ; 2\text{5}
45 ; 4.5 ; 45.01 ; -45 ; 45x ; 45i ; 45\text{e} ; 45\pi ; 45 pi ; 45! ; 45^2 ; 45_6 ; 45' ; [45]
45 ; 45 thousand ; 45\text{ million} ; 45 dozen ; 45 or more ; 45\text{ pens, 46 pins} ; 45 am
6 ; 6 or 8 ; 36 ; 16/6 ; not 6 ; 6 is wrong ; 6 thirds ; 6 miles north ; 6 feet 5 inches ; 6 cos x
6 ; 6 sec x ; 6 + 0 ; 3+3 ; 5 to 6 ; 6 7 ; less than 6 ; \pm 6 ; \sqrt{36}
1/3 ; 0.333 ; 1:3 ; 3 ; 1\frac{}{3} ; \frac{}{3} ; \frac{1]}{3} ; 1/3x
3\frac12 ; \frac{3}{2} ; \frac{31}{2} ; 3\frac52 ; 3,\frac12
18 ; inf ; 1_8 ; 0x12 ; ١٨ ; １８ ; 18e1 ; 18 - 0 ; 2*9
4 ; 1e999999999 ; 9^{9^{9^{9}}} ; 1/(1-1) ; (4).__class__ ; 2**2
x = 3 ; y = 3 ; x = -3 ; x > 3 ; x^2 = 3
x=1, y=2 ; y=1, x=2 ; 2, 1 ; x=1
7 = 11a + c ; 11a + c ; 7
(1,2) ; y=1, x=2 ; (y,x)=(1,2) ; (2,1) ; [1,2] ; (1,2] ; \{1,2\} ; 1,2 ; (1,2,3)
5 ; The answer is not 5 ; the answer is 5 if x=2 ; Half of it is $5$ ; not $5$ ; Is it $5$? $6$
6 ; The answer is 5. No, it is 6.
x<1 or x>3 ; (1,3) ; x<1 ; x<1, x>3 ; y<1 or y>3
x>1 or x<3 ; x>1 and x<3 ; x>1, x<3 ; (1,3)
1 \le x \le 2 ; 1 \le y \le 2
(-\infty,\infty) ; all real numbers except 0 ; \mathbb{R}\setminus\{0\}
x^2/(x+1) ; x/(x+1) ; a+x^2/(x+1) ; x^{\frac{2}{x+1}}
C ; (B) 27 ; C, D ; (C) or (D) ; (C) wrong, (D) ; (C) 1 (D) 2 ; not (C)
\frac{1}{x+1} ; \frac{1}{x-1} ; \frac{1}{x}+1 ; 1/x+1
2^{n+1} ; 2^n+1 ; 2^{n-1} ; x^{n+1}
1,2;3,4 ; (1,3),(2,4) ; 1,2,3,4
(x+y)^2 = 81 ; 81
x > 3 ; x < 3 ; x \ge 3 ; -x > 3
\{1,2\} ; \{1,3\} ; \{1,2,3\} ; 2,1
(0,1)\cup(2,3) ; (0,1) ; (0,1)\cup(2,4) ; (0,1),(2,3)
\begin{pmatrix}1\\2\end{pmatrix} ; \begin{pmatrix}1&2\end{pmatrix} ; (1,2)
\begin{vmatrix}1&2\\3&4\end{vmatrix} ; \begin{pmatrix}1&2\\3&4\end{pmatrix}
\frac{1\pm\sqrt5}{2} ; \frac12\pm\sqrt5 ; \frac{1+\sqrt5}{2}
\frac42(1+\pi)(3^3+2x) ; \frac42(1+\pi)(3^3+2y)
1/2x ; \frac{1}{2x} ; \frac12 x
|x-2|+1 ; |x+1-2|
f(x+1)(x-1) ; f(x-1)(x+1)
\sqrt[3]{8} ; \sqrt{8} ; 2
CBAD ; ABCD ; CBA
9 a.m. ; 9 p.m. ; 9
x^ ; x^≈3 ; x^{≈3 ; x^=3
5 ; 4 \approx 5 ; 2+3 \approx 5 ; 5 = \approx 3 ; (5≈3 ; \frac{5≈3}{1}
E ; e ; 2E ; \text{E}\text{meters}
18 ; 18/7 ; 18g ; 18m ; 18 x ; 18 i ; 18 M ; 18k ; 18 mil ; 18 s^2 ; 18 g/x ; 18 g h
18 ; 18/x ; 18/h ; 18/abc ; 18/dozen ; 18/\text{x} ; 18/pi ; 18 pi ; #### 19 ; 18 m + 2
18 g ; 18 kg ; 18gh ; 18 g^2
18L ; L = 18 ; 18L^2
x+18 ; x + 18 g
1/2 ; \frac{1}{2} h
\pi ; 3 ; e ; p
"""


@pytest.mark.parametrize("row", DIFFERENT.strip().split("\n"))
def test_answers_that_differ(row):
    gold, *others = row.split(" ; ")
    for s in others:
        assert not equal(s, gold), f"{s!r} for {gold!r}"


def test_the_last_line_of_a_worked_solution():
    assert equal("9 * 2 = 18 eggs\n#### 18", "18") and not equal("#### 19\n#### 18", "19")


# ---- brute force ---------------------------------------------------------------------------------

def read(draw, at, depth=3):
    """A random expression: its TeX, its number where the letters have the values `at`, and whether
    it is a sum. draw() gives the numbers that decide it."""
    kind = "++--**//rse0"[draw() % 12] if depth else "0"
    if kind == "0":
        leaf = (1, 2, 3, 4, "x", "y", "i", "\\pi")[draw() % 8]
        return str(leaf), at.get(leaf, leaf), False
    a, p, a_sum = read(draw, at, depth - 1)
    if kind == "r":
        return f"\\sqrt{{{a}}}", cmath.sqrt(p), False
    if kind == "s":
        n = 2 + draw() % 2
        return f"({a})^{n}", p ** n, False
    if kind == "e":
        base = (2, 3, "x")[draw() % 3]
        return f"({base}^{{{a}}})", complex(at.get(base, base)) ** p, False
    b, q, b_sum = read(draw, at, depth - 1)
    if draw() % 2:
        a, p, a_sum, b, q, b_sum = b, q, b_sum, a, p, a_sum
    if kind == "/":
        return f"{a}/{b}" if a.isdigit() and b.isdigit() else f"\\frac{{{a}}}{{{b}}}", p / q, False
    if kind == "+":
        return f"{a} + {b}", p + q, True
    b = f"({b})" if b_sum else b
    if kind == "-":
        return f"{a}-{b}", p - q, True
    a = f"({a})" if a_sum else a
    times = " " if b.startswith((*"(xyi", "\\pi", "\\sqrt")) else r"\cdot "
    return a + times + b, p * q, False


def test_no_two_different_expressions_are_equal():
    """Random expressions and near copies of them, compared numerically at two points: what is
    called equal is equal. Guards, among others: products of brackets deep inside that all became
    the same text."""
    rng, accepted, same = random.Random(0), 0, 0
    points = [{"x": 1.37, "y": -0.61, "i": 2.23, "\\pi": cmath.pi},
              {"x": -0.83, "y": 1.91, "i": 0.39, "\\pi": cmath.pi}]
    for _ in range(4000):
        draws = [rng.randrange(24) for _ in range(40)]
        near = list(draws)
        near[rng.randrange(12)] += 1
        try:
            found = [[read(iter(d).__next__, at) for at in points] for d in (draws, near)]
        except (ZeroDivisionError, OverflowError):
            continue
        (left, *_), (right, *_) = (texts[0] for texts in found)
        truth = all(abs(a - b) < 1e-9 for (_, a, _), (_, b, _) in zip(*found))
        verdict = answers_equal(left, right)
        assert truth or not verdict, (left, right)
        accepted += verdict and left != right
        same += truth and left != right
    assert accepted > 0.35 * same > 100  # and it does see through many of them


def test_inequalities_against_brute_force():
    """Random inequalities, chains, intervals, unions: what is called equal holds for the same x."""
    rng, statements = random.Random(0), []
    grid = [Fraction(i, 2) for i in range(-9, 10)]
    for _ in range(40):
        a, b, c = rng.choice((-2, -1, 1, 2)), rng.randint(-4, 4), rng.randint(-4, 4)
        low, high = min(b, c), max(b, c) + 1
        inside, outside = [low < x <= high for x in grid], [x < low or x >= high for x in grid]
        statements += [
            (f"{a}x < {2 * b}", [a * x < 2 * b for x in grid]),
            (rf"{a}x \geq {2 * b}", [a * x >= 2 * b for x in grid]),
            (rf"{b} \le x", [b <= x for x in grid]), (f"(-\\infty,{b})", [x < b for x in grid]),
            (rf"[{b},\infty)", [x >= b for x in grid]), (f"x > {b}", [x > b for x in grid]),
            (rf"{low} < x \le {high}", inside), (rf"x \in ({low},{high}]", inside),
            (f"[{low},{high})", [low <= x < high for x in grid]),
            (rf"x < {low} or x \geq {high}", outside),
            (rf"(-\infty,{low})\cup[{high},\infty)", outside)]
    accepted = 0
    for s, p in statements:
        for t, q in rng.sample(statements, 20):
            verdict = answers_equal(s, t)
            assert not verdict or p == q, (s, t)
            accepted += verdict and s != t
    assert accepted > 20


# ---- hostile text --------------------------------------------------------------------------------

PIECES = [
    "{", "}", "(", ")", "[", "\\{", "\\frac", "\\frac{", "\\frac{1+", "}{2}", "\\sqrt", "\\sqrt[",
    "\\text{", "\\text{ and", "\\boxed{", "\\boxed ", "-", "+", "1,", "111,", "1 ", " ", "\n", "x",
    "x^", "_", "\\", "\\\\", "\\begin{pmatrix}", "&", "=", "<", "\\approx", "\\cup", "1/", "/1",
    "x=", "sqrt(", "(x+1)", "\\pi", "1e", "1e5", "e+5", "9^{", "and ", "answer is ", "see ",
    " the", "1 cm", " pm", "|", ".", ",", ",\\!000", "<answer>", "</answer>", "<reasoning>",
    "</reasoning>", "<think>", "-(-", "10^{", " 1/2", "٣", "½", "$", "%", "\\ ", "\\left(", "0"]


def grade(text):
    """All that reads a text, as it stands and in the tags; the seconds that it took."""
    gc.disable()  # it would walk all that earlier tests left
    begin = time.process_time()
    wrapped = f"<reasoning>a</reasoning><answer>{text}</answer>"
    verdicts = answers_equal(text, "4"), accuracy_reward(text, "4"), accuracy_reward(wrapped, "4")
    extract_answer(text)
    format_reward(text)
    seconds = time.process_time() - begin
    gc.enable()
    return verdicts, seconds


@pytest.mark.parametrize("text", [
    "<answer>" + " " * 4000 + "5", "<reasoning>" + "</reasoning><answer>" * 1000, "9^{9^{9^{9}}}",
    "\\frac{" * 60 + "1" + "}{x}" * 60, "x^{1+" * 190 + "}" * 190, "1 or " * 199 + "2",
    "\\boxed{1}, " * 3000, "\\boxed{1}, " * 80, "1e999999999", "-1e-999999999", "9" * 6000,
    "9**9**9", "1/(1-1)", "{" * 5000, "{" * 499 + "5" + "}" * 499, "()", "1" + "," * 900,
    "\\frac{" * 150 + "1" + "}{2}" * 150, "0." + "0" * 900 + "1", " " * 997 + "5"])
def test_hostile_answers_are_wrong_and_fast(text):
    """Guards: nested lazy or white space quantifiers (a minute for 4,000 blanks), int() of huge
    exponents, eval, deep recursion."""
    verdicts, seconds = grade(text)
    assert not any(verdicts) and seconds < 0.2


def test_any_text_is_read_in_time():
    """Repeated and shuffled pieces of TeX, of 1,000 characters (parsed) and of 100,000 (compared as
    they stand): no exception, no delay."""
    rng = random.Random(0)
    texts = [(piece * 1000)[:n] for piece in PIECES for n in (999, 100_000)]
    texts += ["".join(rng.choices(PIECES, k=rng.choice((4, 12, 200))))[:999] for _ in range(250)]
    assert max(grade(text)[1] for text in texts) < 0.5
    for text in texts:
        equal(text, "4")
