"""
Fetches the original files of the known problem sets to data/NAME/SPLIT.jsonl.

    python -m tools.download gsm8k math500 aime24 aime25 amc23     # the same as: all
    python -m tools.download math             # says how to get MATH, which is no single file

A file is written when all of it is there, with the right SHA-256. One that is there is kept.
"""
import hashlib
import http.client
import os
import sys
import urllib.request

from data import check_choice
from lib.files import write_whole

RAW = "https://raw.githubusercontent.com/"
GSM8K = (RAW + "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/"
         "grade_school_math/data/")
QWEN = RAW + "QwenLM/Qwen2.5-Math/a45202bd16f1ec06f433442dc1152d0074773465/evaluation/data/"
MATH500 = (RAW + "MobileLLM/BudgetThinker/f0466b9d37595f46603387baa5930e312fefb7f5/"
           "evaluation/data/math500/test_ori.jsonl")
AIME25 = (RAW + "zhshgmail/AReaL/04ab6018c4ef43919348efdc52ba6b679a14ce88/"
          "evaluation/data/aime25/test.jsonl")
FILES = {  # set and split: URL of the original file at a fixed commit, SHA-256
    "gsm8k/train": (GSM8K + "train.jsonl",
                    "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465"),
    "gsm8k/test": (GSM8K + "test.jsonl",
                   "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"),
    "math500/test": (MATH500, "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132"),
    "aime24/test": (QWEN + "aime24/test.jsonl",
                    "af2b8bd2aa911b6333ad0df32f3ca05c7ae8ed10f1731f4372c8ae26990bf7ac"),
    "aime25/test": (AIME25, "b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331"),
    "amc23/test": (QWEN + "amc23/test.jsonl",
                   "43707e1ca784602d8479de24ee8ce36609dbebc46dd152b0b12a46611aa898a4"),
}
MATH_HELP = r"""MATH is no single file. Make two of its archive, which has a JSON file a problem:
    mkdir -p data/math
    jq -c . MATH/train/*/*.json > data/math/train.jsonl
    jq -c . MATH/test/*/*.json > data/math/test.jsonl
or put other JSONL there (.jsonl.gz too): "problem", "solution" (the gold answer is its last
\boxed{...}) and, if you like, "answer", "level" and "type"."""


def download(url, path, sha256):
    """Fetches url to path. OSError says what went wrong; path then does not exist."""
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            body = reply.read()
    except (OSError, http.client.HTTPException) as e:
        raise OSError(f"{url}: {e or type(e).__name__}; check the network and run again") from None
    if hashlib.sha256(body).hexdigest() != sha256:
        raise OSError(f"{url}: cut off, or not the original file (SHA-256 {sha256[:12]}...); what "
                      "came was thrown away")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_whole(path, lambda f: f.write(body), "wb")


def main(argv):
    """Returns the exit code: 0, or 1 when a file could not be had. ValueError for bad usage."""
    if not argv or "-h" in argv or "--help" in argv:
        print(__doc__.strip())
        return 0
    known, failures = sorted({key.split("/")[0] for key in FILES}), 0
    for name in argv:
        if name in ("arithmetic", "word_problems"):
            raise ValueError(f"{name} is built in: --data={name} needs no file")
        check_choice("problem set", name, [*known, "math", "all"])
    for key, (url, sha256) in FILES.items():
        path = f"data/{key}.jsonl"
        if not {key.split("/")[0], "all"} & set(argv):
            continue
        if os.path.isfile(path):
            print(f"{path}: there already")
            continue
        try:
            download(url, path, sha256)
            print(f"{path}: downloaded")
        except OSError as e:
            print(f"error: {e}", file=sys.stderr)
            failures = 1
    if "math" in argv:
        print(MATH_HELP)
    return failures


if __name__ == "__main__":
    from lib.run import command
    sys.exit(command(main))
