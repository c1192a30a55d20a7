"""data.py: known sets, splits, demonstrations, prompts (the rows of a file: test_rows.py)."""
import gzip
import os
import re

import pytest

import data
from data import Problem
from rewards import reward_parts


def test_missing_files_say_what_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, split, message in (
            ("gsm8k", "train", r"data/gsm8k/train.jsonl or .gz; get it with `python data.py gsm8k`"
             r" \(looked in " + re.escape(str(tmp_path))),
            ("amc23", "train", "amc23 has no train split, only: test"),
            ("nowhere.jsonl", "train", r"nowhere.jsonl \(looked in"),
            ("openai/gsm8k", "test", "openai/gsm8k; download a data set of the Hugging Face Hub")):
        with pytest.raises(FileNotFoundError, match="no file .*" + message):
            data.load_problems(name, split)
    os.mkdir("mine")
    for name in ("b.jsonl", "a.jsonl"):
        open(f"mine/{name}", "w").close()
    with pytest.raises(IsADirectoryError, match="mine is a folder; .* files: a.jsonl, b.jsonl"):
        data.load_problems("mine")


def test_names(tmp_path, monkeypatch):
    """Known sets are strict, and columns named for another file are not theirs."""
    monkeypatch.chdir(tmp_path)
    for name in ("gsm8k/train.jsonl", "gsm8k/test.jsonl.gz"):
        os.makedirs("data/gsm8k", exist_ok=True)
        with (gzip.open if name.endswith("gz") else open)(f"data/{name}", "wt") as f:
            f.write(f'{{"question": "{name}", "answer": 1, "q": "no"}}\n')
    for split in ("train", "test"):
        (p,) = data.load_problems("gsm8k", split, "q", "q")
        assert p.question.startswith(f"gsm8k/{split}") and p.answer == "1"
    with open("data/gsm8k/train.jsonl", "a") as f:
        f.write('{"question": "q"}\n')
    with pytest.raises(ValueError, match="data/gsm8k/train.jsonl:2: no answer"):
        data.load_problems("gsm8k")
    with pytest.raises(ValueError, match="unknown problem set 'MATH-500'; .* nearest is 'math500'"):
        data.load_problems("MATH-500")
    for name in ("gsm8k", "arithmetic"):
        with pytest.raises(ValueError, match="unknown split 'tset'; the nearest is 'test'"):
            data.load_problems(name, "tset")


# ---- splits and demonstrations -------------------------------------------------------------------

def test_held_out_is_disjoint_and_keeps_every_other_row():
    problems = [Problem(f"q{i % 50}", str(i)) for i in range(70)]
    train, test = data.held_out(problems, 10, seed=3)
    asked = {p.question for p in test}
    assert len(test) == len(asked) == 10 and all(int(p.answer) < 50 for p in test)
    assert train == [p for p in problems if p.question not in asked]
    assert {p.question for p in data.held_out(problems[::-1], 10, seed=3)[1]} == asked
    assert {p.question for p in data.held_out(problems, 10, seed=4)[1]} != asked
    assert data.held_out(problems, 0) == (problems, [])
    for n in (50, -1):
        with pytest.raises(ValueError, match=f"cannot hold out {n} of 50"):
            data.held_out(problems, n)


def test_demonstration():
    assert data.demonstration(Problem("Tim?", "1,200", "He packs\n1,200 pens.")) == (
        "<reasoning>\nHe packs\n1,200 pens.\n</reasoning>\n<answer>\n1,200\n</answer>")
    easy = data.demonstration(Problem("47+12?", "59", "7+2=9;4+1=5", subject="arithmetic"))
    assert easy == "<reasoning>7+2=9;4+1=5</reasoning><answer>59</answer>"


def test_a_demonstration_closes_the_thought_that_its_prompt_opens():
    """Regression: behind a template that ends in <think> the warm-up taught texts that never left
    the thought, and earn nothing."""
    problem, thought = Problem("1+1?", "2", "It is 2."), "<think>\n"
    text = data.demonstration(problem, "<|assistant|>" + thought)
    assert sum(reward_parts(thought + text, "2").values()) == 20
    assert data.demonstration(problem, "<think>\n\n</think>\n\n") == data.demonstration(problem)


# ----------------------------------------------------------------------------------------
# prompts, with a stand-in tokenizer: one id a character, control ids below 0 that only the
# template and allow_special make

class Characters:
    """`[go]` is its only special token (id -1); its template writes a role as -2, the end of a turn
    as -3, the generation prompt as -4, and a variable `think` as -5."""
    has_chat_template = True

    def encode(self, text, allow_special=False):
        pieces = re.findall(r"\[go\]|." if allow_special else ".", text, re.DOTALL)
        return [-1 if piece == "[go]" else ord(piece) for piece in pieces]

    def chat_ids(self, messages, add_generation_prompt=True, think=False):
        ids = []
        for m in messages:
            ids += [-2] + self.encode(m["role"] + "\n") + self.encode(m["content"]) + [-3]
        return ids + [-4] * add_generation_prompt + [-5] * think

    def decode(self, ids):
        names = {-1: "[go]", -2: "{", -3: "}", -4: "{assistant\n", -5: "!", -9: "^"}
        return "".join(names.get(i) or chr(i) for i in ids)


class Base(Characters):
    has_chat_template, bos_ids = False, (-9,)


SIX = "{user\n6*7?}{assistant\n"
CHAT = Problem("6*7?", "42", messages=[{"role": "system", "content": "Own."},
                                       {"role": "user", "content": "6*7?"}])


@pytest.mark.parametrize("tokenizer, problem, arguments, text", [
    (Characters(), "6*7?", {}, "{system\n" + data.SYSTEM_PROMPT + "}" + SIX),
    (Characters(), Problem("6*7?", "42"), {"system_prompt": "Be brief.", "prompt_style": "chat"},
     "{system\nBe brief.}" + SIX),
    # no empty system turn
    (Characters(), "6*7?", {"system_prompt": ""}, SIX),
    (Characters(), "6*7?", {"system_prompt": "", "template_variables": {"think": True}}, SIX + "!"),
    # messages as they are, our system prompt left out
    (Characters(), CHAT, {}, "{system\nOwn.}" + SIX),
    # base models: begin-of-text once, the same instruction, then the question
    (Base(), "6*7?", {}, "^" + data.SYSTEM_PROMPT + "\n\nProblem: 6*7?\nSolution:\n"),
    (Base(), "6*7?", {"system_prompt": "", "template_variables": {"think": True}}, "^6*7?"),
    (Base(), CHAT, {}, "^Own.\n\n6*7?"),
    # a template that is not used, and no bos_ids
    (Characters(), "6*7?", {"system_prompt": "", "prompt_style": "plain"}, "6*7?"),
])
def test_prompts(tokenizer, problem, arguments, text):
    assert re.findall("</?[a-z]+>", data.SYSTEM_PROMPT)[-4:] == [
        "<reasoning>", "</reasoning>", "<answer>", "</answer>"]
    assert tokenizer.decode(data.build_prompt(tokenizer, problem, **arguments)) == text


def test_prompt_text_never_becomes_a_control_token():
    """Guards against text in the data that forges a turn boundary."""
    for t, style in ((Characters(), "chat"), (Base(), "plain")):
        ids = data.build_prompt(t, "a[go]b", "sys [go]", style)
        assert -1 not in ids and t.decode([i for i in ids if i >= 0]).count("[go]") == 2


def test_prompt_styles_are_checked():
    with pytest.raises(ValueError, match="needs a chat template"):
        data.build_prompt(Base(), "q", prompt_style="chat")
    with pytest.raises(ValueError, match="unknown prompt_style 'plane'; the nearest is 'plain'"):
        data.build_prompt(Base(), "q", prompt_style="plane")


def test_long_prompts_are_skipped_and_counted_never_cut():
    """The template's tokens count too. Guards against questions that lose their beginning."""
    problems = [Problem("x" * n, "1") for n in (1, 5, 6, 20)]
    room = len(data.build_prompt(Characters(), "x" * 5, "s"))
    kept, skipped = data.encode_prompts(Characters(), problems, room, "s")
    assert [p for p, _ in kept] == problems[:2] and skipped == 2
    assert all(ids == data.build_prompt(Characters(), p, "s") for p, ids in kept)


def test_a_refused_prompt_names_its_question():
    """Regression: a template that refuses one row's messages did not say which."""
    def refuse(messages, **variables):
        if messages[0]["role"] == "tool":
            raise ValueError("no such role")
        return [1]

    t, tool = Characters(), [{"role": "tool", "content": "x"}, {"role": "user", "content": "Why?"}]
    t.chat_ids = refuse
    with pytest.raises(ValueError, match="the prompt of 'Why\\?': no such role"):
        data.encode_prompts(t, [Problem("6*7?", "42"), Problem("Why?", "1", messages=tool)], 100)


def test_hostile_questions_are_not_encoded():
    """A row of a million spaces must not reach the tokenizer, where its pattern may hang."""
    t, seen = Base(), []
    t.encode = lambda text, allow_special=False: seen.append(len(text)) or [0] * len(text)
    long = [{"role": "system", "content": " " * 6400}, {"role": "user", "content": "q"}]
    problems = [Problem(" " * 1000000, "1"), Problem("q", "1", messages=long),
                Problem("q" * 6400, "1"), Problem("q", "1")]
    kept, skipped = data.encode_prompts(t, problems, 100, "")
    assert kept == [(problems[3], [-9, 0])] and skipped == 3 and seen == [6400, 1]


# ---- where a plain completion ends, and thoughts that a prompt begins ----------------------------

@pytest.mark.parametrize("text, kept", [
    ("<answer>4</answer>\n\nProblem: 2", "<answer>4</answer>"),
    ("<answer>4</answer>, no <answer>5</answer>", "<answer>4</answer>"),
    ("It is 4.\n\nProblem: 1+1?", "It is 4.\n"),
    ("It is 4. Problem: none", None),
    ("<think>maybe <answer>9</answer>\nProblem: x</think><answer>4</answer>x",
     "<think>maybe <answer>9</answer>\nProblem: x</think><answer>4</answer>"),
    ("<think>a</think>b<think><answer>9</answer>", None),
    ("a</think><answer>4</answer>x", "a</think><answer>4</answer>"),
    ("", None),
])
def test_plain_end(text, kept):
    """Also: what was said of a beginning holds for the whole, whatever comes behind."""
    end = data.plain_end(text)
    assert end == (None if kept is None else len(kept)) and (kept is None or text[:end] == kept)
    first = [e for e in (data.plain_end(text[:n]) for n in range(len(text) + 1)) if e is not None]
    assert set(first) <= {end}


def test_open_thought():
    for prompt, thought in (("<|user|>q<think>\n", "<think>\n"), ("a</think><think>", "<think>"),
                            ("<think>\n\n</think>\n", ""), ("Think in <think> tags.", "")):
        assert data.open_thought(prompt) == thought
