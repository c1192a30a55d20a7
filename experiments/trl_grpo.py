"""
A third party's GRPO in the comparison: TRL's GRPOTrainer from the same SFT starts, with the same
problems in the same order, rewards and settings as experiments.compare's `grpo`.

    pip install trl                              # in an environment of its own: 1.16.0 was tried
    flags="--seeds=8 --learning_rates 3e-4 --out=out/trl --results=out/trl.jsonl"
    python -m experiments.compare $flags --algorithms grpo gtpo
    python -m experiments.trl_grpo $flags        # adds its rows

Its random numbers are its own, so runs of one seed share start and prompts alone.
"""
import os
import sys
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import train
from data import load_problems
from experiments import compare
from lib.run import command
from rewards import reward_parts


def reward(completions, answer, **_):
    """The reward of each completion, given as a list of one message."""
    return [float(sum(reward_parts(completion[0]["content"], gold).values()))
            for completion, gold in zip(completions, answer)]


def prompts(seed, count):
    """The first `count` prompts of a run of train.py with this seed, in their order."""
    problems = load_problems("arithmetic")
    order = [train.order(i, len(problems), seed, "rl") for i in range(count)]
    return Dataset.from_list([
        {"prompt": [{"role": "user", "content": problems[i].question}],
         "answer": problems[i].answer} for i in order])


def train_run(start, folder, rate, seed):
    """Trains from the model in the folder `start` and saves to `folder`. Returns the seconds."""
    s, ours, grpo = compare.SETTINGS["arithmetic"], train.TrainConfig(), train.ALGO_DEFAULTS["grpo"]
    P, G, steps = s["prompts_per_step"], s["group_size"], s["steps"]
    config = GRPOConfig(
        output_dir=f"{folder}/trl", seed=seed, use_cpu=True, bf16=False, report_to="none",
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
        max_steps=steps, per_device_train_batch_size=P * G, num_generations=G,
        shuffle_dataset=False, max_completion_length=ours.max_new_tokens,
        temperature=s["temperature"], loss_type="grpo", scale_rewards="group", beta=ours.beta,
        epsilon=grpo["epsilon"], learning_rate=rate,
        lr_scheduler_type="cosine", warmup_steps=0, weight_decay=train.WEIGHT_DECAY,
        adam_beta1=train.BETAS[0], adam_beta2=train.BETAS[1], max_grad_norm=ours.grad_clip)
    trainer = GRPOTrainer(AutoModelForCausalLM.from_pretrained(start), reward_funcs=reward,
                          args=config, train_dataset=prompts(seed, steps * P),
                          processing_class=AutoTokenizer.from_pretrained(start))
    began = time.time()
    trainer.train()
    seconds = time.time() - began
    trainer.save_model(f"{folder}/model")
    return seconds


def main(argv):
    a = compare.parse(argv)
    if a.task != "arithmetic":
        raise ValueError("--task: only arithmetic is written for TRL")
    torch.set_num_threads(1)
    rows = compare.finished(a)
    done = {(row["learning_rate"], row["seed"]) for row in rows if row["algorithm"] == "trl_grpo"}
    runs = [(rate, seed) for rate in a.learning_rates for seed in range(a.seeds)]
    for rate, seed in [run for run in runs if run not in done]:
        folder = compare.folder_of(a, "trl_grpo", rate, seed)
        start = compare.folder_of(a, "sft", None, seed) + "/model"
        if not os.path.isdir(start):
            raise ValueError(f"no folder {start}: experiments.compare makes the starts")
        seconds = train_run(start, folder, rate, seed)
        compare.call(compare.eval_command(a, folder, seed))
        compare.add(a, rows, {
            "algorithm": "trl_grpo", "learning_rate": rate, "seed": seed,
            "settings": compare.SETTINGS["arithmetic"], "commit": compare.commit(),
            **compare.held_out_figures(f"{folder}/eval.jsonl"), "seconds": seconds})


if __name__ == "__main__":
    sys.exit(command(main))
