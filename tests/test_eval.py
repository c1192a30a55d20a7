import itertools
import json
import math
import os
import random
import re
import shutil
import socket
import subprocess
import sys
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import eval as ev
from data import Problem
from model import GPT, Config
from sample import Samples
from lib.arithmetic import write_byte_tokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
END = 0


# -----------------------------------------------------------------------------
# pass@k

def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
                assert ev.pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
    assert ev.pass_at_k(10, 3, 5) == pytest.approx(0.916667, abs=1e-6)
    assert ev.pass_at_k(8, 2, 4) == pytest.approx(0.785714, abs=1e-6)


def test_pass_at_k_refuses_what_it_cannot_estimate():
    """Regression: the short-cut "n - c < k gives 1" says 1.0 for no right answer at all when k is larger than n."""
    for n, c, k in ((3, 0, 5), (4, 2, 8), (4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, -1), (0, 0, 1)):
        with pytest.raises(ValueError, match="cannot be estimated"):
            ev.pass_at_k(n, c, k)


def test_pass_at_k_is_exact_for_many_completions():
    """Regression: the product of float ratios loses digits, and binomials of n = 10000 do not fit a float."""
    for c, k in ((3, 64), (1, 5000), (9999, 1), (5000, 5000), (0, 10)):
        miss = Fraction(1)
        for i in range(c):                                                          # C(n-c, k) / C(n, k) = C(n-k, c) / C(n, c)
            miss *= Fraction(max(10000 - k - i, 0), 10000 - i)
        assert ev.pass_at_k(10000, c, k) == float(1 - miss)


# -----------------------------------------------------------------------------
# maj@k

def test_maj_a_tie_goes_to_the_answer_seen_first():
    """Regression: ties were resolved by hash order, so that maj@k changed from run to run."""
    for answers in set(itertools.permutations(["4", "4", "9", "9"])):
        assert ev.maj_at_k(list(answers), "9", 4) == (1.0 if answers[0] == "9" else 0.0)
    for answers in set(itertools.permutations(["zeta", "alpha", "mu"])):
        for gold in answers:
            assert ev.maj_at_k(list(answers), gold, 3) == float(answers[0] == gold)


def test_maj_equal_answers_written_differently_vote_together():
    """Regression: votes were counted on the raw text."""
    assert ev.maj_at_k(["3", "0.5", r"\frac{1}{2}", "3", "1/2"], "0.5", 5) == 1.0
    assert ev.maj_at_k(["3", "0.5", r"\frac{1}{2}", "3", "1/2"], "3", 5) == 0.0
    assert ev.maj_at_k(["1/2", "0.5", "3", "3"], r"\frac{1}{2}", 3) == 1.0


def test_maj_counts_readable_answers_among_the_first_k_only():
    assert ev.maj_at_k([None, None, None, "4"], "4", 4) == 1.0
    assert ev.maj_at_k([None, " ", "", "4"], "4", 4) == 1.0
    assert ev.maj_at_k([None, None], "4", 2) == 0.0
    assert ev.maj_at_k(["1", "4", "4"], "4", 1) == 0.0
    assert ev.maj_at_k(["1", "4", "4"], "4", 3) == 1.0
    for answers, k in ((["4"], 2), (["4"], 0), (["4"], -1), ([], 1)):
        with pytest.raises(ValueError, match="maj@"):
            ev.maj_at_k(answers, "4", k)


def test_maj_compares_spellings_not_answers(monkeypatch):
    """10,000 answers in 20 spellings need at most 20 * 19 / 2 comparisons, and one with the gold answer."""
    calls, equal = [], ev.answers_equal
    monkeypatch.setattr(ev, "answers_equal", lambda a, b: calls.append(1) or equal(a, b))
    assert ev.maj_at_k([str(i % 20) for i in range(10000)] + ["7"], "7", 10001) == 1.0
    assert len(calls) <= 191


# -----------------------------------------------------------------------------
# figures from rows

def rows_of(answers, gold="1", index=0, formatted=True, finish="stop", **more):
    return [{"data": "d", "index": index, "sample": j, "question": "q", "gold": gold, "prompt": None, "completion": f"<answer>{a}</answer>",
             "answer": a, "correct": a == gold, "formatted": formatted, "tokens": 10, "finish": finish, **more}
            for j, a in enumerate(answers)]


def header_of(n, problems, shape=(), name="d", ks=(1,)):
    settings = {"data": {name: {"n": n, "problems": problems}}, "max_new_tokens": 16}
    return {"model": "m", "shape": list(shape), "k": {name: list(ks)}, "settings": settings}


def test_figures_of_one_problem():
    rows = rows_of(["2", "1", None, "1"])
    rows[0]["formatted"], rows[2]["finish"], rows[3]["tokens"] = False, "length", 30
    assert ev.columns([1, 3]) == ["pass@1", "pass@3", "maj@1", "maj@3", "format", "truncated", "unreadable", "tokens"]
    assert ev.problem_stats(rows, [1, 3]) == [0.5, 1.0, 0.0, 0.0, 0.75, 0.25, 0.25, 15.0]    # maj@3: "2" and "1" tie, "2" came first
    assert ev.problem_stats(rows, [4]) == [1.0, 1.0, 0.75, 0.25, 0.25, 15.0]


def test_missing_completions_are_not_made_up(capsys):
    """Regression: a row with too few samples was filled up with its last score; 3 of 4 samples [0, 0, 1] became 2 right of 4."""
    rows = rows_of(["0", "0", "1"])
    passed1, passed3, passed4 = ev.problem_stats(rows, [1, 3, 4])[:3]
    assert (passed1, passed3) == (pytest.approx(1 / 3), 1.0) and math.isnan(passed4)
    ev.print_table("d", rows + rows_of(["1"] * 4, index=1), header_of(4, 2), [1, 4])
    shown = capsys.readouterr().out
    assert "completions missing: 1, from 1 of the problems" in shown
    assert re.search(r"pass@k +66\.7 .* 100\.0", shown)                               # (1/3 + 1) / 2, and 1 of the one that has 4
    ev.print_table("d", rows, header_of(4, 1), [4])
    assert re.search(r"pass@k +n/a", capsys.readouterr().out)


def test_the_last_answer_is_graded():
    """Regression: an example that the model recites before its own answer was graded."""
    text = "<reasoning>as in <answer>3</answer></reasoning><answer>3</answer> so <answer>8</answer>"
    assert ev.verdict(text, "8")["correct"] and not ev.verdict(text, "3")["correct"]


def test_verdict_does_not_need_the_format():
    good = "<reasoning>\n2*4\n</reasoning>\n<answer>8</answer>"
    assert ev.verdict(good, "8") == {"answer": "8", "correct": True, "formatted": True}
    assert ev.verdict("It is <answer>8</answer>", "8") == {"answer": "8", "correct": True, "formatted": False}
    assert ev.verdict("It is 8", "8") == {"answer": None, "correct": False, "formatted": False}


def test_bootstrap_resamples_problems():
    values = np.array([1.0, 0.0] * 50)
    low, high = ev.bootstrap(values)
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.05, 0.5 + 1.96 * 0.05), abs=0.011)                # sd of the mean: 0.5 / sqrt(100)
    assert (low, high) == ev.bootstrap(values)
    assert ev.bootstrap(np.array([0.25, 0.25, math.nan])) == (0.25, 0.25)
    assert all(map(math.isnan, ev.bootstrap(np.array([math.nan]))))


def test_table_tells_levels_and_published_figures(capsys):
    rows = rows_of(["1"], index=0, level=1, subject="Algebra") + rows_of(["0"], index=1, level=5, subject="Algebra")
    ev.print_table("d", rows, header_of(1, 2), [1])
    shown = capsys.readouterr().out
    assert re.search(r"\n  1 +1 +100\.0 ", shown) and re.search(r"\n  5 +1 +0\.0 ", shown)
    assert "Algebra" not in shown and "paper" not in shown                           # one subject: nothing to compare
    qwen3b, llama8b = ("qwen2", 2048, 36), ("llama", 4096, 32)                       # by shape: a trained model has a name of its own
    for name, shape, known in (("amc23", qwen3b, True), ("sets/amc23/test.jsonl", qwen3b, True),
                               ("amc23", llama8b, False), ("gsm8k", qwen3b, False), ("amc23", (), False)):
        ev.print_table(name, rows_of(["1"] * 64), header_of(64, 1, shape, name), [1, 2, 8, 64])
        shown = capsys.readouterr().out
        assert ("paper" in shown) == known == ("Qwen2.5-3B-Instruct trained on MATH" in shown)
        for line in (r"paper, GTPO +40\.0 +- +75\.0 +85\.0\n", r"paper, GRPO +30\.0 +- +67\.5 +87\.5\n"):
            assert bool(re.search(line, shown)) == known


# -----------------------------------------------------------------------------
# evaluate, with a scripted sampler

class CharTokenizer:
    """A token is a character."""
    eos_ids, pad_id, has_chat_template = (END,), END, False

    def encode(self, text, allow_special=False):
        assert len(text) < 10000, "an absurd text was encoded"
        return [ord(c) for c in text]

    def decode(self, ids):
        assert END not in ids
        return "".join(map(chr, ids))


def scripted(write, seen=None):
    """A sampler whose completion of a prompt is write(prompt text, its noise (L,)) -> (text, whether it ends)."""
    def sample(model, prompts, group_size, max_new_tokens, temperature=1.0, top_p=1.0, eos_ids=(), noise=None):
        P, G, L = len(prompts), group_size, max_new_tokens
        assert noise.shape == (P, G, L) and 0 <= noise.min() and noise.max() < 1 and eos_ids == (END,)
        assert not model.training and not torch.is_grad_enabled()
        ids, mask = torch.zeros(P, G, L, dtype=torch.long), torch.zeros(P, G, L, dtype=torch.bool)
        finished = torch.zeros(P, G, dtype=torch.bool)
        for p, g in itertools.product(range(P), range(G)):
            text, ends = write("".join(map(chr, prompts[p])), noise[p, g].tolist())
            codes = [ord(c) for c in text] + [END] * ends
            ids[p, g, :len(codes)], mask[p, g, :len(codes)], finished[p, g] = torch.tensor(codes), True, ends
        if seen is not None:
            seen.append(["".join(map(chr, prompt)) for prompt in prompts])
        return Samples(ids=ids, mask=mask, logps=torch.zeros(P, G, L), entropy=torch.zeros(P, G, L), finished=finished)
    return sample


def from_noise(prompt, noise):
    return f"<answer>{int(10 * noise[0])}</answer>", noise[1] < 0.8


def tiny_module(window=512):
    module = torch.nn.Linear(1, 1)
    module.config = SimpleNamespace(max_position_embeddings=window)
    return module


def evaluate(problems, n=4, ks=(1, 4), max_new_tokens=64, **settings):
    settings = {"system_prompt": "", "progress": False, **settings}
    return ev.evaluate(settings.pop("model", None) or tiny_module(), CharTokenizer(), problems, n, ks, max_new_tokens, **settings)


PROBLEMS = [Problem("q" * length, str(length % 10)) for length in (5, 9, 2, 7, 7)]


def test_evaluate_counts_by_hand(monkeypatch):
    good, bare, wrong = "<reasoning>r</reasoning>\n<answer>7</answer>", "<answer>7</answer>", "<reasoning>r</reasoning>\n<answer>6</answer>"
    script = {"a": iter([(wrong, True), (good, True), (bare, True), ("hm", False)]), "b": iter([(wrong, True)] * 4)}
    monkeypatch.setattr(ev, "sample", scripted(lambda prompt, noise: next(script[prompt])))
    result = evaluate([Problem("a", "7", level=2, subject="s"), Problem("b", "7")])
    assert {key: result[key] for key in ("problems", "skipped", "completions")} == {"problems": 2, "skipped": 0, "completions": 8}
    assert (result["pass@1"], result["pass@4"], result["maj@1"], result["maj@4"]) == (0.25, 0.5, 0.0, 0.5)     # a: votes 6 7 7 -
    assert (result["format"], result["truncated"], result["unreadable"]) == (6 / 8, 1 / 8, 1 / 8)
    tokens = [len(wrong) + 1, len(good) + 1, len(bare) + 1, 2] + [len(wrong) + 1] * 4                         # the end token is one
    assert result["tokens"] == pytest.approx(sum(tokens) / 8) and result["sampled_tokens"] == sum(tokens)
    rows = {(r["index"], r["sample"]): r for r in result["rows"]}
    assert rows[0, 1] == {"index": 0, "sample": 1, "question": "a", "gold": "7", "level": 2, "subject": "s", "prompt": "a",
                          "completion": good, "answer": "7", "correct": True, "formatted": True, "tokens": len(good) + 1, "finish": "stop"}
    assert rows[0, 0]["prompt"] == "a" and "level" not in rows[1, 0]
    assert (rows[0, 3]["completion"], rows[0, 3]["answer"], rows[0, 3]["correct"], rows[0, 3]["finish"]) == ("hm", None, False, "length")


def test_skipped_problems_count_as_wrong(monkeypatch):
    """Regression: a prompt over the limit was dropped without a word, or cut."""
    seen = []
    monkeypatch.setattr(ev, "sample", scripted(lambda prompt, noise: ("<answer>1</answer>", True), seen))
    problems = [Problem("q" * 5, "1"), Problem("q" * 9, "1"), Problem("q" * 20000, "1")]
    for settings in ({"max_prompt_tokens": 8}, {"model": tiny_module(window=64 + 8)}):
        del seen[:]
        result = evaluate(problems, **settings)
        assert (result["problems"], result["skipped"], result["completions"]) == (3, 2, 4) and seen == [["q" * 5]]
        assert result["pass@1"] == result["maj@4"] == pytest.approx(1 / 3) and result["format"] == 0 and result["tokens"] == 19
        assert [(r["index"], r["correct"]) for r in result["rows"] if r["finish"] == "skipped"] == [(1, False), (2, False)]
    all_skipped = evaluate(problems[1:], max_prompt_tokens=8)
    assert all_skipped["pass@1"] == 0 and all_skipped["completions"] == 0 and math.isnan(all_skipped["tokens"])


def essence(rows):
    return sorted((r["index"], r["sample"], r["completion"]) for r in rows)


def test_what_is_sampled_depends_on_seed_and_problem_alone(monkeypatch):
    monkeypatch.setattr(ev, "sample", scripted(from_noise))
    rows = {size: essence(evaluate(PROBLEMS, batch_prompts=size)["rows"]) for size in (1, 2, 5)}
    assert rows[1] == rows[2] == rows[5] == essence(evaluate(PROBLEMS)["rows"]) and len(rows[1]) == 20
    assert len({text for _, _, text in rows[1]}) > 5 and rows[1] != essence(evaluate(PROBLEMS, seed=1)["rows"])
    assert essence(evaluate(PROBLEMS[:3])["rows"]) == [r for r in rows[1] if r[0] < 3]                         # --limit
    assert essence(evaluate(PROBLEMS, n=2, ks=[1])["rows"]) == [r for r in rows[1] if r[1] < 2]                # a smaller n
    first = evaluate([PROBLEMS[3], PROBLEMS[4]], n=8, ks=[1])["rows"]                                          # one prompt, two problems
    assert [r["completion"] for r in first[:8]] != [r["completion"] for r in first[8:]]


def test_prompts_of_like_length_are_batched(monkeypatch):
    seen = []
    monkeypatch.setattr(ev, "sample", scripted(from_noise, seen))
    evaluate(PROBLEMS, batch_prompts=2)
    assert [[len(prompt) for prompt in batch] for batch in seen] == [[9, 7], [7, 5], [2]]


def test_evaluate_leaves_random_states_and_mode_alone(monkeypatch):
    """Regression: an evaluation during training changed the rest of the training."""
    monkeypatch.setattr(ev, "sample", scripted(from_noise))
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), tuple(np.random.get_state()[1])
    models = [(tiny_module().train(training), training) for training in (True, False)]
    before = states()
    for model, training in models:
        evaluate(PROBLEMS, model=model)
        assert model.training == training
    assert states() == before
    def broken(*args, **settings): raise RuntimeError("out of memory")
    monkeypatch.setattr(ev, "sample", broken)
    model = tiny_module().train()
    with pytest.raises(RuntimeError):
        evaluate(PROBLEMS, model=model)
    assert model.training and torch.is_grad_enabled()


def test_earlier_rows_are_counted_and_not_sampled_again(monkeypatch):
    seen, written = [], []
    monkeypatch.setattr(ev, "sample", scripted(from_noise, seen))
    whole = evaluate(PROBLEMS, on_rows=written.append)
    assert sum(written, []) == whole["rows"] and len(written) == 5 and all(len({r["index"] for r in rows}) == 1 for rows in written)
    del seen[:], written[:]
    rest = evaluate(PROBLEMS, earlier=[r for r in whole["rows"] if r["index"] in (1, 3)], on_rows=written.append)
    assert sorted(rows[0]["index"] for rows in written) == [0, 2, 4]
    assert sorted(map(len, sum(seen, []))) == [2, 5, 7] and essence(rest["rows"]) == essence(whole["rows"])
    figures = [key for key in whole if key not in ("seconds", "sampled_tokens", "rows")]
    assert {key: rest[key] for key in figures} == {key: whole[key] for key in figures}
    assert rest["sampled_tokens"] == sum(r["tokens"] for r in whole["rows"] if r["index"] not in (1, 3))


def test_evaluate_refuses_nonsense():
    for settings, match in (({"ks": [8]}, "k=8"), ({"ks": []}, "k="), ({"ks": [0]}, "k=0"), ({"n": 0, "ks": [1]}, "n=0"),
                            ({"max_new_tokens": 0}, "max_new_tokens=0"), ({"max_new_tokens": 512}, "512"),
                            ({"temperature": 0}, "temperature 0"), ({"top_p": 0}, "top_p=0"),
                            ({"batch_prompts": 0}, "batch_prompts=0"), ({"max_prompt_tokens": -1}, "max_prompt_tokens=-1")):
        with pytest.raises(ValueError, match=match):
            evaluate(PROBLEMS, **settings)
    with pytest.raises(ValueError, match="no problems"):
        evaluate([])


def test_two_processes_share_the_problems(monkeypatch):
    """Each problem is sampled by exactly one process, also when they do not divide; the all-reduce adds the shares up."""
    monkeypatch.setattr(ev, "sample", scripted(from_noise))
    monkeypatch.setattr(ev.dist, "get_backend", lambda: "gloo")
    shares = {}
    monkeypatch.setattr(ev.dist, "all_reduce", lambda total: shares.setdefault(rank, []).append(total.clone()))
    problems, rows = PROBLEMS + [Problem("q" * 99, "1")], []
    for rank in range(4):
        rows += evaluate(problems, rank=rank, world_size=4, max_prompt_tokens=20)["rows"]
    monkeypatch.setattr(ev.dist, "all_reduce", lambda total: total.copy_(sum(shares[r][0 if total.ndim == 2 else 1] for r in range(4))))
    figures, alone = evaluate(problems, rank=0, world_size=4, max_prompt_tokens=20), evaluate(problems, max_prompt_tokens=20)
    assert essence(rows) == essence(alone["rows"]) and len(rows) == 21
    assert all(figures[key] == alone[key] for key in alone if key not in ("seconds", "rows"))


# -----------------------------------------------------------------------------
# the command, with a tiny random model

@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A random one-layer model with the byte tokenizer; its vocabulary is larger than the tokenizer's, as Qwen's is."""
    folder = str(tmp_path_factory.mktemp("tiny") / "model")
    write_byte_tokenizer(folder)
    torch.random.fork_rng()
    generator = torch.Generator().manual_seed(0)
    model = GPT(Config.from_dict({"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32,
                                  "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
                                  "max_position_embeddings": 64}))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 if p.ndim > 1 else torch.ones(p.shape))
    model.save_pretrained(folder)
    return folder


SMALL = ["--data=p.jsonl", "--samples=4", "--max_new_tokens=6", "--system_prompt=", "--device=cpu"]


@pytest.fixture
def command(model_folder, tmp_path, monkeypatch, capsys):
    """Runs eval.py's main in an empty folder -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with open("p.jsonl", "w") as f:
        f.writelines(json.dumps({"question": q, "answer": a, "level": f"Level {i % 2 + 1}"}) + "\n"
                     for i, (q, a) in enumerate((("1+1?", "2"), ("12+30?", "42"), ("5?", "5"), ("7+8=?", "15"), ("x" * 60, "1"))))

    def run(*flags, base=True):
        start = [f"--model={model_folder}", *SMALL, "--out=o.jsonl"]
        code = ev.main((start if base else []) + list(flags))
        captured = capsys.readouterr()
        return code, captured.out, captured.err
    return run


def lines_of(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


def test_command_writes_completions_and_a_table(command):
    code, out, err = command("--batch_prompts=2")
    assert code == 0, err
    header, *rows = lines_of("o.jsonl")
    assert header["settings"]["data"]["p.jsonl"]["n"] == 4 and header["settings"]["temperature"] == 1.0
    assert [(r["index"], r["sample"]) for r in rows] == [(i, j) for i in range(4) for j in range(4)] + [(4, 0)]      # in order of problem
    assert rows[-1]["finish"] == "skipped" and "problems skipped: 1," in out
    assert all(r["data"] == "p.jsonl" and (r["finish"] == "length") == (r["tokens"] == 6) or r["finish"] == "stop" for r in rows[:-1])
    prompts = [f"<|user|>{q}<|assistant|>" for q in ("1+1?", "12+30?", "5?", "7+8=?") for _ in range(4)]
    assert header["shape"] == ["llama", 16, 1] and [r["prompt"] for r in rows] == prompts + [None]          # in every row
    assert "5 problems, 4 completions each" in out and "pass@k" in out and "maj@k" in out and "k=4" in out and "tokens/s" in out
    assert len({r["completion"] for r in rows}) > 8                                  # the noise is used
    texts = [r["completion"] for r in rows]
    assert command("--batch_prompts=1", "--out=one.jsonl")[0] == 0 and [r["completion"] for r in lines_of("one.jsonl")[1:]] == texts


def test_command_goes_on_after_a_kill(command, monkeypatch):
    """Wherever the file was cut, the run goes on to the very same file, and samples what is missing only."""
    assert command()[0] == 0
    with open("o.jsonl", "rb") as f:
        whole = f.read()
    sampled, sample = [], ev.sample
    def counted(model, prompts, *args, **settings):
        sampled.extend(prompts)
        return sample(model, prompts, *args, **settings)
    monkeypatch.setattr(ev, "sample", counted)
    ends = [at for at, byte in enumerate(whole) if byte == 10]
    for keep, missing in ((len(whole), 0), (ends[8] + 1, 2), (ends[8] - 5, 3), (ends[8] + 20, 2), (ends[2] + 1, 4), (10, 4), (0, 4)):
        with open("o.jsonl", "wb") as f:
            f.write(whole[:keep])
        del sampled[:]
        code, out, err = command()
        assert code == 0, err
        with open("o.jsonl", "rb") as f:
            assert f.read() == whole
        assert len(sampled) == missing, keep
    os.rename("o.jsonl", "o.jsonl.rank3")                                            # what another process had written
    shutil.copy("o.jsonl.rank3", "o.jsonl.rank1")                                    # twice, when putting the files together was cut off
    del sampled[:]
    assert command()[0] == 0 and not sampled and not [name for name in os.listdir(".") if "rank" in name]
    with open("o.jsonl", "rb") as f:
        assert f.read() == whole


def test_command_refuses_a_file_of_other_settings(command):
    assert command()[0] == 0
    before = open("o.jsonl").read()
    for flag, field in (("--temperature=0.5", "temperature"), ("--seed=1", "seed"), ("--n=3", "data"), ("--limit=2", "data"),
                        ("--max_new_tokens=5", "max_new_tokens")):
        code, out, err = command(flag)
        assert code == 2 and err.startswith("error: o.jsonl has other settings") and field in err and "--overwrite" in err
    assert open("o.jsonl").read() == before
    assert command("--k=2")[0] == 0                                                  # k does not change what is sampled
    assert command("--seed=1", "--overwrite")[0] == 0 and lines_of("o.jsonl")[0]["settings"]["seed"] == 1
    for text, match in (("my notes", "o.jsonl:1: "), ('{"a": 1}\n', "o.jsonl:1: not the header"),
                        (before.replace("\n", "\n?\n", 1), "o.jsonl:2: "),
                        (before.replace('"sample": 1', '"sample": "x"', 1), "o.jsonl:3: field 'sample'"),
                        (before.replace('{"data": "p', '{"data": "q', 1), "not in the header")):
        with open("o.jsonl", "w") as f:
            f.write(text)
        code, out, err = command()
        assert code == 2 and match in err
        assert open("o.jsonl").read() == text                                        # never lost


def test_new_weights_are_not_mistaken_for_the_old(command, model_folder, tmp_path):
    """Regression guard: after more training, the old completions must not be shown as those of the new weights."""
    assert command("--out=")[0] == 0
    other = GPT.from_pretrained(model_folder)
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    other.save_pretrained(str(tmp_path / "tiny" / "model"))
    first = os.listdir("out/eval")
    assert command("--out=")[0] == 0 and os.listdir("out/eval") == first             # the same command: the same file
    assert command(f"--model={tmp_path}/tiny/model", "--out=")[0] == 0 and len(os.listdir("out/eval")) == 2
    assert command()[0] == 0
    code, out, err = command(f"--model={tmp_path}/tiny/model")
    assert code == 2 and "weights" in err


def test_few_shot(command):
    """Solved examples stand in each prompt, never a problem that is asked; other examples are another evaluation."""
    with open("e.jsonl", "w") as f:
        f.writelines(json.dumps({"question": q, "answer": a, "solution": w}) + "\n"
                     for q, a, w in (("1+1?", "2", "x"), ("1?", "1", ""), ("3?", "3", "y")))
    few = ("--examples=e.jsonl", "--few_shot=1", "--max_new_tokens=2", "--limit=1")
    code, out, err = command(*few)
    assert code == 0, err
    shown = "<|user|>3?<|assistant|><reasoning>\ny\n</reasoning>\n<answer>\n3\n</answer><|end|>"
    assert lines_of("o.jsonl")[1]["prompt"] == shown + "<|user|>1+1?<|assistant|>"   # not 1+1?, which is asked; not 1?, which has no solution
    code, out, err = command("--examples=e.jsonl", "--few_shot=2")
    assert code == 2 and "e.jsonl has only 1 problems with a solution that are not asked in p.jsonl" in err
    assert command("--max_new_tokens=2", "--limit=1")[0] == 2                        # without examples: other settings
    for flags, match in ((["--few_shot=1"], "p.jsonl is a file"), (["--examples=e.jsonl"], "--few_shot=0"), (["--few_shot=-1"], "--few_shot=-1")):
        code, out, err = command(*flags)
        assert code == 2 and match in err, err


def test_examples_reach_the_prompt(monkeypatch):
    seen = []
    monkeypatch.setattr(ev, "sample", scripted(from_noise, seen))
    rows = evaluate(PROBLEMS[:1], examples=[Problem("1+1?", "2", "1+1=2")], model=tiny_module(4096), max_prompt_tokens=2000)["rows"]
    assert "1+1=2" in seen[0][0] and seen[0][0].endswith("qqqqq") and rows[3]["prompt"] == seen[0][0]


def test_rescore_shows_what_changes(command):
    assert command()[0] == 0
    header, *rows = lines_of("o.jsonl")
    rows[1].update(completion="<reasoning>r</reasoning>\n<answer>2</answer>")        # now right, graded as wrong before
    rows[6].update(answer="42", correct=True)                                        # was called right
    with open("o.jsonl", "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in [header] + rows[:-2] + rows[-1:])
    before = open("o.jsonl").read()
    code, out, err = command("--rescore=o.jsonl", base=False)
    assert code == 0 and "2 verdicts changed" in out and open("o.jsonl").read() == before
    assert "p.jsonl problem 0 sample 1: wrong -> right, answer None -> '2', gold '2'" in out
    assert "p.jsonl problem 1 sample 2: right -> wrong, answer '42' -> " in out
    assert "completions missing: 1, from 1 of the problems" in out and re.search(r"pass@k +5\.0 ", out)      # 1/4 of 1 of 5
    assert command("--rescore=o.jsonl", "--k=8", base=False)[0] == 2
    with open("o.jsonl", "w") as f:
        f.write(json.dumps(header) + "\n")
    code, out, err = command("--rescore=o.jsonl", base=False)                        # killed before the first problem was done
    assert code == 0 and "none of its 5 problems is there" in out
    code, out, err = command("--rescore=nowhere.jsonl", base=False)
    assert code == 2 and "nowhere.jsonl" in err and "Traceback" not in err


def test_wrong_usage_is_one_message(command, model_folder):
    for flags, match in (("--temprature=1", "did you mean --temperature"), ("--n=2 --k=1,8", "k=8"), ("--k=1,x", "1,x"),
                         ("--n=many", "--n"), ("--n=0", "n=0"), ("--limit=0", "--limit=0"), ("--temperature=0", "n=1"),
                         ("--temperature=-1", "temperature"), ("--device=abacus", "--device=abacus"),
                         ("--data=nowhere.jsonl", "nowhere.jsonl"), ("--model=nowhere", "nowhere"),
                         ("--max_new_tokens=64", "64"), ("--preset=essay", "essay"), ("--split=dev", "dev"),
                         ("--batch_prompts=0", "batch_prompts=0"), ("--data=,", "an empty name"), ("--data=p.jsonl,", "an empty name")):
        code, out, err = command(*flags.split())
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and match in err, (flags, err)
    assert command("--n=2", base=False)[0] == 2
    code, out, err = command("--n=1", "--temperature=0", "--out=greedy.jsonl")
    assert code == 0, err


def test_preset_paper(monkeypatch):
    plans = []
    monkeypatch.setattr(ev, "load_problems", lambda name, split: [Problem("1", "1")])
    def stop(folder, **settings): raise FileNotFoundError(folder)
    monkeypatch.setattr(ev.GPT, "from_pretrained", stop)
    monkeypatch.setattr(ev, "check_ks", lambda n, ks: plans.append((n, sorted(set(ks)))) or ks)
    assert ev.main(["--model=x", "--preset=paper", "--device=cpu"]) == 2
    low, high = (32, [1, 2, 4, 8, 16, 32]), (64, [1, 2, 4, 8, 16, 32, 64])
    assert plans == [low, low, high, high, high]                                     # gsm8k, math, aime24, aime25, amc23
    del plans[:]
    assert ev.main(["--model=x", "--preset=paper", "--data=sets/amc23/test.jsonl,gsm8k", "--device=cpu"]) == 2 and plans == [high, low]
    del plans[:]
    assert ev.main(["--model=x", "--preset=paper", "--data=aime24", "--n=16", "--device=cpu"]) == 2 and plans == [(16, [1, 2, 4, 8, 16])]


def test_two_real_processes_give_the_file_of_one(command, model_folder, monkeypatch):
    """Five problems on two processes, as torchrun starts them: each is counted once, and the file is the same to the byte."""
    code, out, err = command("--out=alone.jsonl")
    assert code == 0, err
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    flags = [f"--model={model_folder}", *SMALL, "--out=both.jsonl"]
    for name, value in (("OMP_NUM_THREADS", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", port), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    start = [sys.executable, os.path.join(ROOT, "eval.py"), *flags]
    other = subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    monkeypatch.setenv("RANK", "0")                                                  # this process is the first one
    code, out0, err = command(*flags, base=False)
    out1, err1 = other.communicate(timeout=120)
    assert (code, other.returncode) == (0, 0), err + err1
    assert open("both.jsonl").read() == open("alone.jsonl").read() and not [f for f in os.listdir(".") if "rank" in f]
    table = lambda text: text[text.index("p.jsonl: "):text.index("tokens in")]
    assert table(out0) == table(out) and not out1
