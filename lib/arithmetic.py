"""
The task of the default run, which needs no download: two-digit additions, demonstrations of them
(imperfect ones, so that RL has something to improve), and a tiny model with a byte tokenizer.
"""
import json
import os

import torch

from data import Problem, demonstration, digest, on_side
from lib.files import write_whole
from lib.hf import Config
from model import GPT
from tokenizer import ALPHABET, Tokenizer


def arithmetic_problems(split="train"):
    """The two-digit additions of a split: of all 8,100 about 7/8 are train, the rest test. `47+12?`
    has answer `59` and solution `7+2=9;4+1=5`: units, then tens, with the carry as `+1`:
    `7+5=12;4+1+1=6`. a+b and b+a are on the same side of the split."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)
             if on_side(f"{min(a, b)}+{max(a, b)}", split)]
    return [addition(a, b) for a, b in sorted(pairs, key=lambda pair: digest(0, pair))]


def addition(a, b, units_slip=0, tens_slip=0):
    """a+b as a Problem, with the units or the tens wrong by a slip; what comes later follows."""
    units = a % 10 + b % 10 + units_slip
    carry = units >= 10
    tens = a // 10 + b // 10 + carry + tens_slip
    solution = f"{a % 10}+{b % 10}={units};{a // 10}+{b // 10}{'+1' if carry else ''}={tens}"
    return Problem(f"{a}+{b}?", str(10 * tens + units % 10), solution, subject="arithmetic")


# each tag, with its slash wrong, and misspelt
BROKEN_TAGS = (("<reasoning>", "</reasoning>", "<reason>"),
               ("</reasoning>", "<reasoning>", "</reason>"),
               ("<answer>", "</answer>", "<answering>"),
               ("</answer>", "<answer>", "</answering>"))


def imperfect_demonstration(problem, rng, wrong=0.45, broken=0.25):
    """A demonstration for the warm-up, which leaves RL something to improve. Independent draws from
    rng (random.Random): with probability `wrong` the units, the tens or both are off by one, and so
    is the answer that follows from them; with probability `broken` one of the four tags is missing,
    misspelt, or has its slash wrong."""
    a, b = map(int, problem.question.removesuffix("?").split("+"))
    # The two steps slip independently, so that a policy that copies each step's odds is right as
    # often as the demonstrations are.
    odds = 1 - (1 - wrong) ** 0.5
    units_slip, tens_slip = (rng.choice((-1, 1)) if rng.random() < odds else 0 for _ in range(2))
    if a % 10 + b % 10 + units_slip < 0:  # 0+0 cannot be one less
        units_slip = 1
    text = demonstration(addition(a, b, units_slip, tens_slip))
    if rng.random() < broken:
        tag, slashed, misspelt = rng.choice(BROKEN_TAGS)
        text = text.replace(tag, rng.choice(("", slashed, misspelt)))
    return text


# ----------------------------------------------------------------------------------------
# the tokenizer and the model

MERGES = "r e|a s|o n|re as|reas on|i n|in g|a n|s w|e r|an sw|answ er|< /".split("|")
CONTROL_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = """{%- for message in messages -%}
    {%- if message.role == 'user' -%}{{ '<|user|>' + message.content }}
    {%- elif message.role == 'assistant' -%}{{ '<|assistant|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'system' and loop.first -%}{# left out: too long for this model #}
    {%- else -%}{{ raise_exception('user and assistant; a system message only at its start') }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"""


def write_byte_tokenizer(folder):
    """Writes the tokenizer of the default run as a Hugging Face folder. Ids 0-255 are the bytes;
    then come the pieces `reason`, `ing`, `answer` and `</` with what they are built of; then
    <|end|> (ends a turn, also pads), <|user|> and <|assistant|>: 272 ids. Its chat template leaves
    a system message out."""
    vocab = {ALPHABET[b]: b for b in range(256)}
    vocab |= {merge.replace(" ", ""): 256 + i for i, merge in enumerate(MERGES)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    spec = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": len(vocab) + i, "content": token, **flags}
                         for i, token in enumerate(CONTROL_TOKENS)],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": MERGES}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>",
              "pad_token": "<|end|>", "model_max_length": 10**9,
              "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE}
    os.makedirs(folder, exist_ok=True)
    for name, content in (("tokenizer.json", spec), ("tokenizer_config.json", config)):
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        write_whole(os.path.join(folder, name), lambda f: f.write(text))


def make_tiny_model(folder, seed):
    """Writes the default policy, an untrained Llama of 0.7 million parameters, and its byte
    tokenizer as a Hugging Face folder."""
    write_byte_tokenizer(folder)
    tokenizer = Tokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    model = GPT(Config(dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=tokenizer.vocab_size,
        hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, rms_norm_eps=1e-6, rope_theta=10000.0,
        hidden_act="silu", tie_word_embeddings=False, initializer_range=0.02,
        eos_token_id=tokenizer.eos_ids[0], pad_token_id=tokenizer.pad_id, torch_dtype="float32")))
    model.save_pretrained(folder)
