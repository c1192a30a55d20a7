"""
Fetches the original files of the known problem sets to data/NAME/SPLIT.jsonl.

    python -m tools.download gsm8k math500 aime24 aime25 amc23     # the same as: all
    python -m tools.download math             # says how to get MATH, which is no single file
    python -m tools.download all --mirror=https://host/prefix      # the same paths elsewhere

A file is written when all of it is there, with the right SHA-256.
"""
import hashlib
import http.client
import os
import re
import sys
import urllib.parse
import urllib.request

from data import NAMES, check_choice, load_problems
from lib.files import write_whole

RAW = "https://raw.githubusercontent.com/"
GSM8K = (RAW + "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/"
         "grade_school_math/data/")
QWEN = RAW + "QwenLM/Qwen2.5-Math/a45202bd16f1ec06f433442dc1152d0074773465/evaluation/data/"
MATH500 = (RAW + "MobileLLM/BudgetThinker/f0466b9d37595f46603387baa5930e312fefb7f5/"
           "evaluation/data/math500/test_ori.jsonl")
AIME25 = (RAW + "zhshgmail/AReaL/04ab6018c4ef43919348efdc52ba6b679a14ce88/"
          "evaluation/data/aime25/test.jsonl")
FILES = {  # (name, split): URL of the original file at a fixed commit, bytes, SHA-256
    ("gsm8k", "train"): (GSM8K + "train.jsonl", 4166206,
                         "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"),
    ("gsm8k", "test"): (GSM8K + "test.jsonl", 749738,
                        "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"),
    ("math500", "test"): (MATH500, 446564,
                          "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132"),
    ("aime24", "test"): (QWEN + "aime24/test.jsonl", 156944,
                         "af2b8bd2aa911b6333ad0df32f3ca05c7ae8ed10f1731f4372c8ae26990bf7ac"),
    ("aime25", "test"): (AIME25, 15813,
                         "b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331"),
    ("amc23", "test"): (QWEN + "amc23/test.jsonl", 27631,
                        "43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4"),
}
MATH_HELP = r"""MATH is no single file. Make two of its archive, which has a JSON file a problem:
    mkdir -p data/math
    jq -c . MATH/train/*/*.json > data/math/train.jsonl
    jq -c . MATH/test/*/*.json > data/math/test.jsonl
or put other JSONL there (.jsonl.gz too): "problem", "solution" (the gold answer is its last
\boxed{...}) and, if you like, "answer", "level" and "type"."""


def download(url, path, size, sha256):
    """Fetches url to path. Returns False if the right file was there already. OSError says what
    went wrong; path then does not exist, or is another file of the user's, left as it was."""
    if os.path.exists(path):
        with open(path, "rb") as f:
            if hashlib.sha256(f.read()).hexdigest() == sha256:
                return False
        raise OSError(f"{path} is there but is not the original file (SHA-256 {sha256[:12]}...); "
                      "move it away and run again")
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            # one byte more tells a longer file
            body = reply.read(size + 1)
    except (OSError, http.client.HTTPException) as e:
        raise OSError(f"{url}: {e or type(e).__name__}; check the network and run again, or name "
                      "a mirror with --mirror=URL") from None
    if hashlib.sha256(body).hexdigest() != sha256:
        raise OSError(f"{url}: cut off, or not the original file ({size} bytes, SHA-256 "
                      f"{sha256[:12]}...); what came was thrown away")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_whole(path, lambda f: f.write(body), "wb")
    return True


def main(argv):
    """Returns the exit code: 0, or 1 when a file could not be had. ValueError for bad usage."""
    if "-h" in argv or "--help" in argv:
        print(__doc__.strip())
        return 0
    mirror, names = None, []
    for word in argv:
        if word.startswith("-"):
            mirror = word.removeprefix("--mirror=").rstrip("/")
            if not re.fullmatch(r"https?://\w[\w.-]*(:\d+)?(/\S*)?", mirror):
                raise ValueError(f"{word}: the one flag is --mirror=https://host or "
                                 "--mirror=https://host/prefix")
        else:
            check_choice("problem set", word, (*NAMES, "all"))
            names += [name for name, _ in FILES] if word == "all" else [word]
    if not names:
        raise ValueError(f"name what to download: all, or some of {', '.join(NAMES)}")
    if "arithmetic" in names:
        print("arithmetic: built in")
    failures = 0
    for (name, split), (url, size, sha256) in FILES.items():
        if name not in names:
            continue
        path = f"data/{name}/{split}.jsonl"
        address = mirror + urllib.parse.urlsplit(url).path if mirror else url
        try:
            new = download(address, path, size, sha256)
            print(f"{path}: {'downloaded' if new else 'there already'}, {size} bytes")
        except OSError as e:
            print(f"error: {e}", file=sys.stderr)
            failures += 1
    if "math" in names:
        try:
            counts = [len(load_problems("math", split)) for split in ("train", "test")]
            print(f"math: {counts[0]} train and {counts[1]} test problems are there")
        except FileNotFoundError:
            print(f"error: {MATH_HELP}", file=sys.stderr)
            failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    from lib.run import command
    sys.exit(command(main))
