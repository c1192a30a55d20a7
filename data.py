"""
Problems with known answers: JSONL files, the built-in arithmetic task, demonstrations for SFT, prompts, downloads.

    python data.py gsm8k math500 aime24 aime25 amc23     # fetch the original files to data/NAME/SPLIT.jsonl (the same as: all)
    python data.py math                                  # says how to get MATH, which has no single file to download
    python data.py all --mirror=https://host/prefix      # another scheme and host in front of the same paths

A download that was cut off continues with the next call; a file gets its final name only when its SHA-256 is right.
"""
import difflib
import gzip
import hashlib
import http.client
import json
import math
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
import zlib
from dataclasses import dataclass

from tqdm import tqdm


@dataclass(frozen=True)
class Problem:
    question: str
    answer: str               # the gold answer alone
    solution: str = ""        # worked gold solution in plain text, "" when the data has none
    level: int | None = None  # difficulty (MATH: 1 to 5)
    subject: str | None = None

RAW = "https://raw.githubusercontent.com/"
QWEN = RAW + "QwenLM/Qwen2.5-Math/a45202bd16f1ec06f433442dc1152d0074773465/evaluation/data/"
GSM8K = RAW + "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/"
MATH500 = RAW + "MobileLLM/BudgetThinker/f0466b9d37595f46603387baa5930e312fefb7f5/evaluation/data/math500/test_ori.jsonl"
AIME25 = RAW + "zhshgmail/AReaL/04ab6018c4ef43919348efdc52ba6b679a14ce88/evaluation/data/aime25/test.jsonl"
FILES = {  # (name, split): URL of the original file at a fixed commit, bytes, SHA-256
    ("gsm8k", "train"): (GSM8K + "train.jsonl", 4166206, "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"),
    ("gsm8k", "test"): (GSM8K + "test.jsonl", 749738, "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"),
    ("math500", "test"): (MATH500, 446564, "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132"),
    ("aime24", "test"): (QWEN + "aime24/test.jsonl", 156944, "af2b8bd2aa911b6333ad0df32f3ca05c7ae8ed10f1731f4372c8ae26990bf7ac"),
    ("aime25", "test"): (AIME25, 15813, "b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331"),
    ("amc23", "test"): (QWEN + "amc23/test.jsonl", 27631, "43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4"),
}
# Two problems of MATH's train split end in an empty box in the original file. Both ask for the number of primes among numbers that the
# solution shows to be composite: 0. They are known by the SHA-256 of their text; any other empty box is refused.
MATH_EMPTY_BOXES = {"34d3b36d1c419100", "641a7ef94229c8ca"}
NAMES = ("arithmetic", "gsm8k", "math", "math500", "aime24", "aime25", "amc23")
MATH_HELP = r"""MATH has no stable public home as one plain file. From its original archive (one JSON file a problem) make
    jq -c . MATH/train/*/*.json > data/math/train.jsonl    and    jq -c . MATH/test/*/*.json > data/math/test.jsonl
or put another JSONL there (.jsonl.gz too): "problem", "solution" (gold: its last \boxed{...}), optional "answer", "level", "type"."""


def load_problems(name_or_path, split="train"):
    """
    The problems of a known set (NAMES: a file data/NAME/SPLIT.jsonl[.gz] under the working directory; "arithmetic" is built in), or of
    a JSONL file given by its path (`split` then plays no part). Returns a list of Problem in the order of the file.

    A row is one JSON object a line. Question: "question" or "problem". Gold: "answer" (text or number); what follows its last `####`
    when it holds one (GSM8K); the last \\boxed{...} of "solution" when there is no "answer" (MATH). Blank lines are skipped.
    Raises ValueError naming file:line and field for bad content, FileNotFoundError for a missing file.
    """
    path = name = os.fspath(name_or_path)
    _check_choice("split", split, ("train", "test"))
    if name == "arithmetic":
        return arithmetic_problems(split=split)
    if name in NAMES:
        path = f"data/{name}/{split}.jsonl"
        if not os.path.exists(path) and os.path.exists(path + ".gz"):
            path += ".gz"
    elif os.sep not in name and "." not in name:
        _check_choice("problem set", name, NAMES, "; or the path of a .jsonl file")
    if not os.path.exists(path):
        splits = [s for n, s in FILES if n == name]
        how = f"; get it with `python data.py {name}`"
        if splits and split not in splits:
            how = f"; {name} has no {split} split, only: {', '.join(splits)}; for {split} take another set, or a JSONL file by its path"
        raise FileNotFoundError(f"no file {path}{' or ' + path + '.gz' + how if name in NAMES else ''} (looked in {os.getcwd()})")
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder; give a .jsonl or .jsonl.gz file, or one of {', '.join(NAMES)}")
    problems = []
    for number, line in _read_lines(path):
        try:
            if line.strip():
                problems.append(_problem(json.loads(line)))
        except json.JSONDecodeError as e:
            raise ValueError(f"{path}:{number}: broken JSON at column {e.colno}: {e.msg}") from None
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{path}:{number}: {e}") from None
    if not problems:
        raise ValueError(f"{path}: the file is empty; it needs one JSON object a line")
    return problems


def _check_choice(what, value, known, also=""):
    if value not in known:
        nearest = difflib.get_close_matches(str(value).lower(), known, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown {what} {value!r}; the nearest is {nearest!r} (known: {', '.join(known)}{also})")


def _read_lines(path):
    """Yields (line number from 1, text). Lines end at a newline byte only: U+2028 inside a JSON string does not cut a row."""
    number = 0
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
            for number, raw in enumerate(f, 1):
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")   # -sig drops a byte order mark
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}:{number}: not UTF-8 at byte {e.start + 1} of the line; save the file as UTF-8") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as e:
        raise ValueError(f"{path}:{number + 1}: broken or cut-off gzip data ({e}); fetch the file again") from None


def _problem(row):
    """One parsed line -> Problem. Which field is the gold is decided by the fields that are there."""
    if not isinstance(row, dict):
        raise ValueError(f'not an object like {{"question": ..., "answer": ...}}: {row!r:.60}')
    field = "problem" if "problem" in row and "question" not in row else "question"
    question = _text(row, field)
    if not question.strip():
        raise ValueError(f'"{field}" is empty')
    solution = "" if row.get("solution") is None else _text(row, "solution")
    source = "answer" if "answer" in row or not solution else "solution"
    if source == "solution":                                                  # MATH
        if hashlib.sha256(question.strip().encode()).hexdigest()[:16] in MATH_EMPTY_BOXES:
            solution = solution.replace(r"\boxed{}", r"\boxed{0}")
        answer = _last_boxed(solution)
    elif type(row.get("answer")) in (int, float):
        answer = _number(row["answer"])
    else:
        worked, marker, answer = _text(row, "answer").rpartition("####")
        if marker:                                                            # GSM8K: the worked solution, then `#### gold`
            solution, answer = solution or worked, _drop_calculator(answer)
        if answer != _drop_calculator(answer) or ("\n" in answer.strip() and "\\" not in answer):     # a LaTeX matrix may have lines
            raise ValueError('"answer" must be the gold answer alone, or a worked solution that ends in a line `#### GOLD`')
    answer, solution = answer.strip(), _drop_calculator(solution).strip()
    if not answer:
        raise ValueError(f'"{source}" gives an empty gold answer')
    for field, text in ((source, answer), ("solution", solution)):
        if re.search(r"</?(reasoning|answer)>", text):
            raise ValueError(f'"{field}" holds a <reasoning> or <answer> tag, which would break the tagged format')
    level = re.fullmatch(r"(Level )?(\d{1,3})", str(row.get("level")))        # MATH writes "Level 3", and twice "Level ?"
    subject = row.get("subject", row.get("type"))
    return Problem(question, answer, solution, int(level[2]) if level else None, subject if isinstance(subject, str) else None)


def _text(row, field):
    if field not in row:
        raise ValueError(f'no "{field}" field; the row has: {", ".join(row):.200}')
    if not isinstance(row[field], str):
        raise ValueError(f'"{field}" must be text{" or a number" if field == "answer" else ""}, not {row[field]!r:.60}')
    if re.search("[\ud800-\udfff]", row[field]):                              # "\ud800" is legal JSON, but no text that can be encoded
        raise ValueError(f'"{field}" holds half a surrogate pair, which is no character')
    return row[field]


def _number(value):
    """27.0 -> "27". NaN and infinity are refused, and floats so large that they are not the number that was written."""
    if not math.isfinite(value) or (type(value) is float and abs(value) >= 2 ** 53):
        raise ValueError(f'"answer" is {value}, not an exact finite number; write it as an integer or as text')
    return str(int(value)) if value == int(value) else repr(value)


def _drop_calculator(text):
    """Removes GSM8K's calculator marks: `48/2 = <<48/2=24>>24` -> `48/2 = 24`."""
    return re.sub(r"<<[^<>\n]*=[^<>\n]*>>", "", text)


def _last_boxed(text):
    """The content of the last \\boxed{...} (braces balance; \\{ and \\} are no braces), or of `\\boxed 2` up to a space or dollar sign."""
    rest = re.split(r"\\(?:boxed|fbox)(?![A-Za-z])\s*", text)[1:][-1:]
    if not rest:
        raise ValueError(r'no "answer" field, and no \boxed{...} in "solution" to take the gold answer from')
    if not rest[0].startswith("{"):
        return re.match(r"(?:(?!\\[)\]])[^\s${}])*", rest[0])[0].rstrip(".,;")
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", rest[0], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return rest[0][1:brace.start()]
    raise ValueError(r'the last \boxed{ of "solution" is never closed')


def held_out(problems, n, seed=0):
    """
    (train, test): test has n distinct questions, train none of them (a repeated question never stands on both sides; test keeps its
    first copy). Decided by the SHA-256 of seed and question: the same in every process and for every order of the rows.
    """
    first = {}
    for p in problems:
        first.setdefault(p.question, p)
    if not 0 < n < len(first):
        raise ValueError(f"cannot hold out {n} of {len(first)} distinct questions: at least one must stay on each side")
    chosen = set(sorted(first, key=lambda question: _digest(seed, question))[:n])
    return [p for p in problems if p.question not in chosen], [p for p in first.values() if p.question in chosen]


def _digest(seed, text):
    return hashlib.sha256(f"{seed}:{text}".encode()).digest()


def arithmetic_problems(n=None, seed=0, split="train"):
    """
    n two-digit additions (None: all of the split; of the 8,100 about 7/8 are train, the rest test) in an order that follows from seed.
    `47+12?` has answer `59` and solution `7+2=9;4+1=5`: units, then tens, with the carry as `+1`: `7+5=12;4+1+1=6`.
    a+b and b+a are on the same side of the split, which does not depend on the seed.
    """
    _check_choice("split", split, ("train", "test"))
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)
             if (_digest("split", f"{min(a, b)}+{max(a, b)}")[0] < 32) == (split == "test")]
    if n is not None and not 0 < n <= len(pairs):
        raise ValueError(f"{n} arithmetic problems asked for; the {split} split has {len(pairs)}")
    return [_addition(a, b) for a, b in sorted(pairs, key=lambda pair: _digest(seed, pair))[:n]]


def _addition(a, b, units_slip=0, tens_slip=0):
    """a+b as a Problem, with the units or the tens wrong by a slip; what comes later follows from the slip."""
    units = a % 10 + b % 10 + units_slip
    carry = units >= 10
    tens = a // 10 + b // 10 + carry + tens_slip
    solution = f"{a % 10}+{b % 10}={units};{a // 10}+{b // 10}{'+1' if carry else ''}={tens}"
    return Problem(f"{a}+{b}?", str(10 * tens + units % 10), solution, subject="arithmetic")


def demonstration(problem):
    """
    The gold solution in the tagged format: a target for SFT. On lines of its own; without line breaks for the arithmetic task, where
    each would cost a token. Raises ValueError for a problem without a worked solution.
    """
    if not problem.solution:
        raise ValueError(f'no worked "solution" to demonstrate for the problem {problem.question!r:.80}; it cannot be used for SFT')
    line = "" if problem.subject == "arithmetic" else "\n"
    return f"<reasoning>{line}{problem.solution}{line}</reasoning>{line}<answer>{line}{problem.answer}{line}</answer>"


def imperfect_demonstration(problem, rng, wrong=0.45, broken=0.25):
    """
    A demonstration for the warm-up on arithmetic, which leaves RL something to improve. Independent draws from rng (random.Random): with
    probability `wrong` the units, the tens or both are off by one, and so is the answer that follows from them; with probability
    `broken` one of the four tags is missing, misspelt, or has its slash wrong.
    """
    operands = re.fullmatch(r"(\d\d)\+(\d\d)\?", problem.question)
    if not operands:
        raise ValueError(f"imperfect demonstrations are for arithmetic problems like '47+12?', not {problem.question!r:.80}")
    # the two steps slip independently, so that a policy that copies each step's odds is right as often as the demonstrations are
    a, b, odds = int(operands[1]), int(operands[2]), 1 - (1 - wrong) ** 0.5
    units_slip, tens_slip = (rng.choice((-1, 1)) if rng.random() < odds else 0 for _ in range(2))
    if a % 10 + b % 10 + units_slip < 0:
        units_slip = 1                                                        # 0+0 cannot be one less
    problem = _addition(a, b, units_slip, tens_slip)
    text = demonstration(problem)
    if rng.random() < broken:
        tag, slashed, misspelt = rng.choice((("<reasoning>", "</reasoning>", "<reason>"), ("</reasoning>", "<reasoning>", "</reason>"),
                                             ("<answer>", "</answer>", "<answering>"), ("</answer>", "<answer>", "</answering>")))
        text = text.replace(tag, rng.choice(("", slashed, misspelt)))
    return text


SYSTEM_PROMPT = """Solve the problem step by step. Put your whole reasoning between <reasoning> and </reasoning>, \
then put the final answer, and nothing else, between <answer> and </answer>:
<reasoning>
...
</reasoning>
<answer>
...
</answer>"""


def build_prompt(tokenizer, question, system_prompt=SYSTEM_PROMPT, prompt_style="auto", examples=()):
    """
    Token ids of the prompt for a question (T,); the completion starts right behind. prompt_style "chat": the chat template with a system
    turn (none when system_prompt is "") and a user turn; "plain", for base models: the tokenizer's bos_ids if it has any, the
    system prompt and the question (just the question when system_prompt is ""); "auto": chat if there is a template. Examples (Problems
    with solutions) come solved before the question (few-shot), as turns of their own in a chat. The texts never become control tokens.
    Raises ValueError for an unknown style, for "chat" without a template, and for an example without a solution.
    """
    _check_choice("prompt_style", prompt_style, ("auto", "chat", "plain"))
    if prompt_style == "chat" and not tokenizer.has_chat_template:
        raise ValueError('prompt_style "chat" needs a chat template, and the tokenizer has none; use "plain"')
    if prompt_style != "plain" and tokenizer.has_chat_template:
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        shown = [{"role": role, "content": text} for p in examples for role, text in (("user", p.question), ("assistant", demonstration(p)))]
        return tokenizer.chat_ids(system + shown + [{"role": "user", "content": question}], add_generation_prompt=True)
    ask = (lambda text: f"Problem: {text}\nSolution:\n") if system_prompt else str
    solved = "".join(ask(p.question) + demonstration(p) + ("\n\n" if system_prompt else "\n") for p in examples)
    text = (f"{system_prompt}\n\n" if system_prompt else "") + solved + ask(question)
    return [*getattr(tokenizer, "bos_ids", ())] + tokenizer.encode(text, allow_special=False)


def encode_prompts(tokenizer, problems, max_prompt_tokens, system_prompt=SYSTEM_PROMPT, prompt_style="auto"):
    """
    ([(problem, prompt_ids)], number skipped). A prompt of more than max_prompt_tokens ids, template included, is skipped and counted,
    never cut. So is, before encoding, a question of more than 64 characters per allowed token: no tokenizer makes so few tokens of
    ordinary text, and a row of a million spaces must not hang the run.
    """
    short = [p for p in problems if len(p.question) <= 64 * max_prompt_tokens]
    encoded = [(p, build_prompt(tokenizer, p.question, system_prompt, prompt_style)) for p in short]
    kept = [(p, ids) for p, ids in encoded if len(ids) <= max_prompt_tokens]
    return kept, len(problems) - len(kept)


def download(url, path, size, sha256):
    """
    Fetches url to path by way of path.part, from where an earlier try ended. Returns False if the right file was there already.
    Raises OSError saying what went wrong; path then does not exist, or is another file of the user's, left as it was.
    """
    if os.path.exists(path):
        if _sha256(path) != sha256:
            raise OSError(f"{path} is there but is not the original file (SHA-256 {sha256[:12]}...); move it away and run again")
        return False
    os.makedirs(os.path.dirname(path), exist_ok=True)
    part, have = path + ".part", 0
    if os.path.exists(part) and os.path.getsize(part) <= size:
        have = os.path.getsize(part)
    try:
        if have < size:
            request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
            with urllib.request.urlopen(request, timeout=30) as reply:
                if not reply.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                    have = 0                                                  # the server sends the file from its start
                with (open(part, "ab" if have else "wb") as f,
                      tqdm(total=size, initial=have, desc=path, unit="B", unit_scale=True, disable=None) as bar):
                    while have <= size and (block := reply.read(1 << 16)):
                        have += f.write(block)
                        bar.update(len(block))
    except urllib.error.URLError as e:                                        # no connection, or an HTTP status such as 404
        raise OSError(f"{url}: {e}; check the network, or name a mirror with --mirror=URL") from None
    except (http.client.HTTPException, ConnectionError, TimeoutError) as e:
        raise OSError(f"{url}: cut off after {have} of {size} bytes ({e!r}); run again to continue") from None
    if have < size:
        raise OSError(f"{url}: cut off after {have} of {size} bytes; run again to continue")
    if _sha256(part) != sha256:
        os.remove(part)
        raise OSError(f"{url}: not the original file ({size} bytes, SHA-256 {sha256[:12]}...); what came was thrown away")
    os.replace(part, path)
    return True


def _sha256(path):
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


def _is_url(text):
    try:
        address = urllib.parse.urlsplit(text)
        return address.port != 0 and bool(re.fullmatch(r"https?://[^/\s]\S*", text) and (address.hostname or "").encode("idna"))
    except ValueError:                                                        # a broken [address], port or label
        return False


def main(args):
    """The command line. Returns the exit code: 0, 1 when a file could not be had, 2 for bad usage, 130 when interrupted."""
    if "-h" in args or "--help" in args:
        print(__doc__.strip())
        return 0
    mirror, names = None, []
    try:
        for arg in args:
            if arg.startswith("-"):
                mirror = arg.removeprefix("--mirror=").rstrip("/")
                if not _is_url(mirror):
                    raise ValueError(f"{arg}: the one flag is --mirror=https://host or --mirror=https://host/prefix")
            else:
                _check_choice("problem set", arg, NAMES + ("all",))
                names += [name for name, split in FILES] if arg == "all" else [arg]
        if not names:
            raise ValueError(f"name what to download: all, or some of {', '.join(NAMES)}")
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    status = 0
    for (name, split), (url, size, sha256) in FILES.items():
        if name in names:
            path = f"data/{name}/{split}.jsonl"
            try:
                new = download(mirror + urllib.parse.urlsplit(url).path if mirror else url, path, size, sha256)
                print(f"{path}: {'downloaded' if new else 'there already'}, {size} bytes, SHA-256 right")
            except OSError as e:
                print(f"error: {e}", file=sys.stderr)
                status = 1
            except KeyboardInterrupt:
                print(f"interrupted; the same command goes on from {path}.part", file=sys.stderr)
                return 130
    for name in [name for name in ("arithmetic", "math") if name in names]:
        try:
            print(f"{name}: {len(load_problems(name, 'train'))} train and {len(load_problems(name, 'test'))} test problems are there")
        except (OSError, ValueError) as e:
            print(f"error: {MATH_HELP if isinstance(e, FileNotFoundError) else e}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
