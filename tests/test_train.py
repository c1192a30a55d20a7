"""train.py: its settings, whole tiny runs, and the parts that a setting turns on."""
import gc
import json
import math
import os
import re
import shutil
import stat
import zlib

import pytest
import torch
from safetensors.torch import load_file

import eval as ev
import model
import train
from conftest import (OUT, assert_close_rows, checkpoint, largest_difference, learned, metrics,
                      refused, rl_rows, run, small_model, spied, tree, weights, write_rows)
from data import demonstration, held_out, load_problems
from lib import training
from lib.config import help_text
from lib.hf import save_folder
from model import GPT
from tokenizer import Tokenizer

RL = ["--sft_steps=0", "--eval_problems=0"]


# ---- settings ------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, says", [
    (dict(algo="ppo"), "algo"), (dict(group_size=1), "group_size"), (dict(scale="x"), "scale"),
    (dict(temperature=0.0), "temperature"), (dict(epsilon=1.0), "epsilon"),
    (dict(steps=2**40), "steps"), (dict(updates_per_rollout=2), "needs a clipped ratio"),
    (dict(sft_steps=0, steps=0), "nothing to do"), (dict(algo="sft", sft_steps=0), "nothing to do"),
    (dict(overwrite=True, resume="yes"), "give one of the two"), (dict(compile="1"), "compile"),
    (dict(lora_rank=2, adapter="x"), "give one of the two"), (dict(resume="maybe"), "resume"),
    (dict(template_variables={"self": 1}), "'self' cannot be set"),
    (dict(question_field="q"), "question_field and .* a file, and arithmetic is none"),
    (dict(prompts_per_step=3), "prompts_per_step=3 .* 2 processes"),
    (dict(sft_batch_size=5), "sft_batch_size=5 .* 2 processes")])
def test_settings_that_cannot_work_are_refused(change, says):
    """P64, P65: sizes are divided by the number of processes, not by that of the devices."""
    with pytest.raises(ValueError, match=says):
        train.check(train.TrainConfig(**change), 2)
    train.check(train.TrainConfig(prompts_per_step=3, algo="sft"), 2)
    train.check(train.TrainConfig(sft_batch_size=5, sft_steps=0), 2)


def test_the_command_line_of_users():
    c, _ = train.settings(["--name=x", "--algo", "grpo", "--resume", "--gamma=0.2"])
    assert (c.out, c.resume, c.gamma, c.conflict, c.scale, c.epsilon) == (
        "out/x", "yes", 0.2, False, "std", 0.2)
    for name, instead in training.GONE.items():
        with pytest.raises(ValueError, match=f"--{name} is gone: {re.escape(instead)}"):
            train.settings([f"--{name}=1"])
        assert not hasattr(c, name)
    text = help_text(train.TrainConfig, train.__doc__)
    for name in train.TrainConfig.__dataclass_fields__:  # each with its comment
        assert len(re.search(rf"\n  --{name}=\S* +(.*)", text)[1]) > 5, name


# ---- whole runs ----------------------------------------------------------------------------------

DEMO = ["--sft_steps=3", "--sft_batch_size=8", "--steps=4", "--prompts_per_step=4",
        "--group_size=4", "--max_new_tokens=12", "--eval_problems=4", "--eval_samples=2",
        "--show_every=2", "--save_every=3", "--eval_every=2", "--device=cpu"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo, short, under umask 027: (working folder, flags, output)."""
    cwd, before = tmp_path_factory.mktemp("demo"), os.umask(0o027)
    text = run(cwd, *DEMO)
    os.umask(before)
    return cwd, DEMO, text


def test_a_run_leaves_everything_it_promises(demo):
    cwd, _, _ = demo
    out, rows = cwd / OUT, metrics(cwd / OUT)
    kinds = [(row.get("label", row["phase"]), row["step"]) for row in rows]
    assert kinds == [("sft", 0), ("sft", 1), ("sft", 2), ("before", 3), ("gtpo", 3), ("gtpo", 4),
                     ("during", 4), ("gtpo", 5), ("gtpo", 6), ("after", 7)]
    for row in rl_rows(out):
        for name in ("reward accuracy format entropy initial_entropy kept conflict tied truncated "
                     "completion_tokens loss grad_norm lr tokens sample_seconds seconds "
                     "memory_mib").split():
            assert math.isfinite(row[name]), name
        assert 0 < row["mismatch"] < 1e-5  # what is sampled is what is scored
    assert sorted(os.listdir(out)) == ["ckpt.pt", "config.toml", "init", "lock", "metrics.jsonl",
                                       "model", "sft"]
    assert [row["lr"] for row in rl_rows(out)] == pytest.approx([3e-4, 3e-4, 2.25e-4, 0.75e-4])
    state = checkpoint(out)
    assert state["step"] == 7 and state["optimizer"]["state"][0]["step"] == 4  # anew for RL
    init, sft, last = (weights(out / folder) for folder in ("init", "sft", "model"))
    assert largest_difference(init, sft) > 1e-4 < largest_difference(sft, last)
    assert sorted(os.listdir(out / "model")) == sorted(os.listdir(out / "init"))
    # weights had mode 0600: no server, no container, no colleague could open them
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in tree(out)} == {0o640}


def test_the_screen_says_what_is_done(demo):
    _, _, text = demo
    for part in ("GTPO on arithmetic", "million parameters", "4 prompts x 4 completions", OUT,
                 "step 0, one group", "step 2, one group", "advantage", "before   after", "pass@1",
                 f"the policy is in {OUT}/model/"):
        assert part in text, part
    assert "step 1, one group" not in text


@pytest.mark.parametrize("flags, says", [
    ("", f"{OUT} already holds ckpt.pt, model, sft, heldout.jsonl, config.toml, metrics.jsonl: "
     "--resume goes on with it, --out=OTHER starts another run beside it, --overwrite deletes it"),
    ("--overwrite --model=/nowhere", "/nowhere"), ("--overwrite --adapter=/none", "/none"),
    ("--overwrite --data=gsm9k", "gsm8k"), ("--overwrite --max_new_tokens=5000", "positions"),
    ("--overwrite --prompts_per_step=50", "13 usable prompts (0 longer than"),
    (f"--overwrite --model={OUT}/model", f"model={OUT}/model lies in the output folder"),
    (f"--overwrite --eval_data={OUT}/heldout.jsonl", "eval_data="),
    ("--overwrite --max_prompt_tokens=10 --max_new_tokens=8", "demonstrations are longer"),
    ("--overwrite --eval_problems=15", "cannot hold out"),
    ("--resume --seed=1", f"{OUT}/ckpt.pt: another seed than then; a run keeps these; --out=OTHER "
     "starts another\n  seed is 1, it was 0"),
    ("--resume --sft_steps=3", "other sft_steps than then"),
    ("--resume --data=arithmetic --steps=9", "other problems to train on than then"),
    ("--resume --lora_rank=2", "lora_A' is missing in the checkpoint and (2, 32) in this model")])
def test_nothing_is_deleted_before_all_is_checked(done, flags, says):
    """The old run was deleted first, and the mistake in the new command found then."""
    cwd, start_flags, _ = done
    before = tree(cwd / OUT)
    refused(cwd, [*start_flags, *flags.split()], says)
    assert tree(cwd / OUT) == before


def test_overwrite_deletes_the_old_run_alone(done, tmp_path):
    cwd, flags, _ = done
    shutil.copytree(cwd / "out", tmp_path / "out")
    (tmp_path / OUT / "notes.txt").write_text("mine")
    run(tmp_path, *flags, "--overwrite", "--algo=sft")
    assert (tmp_path / OUT / "notes.txt").exists() and not (tmp_path / OUT / "sft").exists()
    assert [row["phase"] for row in metrics(tmp_path / OUT)] == ["sft", "sft", "eval"]


def test_plan_prints_and_writes_nothing(small, tmp_path):
    for flags in (small, []):
        assert "the largest peak" in run(tmp_path, *flags, "--plan")
    assert not os.listdir(tmp_path)


def test_no_problems_held_out_no_evaluation(small, tmp_path):
    text = run(tmp_path, *small, "--eval_problems=0", "--sft_steps=1", "--steps=2",
               "--eval_every=1", "--eval_data=/not/read.jsonl")
    assert "15 problems" in text and "pass@" not in text
    assert not os.path.exists(tmp_path / OUT / "heldout.jsonl")
    assert [row["phase"] for row in metrics(tmp_path / OUT)] == ["sft", "gtpo", "gtpo"]


def test_problems_without_a_solution_are_found_before_anything_is_written(small, tmp_path):
    """The message came when the problem was drawn, perhaps hours later."""
    rows = [{"question": f"{i}+1?", "answer": str(i + 1), "solution": "count"} for i in range(9)]
    write_rows(tmp_path / "some.jsonl", [*rows, {"question": "no idea?", "answer": "1"}])
    flags = [*small, "--data=some.jsonl", "--eval_data=some.jsonl"]
    refused(tmp_path, [*flags, "--sft_steps=1"], "'no idea?'", "solution", "--sft_steps=0")
    assert os.listdir(tmp_path / OUT) == ["lock"]
    run(tmp_path, *flags, "--sft_steps=0", "--steps=1")


def test_a_model_without_an_end_token_is_refused(small, small_folder, tmp_path):
    """All completions would be cut off."""
    shutil.copytree(small_folder / "model", tmp_path / "model")
    for name, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token"),
                      ("tokenizer_config.json", "chat_template")):
        content = json.loads((tmp_path / "model" / name).read_text())
        del content[key]
        (tmp_path / "model" / name).write_text(json.dumps(content))
    refused(tmp_path, [*small, f"--model={tmp_path}/model"], "no end token", "eos_token_id")


def test_long_demonstrations_are_left_out_and_counted_on_the_screen(small, small_folder, tmp_path):
    tokenizer = Tokenizer.from_pretrained(small_folder / "model")
    problems, _ = held_out(load_problems(small_folder / "problems.jsonl"), 2)
    lengths = sorted(len(tokenizer.encode(p.question + demonstration(p))) + 1 for p in problems)
    text = run(tmp_path, *small, "--algo=sft", "--sft_steps=1", "--max_prompt_tokens=20",
               f"--max_new_tokens={lengths[4] - 20}")
    too_long = sum(n > lengths[4] for n in lengths)
    assert f"{too_long} skipped: too long" in text and 0 < too_long < len(lengths)


# ---- what settings turn on -----------------------------------------------------------------------

KL = ["--algo=grpo", "--beta=0.1", "--learning_rate=1e-2"]


def test_checkpointing_learns_the_same(done, tmp_path, monkeypatch):
    calls = spied(monkeypatch, model, "checkpoint")
    cwd, flags, _ = done
    run(tmp_path, *flags, "--checkpointing")
    assert calls
    assert_close_rows(learned(tmp_path / OUT), learned(cwd / OUT))
    new, old = weights(tmp_path / OUT / "model"), weights(cwd / OUT / "model")
    assert largest_difference(new, old) < 1e-4


@pytest.mark.parametrize("kind", ["full", "new adapter", "given adapter"])
def test_the_reference_is_the_policy_before_rl_and_made_once_a_rollout(small, tmp_path,
                                                                       monkeypatch, kind):
    """Without a warm-up the reference was the model without --adapter. It does not move."""
    if kind == "given adapter":
        run(tmp_path, *small, "--lora_rank=2", "--algo=sft", "--sft_steps=2", "--out=first",
            "--sft_learning_rate=0.1")
    flags = [*small, "--eval_problems=0", *KL, "--updates_per_rollout=2", "--steps=2", *{
        "full": ["--sft_steps=1"], "new adapter": ["--sft_steps=1", "--lora_rank=2"],
        "given adapter": ["--sft_steps=0", "--adapter=first/adapter"]}[kind]]
    made = spied(monkeypatch, train, "reference_logps")
    losses = spied(monkeypatch, train, "policy_loss")
    run(tmp_path, *flags)
    assert (len(made), len(losses)) == (2, 4)
    apart = [(logps.detach() - reference).abs().max()
             for (logps, _, _, _, reference), _ in losses]
    assert apart[0] < 1e-5 and min(apart[1:]) > 1e-3
    state = checkpoint(tmp_path / OUT)
    assert (state["reference"] is None) == (kind == "full")
    if kind != "full":
        assert {name.rpartition(".")[2] for name in state["model"]} == {"lora_A", "lora_B"}


def test_an_adapter_is_all_that_is_trained_and_saved(small, small_folder, tmp_path):
    base = small_folder / "model"
    before = tree(base)
    text = run(tmp_path, *small, "--lora_rank=2", "--sft_steps=2", "--steps=2", "--out=x",
               "--sft_learning_rate=0.1")
    assert re.search(r"of which 0\.\d\d million, the adapter, are trained", text)
    for folder in ("adapter", "sft"):
        assert sorted(os.listdir(tmp_path / "x" / folder)) == [
            "adapter_config.json", "adapter_model.safetensors"]
    assert not (tmp_path / "x/model").exists() and "the policy is in x/adapter/" in text
    ids = torch.arange(20)[None]
    with torch.no_grad():
        logits = [GPT.from_pretrained(base, adapter=adapter)(ids)
                  for adapter in (None, tmp_path / "x/sft", tmp_path / "x/adapter")]
    assert (logits[0] - logits[1]).abs().max() > 1e-2 and not torch.equal(logits[1], logits[2])
    assert tree(base) == before


def alive():
    """How many models and optimizers are in memory."""
    gc.collect()
    return sum(issubclass(type(o), (GPT, torch.optim.Optimizer)) for o in gc.get_objects())


def test_the_type_that_came_in_goes_out_and_the_last_evaluation_reads_it(small, small_folder,
                                                                        tmp_path, monkeypatch):
    """A bfloat16 folder came back as float32. At the last evaluation nothing of the training is in
    memory any more; none takes a larger batch than the rollout."""
    save_folder(GPT.from_pretrained(small_folder / "model"), tmp_path / "given", torch.bfloat16)
    seen, evaluate, before = [], training.evaluate, alive()

    def evaluating(model, *arguments, **more):
        seen.append((alive(), {name: p.detach().clone() for name, p in model.named_parameters()}))
        assert arguments[3].batch_prompts * 2 == 16
        return evaluate(model, *arguments, **more)
    monkeypatch.setattr(training, "evaluate", evaluating)
    run(tmp_path, *small, f"--model={tmp_path}/given", "--sft_steps=1", "--steps=1", *KL)
    out = tmp_path / OUT
    for folder, dtype in (("model", torch.bfloat16), ("sft", torch.float32)):
        saved = load_file(out / folder / "model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {dtype}
    state = checkpoint(out)["model"]
    rounded = {name: tensor.bfloat16().float() for name, tensor in state.items()}
    (_, _), (count, evaluated) = seen
    assert largest_difference(rounded, evaluated) == 0 < largest_difference(state, evaluated)
    assert count == before + 1
    assert json.loads((out / "model/config.json").read_text())["torch_dtype"] == "bfloat16"


def spy_on_prompts(monkeypatch, change=lambda samples: None):
    """Every prompt with its completions' ids and mask, in training and in evaluation. What is
    sampled can be changed."""
    seen, sample = [], train.sample

    def sampling(model, prompts, *arguments, **more):
        samples = sample(model, prompts, *arguments, **more)
        change(samples)
        seen.extend(zip(prompts, samples.ids, samples.mask))
        return samples
    monkeypatch.setattr(train, "sample", sampling)
    monkeypatch.setattr(ev, "sample", sampling)
    return seen


def test_plain_prompts_end_with_their_answer(small, small_folder, tmp_path, monkeypatch):
    """A base model answered, invented the next question, and that answer was graded."""
    seen, tokenizer = spy_on_prompts(monkeypatch), Tokenizer.from_pretrained(small_folder / "model")
    run(tmp_path, *small, "--sft_steps=0", "--steps=2")
    texts = [tokenizer.decode(ids[mask].tolist())
             for _, group, masks in seen for ids, mask in zip(group, masks)]
    behind = [text.partition("</answer")[2] for text in texts if "</answer" in text]
    assert len(texts) == 2 * 16 + 2 * 4 and len(behind) > 10
    assert all(len(rest) < 2 and "<|end|>" not in rest for rest in behind)


def test_every_group_of_one_question_is_another(small, tmp_path, monkeypatch):
    """P63: four times the same question in a step, and again in the next: eight groups that differ;
    a rerun repeats all, another seed none."""
    write_rows(tmp_path / "one.jsonl", [{"question": "1+2?", "answer": "3"}] * 4)
    groups = {}
    for name in ("a", "b", "seed=1"):
        seen = spy_on_prompts(monkeypatch)
        run(tmp_path, *small, *RL, "--data=one.jsonl", "--steps=2", "--learning_rate=1e-30",
            f"--out={name}", *(["--seed=1"] if name == "seed=1" else []))
        groups[name] = [repr(ids.tolist()) for _, ids, _ in seen]
    assert groups["a"] == groups["b"] and len(set(groups["a"] + groups["seed=1"])) == 16


def write_template(folder, text):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[-1].content }}" + text
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_template_variables_reach_the_template_in_training_and_evaluation(small, small_folder,
                                                                          tmp_path, monkeypatch):
    shutil.copytree(small_folder / "model", tmp_path / "model")
    write_template(tmp_path / "model", "{{ mark | default('no') }}")
    seen = spy_on_prompts(monkeypatch)
    flags = [*small, f"--model={tmp_path}/model", "--prompt_style=auto", "--sft_steps=0"]
    run(tmp_path, *flags, "--steps=1", '--template_variables={"mark": "!!"}')
    run(tmp_path, "--resume", "--steps=2")  # it is kept with the run
    assert len(seen) == 4 + 2 * 2 + 4 + 2 and {bytes(prompt[-2:]) for prompt, *_ in seen} == {b"!!"}


def test_a_line_says_that_the_template_leaves_the_system_prompt_out(small, small_folder, tmp_path):
    """Nobody asked for the format then, without a word."""
    shutil.copytree(small_folder / "model", tmp_path / "model")
    flags = [*small, f"--model={tmp_path}/model", "--prompt_style=auto", *RL, "--steps=1"]
    says = "the chat template leaves the system prompt out"
    for template, prompt, said in (("x", "", 0), ("x", "Be brief. ", 1),
                                   ("{{ messages[0].content | trim }}", "Be brief. ", 0)):
        write_template(tmp_path / "model", template)
        text = run(tmp_path, *flags, f"--system_prompt={prompt}", "--overwrite")
        assert text.count(says) == said


def test_an_adapters_own_tokenizer_counts_and_one_line_says_so(small, small_folder, tmp_path,
                                                              monkeypatch):
    run(tmp_path, *small, "--lora_rank=2", "--algo=sft", "--sft_steps=1", "--out=first")
    adapter = tmp_path / "first/adapter"
    flags = [*small, "--adapter=first/adapter", "--prompt_style=auto", *RL, "--steps=1"]
    says = "tokenizer and template are those of the adapter first/adapter"
    assert says not in run(tmp_path, *flags)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small_folder / "model" / name, adapter)
    write_template(adapter, "??")
    seen = spy_on_prompts(monkeypatch)
    assert run(tmp_path, *flags, "--out=second").count(says) == 1
    assert {bytes(prompt[-2:]) for prompt, *_ in seen} == {b"??"}


@pytest.mark.parametrize("cut, tied, says", [
    (True, True, "in 5 steps in a row most completions were cut off at max_new_tokens=16"),
    (False, True, "in 5 steps in a row all groups had equal rewards"), (False, False, None)])
def test_one_line_when_steps_teach_nothing(small, tmp_path, monkeypatch, cut, tied, says):
    """All groups tied at 0 and only the entropy term trained: 128 tokens were too few."""
    spy_on_prompts(monkeypatch, lambda samples: samples.finished.fill_(not cut))
    places = iter(range(10**6))
    monkeypatch.setattr(train, "reward_parts", lambda text, gold: {
        "format": 0.0 if tied else float(next(places)), "accuracy": 0.0})
    text = run(tmp_path, *small, *RL, "--steps=11")
    assert text.count("note: ") == bool(says) and (says or "") in text


def test_the_row_measures_and_the_picture_shows_what_was_used(small, tmp_path, monkeypatch):
    """The picture marked conflict tokens and filtered completions where neither switch was on.
    mismatch is a mean over the trained tokens, also where the filter leaves none."""
    keep = train.keep_completions
    monkeypatch.setattr(train, "reward_parts", lambda text, gold: {
        "format": float(zlib.crc32(text.encode()) % 3), "accuracy": 0.0})
    spy_on_prompts(monkeypatch, lambda samples: samples.logps.add_(0.5 * samples.mask))
    found = {}
    for name, share, flags in (("all", 0.0, []), ("half", 0.5, []), ("grpo", 0.0, ["--algo=grpo"]),
                               ("off", 0.0, ["--entropy_filter=false"])):
        monkeypatch.setattr(train, "keep_completions", lambda entropy, initial, threshold:
                            keep(entropy, -1.0, entropy.quantile(share) - 1e-6))
        text = run(tmp_path, *small, *RL, "--steps=1", "--show_every=1", "--group_size=8",
                   f"--out={name}", *flags)
        row, = rl_rows(tmp_path / name)
        marks = "[[" in text or "((" in text
        found[name] = row["kept"], text.count("(filtered)"), marks, row["grad_norm"] > 0
        assert row["mismatch"] == pytest.approx(0.5, abs=1e-5) and row["conflict"] > 0
    assert 0 < found["half"][0] < 1 and 0 < found["half"][1] < 8
    assert found["all"][:2] == (0, 8) and not found["all"][3]
    assert found["off"] == (0, 0, True, True) and found["grpo"] == (0, 0, False, True)


def test_problems_held_out_of_a_file_are_written_beside_the_run(done, small_folder):
    cwd, _, text = done
    everything = load_problems(small_folder / "problems.jsonl")
    apart = load_problems(cwd / OUT / "heldout.jsonl")
    assert apart == held_out(everything, 2)[1] and "13 problems" in text


def test_problems_of_the_evaluation_leave_the_training_set(small, small_folder, tmp_path):
    """--eval_data may be the file of --data: what was evaluated had been trained on."""
    data = small_folder / "problems.jsonl"
    text = run(tmp_path, *small, "--sft_steps=0", "--steps=1", f"--eval_data={data}")
    assert "2 problems are left out of training" in text and "13 problems" in text


def test_a_tokenizer_of_another_model_is_refused_before_anything_is_written(small, tmp_path):
    """With a warm-up it was an IndexError, without one the old run was deleted first."""
    small_model(str(tmp_path / "model"), vocab_size=268, eos_token_id=260)
    flags = [*small, f"--model={tmp_path}/model", "--overwrite"]
    refused(tmp_path, flags, "the tokenizer makes the id 269", "vocab_size 268")
    assert sorted(os.listdir(tmp_path / OUT)) == ["lock"]


def test_weights_that_are_not_finite_are_not_saved(small, tmp_path):
    """A folder full of nan was written, with exit code 0."""
    model = small_model(str(tmp_path / "model"))
    model.model.norm.weight.data[0] = math.nan
    model.save_pretrained(tmp_path / "model")
    flags = [*small, f"--model={tmp_path}/model", "--algo=sft", "--sft_steps=1"]
    refused(tmp_path, flags, "the policy's weights are not finite")
    assert not (tmp_path / OUT / "model").exists()


def test_output_folders_that_cannot_be(small, tmp_path):
    (tmp_path / "file").write_text("mine")
    refused(tmp_path, [*small, "--out="], "name a folder")
    refused(tmp_path, [*small, "--out=file"], "file: cannot be written to")
    assert (tmp_path / "file").read_text() == "mine"
