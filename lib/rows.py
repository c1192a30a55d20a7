r"""
The rows of a data file, as people have them.

    for where, row in read_rows(path):                  # "PATH:LINE", one JSON value
        fields = read_problem(row)                      # question, answer, solution, ...

A file holds one JSON object a line, or one JSON list of objects; .gz is fine. These columns are
known; capitals do not count, and a.b is b in a:

    question   the first of QUESTIONS that holds something: text, or messages (role and content;
               from and value), which are then the prompt as they are; text gets the row's CHOICES
    answer     the first of ANSWERS: the gold answer alone, or a worked text; else a worked text in
               the first of SOLUTIONS (`assistant` is that turn at the end of the messages;
               TRL's `completion` may be that message alone)
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
# Two problems of MATH's train split, by SHA-256, end in an empty box. Both ask for the number of
# primes among numbers that the solution shows to be composite: 0.
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
    text = _read_text(path)
    is_list = text.lstrip().startswith("[")
    # not splitlines(): U+2028 inside a JSON string does not end a line
    for number, part in enumerate([text] if is_list else text.split("\n"), 1):
        if not part.strip():
            continue
        try:
            value = json.loads(part)
        except (ValueError, RecursionError) as e:
            line = number + getattr(e, "lineno", 1) - 1
            raise ValueError(f"{path}:{line}: broken JSON ({e}); {RECORDS}") from None
        if is_list:
            yield from ((f"{path}, item {item}", row) for item, row in enumerate(value, 1))
        else:
            yield f"{path}:{number}", value


def _read_text(path):
    """The text of a file, gzip or not, in UTF-8 or UTF-16."""
    with open(path, "rb") as f:
        raw = f.read()
    try:
        if path.endswith(".gz") or raw.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
        refuse_lfs_pointer(path, raw)
        kind = "parquet" if raw.startswith(b"PAR1") else os.path.splitext(path)[1].lower()[1:]
        if kind in TO_JSONL:
            made = re.sub(rf"(?i)\.{kind}$", "", path) + ".jsonl"
            raise ValueError(f"{path} is a {kind} file; make JSONL of it and give that (with `pip "
                             "install pandas pyarrow openpyxl zstandard`):\n    python -c \"import "
                             f"pandas; pandas.{TO_JSONL[kind] % path}.to_json('{made}', "
                             "orient='records', lines=True)\"")
        wide = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
        return raw.decode("utf-16" if wide else "utf-8-sig")  # without a byte order mark
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8; save the file as UTF-8") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise ValueError(f"{path}: broken or cut-off gzip data ({e}); fetch it again") from None


def read_problem(row, question_field="", answer_field=""):
    """The fields of data.Problem of one row; the columns of question and gold answer may be named.
    ValueError for a broken row, NoAnswer for a whole one whose gold answer cannot be had."""
    if not isinstance(row, dict):
        raise ValueError(f'not an object like {{"question": ..., "answer": ...}}: {row!r:.60}')
    row = _columns(row)
    named = [answer_field.lower()] if answer_field else []
    question, messages = _question(row, [question_field.lower()] if question_field else QUESTIONS)
    if _find(row, CHOICES):
        shown, row["answer"] = _choose(row, named, question)
        if messages and shown != question:
            raise NoAnswer("the messages do not show the options that the row has")
        question, named = shown, ["answer"]
    answer, solution = _answer(row, named, question)
    for text in (question, answer, solution, *(m["content"] for m in messages or ())):
        text.encode()  # "\ud800" is legal JSON, but half a character: a ValueError
    # MATH writes "Level 3", and twice "Level ?"
    level = re.fullmatch(r"(Level )?(\d{1,3})", str(row.get("level")))
    subject = row.get(_find(row, ("subject", "type")))
    return dict(question=question, answer=answer, solution=solution, messages=messages,
                level=int(level[2]) if level else None,
                subject=subject if isinstance(subject, str) else None)


def _columns(row, deep=8):
    """A row by its columns' names in small letters, and by a.b for b in a, so many dots deep."""
    columns = {}
    for name, value in row.items():
        columns[name.lower()] = _cell(value)
        if isinstance(value, dict) and deep:
            inside = _columns(value, deep - 1)
            columns |= {f"{name.lower()}.{key}": cell for key, cell in inside.items()}
    return columns


def _cell(value):
    """What a cell holds, None if nothing. A list of one is its item, but for messages. 27.0 is 27
    (pandas writes a column with a gap so); but of 1e30 only the digits that it shows are known."""
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], dict):
        value = value[0]
    if isinstance(value, str):
        return value if value.strip() else None
    if isinstance(value, float) and value % 1 == 0 and abs(value) < 2**53:
        return int(value)
    return None if value in ([], {}) or value != value else value  # nan is no value


def _find(row, names, what=""):
    """The first of these columns that holds something. If none does: None, or, with `what` they
    are asked for, an error."""
    name = next((name for name in names if row.get(name) is not None), None)
    if name or not what:
        return name
    if row.keys() & names:
        raise NoAnswer(f"the {what} is empty")
    kind, more = (NoAnswer, "") if what == "answer" else (ValueError, f" ({RECORDS})")
    raise kind(f"no {what} in {', '.join(names)}; the row has: {', '.join(row):.200}; name its "
               f"column with --{what}_field{more}")


def _text(name, value):
    """A cell's text, number as text, or assistant's turn, without the thought that may stand before
    it."""
    match value:
        case [{"role": "assistant", "content": content}]:
            value = content
    if type(value) in (int, float):
        return str(value)
    if not isinstance(value, str):
        raise NoAnswer(f'"{name}" must be text or a number, not {value!r:.60}'
                       + "; write yes or no" * isinstance(value, bool))
    return value.rpartition("</think>")[2].strip()


def _question(row, names):
    """(question, None) of a row that asks in text; of one that asks in messages (content of the
    last user turn, the messages up to it): the assistant's turn behind it is put into the row."""
    name = _find(row, names, "question")
    turns = row[name]
    if isinstance(turns, str):
        return _whole_question(row, name), None
    try:
        if "from" in turns[0]:
            turns = [{"role": ROLES.get(m["from"], m["from"]), "content": m["value"]}
                     for m in turns]
        are_text = all(isinstance(m[key], str) for m in turns for key in ("role", "content"))
    except (KeyError, TypeError):
        are_text = False
    if not are_text:
        raise ValueError(f'"{name}" must be text, or messages with "role" and "content" as text, '
                         f"not {turns!r:.60}; {RECORDS}")
    if turns[-1]["role"] == "assistant":
        *turns, reply = turns
        row["assistant"] = _cell(reply["content"])
    if not turns or turns[-1]["role"] != "user":
        raise ValueError(f'the messages of "{name}" must end in a user turn')
    return turns[-1]["content"], turns


def _whole_question(row, name):
    """The question with what stands apart from it: alpaca's input behind an instruction; the body
    (SVAMP), context, passage ... that a question is about."""
    parts = {key: part.strip() for key, part in row.items() if isinstance(part, str)}
    about = _find(parts, ("body", "context", "passage", "article", "story"))
    if name == "instruction" and "input" in parts:
        return f"{row[name]}\n\n{parts['input']}"
    if name in ("question", "problem", "query", "instruction") and about:
        return f"{parts[about]}\n\n{row[name]}"
    return row[name]


def _options(row):
    """{label: text} of a row with CHOICES. NoAnswer if they cannot be told for sure."""
    column = _find(row, CHOICES)
    labels, texts = string.ascii_uppercase, row[column]
    if isinstance(texts, dict):  # {"label": [..], "text": [..]}, or {"A": ..}
        labels, texts = texts.get("label", [*texts]), texts.get("text", [*texts.values()])
    try:
        options = {label.strip(): text.strip() for label, text in zip(labels, texts)}
    except (AttributeError, TypeError):
        options = {}
    if (not isinstance(texts, list) or not 1 < len(texts) == len(options)
            or not all([*options, *options.values()])):
        raise NoAnswer(f'"{column}" must be a list of texts, or texts by label: '
                       f"{row[column]!r:.60}")
    bare = {label: re.sub(rf"^\(?{re.escape(label)} ?(\)|[.:]\s)(?=.)", "", text).strip()
            for label, text in options.items()}
    return options if bare.items() & options.items() else bare  # all carry it, AQuA: A)21


def _choose(row, named, question):
    """(question, letter of the answer) of a row with CHOICES, which the question then shows as
    lines `A. text`. NoAnswer if it cannot be told for sure which of them is right; ValueError for
    a place that is none of theirs: the column may count from 1."""
    options = _options(row)
    name = _find(row, named or CHOSEN)
    gold = row[name] if name else _answer(row, named, question)[0]
    patterns = {label: (re.escape(label), re.escape(text)) for label, text in options.items()}
    if type(gold) is int:
        found = [label for place, label in enumerate(options) if str(gold) in (str(place), label)]
        if not found:
            raise ValueError(f'"{name}" is {gold}, the {len(options)} of "{_find(row, CHOICES)}" '
                             f"count from 0 to {len(options) - 1}")
    else:
        gold = _text(name, gold)
        found = [label for label, (a, b) in patterns.items()
                 if re.fullmatch(rf"\(?{a}[).:]?|(\(?{a}[).:]+ *)?{b}", gold)]
    if len(found) != 1:
        raise NoAnswer(f'"{name or "solution"}" is {gold!r:.40}, which is not the letter, the text '
                       f"or the place (from 0) of one of the {len(options)} options")
    if not all(re.search(rf"\b{a}[).:\s]+{b}(?!\w)", question) for a, b in patterns.values()):
        lines = "".join(f"\n{label}. {text}" for label, text in options.items())
        question = f"{question}{lines}\nAnswer with the letter."
    return question, found[0]


def _answer(row, named, question):
    """(gold answer, worked solution or "") of a row."""
    name = _find(row, named or ANSWERS + SOLUTIONS, "answer")
    text = _text(name, row[name])
    if hashlib.sha256(question.strip().encode()).hexdigest()[:16] in MATH_EMPTY_BOXES:
        text = text.replace(r"\boxed{}", r"\boxed{0}")
    answer, solution = _marked(text, question)
    if answer is None and text == _drop_calculator(text):
        # a column of solutions holds an answer alone only if it is no sentence and no sum
        if name not in SOLUTIONS or (_words(text) < 2 and not re.search("[=;\n]", text)):
            answer = text
    _check_answer(name, answer)
    worked = _find(row, SOLUTIONS)
    if worked and name not in SOLUTIONS:
        solution = _text(worked, row[worked])
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
