"""
Problems with known answers, and the prompts that ask them.

    problems = load_problems("gsm8k", "train")          # a known set, or a file by its path
    train, test = held_out(problems, 200)
    prompts, skipped = encode_prompts(tokenizer, train, max_prompt_tokens=512)

lib/rows.py knows the columns that a file may have; `python data.py gsm8k` downloads a known set.
"""
import hashlib
import os
import re
import sys
from dataclasses import dataclass, field

from lib.files import nearest
from lib.rows import NoAnswer, read_problem, read_rows

NAMES = ("arithmetic", "word_problems", "gsm8k", "math", "math500", "aime24", "aime25", "amc23")
ONLY_TEST = ("math500", "aime24", "aime25", "amc23")


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str  # the gold answer alone
    solution: str = ""  # worked gold solution in plain text, "" when the data has none
    level: int | None = None  # difficulty (MATH: 1 to 5)
    subject: str | None = None
    # the prompt, where the data give it as messages; question is then its last turn
    messages: list | None = field(default=None, hash=False)


# ----------------------------------------------------------------------------------------
# files

def to_stderr(line):
    print(line, file=sys.stderr, flush=True)


def load_problems(name_or_path, split="train", question_field="", answer_field="", strict=False,
                  say=to_stderr):
    """
    A list of Problem in the order of the file: of a known set (NAMES: data/NAME/SPLIT.jsonl[.gz]
    under the working directory; two are built in), or of a file by its path, whose question
    and gold answer may be named (question_field, answer_field; a.b is b in a).

    In a file to train on (split "train") rows without a usable answer are left out, and say(line)
    tells how many. In a known set, in a file to test on, or if `strict`, they are errors.
    ValueError names file, line and field of what is wrong, FileNotFoundError the missing file.
    """
    name = os.fspath(name_or_path)
    check_choice("split", split, ("train", "test"))
    if name == "arithmetic":
        from lib.arithmetic import arithmetic_problems  # which imports this file
        return arithmetic_problems(split)
    if name == "word_problems":
        from lib.word_problems import word_problems
        return word_problems(split)
    if name in NAMES:
        question_field, answer_field, strict = "", "", True
    path = _find_file(name, split)
    problems, unusable = [], []
    for where, row in read_rows(path):
        try:
            problems.append(Problem(**read_problem(row, question_field, answer_field)))
        except ValueError as e:
            unusable.append(f"{where}: {e}")
            if strict or split == "test" or not isinstance(e, NoAnswer):
                raise ValueError(unusable[-1]) from None
    if not problems:
        raise ValueError(f"{unusable[0]} (no row of the file has a usable answer)" if unusable else
                         f"{path}: the file is empty; it needs one JSON object a line")
    if unusable:
        say(f"{path}: left out {len(unusable)} of {len(problems) + len(unusable)} rows, which have "
            f"no usable question or answer; the first: {unusable[0]}")
    turns = [m["content"] for p in problems for m in p.messages or ()]
    if turns:
        line = f"{path}: prompts given as messages are used as they are, without system_prompt"
        if not any("<answer>" in turn for turn in turns):
            line += ("; none asks for <reasoning> and <answer>, for which the rewards look "
                     "(--question_field can name a column of plain questions)")
        say(line)
    return problems


def check_choice(what, value, known, also=""):
    """ValueError unless the value is one of the known ones; it names the nearest."""
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}; the nearest is {nearest(value, known)!r} "
                         f"(known: {', '.join(known)}{also})")


def check_fields(question_field, answer_field, names):
    """ValueError if columns are named, but all data are known sets, whose columns are fixed."""
    if (question_field or answer_field) and set(names) <= {*NAMES, ""}:
        raise ValueError("question_field and answer_field name columns of a file, and "
                         f"{names[0]} is none")


def _find_file(name, split):
    """The path of a known set's split, or the path given; an error says how to get a file."""
    path, how = name, ""
    if name in NAMES:
        path, how = f"data/{name}/{split}.jsonl", f" or .gz; get it with `python data.py {name}`"
        if not os.path.exists(path) and os.path.exists(path + ".gz"):
            path += ".gz"
        if name in ONLY_TEST and split == "train":
            how = f"; {name} has no train split, only: test"
    elif os.path.isdir(name):
        raise IsADirectoryError(f"{name} is a folder; give one of its files: "
                                f"{', '.join(sorted(os.listdir(name))):.200}")
    elif os.sep not in name and "." not in name and not os.path.isfile(name):
        check_choice("problem set", name, NAMES, "; or the path of a .jsonl file")
    elif re.fullmatch(r"[\w-]+/[\w.-]+", name):
        how = "; download a data set of the Hugging Face Hub first, and give the file's path"
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no file {path}{how} (looked in {os.getcwd()})")
    return path


def as_row(problem):
    """The problem as a row that load_problems reads back."""
    asked = {"prompt": problem.messages} if problem.messages else {"question": problem.question}
    row = {**asked, "answer": problem.answer, "solution": problem.solution,
           "level": problem.level, "subject": problem.subject}
    return {name: value for name, value in row.items() if value not in (None, "")}


# ----------------------------------------------------------------------------------------
# splits, demonstrations

def digest(seed, text):
    return hashlib.sha256(f"{seed}:{text}".encode()).digest()


def on_side(question, split):
    """Is a question of a built-in task in this split? About 7/8 are train, the rest test."""
    return (digest("split", question)[0] < 32) == (split == "test")


def held_out(problems, n, seed=0):
    """
    (train, test): test has n distinct questions, train none of them (a repeated question never
    stands on both sides; test keeps its first copy). Decided by the SHA-256 of seed and question:
    the same in every process and for every order of the rows. ValueError if train would be empty.
    """
    first = {}
    for p in problems:
        first.setdefault(p.question, p)
    if not 0 <= n < len(first):
        raise ValueError(f"cannot hold out {n} of {len(first)} distinct questions: at least one "
                         "must stay to train on; lower --eval_problems, or give --eval_data=FILE")
    chosen = set(sorted(first, key=lambda question: digest(seed, question))[:n])
    train = [p for p in problems if p.question not in chosen]
    return train, [p for p in first.values() if p.question in chosen]


def demonstration(problem, prompt_text=""):
    """The gold solution in the tagged format: a target for SFT. On lines of its own; without line
    breaks for the arithmetic task, where each would cost a token. A thought that the prompt opens
    is closed first."""
    line = "" if problem.subject == "arithmetic" else "\n"
    thought = "</think>\n\n" if open_thought(prompt_text) else ""
    return (f"{thought}<reasoning>{line}{problem.solution}{line}</reasoning>{line}"
            f"<answer>{line}{problem.answer}{line}</answer>")


# ----------------------------------------------------------------------------------------
# prompts

SYSTEM_PROMPT = """Solve the problem step by step. Put your whole reasoning between <reasoning> \
and </reasoning>, then put the final answer, and nothing else, between <answer> and </answer>:
<reasoning>
...
</reasoning>
<answer>
...
</answer>"""


def build_prompt(tokenizer, problem, system_prompt=SYSTEM_PROMPT, prompt_style="auto",
                 template_variables=None):
    """
    Token ids (T,) of the prompt for a Problem, or for a question as text; the completion starts
    right behind. prompt_style "chat": the chat template, which also gets template_variables, with a
    system turn (none when system_prompt is "") and a user turn; "plain", for base models: system
    prompt and question; "auto": chat if there is a template. A problem's own messages take the
    place of both turns. The texts never become control tokens. ValueError for an unknown style,
    "chat" without a template, or what the template refuses.
    """
    if isinstance(problem, str):
        problem = Problem(problem, "")
    if not is_plain(tokenizer, prompt_style):
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        messages = problem.messages or [*system, {"role": "user", "content": problem.question}]
        return tokenizer.chat_ids(messages, add_generation_prompt=True, **template_variables or {})
    text = problem.question
    if problem.messages:
        text = "\n\n".join(m["content"] for m in problem.messages)
    elif system_prompt:
        text = f"{system_prompt}\n\nProblem: {text}\nSolution:\n"
    return [*getattr(tokenizer, "bos_ids", ()), *tokenizer.encode(text, allow_special=False)]


def is_plain(tokenizer, prompt_style):
    """Are prompts of this style written without a chat template? ValueError: "chat" without one."""
    check_choice("prompt_style", prompt_style, ("auto", "chat", "plain"))
    if prompt_style == "chat" and not tokenizer.has_chat_template:
        raise ValueError('prompt_style "chat" needs a chat template, and the tokenizer has none; '
                         'use "plain"')
    return prompt_style == "plain" or not tokenizer.has_chat_template


def encode_prompts(tokenizer, problems, max_prompt_tokens, system_prompt=SYSTEM_PROMPT,
                   prompt_style="auto", template_variables=None):
    """
    ([(problem, prompt_ids)], number skipped). A prompt of more than max_prompt_tokens ids, template
    included, is skipped and counted, never cut. So is, before encoding, one of more than 64
    characters per allowed token: a row of a million spaces must not hang the run.
    """
    kept = []
    for p in problems:
        asked = [m["content"] for m in p.messages] if p.messages else [p.question]
        if sum(map(len, asked)) > 64 * max_prompt_tokens:
            continue
        try:
            ids = build_prompt(tokenizer, p, system_prompt, prompt_style, template_variables)
        except ValueError as e:
            raise ValueError(f"the prompt of {p.question!r:.60}: {e}") from None
        if len(ids) <= max_prompt_tokens:
            kept.append((p, ids))
    return kept, len(problems) - len(kept)


def plain_end(text):
    r"""Where the text of a completion of a plain prompt ends: behind its first `</answer>`, or
    before `\nProblem:`, where it begins another problem, both outside a thought; None: it goes on.
    What this says of a text, it says of every longer text that begins so."""
    thinking = False
    for m in re.finditer(r"</?think>|</answer>|\nProblem:", text):
        if m[0] in ("<think>", "</think>"):
            thinking = m[0] == "<think>"
        elif not thinking:
            return m.end() if m[0] == "</answer>" else m.start()
    return None


def open_thought(prompt_text):
    """`<think>` and the white space behind it, if the prompt ends so (templates of models that
    think may write it): the completion begins inside the thought. Else ""."""
    end = re.search(r"<think>\s*\Z", prompt_text)
    return end[0] if end else ""


if __name__ == "__main__":
    from lib.run import command
    from tools.download import main
    sys.exit(command(main))
