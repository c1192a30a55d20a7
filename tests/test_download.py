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
TRAIN, TEST = "data/gsm8k/train.jsonl", "data/gsm8k/test.jsonl"


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server whose `files` maps paths to bytes; it ends a reply after `cut` bytes."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.server.files.get(self.path)
            if body is None:
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:self.server.cut])

        def log_message(self, *args):
            pass

    s = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    s.files, s.cut = {"/train": BODY, "/test": ROW}, None
    threading.Thread(target=s.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "FILES", {
        f"gsm8k/{split}": (f"http://127.0.0.1:{s.server_port}/{split}",
                           hashlib.sha256(body).hexdigest())
        for split, body in (("train", BODY), ("test", ROW))})
    yield s
    s.shutdown()
    s.server_close()


def test_whole_then_left_alone(server, capsys):
    assert download.main(["gsm8k"]) == 0
    assert len(load_problems("gsm8k")) == 9000 and len(load_problems("gsm8k", "test")) == 1
    with open(TRAIN, "wb") as f:
        f.write(b"the user's own")
    assert download.main(["gsm8k", "all"]) == 0
    assert capsys.readouterr().out.count("there already") == 2
    assert os.path.getsize(TRAIN) == 14


@pytest.mark.parametrize("body, cut, says", [
    (None, None, "/train: HTTP Error 404"), (BODY, 1000, "/train: .*read"),
    (BODY[:-2] + b"!\n", None, "not the original file")])
def test_what_is_not_the_whole_file_is_thrown_away(server, capsys, body, cut, says):
    """The other file is still fetched, and the next call fetches the whole file."""
    server.files["/train"], server.cut = body, cut
    assert download.main(["gsm8k"]) == 1
    assert not os.path.exists(TRAIN) and os.path.exists(TEST)
    assert re.search(says, capsys.readouterr().err)
    server.files["/train"], server.cut = BODY, None
    assert download.main(["gsm8k"]) == 0 and os.path.exists(TRAIN)


def test_a_folder_in_the_place_of_a_file(server, capsys):
    """Regression: it was called `there already`, and could not be read."""
    os.makedirs(TEST)
    assert download.main(["gsm8k"]) == 1 and os.path.isfile(TRAIN)
    assert re.search(f"error: {TEST}: could not be written .*directory", capsys.readouterr().err)


def test_no_connection(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(OSError, match="refused.*; check the network and run again"):
        download.download(f"http://127.0.0.1:{port}/x", str(tmp_path / "d" / "x"), "0")
    assert os.listdir(tmp_path) == []


def test_usage(capsys):
    for argv in ([], ["gsm8k", "--help"]):
        assert download.main(argv) == 0 and "python -m tools.download" in capsys.readouterr().out
    with pytest.raises(ValueError, match="word_problems is built in: --data=word_problems needs"):
        download.main(["word_problems"])
    with pytest.raises(ValueError, match="unknown problem set 'gms8k'; the nearest is 'gsm8k'"):
        download.main(["gms8k"])
    assert download.main(["math"]) == 0
    out = capsys.readouterr().out
    assert "data/math/train.jsonl" in out and '"solution"' in out


def test_the_table_of_files_is_complete():
    """One address at a fixed commit on one host for each file, and a SHA-256."""
    splits = {n: {"test"} if n in ONLY_TEST else {"train", "test"} for n in NAMES}
    assert set(download.FILES) == {f"{n}/{s}" for n in splits for s in splits[n]
                                   if n not in ("arithmetic", "word_problems", "math")}
    for url, sha256 in download.FILES.values():
        host, commit = r"https://raw\.githubusercontent\.com", "[0-9a-f]{40}"
        assert re.fullmatch(rf"{host}/[\w.-]+/[\w.-]+/{commit}/[\w./-]+\.jsonl", url)
        assert re.fullmatch("[0-9a-f]{64}", sha256)
