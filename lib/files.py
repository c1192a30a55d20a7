"""Files: JSON in, whole files out, and which known name was meant."""
import contextlib
import difflib
import json
import os
import re

REQUIRED = object()


def read_json(path, default=REQUIRED):
    """The object in a JSON file; `default`, if given, when there is no such file.
    FileNotFoundError and ValueError name the file and say what to do."""
    path = os.fspath(path)
    if not os.path.isfile(path):
        if default is not REQUIRED:
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


def check_model_folder(folder):
    """FileNotFoundError or ValueError, with what to do, if `folder` is no model's folder: the id
    of a model on the Hub, a wrong path, a file, an adapter without its model."""
    path = os.fspath(folder)
    if not os.path.isdir(path):
        hub_id = path if re.fullmatch(r"[\w.-]+/[\w.-]+", path) else "OWNER/NAME"
        raise FileNotFoundError(
            f"{path}: {'a file' if os.path.exists(path) else 'no such folder'}; a model is a "
            "folder in Hugging Face format. To download one from the Hub: "
            f"hf download {hub_id} --local-dir {os.path.basename(hub_id)}")
    adapter = os.path.join(path, "adapter_config.json")
    if os.path.exists(adapter) and not os.path.exists(os.path.join(path, "config.json")):
        base = read_json(adapter).get("base_model_name_or_path") or "its base model"
        raise ValueError(f"{path}: an adapter, not a whole model: give the model that it was made "
                         f"for ({base}) as --model and this folder as --adapter")


def write_whole(path, write, mode="w"):
    """write(file), beside the path, flushed to the disk, then renamed: what stood there stays
    until the new file is whole. Its mode is 0666 less the umask. OSError says what went wrong."""
    path = os.fspath(path)
    try:
        with open(path + ".tmp", mode, encoding=None if "b" in mode else "utf-8") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
    except (OSError, RuntimeError) as e:
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
        while e.__context__ and not isinstance(e, OSError):  # torch.save hides it in a RuntimeError
            e = e.__context__
        raise OSError(f"{path}: could not be written ({e}); what stood there before is "
                      "untouched") from None


def nearest(name, known):
    """The known name that is most like `name`."""
    return difflib.get_close_matches(str(name).lower(), list(known), n=1, cutoff=0.0)[0]
