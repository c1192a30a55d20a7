"""lib/rows.py, by way of load_problems: layouts of files, rows that are refused or left out."""
import contextlib
import gzip
import hashlib
import json
import re
import time

import pytest

import data
from data import Problem
from lib import rows


def write(path, *lines):
    """Rows (dicts, or raw lines as text) to a JSONL file; returns its path as text."""
    lines = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    text = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


def load(tmp_path, row, *fields):
    return data.load_problems(write(tmp_path / "rows.jsonl", row), "train", *fields)[0]


# ---- the layouts of real files, with rows of our own ---------------------------------------------

def test_math_layouts(tmp_path):
    """Gold from the box of the solution; in MATH-500 an `answer` beside it wins."""
    worked = "First $\\boxed{7}$, no: it is $\\boxed{\\frac{5}{6}}$."
    row = {"problem": "q", "level": "Level 2", "type": "Algebra", "solution": worked}
    assert load(tmp_path, row) == Problem("q", "\\frac{5}{6}", worked, 2, "Algebra")
    assert load(tmp_path, {**row, "level": "Level ?"}).level is None
    row = {"problem": "q", "solution": "\\boxed{2 - q}.", "answer": "q", "subject": "S", "level": 5}
    assert load(tmp_path, row) == Problem("q", "q", "\\boxed{2 - q}.", 5, "S")


@pytest.mark.parametrize("question, solution, gold", [
    # side by side they are one answer, all of it
    ("Find $x$ and $y$.", "$x = \\boxed{3}$ and $y = \\boxed{4}$", "3, 4"),
    ("Find all $t$.", "$t = \\boxed{-3}$ or $t = \\boxed{5}$", "-3 or 5"),
    ("What are the possible values?", "$\\boxed{-3}$ or $\\boxed{5}$", "-3 or 5"),
    # as rows of MATH have it: an answer that nobody writes so paid nobody
    ("What is $N$, in base 9?", "this is $\\boxed{28}$ or $\\boxed{28_9}$.", "28_9"),
    ("What time will it be?", "$\\boxed{20:34}$ or $\\boxed{8:34 \\text{ p.m.}}$",
     "8:34 \\text{ p.m.}"),
    ("Enter only one of the foci, not both.", "points: $\\boxed{(-5, 7)}$ and $\\boxed{(-5, 1)}.$",
     "(-5, 1)"),
    ("q", "$\\boxed{-2 \\text{ or } -12}$", "-2 \\text{ or } -12"),
])
def test_golds_of_boxes(tmp_path, question, solution, gold):
    """Regression: `28 or 28_9` as gold equals no answer but itself."""
    assert load(tmp_path, {"problem": question, "solution": solution}).answer == gold


USER = [{"role": "user", "content": "q"}]
SYSTEM = {"role": "system", "content": "Use <answer>."}


def nested(depth):
    """An object in an object in ..."""
    return json.loads('{"a": ' * depth + "1" + "}" * depth)


@pytest.mark.parametrize("row, answer, solution", [
    # GSM8K: gold after the last `####`, comma and sign kept; calculator marks leak nowhere
    ({"question": "q", "answer": "4*300 = <<4*300=1200>>1,200 pens.\n#### 1,200"}, "1,200",
     "4*300 = 1,200 pens."),
    ({"question": "q", "answer": "So #### 3. Ours: 4-12 = <<4-12=-8>>-8 #### <<4-12=-8>>-8"}, "-8",
     "So #### 3. Ours: 4-12 = -8"),
    # open-r1, NuminaMath, DeepScaleR, Big-Math
    ({"problem": "q", "solution": "so \\boxed{5}", "answer": None}, "5", "so \\boxed{5}"),
    ({"problem": "q", "answer": "6", "solution": "w", "messages": USER, "tests": []}, "6", "w"),
    # DAPO-Math as reworked: the solution is the bare answer
    ({"prompt": "q", "solution": "34", "reward_model": {"ground_truth": "34"}}, "34", ""),
    # MetaMathQA
    ({"query": "q", "response": "1+1\n#### 110\nThe answer is: 110", "type": "GSM"}, "110", "1+1"),
    ({"query": "q", "response": "x=\\boxed{5}. The answer is: 5"}, "5",
     "x=\\boxed{5}. The answer is: 5"),
    ({"query": "q", "response": "x is 5.\nThe answer is: 5"}, "5", "x is 5.\nThe answer is: 5"),
    ({"query": "q", "response": "The answer is: below.\n#### 5"}, "5", "The answer is: below."),
    ({"query": "q", "response": "So the answer is 4. #### 5"}, "5", "So the answer is 4."),
    # Orca-Math, MathInstruct: the sentences were the gold
    ({"question": "q", "answer": "3 and 1 are 4. Therefore, the answer is 4."}, "4",
     "3 and 1 are 4. Therefore, the answer is 4."),
    ({"instruction": "q", "output": "Well.\nThe answer is B"}, "B", "Well.\nThe answer is B"),
    # alpaca, TRL, capitals, others
    ({"instruction": "q", "input": "", "output": "So \\boxed{3}."}, "3", "So \\boxed{3}."),
    ({"prompt": "q", "solution": "$\\frac{2}{3}$"}, "$\\frac{2}{3}$", ""),
    ({"Problem": "q", "Answer": 2}, "2", ""),
    ({"question": "q", "final_answer": "$5$", "solution": "so x"}, "$5$", "so x"),
    ({"problem": "q", "expected_answer": "2", "ground_truth": "3"}, "2", ""),
    ({"question": None, "problem": ["q"], "answer": "2"}, "2", ""),
    # TRL's completion as a conversation
    ({"prompt": "q", "completion": [{"role": "assistant", "content": "so \\boxed{5}"}]}, "5",
     "so \\boxed{5}"),
    # deep columns that say nothing
    ({"question": "q", "answer": "5", "x": nested(500)}, "5", ""),
    # a thought before the solution is none of it
    ({"problem": "q", "solution": "<think>\\boxed{4}?</think>\n\nIt is \\boxed{5}."}, "5",
     "It is \\boxed{5}."),
])
def test_columns_of_other_layouts(tmp_path, row, answer, solution):
    p = load(tmp_path, row)
    assert (p.question, p.answer, p.solution, p.messages) == ("q", answer, solution, None)


@pytest.mark.parametrize("row, messages, solution", [
    ({"prompt": [SYSTEM, *USER], "reward_model": {"ground_truth": "5"}}, [SYSTEM, *USER], ""),
    ({"prompt": USER, "solution": "so \\boxed{5}"}, USER, "so \\boxed{5}"),
    ({"messages": [SYSTEM, *USER, {"role": "assistant", "content": "so \\boxed{5}"}]},
     [SYSTEM, *USER], "so \\boxed{5}"),
    ({"messages": USER, "answer": 5}, USER, ""),
    # an empty turn is no solution
    ({"messages": [*USER, {"role": "assistant", "content": ""}], "answer": "The answer is: 5"},
     USER, "The answer is: 5"),
    # ShareGPT
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "\\boxed{5}"}]},
     USER, "\\boxed{5}"),
])
def test_prompts_given_as_messages(tmp_path, row, messages, solution):
    """verl, DAPO, TRL, chats: the messages are kept as they are, one line says so."""
    said = []
    path = write(tmp_path / "rows.jsonl", row, row)
    p, _ = data.load_problems(path, say=said.append)
    assert p == Problem("q", "5", solution, messages=messages) and len({p, p}) == 1
    (line,) = said
    assert "rows.jsonl: prompts given as messages are used as they are" in line
    assert ("none asks for <reasoning> and <answer>" in line) == (SYSTEM not in messages)


@pytest.mark.parametrize("row, question", [
    ({"instruction": "Add.", "input": "2, 3"}, "Add.\n\n2, 3"),
    ({"question": "Add 2.", "input": "3"}, "Add 2."),
    # SVAMP's body, which holds the numbers, was left out without a word
    *(({about: "3 nails.", "Question": "How many?"}, "3 nails.\n\nHow many?")
      for about in ("Body", "context", "passage", "article", "story")),
    *(({asks: "Why?", "context": "It rained."}, "It rained.\n\nWhy?")
      for asks in ("query", "instruction"))])
def test_a_question_comes_with_what_it_is_about(row, question):
    assert rows.read_problem({**row, "answer": 3})["question"] == question
    (name,) = {"instruction", "question", "Question", "query"} & set(row)
    # naming its column dropped what it is about
    assert rows.read_problem({**row, "answer": 3}, name)["question"] == question
    assert rows.read_problem({**row, "q": "Why?", "answer": 3}, "q")["question"] == "Why?"


def arc(gold, *texts, **more):
    return {"choices": {"label": ["A", "B"], "text": [*texts]}, "answerKey": gold, **more}


@pytest.mark.parametrize("row, shown, letter", [
    # MMLU, ARC and CommonsenseQA, AQuA, MedQA
    ({"choices": ["1", "2", "0"], "answer": 1}, "1 2 0", "B"),
    (arc("B", "here", "there"), "here there", "B"),
    ({"options": ["A)21", "B)21.5"], "rationale": "So B.", "correct": "B"}, "21 21.5", "B"),
    ({"choices": ["1", "0"], "answer": 1.0}, "1 0", "B"),  # an index as pandas may write it
    ({"choices": ["1", "0"], "answer": [1]}, "1 0", "B"),
    ({"choices": ["A.D.", "B.C."], "answer": "A"}, "A.D. B.C.", "A"),  # no labels of their own
    ({"choices": ["x", "y"], "ground_truth": 1}, "x y", "B"),
    ({"choices": {"1": "1.5", "2": "2.7"}, "answer": "2"}, "1.5 2.7", "2"),  # 2.7 is not 2. 7
    ({"question": "Plan A 50 or plan B 60?", "choices": ["5", "6"], "answer": "B"}, "5 6", "B"),
    ({"options": {"A": "x", "B": "y"}, "answer": "y", "answer_idx": "B"}, "x y", "B"),
    ({"options": ["red", "green"], "answer": "(B) green"}, "red green", "B"),
    ({"options": ["red", "green"], "solution": "It is \\boxed{A}."}, "red green", "A"),
    ({"options": ["red", "green"], "gold": {"place": 0}}, "red green", "A"),
    # shown already, or none
    ({"question": "Which? (A) 4 (B) 5", "options": ["4", "5"], "answer": "5"}, "", "B"),
    ({"choices": [], "options": {}, "answer": "B"}, "", "B"),
])
def test_options_are_shown_and_the_gold_is_a_letter(row, shown, letter):
    """Regression: the options were dropped without a word, and an index was the gold answer."""
    row, named = {"question": "Which?", **row}, "gold.place" if "gold" in row else ""
    labels = row["choices"] if letter == "2" else "ABC"
    lines = "".join(f"\n{a}. {text}" for a, text in zip(labels, shown.split()))
    lines += "\nAnswer with the letter." * bool(shown)
    got = rows.read_problem(row, "", named)
    assert (got["question"], got["answer"]) == (row["question"] + lines, letter)


@pytest.mark.parametrize("row, says", [
    ({"choices": ["x", "y"], "answer": "I"}, "\"answer\" is 'I', which is not"),
    ({"choices": ["x", "x"], "answer": "x"}, "\"answer\" is 'x', which is not"),
    ({"choices": {"label": ["A", "A"], "text": ["x", "y"]}, "answer": "x"}, "a list of texts"),
    # the label, or the place from 0?
    ({"choices": {"1": "x", "2": "y"}, "answer": 1}, '"answer" is 1, which is not'),
    ({"choices": ["x", "y"], "answer": None}, "the answer is empty"),
    ({"options": "a ) 1 , b ) 2", "correct": "a"}, '"options" must be a list of texts'),
    ({"options": [1, 2], "answer": 1}, '"options" must be a list of texts'),
    (arc("A", "x"), None), (arc("A", choices={"label": 3, "text": ["x", "y"]}), "a list of"),
    ({"question": None, "prompt": [{"role": "user", "content": "Which?"}], "choices": ["x", "y"],
      "answer": 1}, "the messages do not show the options"),
])
def test_options_that_cannot_be_told_are_refused(row, says):
    """And a place beyond the last option stops the whole file: its column may count from 1."""
    with pytest.raises(ValueError, match="is 2, the 2 of \"choices\" count from 0 to 1") as e:
        rows.read_problem({"question": "Which?", "choices": ["x", "y"], "answer": 2})
    assert not isinstance(e.value, rows.NoAnswer)
    with pytest.raises(rows.NoAnswer, match=says or '"choices" must be a list of texts'):
        rows.read_problem({"question": "Which?", **row})


def test_columns_by_name(tmp_path):
    row = {"q": "Why?", "question": "no", "extra": {"question": "How?", "gold": "It is\n#### 4"},
           "answer": "7", "Result": 5, "solution": "\\boxed{8}", "A": {"B": {"c": "Who?"}}}
    assert load(tmp_path, row, "q", "result").answer == "5"
    assert load(tmp_path, row, "A.B.c", "result").question == "Who?"
    p = load(tmp_path, row, "extra.question", "extra.gold")
    assert (p.question, p.answer, p.solution) == ("How?", "4", "\\boxed{8}")
    with pytest.raises(ValueError, match="jsonl:1: no question in qq; the row has: q, question"):
        load(tmp_path, row, "qq")
    with pytest.raises(ValueError, match="jsonl:1: no answer in gold; .* --answer_field"):
        load(tmp_path, row, "", "gold")


def test_json_lists(tmp_path):
    """The place of a mistake is the item, or the line of the file."""
    text = '\n [\n  {"question": "q",\n   "answer": 1},\n  {"question": "r", "answer": 2}\n]\n'
    for name, content in (("x.json", text), ("x.json.gz", text.replace("\n", ""))):
        path = write(tmp_path / name, content)
        assert [p.answer for p in data.load_problems(path)] == ["1", "2"]
        path = write(tmp_path / name, content.replace('"question": "r"', '"question": 5'))
        with pytest.raises(ValueError, match=f'{name}, item 2: "question" must be text'):
            data.load_problems(path)
    path = write(tmp_path / "y.json", '[\n{"question": "q",\n"answer" 1}]')
    with pytest.raises(ValueError, match="y.json:3: broken JSON"):
        data.load_problems(path)


@pytest.mark.parametrize("answer, gold", [
    # ASDiv's units, which the gold then never lost; a dozen is no unit
    ("5 (apples)", "5 apples"), ("2 (dozen)", "2 dozen"), ("f (x)", "f (x)"), (["5"], "5"),
    ("2(x-y)", "2(x-y)"), ("3 (x-y)", "3 (x-y)"),
    (" 3/4 ", "3/4"), (12, "12"), (-3, "-3"), (0.25, "0.25"), (27.0, "27"), (1e30, "1e+30"),
    (10**400, "1" + "0" * 400), ("025", "025"), ("<3", "<3"), ("a << b", "a << b"),
    ("5225 \\text{ cubic inches}", "5225 \\text{ cubic inches}"),
    ("\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}", "\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}")])
def test_plain_answers(tmp_path, answer, gold):
    assert load(tmp_path, {"question": "q", "answer": answer}) == Problem("q", gold)


def test_lines(tmp_path):
    """U+2028 or a carriage return do not cut a row; a byte order mark is none of it."""
    path = tmp_path / "a.jsonl.gz"
    lines = '\ufeff{"question": "x\u2028y", "answer": 1}\r\n\n  \t\n{"question": "r", "answer": 5}'
    path.write_bytes(gzip.compress(lines.encode()))
    assert data.load_problems(path) == [Problem("x\u2028y", "1"), Problem("r", "5")]


def test_two_rows_of_math_with_an_empty_box(tmp_path, monkeypatch):
    """MATH has two problems with `\\boxed{}` and answer 0: they are mended, others refused."""
    row = {"problem": " How many? \n", "solution": "There are $\\boxed{}$."}
    with pytest.raises(ValueError, match='rows.jsonl:1: "solution" must'):
        load(tmp_path, row)
    monkeypatch.setattr(rows, "MATH_EMPTY_BOXES", {hashlib.sha256(b"How many?").hexdigest()[:16]})
    p = load(tmp_path, row)
    assert (p.answer, p.solution) == ("0", "There are $\\boxed{0}$.")


def test_a_problem_becomes_a_row_and_a_problem_again(tmp_path):
    problems = [Problem("q", "1,000"),
                Problem("r", "\\frac12", "so \\boxed{\\frac12}", 3, "Algebra"),
                Problem("q", "5", messages=[SYSTEM, *USER])]
    path = write(tmp_path / "heldout.jsonl", *map(data.as_row, problems))
    assert data.load_problems(path, "test") == problems


# ---- rows and files that are refused or left out -------------------------------------------------

FINE = {"question": "fine", "answer": "1"}


@pytest.mark.parametrize("line, says", [
    ('{"question": "a" "answer": 1}', "broken JSON .*column 18"),
    ("[" * 100000, "recursion"),
    ("[1, 2]", r"not an object .*: \[1, 2\]"),
    ('{"answer": "1"}', "no question in question, problem, .*; the row has: answer"),
    ('{"data": [{"question": "a"}]}', "no question in .*one object a line.*lines=True"),
    ('{"question": ["a", "b"]}', '"question" must be text.*one object a line.*lines=True'),
    ('{"question": 5, "answer": "1"}', '"question" must be text, or messages'),
    ('{"prompt": [{"role": "user"}], "answer": "1"}', '"prompt" must be text, or messages with'),
    ('{"messages": [{"role": "assistant", "content": "r"}], "answer": "1"}', "end in a user turn"),
    ('{"question": "\\ud800", "answer": "1"}', "surrogates not allowed"),
    ('{"messages": [{"role": "system", "content": "\\udc00"}, {"role": "user", "content": "q"}], '
     '"answer": "1"}', "surrogates not allowed"),
])
def test_broken_rows_are_refused(tmp_path, line, says):
    """The bad row is the third line (a blank line counts); the message is one short line."""
    path = write(tmp_path / "bad.jsonl", FINE, "", line)
    with pytest.raises(ValueError, match=f"bad.jsonl:3: .*{says}") as e:
        data.load_problems(path)
    assert len(str(e.value)) < 400 + len(path)


@pytest.mark.parametrize("row, says", [
    ({}, "no answer in answer, .*; the row has: question; name its column"),
    ({"solution": None, "answer": ""}, "the answer is empty"),
    ({"question": "", "answer": "1"}, "the question is empty"),
    ({"question": float("nan"), "answer": "1"}, "the question is empty"),
    ({"answer": True}, '"answer" must be text or a number, not True; write yes or no'),
    ({"answer": "He has 2 left over. So it may be 3."}, '"answer" must be the gold answer alone'),
    ({"answer": "5 it is. So the answer is 5. Or 6."}, '"answer" must be the gold answer alone'),
    ({"answer": [1, 2]}, r'"answer" must be text or a number, not \[1, 2\]'),
    ({"answer": float("-inf")}, "'-inf', which stands for no answer"),
    ({"answer": "1+1 = <<1+1=2>>2 apples"}, '"answer" must be the gold answer alone'),
    ({"answer": "He has 2.\nSo it is 3."}, '"answer" must be the gold answer alone'),
    ({"answer": "If Tom is fifth, then four people came in before him."}, "gold .* alone"),
    ({"answer": "It is 3.\n#### "}, "'', which stands for no answer"),
    ({"answer": '["1", "2"]'}, '"answer" must be the gold answer alone'),
    ({"answer": "\\boxed{1"}, '"answer" must be the gold answer alone'),
    ({"answer": "<answer>1</answer>"}, "answer or solution holds a tag"),
    ({"answer": "1", "solution": "<think>a"}, "answer or solution holds a tag"),
    ({"answer": "1", "solution": ["a", "b"]}, '"solution" must be text'),
    ({"completion": [{"role": "user", "content": "1"}]}, '"completion" must be text'),
    ({"completion": [{"role": "assistant", "content": None}]}, '"completion" must be text'),
    ({"solution": "It is 7."}, r'"solution" must .*mark it: in its last \\boxed{GOLD} .finished'),
    ({"solution": "7+2=9;4+1=5"}, '"solution" must'),
    # an unfinished last box is no answer, and an earlier one is none either
    ({"solution": "$\\boxed{7}$, then $\\boxed{\\frac{1}{2}$"}, '"solution" must'),
    ({"answer": "proof", "solution": "QED \\boxed{1}"}, "'proof', which stands for no answer"),
    ({"solution": "so \\boxed{None}"}, "'None', which stands for no answer"),
])
def test_rows_without_a_usable_answer(tmp_path, row, says, capsys):
    """Left out of a training file, counted, said once with the first's line; an error in a file to
    test on, in one asked for strictly, and where no row is left."""
    row = {"question": "q", **row}
    path = write(tmp_path / "bad.jsonl", FINE, "", row, FINE, row)
    assert len(data.load_problems(path)) == 2
    out, said = capsys.readouterr()
    assert out == "" and said.count("\n") == 1
    assert re.search(f"bad.jsonl: left out 2 of 4 .* question or .*: .*bad.jsonl:3: .*{says}", said)
    for kwargs in ({"split": "test"}, {"strict": True}):
        with pytest.raises(ValueError, match=f"bad.jsonl:3: .*{says}"):
            data.load_problems(path, **kwargs)
    with pytest.raises(ValueError, match=f"bad.jsonl:1: .*{says}.*no row of the file"):
        data.load_problems(write(tmp_path / "bad.jsonl", row, row), say=None)


@pytest.mark.parametrize("name, content, says", [
    ("x.jsonl", b'{"question": "q", "answer": "1"}\n{"question": "caf\xe9"}\n', ":2: not UTF-8"),
    ("z.gz", gzip.compress(b"\xff"), ":1: not UTF-8"),
    ("x.jsonl", b"version https://git-lfs.github.com/spec/v1\n", ": a Git LFS pointer"),
    ("x.jsonl.gz", gzip.compress(b'{"question": "q", "answer": 1}\n')[:-3], ": broken or cut-off"),
    ("x.jsonl.gz", b"not gzip at all\n", ": broken or cut-off gzip"),
    ("x.jsonl.gz", gzip.compress(b"")[:10] + b"\xff" * 20, ": broken or cut-off gzip"),
    ("x.jsonl", b"\xef\xbb\xbf\n", ": the file is empty"),
    ("x.jsonl", b"[]", ": the file is empty"),
    ("x.PARQUET", b"PAR1", r" is a parquet file.*\n.*read_parquet\('.*x.PARQUET'\).*x.jsonl'"),
    ("x.json", b"PAR1\xff", r" is a parquet file.*\n.*x.json'\)\.to_json\('.*x.json.jsonl'"),
    ("x.tsv", b"", r" is a tsv file.*\n.*read_csv\('.*x.tsv', dtype=str, sep='\\t'\).*x.jsonl'"),
    ("x.xlsx", b"PK", r" is a xlsx file.*\n.*read_excel\('.*x.xlsx', dtype=str\)"),
    ("x.json.zst", b"", r" is a zst file.*\n.*read_json\('.*zst', lines=True.*x.json.jsonl'"),
    ("x.csv", b"question,answer\n", r" is a csv file.*\n.*read_csv\('.*x.csv', dtype=str\)"),
])
def test_files_that_cannot_be_read_are_refused(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name + says):
        data.load_problems(tmp_path / name)


def test_files_are_known_by_their_bytes(tmp_path, monkeypatch):
    """gzip under another name, UTF-16, and a name without a dot were refused."""
    text = '{"question": "caf\u00e9?", "answer": "1"}\n'
    monkeypatch.chdir(tmp_path)
    for name, raw in (("x.json.GZ", gzip.compress(text.encode())), ("x", text.encode()),
                      ("y.jsonl", text.encode("utf-16"))):
        (tmp_path / name).write_bytes(raw)
        assert data.load_problems(name) == [Problem("caf\u00e9?", "1")]


def test_hostile_rows_are_read_quickly(tmp_path):
    """Guards against quadratic patterns: rows built to make a backtracking search slow."""
    many, start = 100000, time.process_time()
    for answer in ("<<" * many + "#### 1", "\\boxed{" * many + "}" * many,
                   "\\boxed" + " " * many + "{1}", "The answer is:" * many, "#" * many + " 1"):
        with contextlib.suppress(ValueError):
            load(tmp_path, {"question": "q", "answer": answer})
    assert time.process_time() - start < 3
