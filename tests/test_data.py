"""data.py: file layouts, bad rows, the arithmetic task, demonstrations, prompts, downloads (from a server on this machine)."""
import gzip
import hashlib
import http.server
import io
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import FrozenInstanceError

import pytest

import data
from data import Problem

ROOT = os.path.dirname(os.path.abspath(data.__file__))


def write(path, *rows):
    """Rows (dicts, or raw lines as text) to a JSONL file; returns its path as text."""
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


def load(tmp_path, row):
    return data.load_problems(write(tmp_path / "rows.jsonl", row))[0]

# -----------------------------------------------------------------------------
# the layouts of the original files, with rows of our own

def test_gsm8k_layout(tmp_path):
    """Gold after the last `####`, comma and sign kept; calculator marks leak neither into the solution nor into the answer."""
    p = load(tmp_path, {"question": "Tim packs 4 boxes of 300 pens. How many pens?",
                        "answer": "He packs 4*300 = <<4*300=1200>>1,200 pens.\n#### 1,200"})
    assert p == Problem("Tim packs 4 boxes of 300 pens. How many pens?", "1,200", "He packs 4*300 = 1,200 pens.")
    assert load(tmp_path, {"question": "q", "answer": "Down <<3-8=-5>>-5.\n#### -5\n"}).answer == "-5"
    p = load(tmp_path, {"question": "q", "answer": "A recited example ends #### 3. Ours: 4*2 = <<4*2=8>>8 #### <<4*2=8>>8"})
    assert p.answer == "8" and "<<" not in p.solution and p.solution.endswith("4*2 = 8")


def test_math_layout(tmp_path):
    p = load(tmp_path, {"problem": "Halve $\\frac53$.", "level": "Level 2", "type": "Algebra", "unique_id": "train/algebra/1.json",
                        "solution": "First $\\boxed{7}$, no: it is $\\boxed{\\frac{5}{6}}$."})
    assert p == Problem("Halve $\\frac53$.", "\\frac{5}{6}", "First $\\boxed{7}$, no: it is $\\boxed{\\frac{5}{6}}$.", 2, "Algebra")
    assert load(tmp_path, {"problem": "q", "solution": "\\boxed{1}", "level": "Level ?"}).level is None


@pytest.mark.parametrize("solution, gold", [
    ("so $x = \\boxed 2$.", "2"),
    ("so \\[x = \\boxed 1,250.\\]", "1,250"),
    ("so \\(\\boxed 9\\) of them", "9"),
    ("so $\\boxed\\frac12$", "\\frac12"),
    ("so $\\boxed {3}$", "3"),
    ("so $\\fbox{4}$", "4"),
    ("$\\boxed{\\text{even}}$", "\\text{even}"),
    ("$\\boxed{\\left\\{ 1, 2 \\right.}$ and {more}", "\\left\\{ 1, 2 \\right."),        # an escaped brace is no brace
    ("$\\boxed{\\begin{pmatrix} 1 \\\\{} 2\\end{pmatrix}}$", "\\begin{pmatrix} 1 \\\\{} 2\\end{pmatrix}"),
    ("$\\boxed{1}$ and $\\boxedsymbol{2}$", "1"),
])
def test_boxed(tmp_path, solution, gold):
    """Guards against a gold cut at the first closing brace, and against brace-less boxes that are missed."""
    assert load(tmp_path, {"problem": "q", "solution": solution}).answer == gold


def test_math500_layout(tmp_path):
    """`answer` wins over the box when both are there; the level is a number here."""
    p = load(tmp_path, {"problem": "Add.", "solution": "It is $\\boxed{2 - q}.$", "answer": "2 - q", "subject": "Precalculus", "level": 5,
                        "unique_id": "test/precalculus/1.json"})
    assert p == Problem("Add.", "2 - q", "It is $\\boxed{2 - q}.$", 5, "Precalculus")
    matrix = "\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}"
    assert load(tmp_path, {"problem": "q", "answer": matrix}).answer == matrix


def test_aime_and_amc_layouts(tmp_path):
    """AIME 24: text with leading zeros; AIME 25: integers; AMC 23: floats, of which `27.0` must not become the answer."""
    path = write(tmp_path / "t.jsonl",
                 {"id": 6, "problem": "A?", "solution": "No box here.", "answer": "025", "url": "https://example.org", "question": "A?"},
                 {"problem": "B?", "answer": 70, "id": "0"},
                 {"id": 0, "problem": "C?", "answer": 27.0, "url": "https:\\/\\/example.org", "question": "C?"},
                 {"id": 1, "problem": "D?", "answer": -1.0, "question": "D?"})
    assert [(p.question, p.answer) for p in data.load_problems(path)] == [("A?", "025"), ("B?", "70"), ("C?", "27"), ("D?", "-1")]


@pytest.mark.parametrize("answer, gold", [("blue", "blue"), (" 3/4 ", "3/4"), (12, "12"), (-3, "-3"), (0, "0"), (0.25, "0.25"), (-0.0, "0"),
                                          (10 ** 30, "1" + "0" * 30), ("<3", "<3"), ("a << b", "a << b"), ("\\infty", "\\infty")])
def test_plain_answers(tmp_path, answer, gold):
    assert load(tmp_path, {"question": "q", "answer": answer}) == Problem("q", gold)


def test_plain_row_with_solution_and_unicode(tmp_path):
    """A line separator U+2028 and a carriage return inside or at the end of a row do not cut it; marks leave a `solution` field too."""
    row = json.dumps({"question": "x\u2028y\u00e9?", "answer": "5", "solution": "2+3 = <<2+3=5>>5"}, ensure_ascii=False) + "\r"
    assert load(tmp_path, row) == Problem("x\u2028y\u00e9?", "5", "2+3 = 5")


def test_gz_blank_lines_bom_and_path_objects(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'\xef\xbb\xbf{"question": "q", "answer": 1}\n\n  \t\n{"question": "r", "answer": 2}'))
    assert [p.answer for p in data.load_problems(path)] == ["1", "2"]


def test_problem_is_frozen():
    with pytest.raises(FrozenInstanceError):
        Problem("q", "1").answer = "2"


def test_two_rows_with_an_empty_box(tmp_path, monkeypatch):
    """MATH's train split has two problems with `\\boxed{}` and answer 0: they are mended (in the solution too), others refused."""
    row = {"problem": " How many? \n", "solution": "There are $\\boxed{}$."}
    with pytest.raises(ValueError, match='rows.jsonl:1: "solution" gives an empty gold answer'):
        load(tmp_path, row)
    monkeypatch.setattr(data, "MATH_EMPTY_BOXES", {hashlib.sha256(b"How many?").hexdigest()[:16]})
    assert (load(tmp_path, row).answer, load(tmp_path, row).solution) == ("0", "There are $\\boxed{0}$.")

# -----------------------------------------------------------------------------
# bad rows and files

@pytest.mark.parametrize("line, says", [
    ('{"question": ', "broken JSON at column"),
    ('{"question": "a" "answer": 1}', "broken JSON at column 18"),
    ('[' * 100000, "recursion"),
    ('{"question": "q", "answer": ' + "9" * 5000 + '}', "4300 digits"),
    ("[1, 2]", r"not an object .*: \[1, 2\]"),
    ('"text"', "not an object"),
    ("null", "not an object"),
    ('{"answer": "1"}', 'no "question" field; the row has: answer'),
    ('{"question": "", "answer": "1"}', '"question" is empty'),
    ('{"problem": " \\n", "answer": "1"}', '"problem" is empty'),
    ('{"question": ["q"], "answer": "1"}', '"question" must be text, not'),
    ('{"question": null, "answer": "1"}', '"question" must be text, not None'),
    ('{"question": "\\ud800", "answer": "1"}', '"question" holds half a surrogate'),
    ('{"question": "q"}', 'no "answer" field; the row has: question'),
    ('{"question": "q", "solution": null}', 'no "answer" field'),
    ('{"question": "q", "answer": ""}', '"answer" gives an empty gold answer'),
    ('{"question": "q", "answer": " \\n "}', '"answer" gives an empty gold answer'),
    ('{"question": "q", "answer": null, "solution": "\\\\boxed{1}"}', '"answer" must be text or a number, not None'),
    ('{"question": "q", "answer": true}', '"answer" must be text or a number, not True'),
    ('{"question": "q", "answer": [1]}', r'"answer" must be text or a number, not \[1\]'),
    ('{"question": "q", "answer": {"value": 1}}', '"answer" must be text or a number'),
    ('{"question": "q", "answer": NaN}', '"answer" is nan'),
    ('{"question": "q", "answer": -Infinity}', '"answer" is -inf'),
    ('{"question": "q", "answer": 1e999}', '"answer" is inf'),
    ('{"question": "q", "answer": 12345678901234567890.0}', "not an exact finite number"),
    ('{"question": "q", "answer": "1+1 = <<1+1=2>>2 apples"}', '"answer" .* a line `#### GOLD`'),
    ('{"question": "q", "answer": "He has 2.\\nSo it is 3."}', '"answer" .* a line `#### GOLD`'),
    ('{"question": "q", "answer": "It is 3.\\n#### 3\\nBye"}', '"answer" .* a line `#### GOLD`'),
    ('{"question": "q", "answer": "It is 3.\\n#### "}', '"answer" gives an empty gold answer'),
    ('{"question": "q", "answer": "<answer></answer>"}', '"answer" holds a <reasoning> or <answer> tag'),
    ('{"question": "q", "answer": "1", "solution": "a</reasoning>"}', '"solution" holds a <reasoning> or <answer> tag'),
    ('{"question": "q", "answer": "1", "solution": 7}', '"solution" must be text, not 7'),
    ('{"problem": "q", "solution": "It is 7."}', 'no "answer" field, and no .*boxed.* in "solution"'),
    ('{"problem": "q", "solution": "$\\\\boxed{7}$, then $\\\\boxed{\\\\frac{1}{2}$"}', "never closed"),
    ('{"problem": "q", "solution": "It is $\\\\boxed$"}', '"solution" gives an empty gold answer'),
])
def test_bad_rows_name_file_line_and_field(tmp_path, line, says):
    """The bad row is the third line (a blank line counts); the message is one short line."""
    path = write(tmp_path / "bad.jsonl", {"question": "fine", "answer": "1"}, "", line)
    with pytest.raises(ValueError, match=f"bad.jsonl:3: .*{says}") as e:
        data.load_problems(path)
    assert type(e.value) is ValueError and len(str(e.value)) < 400 + len(path)


def test_unreadable_bytes_name_the_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"question": "q", "answer": "1"}\n{"question": "caf\xe9", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"x.jsonl:2: not UTF-8 at byte 18 "):
        data.load_problems(str(path))
    path = tmp_path / "x.jsonl.gz"
    whole = gzip.compress(b"".join(b'{"question": "%d", "answer": "%d"}\n' % (i * 7919, i) for i in range(3000)))
    for cut in (whole[:len(whole) // 2], whole[:-3], b"not gzip at all\n", whole[:400] + b"\xff" * 400 + whole[800:]):
        path.write_bytes(cut)
        with pytest.raises(ValueError, match=r"x.jsonl.gz:\d+: "):
            data.load_problems(str(path))


@pytest.mark.parametrize("name, content", [("e.jsonl", b""), ("e.jsonl", b"\n \n"), ("e.jsonl", b"\xef\xbb\xbf"),
                                           ("e.jsonl.gz", gzip.compress(b""))])
def test_empty_file_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: the file is empty"):
        data.load_problems(tmp_path / name)


def test_missing_files_say_what_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no file data/gsm8k/train.jsonl or data/gsm8k/train.jsonl.gz; get it with "
                                                "`python data.py gsm8k`.*" + re.escape(str(tmp_path))):
        data.load_problems("gsm8k")
    for name in ("math500", "aime24", "aime25", "amc23"):
        with pytest.raises(FileNotFoundError, match=f"{name} has no train split, only: test; for train take another set"):
            data.load_problems(name, "train")
    with pytest.raises(FileNotFoundError, match="python data.py math`"):
        data.load_problems("math")
    with pytest.raises(FileNotFoundError, match=r"no file nowhere.jsonl \(looked in"):
        data.load_problems("nowhere.jsonl")
    with pytest.raises(ValueError, match="is a folder"):
        data.load_problems(str(tmp_path))


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, file, answer in (("gsm8k", "train.jsonl", 1), ("gsm8k", "test.jsonl.gz", 2), ("amc23", "test.jsonl", 3)):
        (tmp_path / "data" / folder).mkdir(parents=True, exist_ok=True)
        write(tmp_path / "data" / folder / file, {"question": "q", "answer": answer})
    assert [data.load_problems(*a)[0].answer for a in (("gsm8k",), ("gsm8k", "test"), ("amc23", "test"))] == ["1", "2", "3"]
    with pytest.raises(ValueError, match="unknown problem set 'gsm9k'; the nearest is 'gsm8k'"):
        data.load_problems("gsm9k")
    with pytest.raises(ValueError, match="the nearest is 'math500'"):
        data.load_problems("MATH-500")
    for name in ("gsm8k", "arithmetic"):
        with pytest.raises(ValueError, match="unknown split 'tset'; the nearest is 'test'"):
            data.load_problems(name, "tset")

# -----------------------------------------------------------------------------
# splits and the arithmetic task

def test_held_out_is_disjoint_and_keeps_every_other_row():
    problems = [Problem(f"q{i % 50}", str(i)) for i in range(70)]                # q0..q19 twice
    train, test = data.held_out(problems, 10, seed=3)
    asked = {p.question for p in test}
    assert len(test) == len(asked) == 10 and all(int(p.answer) < 50 for p in test)
    assert train == [p for p in problems if p.question not in asked]
    assert {p.question for p in data.held_out(problems[::-1], 10, seed=3)[1]} == asked
    assert {p.question for p in data.held_out(problems, 10, seed=4)[1]} != asked
    assert len(data.held_out([problems[0], problems[0], problems[1]], 1)[1]) == 1
    for n in (0, 50, -1):
        with pytest.raises(ValueError, match=f"cannot hold out {n} of 50"):
            data.held_out(problems, n)


def test_splits_are_the_same_in_every_process():
    """Guards against splits or orders that hang on the hash seed, which differs between the ranks of one run."""
    code = ("import data, hashlib, random; p = data.load_problems('arithmetic'); r = random.Random(1);"
            "t = [q.question for q in p + data.held_out(p, 99, seed=5)[1]] + [data.imperfect_demonstration(q, r) for q in p[:99]];"
            "print(hashlib.sha256(' '.join(t).encode()).hexdigest())")
    seen = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True,
                           text=True, check=True).stdout for seed in ("1", "2")}
    assert len(seen) == 1


def test_arithmetic_is_right_and_split():
    """All 90 x 90 additions, each once, on one side only; a+b and b+a together. Every step of the worked solution is checked by hand."""
    train, test = data.load_problems("arithmetic"), data.load_problems("arithmetic", "test")
    assert {p.question for p in train + test} == {f"{a}+{b}?" for a in range(10, 100) for b in range(10, 100)} and len(train + test) == 8100
    asked = {p.question for p in test}
    assert 800 < len(test) < 1200
    for p in train + test:
        a, b = map(int, p.question[:-1].split("+"))
        assert p.answer == str(a + b) and (f"{b}+{a}?" in asked) == (p.question in asked)
        first, second = p.solution.split(";")
        units = a % 10 + b % 10
        assert first == f"{a % 10}+{b % 10}={units}"
        assert second == f"{a // 10}+{b // 10}" + ("+1" if units > 9 else "") + f"={(a + b) // 10}"


def test_arithmetic_by_hand_and_by_count():
    by = {p.question: p for s in ("train", "test") for p in data.load_problems("arithmetic", s)}
    assert by["47+12?"] == Problem("47+12?", "59", "7+2=9;4+1=5", None, "arithmetic")
    assert (by["47+15?"].solution, by["47+15?"].answer) == ("7+5=12;4+1+1=6", "62")
    assert (by["99+91?"].solution, by["99+91?"].answer) == ("9+1=10;9+9+1=19", "190")
    some = data.arithmetic_problems(100, seed=1)
    assert some == data.arithmetic_problems(100, seed=1) and len(set(some)) == 100 and some != data.arithmetic_problems(100, seed=2)
    assert some == data.arithmetic_problems(200, seed=1)[:100] and set(some) <= set(data.load_problems("arithmetic"))
    for n in (0, 9000):
        with pytest.raises(ValueError, match=f"{n} arithmetic problems asked for; the test split has"):
            data.arithmetic_problems(n, split="test")

# -----------------------------------------------------------------------------
# demonstrations

ALL_TAGS = re.compile(r"<reasoning>([^<>]*)</reasoning><answer>([^<>]*)</answer>")


def test_demonstration():
    assert (data.demonstration(Problem("Tim?", "1,200", "He packs\n1,200 pens."))
            == "<reasoning>\nHe packs\n1,200 pens.\n</reasoning>\n<answer>\n1,200\n</answer>")
    easy = data.demonstration(data._addition(47, 12))
    assert easy == "<reasoning>7+2=9;4+1=5</reasoning><answer>59</answer>"
    with pytest.raises(ValueError, match="no worked \"solution\".*'Why"):
        data.demonstration(Problem("Why?", "1"))
    with pytest.raises(ValueError, match="arithmetic problems like"):
        data.imperfect_demonstration(Problem("Why?", "1", "s"), random.Random(0))


def test_length_of_arithmetic_completions():
    """About 31 tokens with the end token, where each of `< </ > reason ing answer` is one token and all else are single characters."""
    lengths = [len(re.findall(r"</|reason|ing|answer|.", data.demonstration(p))) + 1 for p in data.load_problems("arithmetic")]
    assert 30 < sum(lengths) / len(lengths) < 32 and max(lengths) <= 33


def test_imperfect_demonstrations_have_the_shares_they_state():
    """Over 2,000: 45% wrong answers, 25% broken tags, independent of each other; a wrong answer follows from a wrong step."""
    problems, rng = data.load_problems("arithmetic")[:2000], random.Random(7)
    texts = [data.imperfect_demonstration(p, rng) for p in problems]
    found = [ALL_TAGS.fullmatch(t) for t in texts]
    right = [m[2] == p.answer for m, p in zip(found, problems) if m]
    assert abs(len(right) / 2000 - 0.75) < 0.03 and abs(sum(right) / len(right) - 0.55) < 0.04
    slips = []
    for m, p in zip(found, problems):
        if m:
            assert (m[1] == p.solution) == (m[2] == p.answer)                    # wrong work if and only if a wrong answer
            units, tens = (int(step.split("=")[1]) for step in m[1].split(";"))
            assert m[2] == str(10 * tens + units % 10)                           # the answer follows from the work
            assert (m[1].count("+") == 3) == (units > 9)                               # and the carry from the units
            slips.append(int(m[2]) - int(p.answer))
    assert set(slips) == {-11, -10, -9, -1, 0, 1, 9, 10, 11}                     # units, tens, or both off by one
    broken = [t for t, m in zip(texts, found) if not m]
    assert all(re.sub("<[^<>]*>", "", t) for t in broken)
    kinds = {tuple(re.findall("<[^<>]*>", t)) for t in broken}
    good = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
    assert good not in kinds and len(kinds) == 12                                # 4 tags: missing, misspelt, slash wrong
    again = random.Random(7)
    assert texts == [data.imperfect_demonstration(p, again) for p in problems]


def test_imperfect_demonstrations_at_the_ends():
    rng, problems = random.Random(0), [data._addition(a, b) for a, b in ((10, 10), (99, 99), (45, 55), (40, 50), (19, 90))] * 40
    for p in problems:
        assert data.imperfect_demonstration(p, rng, wrong=0, broken=0) == data.demonstration(p)
        m = ALL_TAGS.fullmatch(data.imperfect_demonstration(p, rng, wrong=1, broken=0))
        assert m and m[2] != p.answer and re.fullmatch(r"\d\+\d=\d+;\d\+\d(\+1)?=\d+", m[1])
        assert not ALL_TAGS.fullmatch(data.imperfect_demonstration(p, rng, wrong=0, broken=1))

# -----------------------------------------------------------------------------
# prompts, with a stand-in tokenizer: one id a character, control ids below 0 that only the template and allow_special make

class Characters:
    """`[go]` is its only special token (id -1); its template writes a role as -2, the end of a turn as -3, the generation prompt as -4."""
    has_chat_template = True

    def encode(self, text, allow_special=False):
        return [-1 if piece == "[go]" else ord(piece) for piece in re.findall(r"\[go\]|." if allow_special else ".", text, re.DOTALL)]

    def chat_ids(self, messages, add_generation_prompt=True):
        ids = []
        for m in messages:
            ids += [-2] + self.encode(m["role"] + "\n") + self.encode(m["content"]) + [-3]
        return ids + [-4] * add_generation_prompt

    def decode(self, ids):
        return "".join({-1: "[go]", -2: "{", -3: "}", -4: "{assistant\n"}.get(i) or chr(i) for i in ids)


class Base(Characters):
    has_chat_template = False
    bos_ids = (-9,)


def test_chat_prompts():
    t = Characters()
    ids = data.build_prompt(t, "6*7?")
    assert t.decode(ids) == "{system\n" + data.SYSTEM_PROMPT + "}{user\n6*7?}{assistant\n"
    assert t.decode(data.build_prompt(t, "6*7?", "Be brief.", "chat")) == "{system\nBe brief.}{user\n6*7?}{assistant\n"
    assert t.decode(data.build_prompt(t, "6*7?", "")) == "{user\n6*7?}{assistant\n"                       # no empty system turn
    for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"):
        assert tag in data.SYSTEM_PROMPT


def test_plain_prompts():
    """Base models: begin-of-text exactly once, the same instruction, then the question."""
    t = Base()
    ids = data.build_prompt(t, "6*7?")
    assert ids.count(-9) == 1 and ids[0] == -9 and t.decode(ids[1:]) == data.SYSTEM_PROMPT + "\n\nProblem: 6*7?\nSolution:\n"
    assert t.decode(data.build_prompt(t, "6*7?", "")[1:]) == "6*7?"
    assert t.decode(data.build_prompt(Characters(), "6*7?", "", "plain")) == "6*7?"                       # no bos_ids, template unused
    t.bos_ids = ()
    assert data.build_prompt(t, "6*7?", "") == [ord(c) for c in "6*7?"]


def test_few_shot_prompts():
    """Solved examples come before the question: turns of a chat, or text in the very layout of the question."""
    shots = [Problem("1+1?", "2", "1+1=2"), Problem("2+2?", "4", "2+2=4")]
    one, two = (f"<reasoning>\n{p.solution}\n</reasoning>\n<answer>\n{p.answer}\n</answer>" for p in shots)
    chat = Characters().decode(data.build_prompt(Characters(), "6*7?", "Be brief.", examples=shots))
    assert chat == ("{system\nBe brief.}{user\n1+1?}{assistant\n" + one + "}{user\n2+2?}{assistant\n" + two + "}{user\n6*7?}{assistant\n")
    plain = Base().decode(data.build_prompt(Base(), "6*7?", "Be brief.", examples=shots)[1:])
    assert plain == (f"Be brief.\n\nProblem: 1+1?\nSolution:\n{one}\n\nProblem: 2+2?\nSolution:\n{two}\n\nProblem: 6*7?\nSolution:\n")
    bare = Base().decode(data.build_prompt(Base(), "6*7?", "", examples=shots)[1:])
    assert bare == f"1+1?{one}\n2+2?{two}\n6*7?"
    with pytest.raises(ValueError, match="no worked"):
        data.build_prompt(Base(), "6*7?", examples=[Problem("1+1?", "2")])


def test_prompt_text_never_becomes_a_control_token():
    """Guards against text in the data that forges a turn boundary."""
    for t, style in ((Characters(), "chat"), (Base(), "plain")):
        ids = data.build_prompt(t, "a[go]b", "sys [go]", style)
        assert -1 not in ids and t.decode([i for i in ids if i >= 0]).count("[go]") == 2


def test_prompt_styles_are_checked():
    with pytest.raises(ValueError, match="needs a chat template"):
        data.build_prompt(Base(), "q", prompt_style="chat")
    with pytest.raises(ValueError, match="unknown prompt_style 'plane'; the nearest is 'plain'"):
        data.build_prompt(Base(), "q", prompt_style="plane")


def test_long_prompts_are_skipped_and_counted_never_cut():
    """The template's tokens count too. Guards against questions that lose their beginning."""
    problems = [Problem("x" * n, "1") for n in (1, 5, 6, 20)]
    room = len(data.build_prompt(Characters(), "x" * 5, "s"))
    kept, skipped = data.encode_prompts(Characters(), problems, room, "s")
    assert [p for p, _ in kept] == problems[:2] and skipped == 2
    assert all(ids == data.build_prompt(Characters(), p.question, "s") for p, ids in kept)
    assert data.encode_prompts(Characters(), problems[3:], room, "s") == ([], 1)


def test_hostile_questions_are_not_encoded():
    """A row of a million spaces must not reach the tokenizer, where its split pattern may hang."""
    t = Base()
    seen = []
    t.encode = lambda text, allow_special=False: seen.append(len(text)) or Characters.encode(t, text)
    kept, skipped = data.encode_prompts(t, [Problem(" " * 1000000 + "q", "1"), Problem("q" * 6400, "1"), Problem("q", "1")], 100, "")
    assert [p.question for p, _ in kept] == ["q"] and skipped == 2 and seen == [6400, 1]

# -----------------------------------------------------------------------------
# downloads

ROW = b'{"question": "q", "answer": "7"}\n'
BODY = ROW * 9000                                                                # several blocks of 64 KiB


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server whose `files` maps paths to bytes; it ends a reply after `cut` bytes, and knows Range unless `ranges` is off."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            s = self.server
            s.seen.append((self.path, self.headers.get("Range")))
            body = s.files.get(self.path)
            if body is None:
                return self.send_error(404)
            start = int(self.headers["Range"][6:-1]) if s.ranges and self.headers.get("Range") else 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            self.wfile.write(body[start:][:s.cut])

        def log_message(self, *args):
            pass

    s = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    s.files, s.cut, s.ranges, s.seen = {"/c0ffee/train.jsonl": BODY, "/c0ffee/test.jsonl": ROW}, None, True, []
    s.url = f"http://127.0.0.1:{s.server_port}"
    threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(data, "FILES", {
        ("gsm8k", split): (f"https://unreachable.invalid/c0ffee/{split}.jsonl", len(body), hashlib.sha256(body).hexdigest())
        for split, body in (("train", BODY), ("test", ROW))})
    yield s
    s.shutdown()
    s.server_close()


def listing():
    return sorted(os.listdir("data/gsm8k"))


def test_download_whole_then_skip(server, capsys):
    """The mirror takes the place of scheme and host; the second call fetches nothing."""
    assert data.main(["gsm8k", f"--mirror={server.url}/"]) == 0
    assert listing() == ["test.jsonl", "train.jsonl"] and open("data/gsm8k/train.jsonl", "rb").read() == BODY
    assert len(data.load_problems("gsm8k")) == 9000
    assert [path for path, _ in server.seen] == ["/c0ffee/train.jsonl", "/c0ffee/test.jsonl"]
    assert data.main(["gsm8k", "all", f"--mirror={server.url}"]) == 0 and len(server.seen) == 2
    assert capsys.readouterr().out.count("there already") == 2


def test_mirror_with_a_path_prefix(server):
    server.files = {"/raw" + path: body for path, body in server.files.items()}
    assert data.main([f"--mirror={server.url}/raw", "gsm8k"]) == 0


@pytest.mark.parametrize("ranges", [True, False])
def test_cut_off_then_continued(server, capsys, ranges):
    """A reply that ends early leaves no file under the final name; the next call asks for the rest; a server without Range sends all."""
    server.cut, server.ranges = 100000, ranges
    del data.FILES["gsm8k", "test"]
    assert data.main(["gsm8k", f"--mirror={server.url}"]) == 1
    assert listing() == ["train.jsonl.part"] and os.path.getsize("data/gsm8k/train.jsonl.part") == 100000
    assert f"cut off after 100000 of {len(BODY)} bytes" in capsys.readouterr().err
    server.cut = None
    assert data.main(["gsm8k", f"--mirror={server.url}"]) == 0
    assert listing() == ["train.jsonl"] and open("data/gsm8k/train.jsonl", "rb").read() == BODY
    assert server.seen[1][1] == "bytes=100000-"


def test_complete_or_oversized_part(server):
    os.makedirs("data/gsm8k")
    del data.FILES["gsm8k", "test"]
    with open("data/gsm8k/train.jsonl.part", "wb") as f:
        f.write(BODY)                                                            # stopped between the last byte and the renaming
    assert data.main(["gsm8k", f"--mirror={server.url}"]) == 0 and server.seen == [] and listing() == ["train.jsonl"]
    os.rename("data/gsm8k/train.jsonl", "data/gsm8k/train.jsonl.part")
    with open("data/gsm8k/train.jsonl.part", "ab") as f:
        f.write(b"more")
    assert data.main(["gsm8k", f"--mirror={server.url}"]) == 0 and server.seen[0][1] is None and listing() == ["train.jsonl"]


@pytest.mark.parametrize("wrong", [BODY[:-2] + b"!\n", BODY + b"x" * 10 ** 6])
def test_wrong_content_is_thrown_away(server, capsys, wrong):
    """Right length but another sum, or too long. A bad part must not stay: it would be continued. The other file is still fetched."""
    server.files["/c0ffee/train.jsonl"] = wrong
    assert data.main(["gsm8k", f"--mirror={server.url}"]) == 1
    assert listing() == ["test.jsonl"]
    assert "not the original file" in capsys.readouterr().err


def test_an_endless_reply_is_given_up(tmp_path, monkeypatch):
    """Guards against a full disk: reading stops at the first block beyond the known size."""
    class Endless(io.BytesIO):
        headers, blocks = {}, 0

        def read(self, n):
            self.blocks += 1
            assert self.blocks < 20
            return b"x" * n

    monkeypatch.setattr(data.urllib.request, "urlopen", lambda request, timeout: Endless())
    with pytest.raises(OSError, match="not the original file"):
        data.download("https://unreachable.invalid/x", str(tmp_path / "d" / "x.jsonl"), 100000, "0" * 64)
    assert os.listdir(tmp_path / "d") == []


def test_a_file_of_the_users_own_is_left_alone(server, capsys):
    os.makedirs("data/gsm8k")
    with open("data/gsm8k/train.jsonl", "wb") as f:
        f.write(ROW)
    assert data.main(["gsm8k", f"--mirror={server.url}"]) == 1
    assert "data/gsm8k/train.jsonl is there but is not the original file" in capsys.readouterr().err
    assert open("data/gsm8k/train.jsonl", "rb").read() == ROW


def test_missing_at_the_server_and_no_connection(server, capsys):
    server.files = {}
    assert data.main(["gsm8k", f"--mirror={server.url}"]) == 1
    err = capsys.readouterr().err
    assert f"{server.url}/c0ffee/train.jsonl: HTTP Error 404" in err and "--mirror=URL" in err and "Traceback" not in err
    with socket.socket() as free:                                                # a port where nobody listens
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert data.main(["gsm8k", f"--mirror=http://127.0.0.1:{port}"]) == 1
    assert "refused" in capsys.readouterr().err and listing() == []


@pytest.mark.parametrize("args, says", [
    ([], "name what to download"), (["gms8k"], "nearest is 'gsm8k'"), (["--mirrow=http://x", "gsm8k"], "--mirror="),
    (["gsm8k", "--mirror=ftp://x"], "--mirror="), (["gsm8k", "--mirror=file:///etc"], "--mirror="), (["gsm8k", "--mirror="], "--mirror="),
    (["gsm8k", "--mirror=https://[bad"], "--mirror="), (["gsm8k", "--mirror=https://.x"], "--mirror="), (["all", "--mirror=http://x:y"], "--mirror="),
    (["gsm8k", "--mirror=https://a b"], "--mirror="), (["gsm8k", "--mirror=https://:80"], "--mirror="),
    (["--mirror=http://x"], "name what to download")])
def test_bad_usage_ends_with_2(server, capsys, args, says):
    assert data.main(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and says in err and not os.path.exists("data")


def test_an_interrupt_is_no_traceback(server, capsys, monkeypatch):
    """Regression: Ctrl-C in a download ended in a traceback. What had come stays, and the next call goes on from there."""
    bar = data.tqdm
    class Interrupting(bar):
        def update(self, n=1):
            raise KeyboardInterrupt
    monkeypatch.setattr(data, "tqdm", Interrupting)
    assert data.main(["gsm8k", f"--mirror={server.url}"]) == 130
    assert "interrupted" in capsys.readouterr().err and listing() == ["train.jsonl.part"]
    monkeypatch.setattr(data, "tqdm", bar)
    assert data.main(["gsm8k", f"--mirror={server.url}"]) == 0 and server.seen[1][1] == "bytes=65536-"
    assert open("data/gsm8k/train.jsonl", "rb").read() == BODY


def test_math_says_how_to_get_it(server, capsys):
    assert data.main(["math", "arithmetic"]) == 1
    out, err = capsys.readouterr()
    assert "data/math/train.jsonl" in err and '"solution"' in err and "arithmetic: " in out
    os.makedirs("data/math")
    for split in ("train", "test"):
        with open(f"data/math/{split}.jsonl", "w") as f:
            f.write('{"problem": "q", "solution": "\\\\boxed{1}"}\n')
    assert data.main(["math"]) == 0 and "1 train and 1 test problems" in capsys.readouterr().out


def test_command_line():
    run = [subprocess.run([sys.executable, "data.py", arg], cwd=ROOT, capture_output=True, text=True) for arg in ("--help", "nothing")]
    assert [r.returncode for r in run] == [0, 2] and "--mirror=" in run[0].stdout and "Traceback" not in run[1].stderr


def test_the_table_of_files_is_complete():
    """One commit-fixed address on one host for each file, a size and a SHA-256."""
    assert {n for n, _ in data.FILES} == set(data.NAMES) - {"arithmetic", "math"}
    for (_, split), (url, size, sha256) in data.FILES.items():
        assert re.fullmatch(r"https://raw\.githubusercontent\.com/[\w.-]+/[\w.-]+/[0-9a-f]{40}/[\w./-]+\.jsonl", url)
        assert split in ("train", "test") and size > 10000 and re.fullmatch("[0-9a-f]{64}", sha256)


def test_large_files_load_quickly(tmp_path):
    """Guards against quadratic patterns: rows built to make a backtracking search slow are read (or refused) in no time."""
    rows = [{"question": "q", "answer": "<<" * 100000 + "#### 1"}, {"problem": "q", "solution": "\\boxed{" * 50000 + "}" * 50000},
            {"problem": "q", "solution": "\\boxed" + " " * 200000 + "{1}"}, {"question": "q", "answer": "#" * 200000 + " 1"}]
    start = time.process_time()
    for row in rows:
        try:
            load(tmp_path, row)
        except ValueError:
            pass
    assert time.process_time() - start < 2
