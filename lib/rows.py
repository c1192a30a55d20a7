r"""
The rows of a data file, as people have them.

    for where, row in read_rows(path):                  # "PATH:LINE", one JSON value
        fields = read_problem(row)                      # question, answer, solution, ...

A file holds one JSON object a line, or one JSON list of objects; .gz is fine. These columns are
known; capitals do not count, and a.b is b in a:

    question   the first of QUESTIONS that holds something: text, or messages (role and content),
               which are then the prompt as they are
    answer     the first of ANSWERS: the gold answer alone, or a worked text; else a worked text in
               the first of SOLUTIONS (`assistant` is that turn at the end of the messages)
    worked     the gold answer of a worked text is its last \boxed{...}, or what stands behind its
               last `####`, or behind `The answer is:` at its end
"""
import gzip
import hashlib
import json
import os
import re
import zlib

from lib.files import refuse_lfs_pointer
from lib.grading import is_placeholder, last_boxed

QUESTIONS = ("question", "problem", "prompt", "query", "instruction", "messages")
ANSWERS = ("answer", "reward_model.ground_truth", "final_answer", "expected_answer", "ground_truth")
SOLUTIONS = ("solution", "response", "output", "completion", "assistant")
# A question that may want several answers. Boxes with `or` between are all of them then; else they
# are two ways to write one: $\boxed{28}$ or $\boxed{28_9}$.
SEVERAL = re.compile(
    r"(?i)\b(all|both|each|list|possible|roots|separated|solutions|solve|values)\b")
LONGEST_ANSWER = 7  # words; what is longer is prose (three are the most in MATH)
# Two problems of MATH's train split end in an empty box in the original file. Both ask for the
# number of primes among numbers that the solution shows to be composite: 0. They are known by the
# SHA-256 of their text.
MATH_EMPTY_BOXES = {"34d3b36d1c419100", "641a7ef94229c8ca"}
TO_JSONL = {"parquet": "read_parquet('%s')", "csv": "read_csv('%s', dtype=str)",
            "tsv": r"read_csv('%s', dtype=str, sep='\t')"}


class NoAnswer(ValueError):
    """A row that is whole, but whose gold answer cannot be had."""


def read_rows(path):
    """Yields (where it stands, JSON value) for each line, or for each item of the one list.
    ValueError says where the file is broken, or how to make JSONL of another format."""
    _refuse_table(path, os.path.splitext(path)[1].lower()[1:])
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
            raw = f.read().removeprefix(b"\xef\xbb\xbf")  # a byte order mark
        refuse_lfs_pointer(path, raw)
        _refuse_table(path, "parquet" if raw.startswith(b"PAR1") else "")
        text = raw.decode()
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8; save the file as UTF-8") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise ValueError(f"{path}: broken or cut-off gzip data ({e}); fetch it again") from None
    if text.lstrip().startswith("["):
        for item, row in enumerate(_parse(path, 1, text), 1):
            yield f"{path}, item {item}", row
        return
    # not splitlines(): U+2028 inside a JSON string does not end a line
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path}:{number}", _parse(path, number, line)


def _refuse_table(path, kind):
    """ValueError for a file of another format: how to make JSONL of it, beside it."""
    if kind in TO_JSONL:
        made = re.sub(rf"(?i)\.{kind}$", "", path) + ".jsonl"
        raise ValueError(f"{path} is a {kind} file; make JSONL of it and give that (with `pip "
                         f'install pandas pyarrow`):\n    python -c "import pandas; pandas.'
                         f"{TO_JSONL[kind] % path}.to_json('{made}', orient='records', "
                         'lines=True)"')


def _parse(path, number, text):
    """The JSON value of a text that begins in this line of the file."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        line = number + getattr(e, "lineno", 1) - 1
        raise ValueError(f"{path}:{line}: broken JSON ({e}); a file holds one object a line, or "
                         "one list of objects") from None


def read_problem(row, question_field="", answer_field=""):
    """The fields of data.Problem of one row; the columns of question and gold answer may be named.
    ValueError for a broken row, NoAnswer for a whole one whose gold answer cannot be had."""
    if not isinstance(row, dict):
        raise ValueError(f'not an object like {{"question": ..., "answer": ...}}: {row!r:.60}')
    question, messages, reply = _question(row, question_field)
    if reply:
        row = {**row, "assistant": reply}
    answer, solution = _answer(row, answer_field, question)
    for text in (question, answer, solution, *(m["content"] for m in messages or ())):
        text.encode()  # "\ud800" is legal JSON, but half a character: a ValueError
    # MATH writes "Level 3", and twice "Level ?"
    level = re.fullmatch(r"(Level )?(\d{1,3})", str(row.get("level")))
    subject = row.get("subject", row.get("type"))
    return dict(question=question, answer=answer, solution=solution, messages=messages,
                level=int(level[2]) if level else None,
                subject=subject if isinstance(subject, str) else None)


def _question(row, named):
    """(question, None, "") of a row that asks in text; of one that asks in messages (content of the
    last user turn, the messages up to it, the assistant's turn behind it or "")."""
    name, value = _first(row, [named] if named else QUESTIONS)
    if not name:
        raise ValueError(f"no question in {named or ', '.join(QUESTIONS)}; the row has: "
                         f"{', '.join(row):.200}; name its column with --question_field")
    if isinstance(value, str):
        return value if named else _whole_question(row, name, value), None, ""
    if not isinstance(value, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str) for m in value):
        raise ValueError(f'"{name}" must be text, or messages with "role" and "content" as text, '
                         f"not {value!r:.60}")
    reply = ""
    if value[-1]["role"] == "assistant":
        *value, answered = value
        reply = answered["content"]
    if not value or value[-1]["role"] != "user":
        raise ValueError(f'the messages of "{name}" must end in a user turn')
    return value[-1]["content"], value, reply


def _whole_question(row, name, question):
    """The question with what stands apart from it: alpaca's input behind an instruction; the body
    (SVAMP), context or passage that a question is about."""
    parts = {key.lower(): part.strip() for key, part in row.items()
             if isinstance(part, str) and part.strip()}
    if name == "instruction" and "input" in parts:
        return f"{question}\n\n{parts['input']}"
    for about in ("body", "context", "passage"):
        if name.lower() in ("question", "problem") and about in parts:
            return f"{parts[about]}\n\n{question}"
    return question


def _first(row, names):
    """(name, value) of the first column that holds something, ("", None) if none does. Capitals do
    not count; a.b is b in a."""
    columns = {key.lower(): value for key, value in row.items()}
    for name in names:
        outer, _, inner = name.lower().partition(".")
        value = columns.get(name.lower())
        if value is None and inner and isinstance(columns.get(outer), dict):
            value = columns[outer].get(inner)
        if value not in (None, []) and not (isinstance(value, str) and not value.strip()):
            return name, value
    return "", None


def _answer(row, named, question):
    """(gold answer, worked solution or "") of a row."""
    name, value = _first(row, [named] if named else ANSWERS + SOLUTIONS)
    if not name:
        raise NoAnswer(f"no answer in {named or ', '.join(ANSWERS + SOLUTIONS)}; the row has: "
                       f"{', '.join(row):.200}; name its column with --answer_field")
    text = _text(name, value)
    if hashlib.sha256(question.strip().encode()).hexdigest()[:16] in MATH_EMPTY_BOXES:
        text = text.replace(r"\boxed{}", r"\boxed{0}")
    answer, solution = _marked(text, question)
    if answer is None and text == _drop_calculator(text):
        # a column of solutions holds an answer alone only if it is no sentence and no sum
        if name not in SOLUTIONS or (_words(text) < 2 and not re.search("[=;\n]", text)):
            answer = text
    _check_answer(name, answer)
    source, worked = _first(row, SOLUTIONS)
    if source and name not in SOLUTIONS:
        solution = _text(source, worked)
    answer, solution = (_drop_calculator(text).strip() for text in (answer, solution))
    if re.search(r"</?(reasoning|answer)>|<think>", answer + solution):
        raise NoAnswer("answer or solution holds a tag <reasoning>, <answer> or <think>, which "
                       "would break the tagged format")
    return answer, "" if solution == answer else solution


def _check_answer(name, answer):
    """NoAnswer unless it is something that an answer can be compared with."""
    lines = "\n" in (answer or "").strip() and "\\" not in answer  # a LaTeX matrix may have lines
    if (answer is None or lines or "boxed{" in answer or answer.startswith('["')
            or _words(answer) > LONGEST_ANSWER):
        raise NoAnswer(f'"{name}" must be the gold answer alone, at most {LONGEST_ANSWER} words, '
                       r"or mark it: in its last \boxed{GOLD} (finished), in a last line "
                       "`#### GOLD` or `The answer is: GOLD`")
    if is_placeholder(answer):
        raise NoAnswer(f'"{name}" is {answer!r}, which stands for no answer')


def _words(text):
    r"""How many words: names, units, `\text{cubic inches}`; x, and commands like \pi, are none."""
    return len(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text))


def _text(name, value):
    """A column's text, or number as text, without the thought that may stand before it."""
    if type(value) in (int, float):
        # 27.0 is 27; but of 1e30 only the digits that it shows are known
        return str(int(value) if value % 1 == 0 and abs(value) < 2**53 else value)
    if not isinstance(value, str):
        raise NoAnswer(f'"{name}" must be text or a number, not {value!r:.60}')
    return value.rpartition("</think>")[2].strip()


def _marked(text, question):
    """(gold answer, worked solution) of a worked text; (None, "") if it marks no answer."""
    boxed = last_boxed(text)
    if boxed is not None:
        # of boxes side by side the last alone, where one answer is asked for
        if "not both" in question or " or " in boxed and not SEVERAL.search(question):
            boxed = last_boxed(text[max(map(text.rfind, (r"\boxed", r"\fbox"))):]) or boxed
        return boxed, text
    rest, marker, stated = text.rpartition("The answer is:")
    if not marker or "\n" in stated.strip():
        rest, marker = text, ""
    worked, hashes, answer = rest.rpartition("####")
    if hashes:
        return answer.strip(), worked
    return (stated.strip(), text) if marker else (None, "")


def _drop_calculator(text):
    """Removes GSM8K's calculator marks: `48/2 = <<48/2=24>>24` -> `48/2 = 24`."""
    return re.sub(r"<<[^<>\n]*=[^<>\n]*>>", "", text)
