r"""
The rows of a data file, as people have them.

    for where, row in read_rows(path):                  # "PATH:LINE", one JSON value
        fields = read_problem(row)                      # question, answer, solution, ...

A file holds one JSON object a line, or one JSON list of objects; .gz is fine. These columns are
known; capitals do not count, and a.b is b in a:

    question   the first of QUESTIONS that holds something: text, or messages (role and content),
               which are then the prompt as they are
    answer     the first of ANSWERS: the gold answer alone, or a worked text; else a worked text in
               the first of SOLUTIONS, or in the assistant's turn at the end of the messages
    worked     the gold answer of a worked text is its last \boxed{...}, or what stands behind its
               last `####`, or behind `The answer is:` at its end
"""
import gzip
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import zlib

from lib.files import refuse_lfs_pointer
from lib.grading import answers_equal, is_placeholder, last_boxed

QUESTIONS = ("question", "problem", "prompt", "query", "instruction", "messages")
ANSWERS = ("answer", "reward_model.ground_truth", "final_answer", "expected_answer", "ground_truth")
SOLUTIONS = ("solution", "response", "output", "completion")
LONGEST_ANSWER = 7  # words; what is longer is prose (three are the most in MATH)
# Two problems of MATH's train split end in an empty box in the original file. Both ask for the
# number of primes among numbers that the solution shows to be composite: 0. They are known by the
# SHA-256 of their text.
MATH_EMPTY_BOXES = {"34d3b36d1c419100", "641a7ef94229c8ca"}
TO_JSONL = {  # ends of file names: what the file is, and what prints it as JSONL
    ".parquet": ("Parquet", "pip install pyarrow",
                 "import json, sys, pyarrow.parquet as p; [print(json.dumps(r, default=str)) "
                 "for r in p.read_table(sys.argv[1]).to_pylist()]"),
    ".csv": ("CSV", "Python alone will do",
             "import csv, json, sys; csv.field_size_limit(2**30); [print(json.dumps(r)) "
             "for r in csv.DictReader(open(sys.argv[1], encoding='utf-8-sig', newline=''))]"),
}


class NoAnswer(ValueError):
    """A row that is whole, but whose gold answer cannot be had."""


def read_rows(path):
    """Yields (where it stands, JSON value) for each line, or for each item of the one list.
    ValueError says where the file is broken, or how to make JSONL of another format."""
    end = os.path.splitext(path)[1].lower()
    if end in TO_JSONL:
        kind, needs, program = TO_JSONL[end]
        raise ValueError(f"{path} is a {kind} file; make JSONL of it ({needs}) and give that:\n"
                         f'    python -c "{program}" {shlex.quote(path)} > '
                         + shlex.quote(path[:-len(end)] + ".jsonl"))
    lines = _lines(path)
    number, text = next((line for line in lines if line[1].strip()), (0, ""))
    if text.lstrip().startswith("["):
        text += "".join(line for _, line in lines)
        for item, row in enumerate(_parse(path, number, text), 1):
            yield f"{path}, item {item}", row
        return
    for number, text in itertools.chain([(number, text)], lines):
        if text.strip():
            yield f"{path}:{number}", _parse(path, number, text)


def _lines(path):
    """Yields (line number from 1, text). Lines end at a newline byte only: U+2028 inside a JSON
    string does not cut a row."""
    number = 0
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
            for number, raw in enumerate(f, 1):
                if number == 1:
                    refuse_lfs_pointer(path, raw)
                    raw = raw.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
                yield number, raw.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}:{number}: not UTF-8 at byte {e.start + 1} of the line; save the "
                         "file as UTF-8") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise ValueError(f"{path}:{number + 1}: broken or cut-off gzip data ({e}); fetch the file "
                         "again") from None


def _parse(path, number, text):
    """The JSON value of a text that begins in this line of the file."""
    try:
        return json.loads(text.rstrip())
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}:{number + e.lineno - 1}: broken JSON at column {e.colno}: {e.msg}"
                         " (a file holds one object a line, or one list of objects)") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}:{number}: {e}") from None


def read_problem(row, question_field="", answer_field=""):
    """The fields of data.Problem of one row; the columns of question and gold answer may be named.
    ValueError for a broken row, NoAnswer for a whole one whose gold answer cannot be had."""
    if not isinstance(row, dict):
        raise ValueError(f'not an object like {{"question": ..., "answer": ...}}: {row!r:.60}')
    question, messages, reply = _question(row, question_field)
    answer, solution = _answer(row, answer_field, question, reply)
    for text in (question, answer, solution, *(m["content"] for m in messages or ())):
        if re.search("[\ud800-\udfff]", text):  # "\ud800" is legal JSON, but cannot be encoded
            raise ValueError("a text holds half a surrogate pair, which is no character")
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
        # alpaca's instruction may come with an input
        more = row.get("input") if name == "instruction" else None
        return f"{value}\n\n{more}" if isinstance(more, str) and more else value, None, ""
    if not isinstance(value, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str) for m in value):
        raise ValueError(f'"{name}" must be text, or messages with "role" and "content" as text, '
                         f"not {value!r:.60}")
    reply = ""
    if name != "prompt" and value[-1]["role"] == "assistant":
        *value, answered = value
        reply = answered["content"]
    if not value or value[-1]["role"] != "user":
        raise ValueError(f'the messages of "{name}" must end in a user turn')
    return value[-1]["content"], value, reply


def _first(row, names):
    """(name, value) of the first column that holds something, ("", None) if none does. Capitals do
    not count; a.b is b in a."""
    columns = {key.lower(): value for key, value in row.items()}
    for name in names:
        outer, _, inner = name.lower().partition(".")
        value = columns.get(name.lower())
        if value is None and inner and isinstance(columns.get(outer), dict):
            value = columns[outer].get(inner)
        if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], dict):
            value = value[0]
        if value not in (None, []) and not (isinstance(value, str) and not value.strip()):
            return name, value
    return "", None


def _answer(row, named, question, reply):
    """(gold answer, worked solution or "") of a row."""
    name, value = _first(row, [named] if named else ANSWERS)
    source, solution = _first(row, SOLUTIONS)
    if not source:
        source, solution = "messages", reply
    solution = _text(source, solution)
    asked = question.strip().encode(errors="replace")
    if hashlib.sha256(asked).hexdigest()[:16] in MATH_EMPTY_BOXES:
        solution = solution.replace(r"\boxed{}", r"\boxed{0}")
    alone = bool(name)
    if name:
        text = _text(name, value)
    elif solution and not named:
        name, text = source, solution
    else:
        raise NoAnswer(f"no answer in {named or ', '.join(ANSWERS + SOLUTIONS)}; the row has: "
                       f"{', '.join(row):.200}; name its column with --answer_field")
    answer, worked = _marked(text)
    if answer is None and text == _drop_calculator(text):
        # a column of solutions holds an answer alone only if it is no sentence and no sum
        if alone or (_words(text) < 2 and not re.search("[=;\n]", text)):
            answer = text
    _check_answer(name, answer)
    answer = _drop_calculator(answer).strip()
    solution = _drop_calculator(solution if alone and solution else worked).strip()
    for where, text in ((name, answer), (source, solution)):
        if re.search(r"</?(reasoning|answer)>|<think>", text):
            raise NoAnswer(f'"{where}" holds a tag <reasoning>, <answer> or <think>, which would '
                           "break the tagged format")
    return answer, "" if solution == answer else solution


def _check_answer(name, answer):
    """NoAnswer unless it is something that an answer can be compared with."""
    lines = "\n" in (answer or "").strip() and "\\" not in answer  # a LaTeX matrix may have lines
    if (answer is None or lines or "boxed{" in answer or answer.startswith('["')
            or _words(answer) > LONGEST_ANSWER):
        raise NoAnswer(f'"{name}" must be the gold answer alone, at most {LONGEST_ANSWER} words, '
                       r"or mark it: in its last \boxed{GOLD} (finished), in a last line "
                       "`#### GOLD` or `The answer is: GOLD`")
    if not answer.strip():
        raise NoAnswer(f'"{name}" gives an empty gold answer')
    if is_placeholder(answer):
        raise NoAnswer(f'"{name}" is {answer!r}, which stands for no answer')


def _words(text):
    r"""How many words: names, units, `\text{cubic inches}`; x, and commands like \pi, are none."""
    return len(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text))


def _text(name, value):
    """A column's text, or number as text, without the thought that may stand before it."""
    if type(value) in (int, float):
        # floats so large are not the number that was written
        if not math.isfinite(value) or (type(value) is float and abs(value) >= 2**53):
            raise NoAnswer(f'"{name}" is {value}, not an exact finite number; write it as an '
                           "integer or as text")
        return str(int(value)) if value == int(value) else repr(value)
    if not isinstance(value, str):
        raise NoAnswer(f'"{name}" must be text or a number, not {value!r:.60}')
    return value.rpartition("</think>")[2].strip()


def _marked(text):
    """(gold answer, worked solution) of a worked text; (None, "") if it marks no answer."""
    boxed = last_boxed(text)
    if boxed is not None:
        one, _, other = boxed.partition(" or ")
        # \boxed{x+11} or \boxed{11+x} is one answer, written twice
        return other if answers_equal(one, other) else boxed, text
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
