"""eval.py: estimators, figures, sampling by a scripted sampler, the command on a tiny model."""
import contextlib
import functools
import itertools
import json
import math
import random
import re
import tempfile
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import eval as ev
from conftest import finish, run, spied, start, write_rows
from data import Problem
from lib.arithmetic import make_tiny_model, write_byte_tokenizer
from lib.run import Processes
from model import GPT
from sample import Samples, pad
from tokenizer import Tokenizer

END = 269
GOOD, BARE = "<reasoning>r</reasoning>\n<answer>7</answer>", "<answer>7</answer>"


# ---- pass@k and maj@k ----------------------------------------------------------------------------

def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
            share = sum(map(any, subsets)) / len(subsets)
            assert ev.pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12)
    assert ev.pass_at_k(10, 3, 5) == pytest.approx(0.916667, abs=1e-6)


def test_estimators_refuse_what_they_cannot_estimate():
    """The short-cut "n - c < k gives 1" says 1.0 for no right answer at all when k is above n."""
    for n, c, k in ((3, 0, 5), (4, 5, 1), (4, -1, 1), (4, 2, 0)):
        with pytest.raises(ValueError, match="cannot be estimated"):
            ev.pass_at_k(n, c, k)
    for k in (2, 0, -1):
        with pytest.raises(ValueError, match="maj@"):
            ev.maj_at_k(["4"], "4", k)


def test_pass_at_k_is_exact_for_many_completions():
    """A product of float ratios loses digits, and binomials of n = 10000 do not fit a float."""
    for c, k in ((3, 64), (1, 5000), (9999, 1), (5000, 5000), (0, 10)):
        miss = Fraction(1)  # C(n-c, k) / C(n, k) = C(n-k, c) / C(n, c)
        for i in range(c):
            miss *= Fraction(max(10000 - k - i, 0), 10000 - i)
        assert ev.pass_at_k(10000, c, k) == float(1 - miss)


def test_maj_a_tie_goes_to_the_answer_seen_first():
    """Ties were resolved by hash order, so that maj@k changed from run to run."""
    for answers in set(itertools.permutations(["4", "4", "9", "9", "x"])):
        first = next(answer for answer in answers if answer != "x")
        assert ev.maj_at_k(list(answers), "9", 5) == float(first == "9")


@pytest.mark.parametrize("answers, gold, k, right", [
    (["3", "0.5", r"\frac{1}{2}", "3", "1/2"], "0.5", 5, 1.0),  # three spellings of one answer
    (["1/2", "0.5", "3", "3"], r"\frac{1}{2}", 3, 1.0), ([None, " ", "", "4"], "4", 4, 1.0),
    ([None, None], "4", 2, 0.0), (["1", "4", "4"], "4", 1, 0.0), (["1", "4", "4"], "4", 3, 1.0)])
def test_maj_counts_equal_readable_answers_among_the_first_k(answers, gold, k, right):
    """Votes were counted on the raw text."""
    assert ev.maj_at_k(answers, gold, k) == right


def test_maj_compares_spellings_not_answers(monkeypatch):
    """10,000 answers in 20 spellings: at most 20 * 19 / 2 comparisons, and one with the gold."""
    calls = spied(monkeypatch, ev, "answers_equal")
    assert ev.maj_at_k([str(i % 20) for i in range(10000)] + ["7"], "7", 10001) == 1.0
    assert len(calls) <= 191


# ---- figures from rows ---------------------------------------------------------------------------

def rows_of(answers, finish="stop", **more):
    return [ev.row_of(Problem("q", "1", **more), 0, j, "q", f"<answer>{a}</answer>", 10, finish)
            for j, a in enumerate(answers)]


def tables(capsys, groups, n, problems, shape=(), name="d", k=""):
    header = {"shape": list(shape), "settings": {"data": {name: {"n": n, "problems": problems}}}}
    ev.print_tables(header, {name: dict(enumerate(groups))}, k)
    return capsys.readouterr().out


def test_verdict_takes_the_last_answer_and_needs_no_format():
    """An example that the model recites before its own answer was graded."""
    text = "<reasoning>as in <answer>3</answer></reasoning><answer>3</answer> so <answer>8</answer>"
    assert ev.verdict(text, "8") == {"answer": "8", "correct": True, "formatted": False}
    assert ev.verdict(GOOD, "3") == {"answer": "7", "correct": False, "formatted": True}
    assert ev.verdict("It is 8", "8") == {"answer": None, "correct": False, "formatted": False}


def test_the_interval_is_that_of_resampled_problems():
    """As of a normal distribution: 50 % +- 1.96 standard deviations of the mean, 0.5 / 10."""
    problems = [{"x": 1.0}, {"x": 0.0}, {}] * 50  # a third has no such figure
    shown = list(map(float, re.findall(r"[\d.]+", ev.figure(problems, "x"))))
    assert shown[0] == 50 and shown[1:] == pytest.approx([50 - 9.8, 50 + 9.8], abs=1.1)


def test_table_tells_levels_but_not_a_single_subject(capsys):
    groups = [rows_of(["1"], level=1, subject="A"), rows_of(["0"], level=5, subject="A")]
    shown = tables(capsys, groups, 1, 3)
    assert "d: 2 of 3 problems, 1 completions each" in shown
    assert re.search(r"\n  1 +1 +100\.0 ", shown) and re.search(r"\n  5 +1 +0\.0 ", shown)
    assert "subject" not in shown and "paper" not in shown and "cut off" not in shown
    cut = [rows_of([""], finish="length")] * 2
    assert "raise --max_new_tokens" in tables(capsys, cut, 1, 2)


@pytest.mark.parametrize("name, shape, known", [
    ("amc23", ("qwen2", 2048, 36), True), ("amc23", ("llama", 4096, 32), False),
    ("gsm8k", ("qwen2", 2048, 36), False)])
def test_published_figures_stand_beside_a_model_of_that_shape(name, shape, known, capsys):
    """By shape: a trained model has a name of its own."""
    shown = tables(capsys, [rows_of(["1"] * 64)], 64, 1, shape, name, "1,2,8,64")
    for row in (r"GTPO +40\.0 +- +75\.0 +85\.0\n", r"GRPO +30\.0 +- +67\.5 +87\.5\n"):
        assert bool(re.search("paper, " + row, shown)) == known


# ---- sampling, with a scripted sampler -----------------------------------------------------------

@functools.cache
def byte_tokenizer():
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(folder)
        return Tokenizer.from_pretrained(folder)


@pytest.fixture
def script(monkeypatch):
    """script(write) makes a sampler of write(prompt, its noise (L,)) -> (completion, whether an
    end token ends it), which obeys `stop`; a byte is a token. -> list of the batches of prompts"""
    batches = []

    def scripted(write):
        def sample(model, prompts, G, L, temperature, top_p, eos_ids, noise, stop):
            rows, finished = [], []
            batches.append(list(map(byte_tokenizer().decode, prompts)))
            assert noise.shape == (len(prompts), G, L) and eos_ids == (END,) and not model.training
            for asked, numbers in zip(batches[-1], noise.tolist()):
                for own in numbers:
                    text, ends = write(asked, own)
                    count = stop(list(text.encode())) if stop else None
                    rows.append([*text.encode(), *[END] * ends][:count])
                    finished.append(ends or count is not None)
            ids, lengths = pad(rows)  # (P * G, longest)
            mask = torch.arange(ids.shape[1]) < lengths[:, None]
            ids, mask = (x.view(len(prompts), G, -1) for x in (ids, mask))
            return Samples(ids, mask, None, None, torch.tensor(finished).view(-1, G))

        batches.clear()
        monkeypatch.setattr(ev, "sample", sample)
        return batches
    return scripted


def from_noise(prompt, noise):
    return f"<answer>{int(10 * noise[0])}</answer>", noise[1] < 0.8


def tiny_module(window=512):
    module = torch.nn.Linear(1, 1)
    module.config = SimpleNamespace(max_position_embeddings=window)
    return module


PLAIN = {"system_prompt": "", "prompt_style": "plain", "max_new_tokens": 64}


def evaluate(problems, model=None, **settings):
    return ev.evaluate(model or tiny_module(), byte_tokenizer(), problems, Processes("cpu"),
                       ev.EvalConfig(n=4, k="1,4", **PLAIN | settings))


def rows_by_sampling(problems, n=4, model=None, done=(), **settings):
    groups = ev.sample_problems(model or tiny_module().eval(), byte_tokenizer(), problems,
                                Processes("cpu"), ev.EvalConfig(n=n, **PLAIN | settings), done)
    return list(itertools.chain(*groups))


def essence(*args, **settings):
    rows = rows_by_sampling(*args, **settings)
    return sorted((r["index"], r["sample"], r["completion"]) for r in rows)


PROBLEMS = [Problem("q" * length, str(length % 10)) for length in (5, 9, 2, 7, 7)]


def test_evaluate_counts_by_hand(script):
    wrong = GOOD.replace("7", "6")
    texts = {"a": [(wrong, True), (GOOD, True), (BARE, True), ("hm", False)],
             "b": [(wrong, True)] * 4}
    answers = {question: itertools.cycle(texts[question]) for question in texts}
    script(lambda prompt, noise: next(answers[prompt]))
    problems = [Problem("a", "7", level=2, subject="s"), Problem("b", "7")]
    result = evaluate(problems)
    tokens = [len(wrong), len(GOOD), len(BARE), 2] + [len(wrong)] * 4
    assert result.pop("seconds") >= 0 and result == pytest.approx({
        "problems": 2, "skipped": 0,
        "pass@1": 0.25, "pass@4": 0.5, "maj@1": 0.0, "maj@4": 0.5,  # a: votes 6 7 7 -
        "format": 6 / 8, "truncated": 1 / 8, "unreadable": 1 / 8, "tokens": sum(tokens) / 8})
    assert rows_by_sampling(problems)[1] == {
        "index": 0, "sample": 1, "question": "a", "gold": "7", "level": 2, "subject": "s",
        "prompt": "a", "completion": GOOD, "answer": "7", "correct": True, "formatted": True,
        "tokens": len(GOOD), "finish": "stop"}


@pytest.mark.parametrize("style, question, text, graded, answer, finish", [
    ("plain", "q", BARE + "\nProblem: 1+1?\n<answer>2</answer>", BARE, "7", "stop"),
    ("plain", "q", "hm\nProblem: 1+1?\n<answer>2</answer>", "hm", None, "stop"),
    ("plain", "q<think>", "so</think>" + BARE, "<think>so</think>" + BARE, "7", "stop"),
    ("plain", "q<think>", "so " + BARE, "<think>so " + BARE, None, "stop"),
    ("chat", "q", BARE + "<answer>2</answer>", BARE + "<answer>2</answer>", "2", "length")])
def test_what_is_graded_and_saved(script, style, question, text, graded, answer, finish):
    """A base model answers, then invents the next question; that answer was graded. So were
    answers in a thought that the prompt had opened. A chat ends with an end token alone."""
    script(lambda prompt, noise: (text, False))
    (row,) = rows_by_sampling([Problem(question, "7")], n=1, prompt_style=style)
    assert (row["completion"], row["answer"], row["finish"]) == (graded, answer, finish)


@pytest.mark.parametrize("settings", [{"max_prompt_tokens": 8}, {"model": tiny_module(64 + 8)}])
def test_skipped_problems_count_as_wrong(settings, script):
    """A prompt over the limit was dropped without a word, or cut."""
    batches = script(lambda prompt, noise: ("<answer>1</answer>", False))
    problems = [Problem("q" * length, "1") for length in (5, 9, 20000)]
    result = evaluate(problems, **settings)
    assert (result["problems"], result["skipped"]) == (3, 2) and batches == [["q" * 5]]
    assert result["pass@1"] == result["maj@4"] == pytest.approx(1 / 3) and result["tokens"] == 18
    nothing = evaluate(problems[1:], **settings)
    assert nothing["pass@1"] == 0 and math.isnan(nothing["tokens"])


def test_what_is_sampled_depends_on_seed_and_problem_alone(script):
    script(from_noise)
    rows = essence(PROBLEMS)
    assert len(rows) == 20 and len({text for _, _, text in rows}) > 5
    batches = script(from_noise)
    assert essence(PROBLEMS, batch_prompts=2) == rows
    assert [list(map(len, batch)) for batch in batches] == [[9, 7], [7, 5], [2]]  # alike together
    assert essence(PROBLEMS, seed=1) != rows
    assert essence(PROBLEMS[:3]) == [r for r in rows if r[0] < 3]  # --limit
    assert essence(PROBLEMS, n=2) == [r for r in rows if r[1] < 2]
    assert essence(PROBLEMS, done={1, 3}) == [r for r in rows if r[0] not in (1, 3)]
    same = [text for _, _, text in essence(PROBLEMS[3:])]  # one prompt, two problems
    assert same[:4] != same[4:]


def test_evaluate_leaves_random_states_and_mode_alone(script):
    """An evaluation during training changed the rest of the training."""
    def broken(prompt, noise):
        raise RuntimeError("out of memory")

    def states():
        return torch.get_rng_state().tolist(), random.getstate(), list(np.random.get_state()[1])

    model, before = tiny_module(), states()
    for write, ends in ((from_noise, contextlib.nullcontext()),
                        (broken, pytest.raises(RuntimeError))):
        for training in (True, False):
            model.train(training)
            script(write)
            with ends:
                evaluate(PROBLEMS, model=model)
            assert model.training == training and states() == before


# ---- the command, with a tiny random model -------------------------------------------------------

@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("tiny") / "model")
    make_tiny_model(folder, 0)
    return folder


SMALL = ["--data=p.jsonl", "--samples=4", "--max_new_tokens=6", "--max_prompt_tokens=30",
         "--system_prompt=", "--device=cpu"]
FILE = Path("o.jsonl")


@pytest.fixture
def command(model_folder, tmp_path, monkeypatch):
    """Runs eval.py in an empty folder -> what it printed; its exit code must be `code`."""
    monkeypatch.chdir(tmp_path)
    problems = ("1+1?", "2"), ("12+30?", "42"), ("5?", "5"), ("7+8=?", "15"), ("x" * 60, "1")
    write_rows(Path("p.jsonl"), [{"question": question, "answer": answer,
                                  "level": f"Level {i % 2 + 1}"}
                                 for i, (question, answer) in enumerate(problems)])

    def command(*flags, code=0, base=(f"--model={model_folder}", *SMALL, "--out=o.jsonl")):
        return run(tmp_path, *base, *flags, code=code, main=ev.main)
    return command


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_bytes().splitlines()]


def test_command_writes_completions_and_a_table(command):
    text = command("--batch_prompts=2")
    header, *rows = lines_of(FILE)
    assert header["settings"]["data"]["p.jsonl"]["n"] == 4 and header["shape"][0] == "llama"
    questions = ("1+1?", "12+30?", "5?", "7+8=?")
    places = [(i, j, f"<|user|>{q}<|assistant|>")
              for i, q in enumerate(questions) for j in range(4)]
    assert [(r["index"], r["sample"], r["prompt"]) for r in rows] == [*places, (4, 0, None)]
    assert rows[-1]["finish"] == "skipped"
    for part in ("5 of 5 problems, 4 completions each", "problems skipped: 1,", "pass@k", "maj@k",
                 "k=4", "tokens/s"):
        assert part in text
    assert len({r["completion"] for r in rows}) > 8  # the noise is used


def test_command_goes_on_after_a_kill(command, monkeypatch):
    """Wherever the file was cut, it becomes the very same one; only what is missing is sampled."""
    command()
    whole, calls = FILE.read_bytes(), spied(monkeypatch, ev, "sample")
    ends = [at for at, byte in enumerate(whole) if byte == 10]
    for keep, missing in ((len(whole), 0), (ends[8] + 1, 2), (ends[8] - 5, 3), (ends[8] + 20, 2),
                          (ends[0] + 1, 4)):
        FILE.write_bytes(whole[:keep])
        calls.clear()
        command()
        sampled = [prompt for (_, prompts, *_), _ in calls for prompt in prompts]
        assert FILE.read_bytes() == whole and len(sampled) == missing


def test_command_refuses_a_file_of_other_settings(command):
    command()
    before, problems = FILE.read_bytes(), Path("p.jsonl").read_text()
    for flag, name in (("--temperature=0.5", "temperature"), ("--n=3", "data"),
                       ("--limit=2", "data"),
                       ('--template_variables={"x":1} --prompt_style=plain', "template_var")):
        text = command(*flag.split(), code=2)
        assert text.startswith("error: o.jsonl has other settings") and name in text
        assert FILE.read_bytes() == before
    command("--k=2")  # it does not change what is sampled
    Path("p.jsonl").write_text(problems.replace("1+1", "2+1"))
    assert "data is" in command(code=2)


@pytest.mark.parametrize("old, new, says", [
    (None, b"my notes", ":1: "), (None, b'{"a": 1}\n', ":1: "), (b"\n", b"\n?\n", ":2: "),
    (b'"sample": 1', b'"simple": 1', ":3: not a completion"),
    (b'{"data": "p', b'{"data": "q', ":2: not a completion of p.jsonl"),
    (b'"settings"', b'"settings": null, "x"', ":1: not the settings"),
    (b'"n": 4, ', b"", ":1: not the settings"), (b'"n": 4', b'"n": "4"', ":1: not the settings"),
    (b'"problems": ', b'"x": ', ":1: not the settings"),
    (b'"problems": 1', b'"problems": null', ":1: not the settings"),
    (b'"answer": ', b'"x": ', ":2: not a completion"),
    (b'"n": 4', b'"n": 3', ":5: one completion of problem 0 too many"),
    (b'{"data": "p.jsonl"', b'{"data": ["p.jsonl"]', ":2: not a completion"),
    (b'"index": 0', b'"index": null', ":2: not a completion"),
    (b'"level": 1', b'"level": [1]', ":2: not a completion")])
def test_a_file_that_is_not_ours_stays_as_it_is(command, old, new, says):
    """Regression: values of other types and missing ones ended in a traceback, and a number that is
    text in no rows at all."""
    command("--limit=1")
    content = FILE.read_bytes().replace(old, new, 1) if old else new
    assert content != FILE.read_bytes()
    FILE.write_bytes(content)
    for flag in ("--limit=1", "--rescore=o.jsonl"):
        assert f"o.jsonl{says}" in command(flag, code=2) and FILE.read_bytes() == content


def test_a_second_evaluation_of_one_file_is_refused(command, monkeypatch):
    """Regression: both ended well, and the completions of one were lost."""
    second, sample = [], ev.sample

    def slow(*arguments, **settings):
        if not second:
            second.append(command(code=2))
        return sample(*arguments, **settings)

    monkeypatch.setattr(ev, "sample", slow)
    assert "5 of 5 problems" in command()
    assert "another run is writing to o.jsonl" in second[0] and "--out=FILE" in second[0]
    command()  # now it is free


def test_lost_completions_are_told(command, monkeypatch):
    """Regression: the exit code was 0."""
    sample = ev.sample
    monkeypatch.setattr(ev, "sample", lambda *args, **settings:
                        FILE.unlink() or sample(*args, **settings))
    assert "lost the completions of 5 problems" in command(code=2)


def test_new_weights_are_not_mistaken_for_the_old(command, model_folder, tmp_path):
    """After more training, the old completions must not be shown as those of the new weights."""
    other = GPT.from_pretrained(model_folder)
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    other.save_pretrained(str(tmp_path / "tiny" / "model"))
    for count, flags in ((1, ()), (1, ()), (2, (f"--model={tmp_path}/tiny/model",))):
        command("--out=", "--limit=1", *flags)
        # the same command: the same file
        assert len(list(Path("out/eval").glob("*.jsonl"))) == count


def test_rescore_shows_what_changes_and_writes_nothing(command):
    command()
    header, *rows = lines_of(FILE)
    rows[1].update(completion=GOOD.replace("7", "2"))  # now right, graded as wrong before
    rows[2].update(completion="<think>" + GOOD.replace("7", "2"))  # a thought that does not end
    rows[6].update(answer="42", correct=True)  # was called right
    lines = [json.dumps(line) + "\n" for line in [header] + rows[:-2] + rows[-1:]]
    FILE.write_text("".join(lines))
    text = command("--rescore=o.jsonl", base=())
    assert FILE.read_text() == "".join(lines)
    assert "p.jsonl problem 0 sample 1: None was wrong, '2' is right, gold '2'" in text
    assert "p.jsonl problem 1 sample 2: '42' was right, " in text and text.count(" gold ") == 2
    assert "4 of 5 problems" in text  # the last but one lacks a completion, which is not made up
    assert re.search(r"pass@k +6\.2 ", text)  # 1/4 of 1 of 4
    FILE.write_text(lines[0])  # killed before the first problem was done
    assert "0 of 5 problems" in command("--rescore=o.jsonl", base=())


@pytest.mark.parametrize("flags, says", [
    ("--temprature=1", "temperature"), ("--n=2 --k=1,8", "--k=1,8"), ("--k=1,x", "1,x"),
    ("--k=0,1", "--k=0,1"), ("--temperature=0", "--n=1"), ("--top_p=0", "top_p"),
    ("--device=abacus", "abacus"), ("--data=nowhere.jsonl", "nowhere"),
    ("--data=p.jsonl,", "--data"), ("--model=nowhere", "nowhere"), ("--model=", "--model"),
    ("--max_new_tokens=9999", "9999"), ("--few_shot=4", "system_prompt"),
    ("--out=.", ".: is a folder; give a file"), ("--seed=-1", "seed=-1: should be >= 0"),
    ('--template_variables={"messages":1}', "template_variables: 'messages' cannot be set"),
    ("--data=gsm8k --answer_field=a", "answer_field name columns of a file, and gsm8k is"),
    ("--out=p.jsonl/o.jsonl", "p.jsonl/o.jsonl: cannot be written to")])
def test_wrong_usage_is_one_message(command, flags, says):
    *_, message = command(*flags.split(), code=2).splitlines()
    assert message.startswith("error: ") and says in message


def test_greedy_and_fields_by_name(command):
    Path("q.jsonl").write_text('{"q": "1+1?", "a": "2"}\n')
    command("--data=q.jsonl", "--question_field=q", "--answer_field=a", "--n=1", "--temperature=0")
    assert lines_of(FILE)[1]["question"] == "1+1?"


@pytest.mark.parametrize("flags, plan", [
    ([], {"gsm8k": 32, "math": 32, "aime24": 64, "aime25": 64, "amc23": 64}),
    (["--data=amc23,my.jsonl"], {"amc23": 64, "my.jsonl": 32}),
    (["--data=aime24", "--n=16"], {"aime24": 16})])
@pytest.mark.filterwarnings("error")
def test_preset_paper(command, monkeypatch, flags, plan):
    """Here all prompts are too long, which leaves nothing to take the mean of."""
    monkeypatch.setattr(ev, "load_problems", lambda *a, **k: [Problem("x" * 60, "1")])
    text = command("--preset=paper", "--data=", "--n=0", *flags)
    assert text.count("problems skipped: 1,") == len(plan) and "tokens/s" in text
    data = lines_of(FILE)[0]["settings"]["data"]
    assert {name: spec["n"] for name, spec in data.items()} == plan


def test_two_real_processes_give_the_file_of_one(command, model_folder, tmp_path):
    """As torchrun starts them; they go on where one was killed, three problems for two. (A process
    read the file while the first one already wrote to it.)"""
    text = command("--out=alone.jsonl")
    alone = Path("alone.jsonl").read_bytes()
    Path("both.jsonl").write_bytes(b"".join(alone.splitlines(keepends=True)[:7]))
    flags = [f"--model={model_folder}", *SMALL, "--out=both.jsonl", "--batch_prompts=1"]
    logs = finish(tmp_path, start(tmp_path, flags, 2, main=ev.main))
    assert Path("both.jsonl").read_bytes() == alone and "has those of 1 problems" in logs
    table = text[text.index("p.jsonl: 5") : text.index("tokens in") - 8]
    assert table in logs and not Path("1.log").read_text()
