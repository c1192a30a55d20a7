"""lib/show.py: the marks say what each token counts, never cut a character, steer no terminal."""
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from gtpo import conflict_weights
from lib.show import group_page, show_group, text_mark, weighted_runs


class Bytes:
    """One token a byte; 256 is the end token."""

    def decode(self, ids):
        pieces = re.split(b"\xff", bytes(255 if i == 256 else i for i in ids))
        return "<|end|>".join(piece.decode(errors="replace") for piece in pieces)


def marked(ids, lam):
    runs = weighted_runs(Bytes(), list(ids), lam)
    return "".join(text_mark(piece, weight) for piece, weight in runs)


def group(rows, lam=None, question="1+1?", gold="2"):
    """The arguments of a group of completions; lam: conflict weights unless given."""
    ids = torch.zeros(len(rows), max(map(len, rows)) + 1, dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for g, row in enumerate(rows):
        ids[g, :len(row) + 1] = torch.tensor([*row, 256])
        mask[g, :len(row) + 1] = True
    rewards = torch.tensor([20.0, 0.0, 10.0])[:len(rows)]
    advantages = torch.tensor([10.0, -10.0, 0.0])[:len(rows)]
    if lam is None:
        lam = conflict_weights(ids, mask, advantages)
    kept = torch.tensor([1.0, 1.0, 0.0])
    entropy = torch.tensor([0.25, 0.5, 1.25])
    return Bytes(), question, gold, ids, mask, rewards, advantages, entropy, kept, lam


@pytest.mark.parametrize("text, lam, shown", [
    ("abcde", [2, 2, 1, 1, 2], "[[ab]]cd[[e]]"), ("abcde", [0, 1, 1, 0, 0], "((a))bc((de))"),
    ("abc", [1, 1, 1], "abc"), ("", [], ""), ("a\nb", [2, 2, 1], "[[a\\n]]b"),
    ("abcd", [3, 0.5, 0.5, -1], "[[a]]x3[[bc]]x0.5[[d]]x-1"),
    ("a\x1b[31m\rb\u2028", [1] * 11, "a\\x1b[31m\\rb\\u2028"),
])
def test_marks_of_weights(text, lam, shown):
    """Regression: a weight of 3 was once shown as ((..)), which says 0."""
    assert marked(text.encode(), lam) == shown


def test_no_mark_cuts_a_character():
    """Regression: decoding piece by piece fills the text with U+FFFD. An emoji cut by a run's end
    goes whole into the later run."""
    text = "a\U0001F34E\u2211b"
    plain = text.encode()                       # 1, 4, 3 and 1 bytes
    for cut in range(1, 9):
        for second in range(cut, 10):
            lam = [2] * cut + [1] * (second - cut) + [0] * (9 - second)
            shown = marked(plain, lam)
            assert re.sub(r"\[\[|\]\]|\(\(|\)\)", "", shown) == text
    assert marked(plain, [2, 2, 2, 0, 0, 1, 1, 1, 1]) == "[[a]]((\U0001F34E))\u2211b"
    assert marked(b"a\xf0\x9f", [2, 1, 1]) == "[[a]]\ufffd"     # ends inside a character
    assert marked("\u2211b".encode(), [2, 1, 1, 1]) == "\u2211b"        # no empty [[]] in front


def test_show_group():
    """By hand: two completions of opposite sign share their first three tokens and their end."""
    text = show_group(*group([b"12 a", b"12 bc", b"9"]))
    question, head, *lines, legend = text.split("\n")
    assert question == "1+1?   (gold: 2)"
    assert [line.split(maxsplit=4) for line in lines] == [
        ["20.0", "+10.00", "0.250", "5", "[[12 ]]a[[<|end|>]]"],
        ["0.0", "-10.00", "0.500", "6", "((12 ))bc((<|end|>))"],
        ["10.0", "+0.00", "1.250", "2", "(filtered) 9<|end|>"]]
    assert legend == ("[[..]] weight 2: conflict tokens where A > 0; ((..)) weight 0: conflict "
                      "tokens where A < 0, not punished; all else weight 1")


def test_the_legend_says_what_occurs():
    """Weights at padding, 0 by convention, are none of it."""
    args = group([b"a", b"bc"], torch.tensor([[3.0, 1.0, 0.0], [1.0, 1.0, 1.0]]))
    assert show_group(*args).split("\n")[-1] == "[[..]]x3 weight 3; all else weight 1"
    assert "weight 3; all else weight 1" in group_page(*args)


def test_only_a_screen_gets_colors(monkeypatch):
    args = group([b"12 a", b"12 b"], question="a\x1b[2Jb", gold="1\n2")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;32m[[12 ]]\x1b[0ma" in show_group(*args)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = show_group(*args)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: False))
    assert show_group(*args) == plain and "\x1b" not in plain
    assert plain.startswith("a\\x1b[2Jb   (gold: 1\\n2)\n")      # data steer no terminal either


def test_the_page_is_self_contained_and_escapes_everything():
    page = group_page(*group([b"<b>&1", b"<b>&2", b"x"], question="<script>alert(1)</script>",
                             gold="<i>"))
    assert '<span class="x2" title="weight 2">&lt;b&gt;&amp;</span>1' in page
    assert '<span class="x0" title="weight 0">&lt;b&gt;&amp;</span>2' in page
    assert "&lt;script&gt;" in page and "(gold: &lt;i&gt;)" in page
    assert not re.search("<script|<i>|src=|href|@import|url", page)
    assert re.findall(r"<small>(.*?)</small>", page) == [
        "reward 20.0, A +10.00, entropy 0.250, 6 tokens",
        "reward 0.0, A -10.00, entropy 0.500, 6 tokens",
        "reward 10.0, A +0.00, entropy 1.250, 2 tokens, filtered"]
    assert re.findall('<li class="(.*?)">', page) == ["good", "bad", "tied filtered"]
    assert '<sub>x3</sub>' in group_page(*group([b"a"], torch.full((1, 2), 3.0)))
