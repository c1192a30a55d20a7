"""Files: JSON in, whole files out, locks, which folder or known name was meant."""
import contextlib
import difflib
import fcntl
import glob
import json
import os
import re
import sys

from safetensors import SafetensorError


def read_json(path, default=None):
    """The object in a JSON file; `default`, if given, when there is no such file.
    FileNotFoundError and ValueError name the file and say what to do."""
    path = os.fspath(path)
    if not os.path.isfile(path):
        if default is not None:
            return default
        raise FileNotFoundError(f"{os.path.dirname(path) or '.'}: has no {os.path.basename(path)}")
    try:
        with open(path, "rb") as f:
            raw = f.read()
        refuse_lfs_pointer(path, raw)
        content = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise ValueError(f"{path}: not valid JSON: {e}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def refuse_lfs_pointer(path, head):
    """ValueError if a file that begins with the bytes `head` is Git LFS's note of a file."""
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path}: a Git LFS pointer, not the file itself; run `git lfs pull` "
                         "in that folder, or download the file again")


def expand_home(paths):
    """`~/x`, alone or in a list with commas, as the user's x: in --out=~/x no shell does it."""
    return ",".join(map(os.path.expanduser, paths.split(",")))


def check_folder(folder):
    """FileNotFoundError unless `folder` is a folder: it may be a model's name on the Hub."""
    folder = os.fspath(folder)
    if os.path.isdir(folder):
        return
    if os.path.isfile(folder):
        raise NotADirectoryError(f"{folder}: is a file; give the folder that it is in")
    hub = re.fullmatch(r"(?:https://huggingface\.co/)?(\w[\w.-]*/(\w[\w.-]*))/?", folder)
    name, into = hub.groups() if hub else ("OWNER/NAME", "FOLDER")
    raise FileNotFoundError(
        f"{folder}: no such folder. If this is a name on the Hub, download it first (`pip install "
        f"huggingface_hub`, `hf download {name} --local-dir {into}`), then give that folder")


def check_model_folder(folder):
    """FileNotFoundError or ValueError unless `folder` may hold a whole model, not an adapter."""
    check_folder(folder)
    if os.path.isfile(os.path.join(folder, "config.json")):
        return
    if os.path.isfile(os.path.join(folder, "metrics.jsonl")):
        raise ValueError(f"{folder}: the folder of a run; its policy is in {folder}/model, or with "
                         f"LoRA in {folder}/adapter")
    adapter = read_json(os.path.join(folder, "adapter_config.json"), {})
    if adapter:
        base = adapter.get("base_model_name_or_path")
        raise ValueError(f"{folder}: holds a LoRA adapter, not a model; give its base "
                         f"({base}) as --model and this folder as --adapter")
    inside = [os.path.join(folder, os.path.dirname(path)) for deep in ("*", "snapshots/*")
              for path in glob.glob(f"{deep}/config.json", root_dir=folder)]
    if inside:
        last = max(inside, key=lambda path: (len(path), path))  # checkpoint-10, not checkpoint-9
        raise FileNotFoundError(f"{folder}: has no config.json; did you mean {last}?")


def read_jsonl(path, needs=()):
    """The objects in a JSONL file, each with the keys `needs`. A last line that a kill has cut off
    is left out. ValueError names a line that is no such object."""
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path}: is a folder; give a file")
    with open(path, encoding="utf-8", errors="replace") as f:
        *lines, last = f.read().split("\n")
    rows = []
    for number, line in enumerate([*lines, last], 1):
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and set(needs) <= row.keys():
                rows.append(row)
        if len(rows) < number <= len(lines):
            raise ValueError(f"{path}:{number}: not a JSON object"
                             + f" with {', '.join(needs)}" * bool(needs) + "; mend or remove it")
    return rows


@contextlib.contextmanager
def beside(path):
    """The name of a new file beside `path`. When it is written it is flushed to the disk and
    renamed: what stood there stays until then. Its mode is 0666 less the umask. OSError says what
    went wrong."""
    new = os.fspath(path) + ".tmp"
    try:
        yield new
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(new, 0o666 & ~umask)  # safetensors makes files that only their owner can read
        with open(new, "rb") as f:
            os.fsync(f.fileno())
        os.replace(new, path)
    except (OSError, RuntimeError, SafetensorError) as e:  # a full disk, for example
        with contextlib.suppress(OSError):
            os.remove(new)
        while e.__context__ and not isinstance(e, OSError):  # torch.save hides it in a RuntimeError
            e = e.__context__
        raise OSError(f"{path}: could not be written ({e}); what stood there before is "
                      "untouched") from None


def write_whole(path, write, mode="w"):
    """write(file), into a file beside the path that then takes its place."""
    with beside(path) as new, open(new, mode, encoding=None if "b" in mode else "utf-8") as f:
        write(f)


def lock_file(path, target, other):
    """Opens the file `path`, in a new folder if need be, locked until it is closed or the process
    ends: a lock on `target`, which this process is going to write. ValueError if another holds it
    or nothing can be written there; other: what to take instead, for the message."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        file = open(path, "w")
    except OSError as e:
        raise ValueError(f"{target}: cannot be written to ({e}); choose {other}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"another run is writing to {target}: wait for it or stop it, or "
                         f"choose {other}") from None
    except OSError as e:  # some network file systems
        print(f"note: {target} cannot be locked ({e}); take care that no second run uses it",
              file=sys.stderr)
    return file


def nearest(name, known):
    """The known name that is most like `name`."""
    return difflib.get_close_matches(str(name).lower(), list(known), n=1, cutoff=0.0)[0]
