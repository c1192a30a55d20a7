"""lib/arithmetic.py: the additions and their split, imperfect demonstrations, the tiny model."""
import os
import random
import re
import subprocess
import sys

import torch

from conftest import ROOT
from data import Problem, demonstration, load_problems
from lib.arithmetic import addition, imperfect_demonstration, make_tiny_model
from model import GPT
from tokenizer import Tokenizer

ALL_TAGS = re.compile(r"<reasoning>([^<>]*)</reasoning><answer>([^<>]*)</answer>")


def test_every_addition_is_right_and_on_one_side():
    """All 90 x 90, each once; a+b and b+a together. Every step of the solution is checked."""
    train, test = load_problems("arithmetic"), load_problems("arithmetic", "test")
    questions = {f"{a}+{b}?" for a in range(10, 100) for b in range(10, 100)}
    assert {p.question for p in train + test} == questions and len(train + test) == 8100
    asked = {p.question for p in test}
    assert 800 < len(test) < 1200
    assert Problem("99+91?", "190", "9+1=10;9+9+1=19", None, "arithmetic") in train + test
    for p in train + test:
        a, b = map(int, p.question[:-1].split("+"))
        assert p.answer == str(a + b) and (f"{b}+{a}?" in asked) == (p.question in asked)
        first, second = p.solution.split(";")
        units = a % 10 + b % 10
        carry = "+1" if units > 9 else ""
        assert first == f"{a % 10}+{b % 10}={units}"
        assert second == f"{a // 10}+{b // 10}{carry}={(a + b) // 10}"


def test_imperfect_demonstrations_have_the_shares_they_state():
    """45% wrong answers, 25% broken tags, independent; a wrong answer follows from a wrong step."""
    problems, rng = load_problems("arithmetic")[:2000], random.Random(7)
    texts = [imperfect_demonstration(p, rng) for p in problems]
    found = [ALL_TAGS.fullmatch(t) for t in texts]
    right = [m[2] == p.answer for m, p in zip(found, problems) if m]
    assert abs(len(right) / 2000 - 0.75) < 0.03 and abs(sum(right) / len(right) - 0.55) < 0.04
    slips = set()
    for m, p in zip(found, problems):
        if m:
            assert (m[1] == p.solution) == (m[2] == p.answer)
            units, tens = (int(step.split("=")[1]) for step in m[1].split(";"))
            assert m[2] == str(10 * tens + units % 10)
            assert (m[1].count("+") == 3) == (units > 9)
            slips.add(int(m[2]) - int(p.answer))
    assert slips == {-11, -10, -9, -1, 0, 1, 9, 10, 11}  # units, tens, or both off by one
    # each of 4 tags missing, misspelt, slash wrong
    kinds = {tuple(re.findall("<[^<>]*>", t)) for t, m in zip(texts, found) if not m}
    assert ("<reasoning>", "</reasoning>", "<answer>", "</answer>") not in kinds
    assert len(kinds) == 12


def test_imperfect_demonstrations_at_the_ends():
    rng, pairs = random.Random(0), ((10, 10), (99, 99), (45, 55), (40, 50), (19, 90))
    for p in [addition(a, b) for a, b in pairs] * 40:
        assert imperfect_demonstration(p, rng, wrong=0, broken=0) == demonstration(p)
        m = ALL_TAGS.fullmatch(imperfect_demonstration(p, rng, wrong=1, broken=0))
        assert m and m[2] != p.answer
        assert re.fullmatch(r"\d\+\d=\d+;\d\+\d(\+1)?=\d+", m[1])
        assert not ALL_TAGS.fullmatch(imperfect_demonstration(p, rng, wrong=0, broken=1))


def test_same_in_every_process():
    """Guards against splits or orders that hang on the hash seed, which differs between ranks."""
    code = ("import data, random; from lib.arithmetic import imperfect_demonstration;"
            "p = data.load_problems('arithmetic'); r = random.Random(1);"
            "print([q.question for q in p + data.held_out(p, 99, seed=5)[1]],"
            "[imperfect_demonstration(q, r) for q in p[:99]])")
    seen = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                           env=os.environ | {"PYTHONHASHSEED": seed}, check=True).stdout
            for seed in ("1", "2")}
    assert len(seen) == 1


def test_tiny_model_follows_from_the_seed(tmp_path):
    """Its tokens: 256 bytes, pieces up to `reason`, `ing`, `answer`, `</`, three control tokens."""
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_tiny_model(tmp_path / name, seed)
    a, b, c = (GPT.from_pretrained(tmp_path / name).state_dict() for name in "abc")
    assert 0.7e6 < sum(w.numel() for w in a.values()) < 0.8e6
    assert all(torch.equal(w, b[name]) for name, w in a.items())
    assert not all(torch.equal(w, c[name]) for name, w in a.items())
    tokenizer = Tokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer.vocab_size == 272 and tokenizer.eos_ids == (269,)
    assert len(tokenizer.encode("<reasoning></answer>")) == 7
    ids = tokenizer.chat_ids([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}])
    assert ids == [270, ord("q"), 271]
