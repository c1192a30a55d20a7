"""tools/download.py, with a server on this machine."""
import hashlib
import http.server
import os
import re
import socket
import threading

import pytest

from data import NAMES, ONLY_TEST, load_problems
from tools import download

ROW = b'{"question": "q", "answer": "7"}\n'
BODY = ROW * 9000


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server whose `files` maps paths to bytes; it ends a reply after `cut` bytes."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.seen.append(self.path)
            body = self.server.files.get(self.path)
            if body is None:
                return self.send_error(404)
            self.send_response(200)
            if self.server.length:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:self.server.cut])

        def log_message(self, *args):
            pass

    s = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    s.files = {"/c0ffee/train.jsonl": BODY, "/c0ffee/test.jsonl": ROW}
    s.cut, s.length, s.seen = None, True, []
    s.url = f"http://127.0.0.1:{s.server_port}"
    threading.Thread(target=s.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "FILES", {
        ("gsm8k", split): (f"https://unreachable.invalid/c0ffee/{split}.jsonl", len(body),
                           hashlib.sha256(body).hexdigest())
        for split, body in (("train", BODY), ("test", ROW))})
    yield s
    s.shutdown()
    s.server_close()


def listing():
    return sorted(os.listdir("data/gsm8k"))


def test_whole_then_skipped(server, capsys):
    """The mirror takes the place of scheme and host; the second call fetches nothing."""
    assert download.main(["gsm8k", f"--mirror={server.url}/"]) == 0
    assert listing() == ["test.jsonl", "train.jsonl"] and len(load_problems("gsm8k")) == 9000
    assert server.seen == ["/c0ffee/train.jsonl", "/c0ffee/test.jsonl"]
    assert download.main(["gsm8k", "all", f"--mirror={server.url}"]) == 0 and len(server.seen) == 2
    assert capsys.readouterr().out.count("there already") == 2


def test_mirror_with_a_path_prefix(server):
    server.files = {"/raw" + path: body for path, body in server.files.items()}
    assert download.main([f"--mirror={server.url}/raw", "gsm8k"]) == 0


@pytest.mark.parametrize("length", [True, False])
def test_a_reply_that_is_cut_off_leaves_no_file(server, capsys, length):
    """With and without a Content-Length to tell. The other file is still fetched, and the next call
    fetches the whole file."""
    server.files["/c0ffee/train.jsonl"], server.length = BODY[:-1], length
    server.cut = 1000
    assert download.main(["gsm8k", f"--mirror={server.url}"]) == 1
    assert listing() == ["test.jsonl"] and "/train.jsonl: " in capsys.readouterr().err
    server.files["/c0ffee/train.jsonl"], server.cut = BODY, None
    assert download.main(["gsm8k", f"--mirror={server.url}"]) == 0
    assert listing() == ["test.jsonl", "train.jsonl"]


@pytest.mark.parametrize("wrong", [BODY[:-2] + b"!\n", BODY + b"x" * 10**6])
def test_wrong_content_is_thrown_away(server, capsys, wrong):
    """Right length but another sum, or too long."""
    server.files["/c0ffee/train.jsonl"] = wrong
    assert download.main(["gsm8k", f"--mirror={server.url}"]) == 1
    assert listing() == ["test.jsonl"]
    assert "not the original file" in capsys.readouterr().err


def test_an_endless_reply_is_given_up(tmp_path, monkeypatch):
    """Guards against a full memory: one byte beyond the known size is the last that is read."""
    class Endless:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def read(self, n=-1):
            assert n == 100001
            return b"x" * n

    monkeypatch.setattr(download.urllib.request, "urlopen", lambda url, timeout: Endless())
    with pytest.raises(OSError, match="not the original file"):
        download.download("https://unreachable.invalid/x", str(tmp_path / "d" / "x"), 10**5, "0")
    assert os.listdir(tmp_path) == []


def test_a_file_of_the_users_own_is_left_alone(server, capsys):
    os.makedirs("data/gsm8k")
    with open("data/gsm8k/train.jsonl", "wb") as f:
        f.write(ROW)
    assert download.main(["gsm8k", f"--mirror={server.url}"]) == 1
    assert "train.jsonl is there but is not the original file" in capsys.readouterr().err
    with open("data/gsm8k/train.jsonl", "rb") as f:
        assert f.read() == ROW


def test_missing_at_the_server_and_no_connection(server, capsys):
    server.files = {}
    assert download.main(["gsm8k", f"--mirror={server.url}"]) == 1
    err = capsys.readouterr().err
    assert f"{server.url}/c0ffee/train.jsonl: HTTP Error 404" in err and "--mirror=URL" in err
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert download.main(["gsm8k", f"--mirror=http://127.0.0.1:{port}"]) == 1
    assert "refused" in capsys.readouterr().err and not os.path.exists("data")


@pytest.mark.parametrize("args, says", [
    ([], "name what to download"), (["--mirror=http://x"], "name what to download"),
    (["gms8k"], "nearest is 'gsm8k'"), (["--mirrow=http://x", "gsm8k"], "--mirror="),
    (["gsm8k", "--mirror=ftp://x"], "--mirror="), (["gsm8k", "--mirror="], "--mirror="),
    (["gsm8k", "--mirror=https://[bad"], "--mirror="),
    (["all", "--mirror=https://.x"], "--mirror="),
    (["all", "--mirror=http://x:y"], "--mirror="), (["all", "--mirror=https://:80"], "--mirror=")])
def test_bad_usage_is_refused(server, args, says):
    with pytest.raises(ValueError, match=says):
        download.main(args)
    assert not os.path.exists("data")


def test_math_says_how_to_get_it(server, capsys):
    assert download.main(["math", "arithmetic"]) == 1
    out, err = capsys.readouterr()
    assert "data/math/train.jsonl" in err and '"solution"' in err and "built in" in out
    os.makedirs("data/math")
    for split in ("train", "test"):
        with open(f"data/math/{split}.jsonl", "w") as f:
            f.write('{"problem": "q", "solution": "\\\\boxed{1}"}\n')
    assert download.main(["math"]) == 0
    assert "1 train and 1 test problems" in capsys.readouterr().out


def test_help(capsys):
    assert download.main(["--help"]) == 0 and "--mirror=" in capsys.readouterr().out


def test_the_table_of_files_is_complete():
    """One address at a fixed commit on one host for each file, a size and a SHA-256."""
    assert {name for name, _ in download.FILES} == set(NAMES) - {"arithmetic", "math"}
    assert {n for n, _ in download.FILES if (n, "train") not in download.FILES} == set(ONLY_TEST)
    for url, size, sha256 in download.FILES.values():
        host, commit = r"https://raw\.githubusercontent\.com", "[0-9a-f]{40}"
        assert re.fullmatch(rf"{host}/[\w.-]+/[\w.-]+/{commit}/[\w./-]+\.jsonl", url)
        assert size > 10000 and re.fullmatch("[0-9a-f]{64}", sha256)
