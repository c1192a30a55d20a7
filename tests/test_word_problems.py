"""lib/word_problems.py, and the preset that trains a pretrained model on them."""
import re

from conftest import ROOT, metrics, run, small_model
from data import load_problems
from lib.word_problems import STORIES, word_problem


def test_every_problem_is_right_and_on_one_side():
    """The solution computes the answer, by the operation of its story, from the two numbers of the
    question; quotients are whole, differences positive."""
    sides = load_problems("word_problems"), load_problems("word_problems", "test")
    questions = [{p.question for p in side} for side in sides]
    assert not questions[0] & questions[1] and sum(map(len, questions)) == sum(map(len, sides))
    assert 6500 < len(sides[0]) < 7500 and 700 < len(sides[1]) < 1200
    for p in sides[0] + sides[1]:
        a, sign, b, c = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", p.solution).groups()
        assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b),
                "/": int(a) / int(b)}[sign] == int(c) == int(p.answer) > 0
        assert sorted(re.findall(r"\d+", p.question)) == sorted([a, b]) and p.subject == sign
    assert len({p.subject for p in sides[1]}) == 4


def test_stories_say_their_operation():
    """Words by hand that tell the four operations apart; no place of a story is left open."""
    assert not any("{" in word_problem(number).question for number in range(500))
    says = {"+": ("buys", "another", "more than", "giving away"),
            "-": ("gives", "needs", "fewer", "others are blue"),
            "*": ("boxes with", "dollars each", "a day", "times as many"),
            "/": ("equally", "bags of", "pays", "How many rows")}
    for story, sign in STORIES:
        assert sum(word in story for word in says[sign]) == 1, story


def test_the_preset_runs_on_a_small_llama(tmp_path):
    """config/smollm2_135m.toml: two steps of each kind, on random weights, by a chat template."""
    model = small_model(f"{tmp_path}/model", max_position_embeddings=1024)
    preset = f"{ROOT}/config/smollm2_135m.toml"
    text = run(tmp_path, preset, f"--model={model.folder}", "--sft_steps=2", "--steps=2",
               "--prompts_per_step=2", "--eval_problems=2", "--max_prompt_tokens=600",
               "--dtype=float32")
    assert "word_problems: 6,870 problems" in text and "by the chat template" in text
    rows = metrics(tmp_path / "out/smollm2_135m")
    assert [row["phase"] for row in rows] == ["sft", "sft", "eval", "gtpo", "gtpo", "eval"]
