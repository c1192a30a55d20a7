r"""
The rows of a data file, as people have them.

    for where, row in read_rows(path):                  # "PATH:LINE", one JSON value
        fields = read_problem(row)                      # question, answer, solution, ...

A file holds one JSON object a line, or one JSON list of objects; .gz is fine. These columns are
known; capitals do not count, and a.b is b in a:

    question   the first of QUESTIONS that holds something: text, or messages (role and content;
               from and value), which are then the prompt as they are; text gets the row's CHOICES
    answer     the first of ANSWERS: the gold answer alone, or a worked text; else a worked text in
               the first of SOLUTIONS (`assistant` is that turn at the end of the messages)
    worked     the gold answer of a worked text is its last \boxed{...}, or what stands behind its
               last `####`, or behind `The answer is` in its last sentence
"""
import gzip
import hashlib
import json
import os
import re
import string
import zlib

from lib.files import refuse_lfs_pointer
from lib.grading import is_placeholder, last_boxed

QUESTIONS = ("question", "problem", "prompt", "query", "instruction", "messages", "conversations")
ANSWERS = ("answer", "reward_model.ground_truth", "final_answer", "expected_answer", "ground_truth")
SOLUTIONS = ("solution", "response", "output", "completion", "assistant")
CHOICES = ("choices", "options")
# a letter, index (from 0) or text
CHOSEN = ("answer", "answerkey", "correct", "answer_idx", "answer_index", *ANSWERS[1:])
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
RECORDS = "a file holds one object a line (pandas: orient='records', lines=True), or a list of them"
# A question that may want several answers. Boxes with `or` between are all of them then; else they
# are two ways to write one: $\boxed{28}$ or $\boxed{28_9}$.
SEVERAL = re.compile(
    r"(?i)\b(all|both|each|list|possible|roots|separated|solutions|solve|values)\b")
STATED = re.compile(r"The answer is:|(?:^|[.!?\n] *|\b(?:[Ss]o|[Tt]hus|[Hh]ence|[Tt]herefore),? )"
                    r"[Tt]he (?:final )?answer is\b:?")
LONGEST_ANSWER = 7  # words; what is longer is prose (three are the most in MATH)
# Two problems of MATH's train split end in an empty box in the original file. Both ask for the
# number of primes among numbers that the solution shows to be composite: 0. They are known by the
# SHA-256 of their text.
MATH_EMPTY_BOXES = {"34d3b36d1c419100", "641a7ef94229c8ca"}
TO_JSONL = {"parquet": "read_parquet('%s')", "csv": "read_csv('%s', dtype=str)",
            "xlsx": "read_excel('%s', dtype=str)",
            "zst": "read_json('%s', lines=True, dtype=False)",
            "tsv": r"read_csv('%s', dtype=str, sep='\t')"}


class NoAnswer(ValueError):
    """A row that is whole, but whose gold answer cannot be had."""


def read_rows(path):
    """Yields (where it stands, JSON value) for each line, or for each item of the one list.
    ValueError says where the file is broken, or how to make JSONL of another format."""
    _refuse_table(path, os.path.splitext(path)[1].lower()[1:])
    try:
        with open(path, "rb") as f:
            raw = f.read()
        if path.endswith(".gz") or raw.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
        refuse_lfs_pointer(path, raw)
        _refuse_table(path, "parquet" if raw.startswith(b"PAR1") else "")
        wide = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
        text = raw.decode("utf-16" if wide else "utf-8-sig")  # without a byte order mark
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
                         "install pandas pyarrow openpyxl zstandard`):\n    python -c \"import "
                         f"pandas; pandas.{TO_JSONL[kind] % path}.to_json('{made}', "
                         "orient='records', lines=True)\"")


def _parse(path, number, text):
    """The JSON value of a text that begins in this line of the file."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        line = number + getattr(e, "lineno", 1) - 1
        raise ValueError(f"{path}:{line}: broken JSON ({e}); {RECORDS}") from None


def read_problem(row, question_field="", answer_field=""):
    """The fields of data.Problem of one row; the columns of question and gold answer may be named.
    ValueError for a broken row, NoAnswer for a whole one whose gold answer cannot be had."""
    if not isinstance(row, dict):
        raise ValueError(f'not an object like {{"question": ..., "answer": ...}}: {row!r:.60}')
    question, messages, reply = _question(row, question_field)
    if reply:
        row = {**row, "assistant": reply}
    if _first(row, CHOICES)[0]:
        shown, letter = _choose(row, answer_field, question)
        if messages and shown != question:
            raise NoAnswer("the messages do not show the options that the row has")
        question, row, answer_field = shown, {**row, "answer": letter}, "answer"
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
        raise _nothing(row, [named] if named else QUESTIONS, "question")
    if isinstance(value, str):
        return _whole_question(row, name.lower(), value), None, ""
    if isinstance(value, list) and all(
            isinstance(m, dict) and isinstance(m.get("from"), str) for m in value):
        value = [{"role": ROLES.get(m["from"], m["from"]), "content": m.get("value")}
                 for m in value]
    if not isinstance(value, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str) for m in value):
        raise ValueError(f'"{name}" must be text, or messages with "role" and "content" as text, '
                         f"not {value!r:.60}; {RECORDS}")
    reply = ""
    if value[-1]["role"] == "assistant":
        *value, answered = value
        reply = answered["content"]
    if not value or value[-1]["role"] != "user":
        raise ValueError(f'the messages of "{name}" must end in a user turn')
    return value[-1]["content"], value, reply


def _whole_question(row, name, question):
    """The question with what stands apart from it: alpaca's input behind an instruction; the body
    (SVAMP), context, passage ... that a question is about."""
    parts = {key: part.strip() for key, part in _lower(row).items() if isinstance(part, str)}
    if name == "instruction" and parts.get("input"):
        return f"{question}\n\n{parts['input']}"
    for about in ("body", "context", "passage", "article", "story"):
        if name in ("question", "problem", "query", "instruction") and parts.get(about):
            return f"{parts[about]}\n\n{question}"
    return question


def _first(row, names):
    """(name, value) of the first column that holds something, ("", None) if none does. Capitals do
    not count; a.b is b in a."""
    columns = _lower(row)
    for name in names:
        value = columns.get(name.lower())
        if value is None:
            value = row
            for part in name.lower().split("."):
                value = _lower(value).get(part) if isinstance(value, dict) else None
        holds = value not in (None, [], {}) and value == value  # nan is nothing, too
        if holds and not (isinstance(value, str) and not value.strip()):
            return name, value
    return "", None


def _lower(row):
    return {key.lower(): value for key, value in row.items()}


def _nothing(row, names, what):
    """The error for a row without a question or an answer: its column is empty, or not there."""
    if {name.lower() for name in names} & _lower(row).keys():
        return NoAnswer(f"the {what} is empty")
    kind, more = (NoAnswer, "") if what == "answer" else (ValueError, f" ({RECORDS})")
    return kind(f"no {what} in {', '.join(names)}; the row has: {', '.join(row):.200}; name its "
                f"column with --{what}_field{more}")


def _choose(row, named, question):
    """(question, letter of the answer) of a row with CHOICES, which the question then shows as
    lines `A. text`. NoAnswer if they, or which of them is right, cannot be told for sure;
    ValueError for a place that is none of theirs: the column may count from 1."""
    column, given = _first(row, CHOICES)
    labels, texts = string.ascii_uppercase, given
    if isinstance(given, dict):  # {"label": [..], "text": [..]}, or {"A": ..}
        labels, texts = given.get("label", [*given]), given.get("text", [*given.values()])
    if (not isinstance(labels, (str, list)) or not isinstance(texts, list)
            or not 1 < len(texts) <= len(set(labels))
            or not all(isinstance(x, str) and x.strip() for x in [*labels, *texts])):
        raise NoAnswer(f'"{column}" must be a list of texts, or texts by label: {given!r:.60}')
    name, gold = _first(row, [named] if named else CHOSEN)
    if isinstance(gold, list) and len(gold) == 1:
        gold = gold[0]
    if type(gold) is float and gold % 1 == 0:
        gold = int(gold)  # pandas writes a column of places with a gap so
    if type(gold) is not int:
        gold = _text(name, gold) if name else _answer(row, named, question)[0]
    elif not 0 <= gold < len(texts) and str(gold) not in labels:
        raise ValueError(f'"{name}" is {gold}, the {len(texts)} of "{column}" count from 0 to '
                         f"{len(texts) - 1}")
    carried = [re.match(rf"\(?{re.escape(label)} ?(\)|[.:]\s)(?=.)", text)  # AQuA: A)21
               for label, text in zip(labels, texts)]
    found, shown, lines = [], True, ""
    for place, (label, text) in enumerate(zip(labels, texts)):
        text = text[carried[place].end() if all(carried) else 0 :].strip()
        a, b = re.escape(label), re.escape(text)
        forms = rf"\(?{a}[).:]?" + rf"|(\(?{a}[).:]+ *)?{b}" * isinstance(gold, str)
        if gold == place or re.fullmatch(forms, str(gold)):
            found.append(label)
        shown = shown and re.search(rf"\b{a}[).:\s]+{b}(?!\w)", question)
        lines += f"\n{label}. {text}"
    if len(found) != 1:
        raise NoAnswer(f'"{name or "solution"}" is {gold!r:.40}, which is not the letter, the text '
                       f'or the place (from 0) of one of the {len(texts)} in "{column}"')
    return question if shown else f"{question}{lines}\nAnswer with the letter.", found[0]


def _answer(row, named, question):
    """(gold answer, worked solution or "") of a row."""
    name, value = _first(row, [named] if named else ANSWERS + SOLUTIONS)
    if not name:
        raise _nothing(row, [named] if named else ANSWERS + SOLUTIONS, "answer")
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
    # ASDiv: 5 (apples) is 5 apples
    answer = re.sub(r"^([-+$]*\d[\d,./]*) \(([A-Za-z]{2}[A-Za-z ./-]*)\)$", r"\1 \2", answer)
    if re.search(r"</?(reasoning|answer)>|<think>", answer + solution):
        raise NoAnswer("answer or solution holds a tag <reasoning>, <answer> or <think>, which "
                       "would break the tagged format")
    return answer, "" if solution == answer else solution


def _check_answer(name, answer):
    """NoAnswer unless it is something that an answer can be compared with."""
    lines = "\n" in (answer or "").strip() and "\\" not in answer  # a LaTeX matrix may have lines
    if (answer is None or lines or "boxed{" in answer or answer.startswith('["')
            or _words(answer) > LONGEST_ANSWER
            or _words(answer) > 3 and re.search(r"[a-z0-9][.!?] +[A-Z]", answer)):  # sentences
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
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if type(value) in (int, float):
        # 27.0 is 27; but of 1e30 only the digits that it shows are known
        return str(int(value) if value % 1 == 0 and abs(value) < 2**53 else value)
    if not isinstance(value, str):
        raise NoAnswer(f'"{name}" must be text or a number, not {value!r:.60}'
                       + "; write yes or no" * isinstance(value, bool))
    return value.rpartition("</think>")[2].strip()


def _marked(text, question):
    """(gold answer, worked solution) of a worked text; (None, "") if it marks no answer."""
    boxed = last_boxed(text)
    if boxed is not None:
        # of boxes side by side the last alone, where one answer is asked for
        if "not both" in question or " or " in boxed and not SEVERAL.search(question):
            boxed = last_boxed(text[max(map(text.rfind, (r"\boxed", r"\fbox"))):]) or boxed
        return boxed, text
    *_, last = [None, *STATED.finditer(text)]
    stated = text[last.end():].strip().removesuffix(".") if last else ""
    if re.search(r"\n|[.!?] |####", stated):  # more than the answer
        last = None
    worked, hashes, answer = text[:last.start() if last else None].rpartition("####")
    if hashes:
        return answer.strip(), worked
    return (stated, text) if last else (None, "")


def _drop_calculator(text):
    """Removes GSM8K's calculator marks: `48/2 = <<48/2=24>>24` -> `48/2 = 24`."""
    return re.sub(r"<<[^<>\n]*=[^<>\n]*>>", "", text)
