"""Rewards: the format, where the answer of a text is, and what is paid."""
import runpy
import sys

import pytest

import rewards
from lib.grading import HARD_CASES
from rewards import accuracy_reward, extract_answer, format_reward

FULL = "<reasoning>\n2+2=4\n</reasoning>\n<answer>{}</answer>"


@pytest.mark.parametrize("text, reward", [
    ("<reasoning>a</reasoning><answer>4</answer>", 10),
    # line breaks inside: `.` does not match them; text before and between is paid
    ("Let us see.\n<reasoning>\n3 bags\nof 4\n</reasoning>\nSo:\n<answer>\n12\n</answer>\n", 10),
    # text after the end, wrong order, crossed, one broken tag, cut off
    ("<reasoning>a</reasoning><answer>4</answer> That is all.", 1.5),
    ("<answer>4</answer><reasoning>a</reasoning>", 1.5),
    ("<reasoning>a<answer>4</reasoning></answer>", 1.5),
    ("<reasoning}a</reasoning><answer>4</answer>", 1.5),
    ("<reasoning>a</reasoning><answer>4", 1.5),
    # an answer block that holds nothing
    (FULL.format(""), 1.5), (FULL.format(r"$ \boxed{} $"), 1.5), (FULL.format("." * 2000), 1.5),
    ("<answer> </answer>", 0),
    # a lazy wildcard stretched over inner tags, so that repeated blocks earned everything
    (FULL.format(4) + "<answer>9</answer>", 1.5),
    ("<reasoning>a</reasoning>" + FULL.format(4), 1.5),
    (FULL.format(4) + FULL.format(4), 0),
    ("<reasoning>a</reasoning> 4", 1), ("<reasoning}a<answer>4</answer>", 1),
    ("<reasoning}a<answer>4</answer> feet", 0), ("</reasoning>a<reasoning>", 0),
    ("<Reasoning>a</Reasoning><Answer>4</Answer>", 0), ("", 0),
])
def test_format_reward(text, reward):
    assert format_reward(text) == reward and isinstance(format_reward(text), float)


PROOFS = "proof", "", "see figure"
SIXTHS = FULL.format(r"The answer is \boxed{\frac{5}{6}}.")


@pytest.mark.parametrize("text, gold, paid", [
    (SIXTHS, r"\frac{5}{6}", 10), (SIXTHS, "5", 0), ("<answer>4</answer>", "4", 0),
    # a search over the whole text paid numbers that the model only thought of
    ("<reasoning>maybe 7</reasoning><answer>9</answer>", "7", 0),
    (r"<reasoning>so \boxed{7}", "7", 0),
    (r"<reasoning>\boxed{7}</reasoning><answer></answer>", "7", 0),
    # whoever wrote `proof` was paid where the gold is `proof`
    *((FULL.format(answer), gold, 0) for gold in PROOFS for answer in ("5", "", gold))])
def test_accuracy_needs_the_format_and_the_answer(text, gold, paid):
    assert accuracy_reward(text, gold) == paid


def test_the_parts_of_the_reward():
    parts, text = rewards.reward_parts, FULL.format("4")
    assert parts(text, "4") == {"format": 10.0, "accuracy": 10.0}
    assert parts(text) == {"format": 10.0, "accuracy": 0.0}


@pytest.mark.parametrize("thought, paid", [
    ("They want <reasoning> and <answer>.\n</think>\n\n", 20),  # begun by the prompt
    (f"<think>{FULL.format(9)}</think>", 20), ("<think>a</think>b <answer></think>", 20),
    ("<think>", 0), ("<think>a</think><think>", 0), ("a </think> b <think> ", 0)])
def test_thoughts_are_not_graded(thought, paid):
    """Guards: tags that a thought names cost the format; the answer of a thought was graded."""
    text = thought + FULL.format(4)
    assert sum(rewards.reward_parts(text, "4").values()) == paid
    assert extract_answer(text) == ("4" if paid else None)


@pytest.mark.parametrize("text, answer", [
    ("<answer>4</answer>", "4"),
    ("<answer>\n 4 \n</answer> and <answer>5</answer> and <answer>6", "5"),  # the last whole block
    ("<answer>4</answer> stray </answer>", "4"),
    ("<answer>3<answer>4</answer>", "4"),
    (r"<answer>\boxed{5}</answer>", "5"),
    (r"\boxed{3} <answer>4</answer> \boxed{5}", "4"),  # the block wins
    ("<answer> </answer>", None), (r"<answer>\boxed{}</answer>", None),
    (r"<answer>\boxed{4} or \boxed{5</answer>", None),
    (r"<think>\boxed{3}</think> \boxed{4}", "4"),
    (r"<think>so \boxed{7}</think> I give up", None), (r"<think>so \boxed{7}, or is it", None),
    ("<think>maybe <answer>9</answer>? no</think>\n\\boxed{7}", "7"),
    (r"<reasoning>\boxed{3}</reasoning> \boxed{4}", "4"),
    (r"<reasoning>so \boxed{7}", None),
    ("the answer is 42", None), ("#### 42", None), ("", None),
])
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


def test_the_table_prints(capsys, monkeypatch):
    """Regression: what was given to the command was ignored."""
    monkeypatch.setattr(sys, "argv", ["rewards.py"])
    runpy.run_path(rewards.__file__, run_name="__main__")
    out = capsys.readouterr().out
    assert len(out.splitlines()) == len(HARD_CASES) + 1 and "WRONG" not in out
    monkeypatch.setattr(sys, "argv", ["rewards.py", "--zz"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(rewards.__file__, run_name="__main__")
    assert "usage: rewards.py" in capsys.readouterr().err
