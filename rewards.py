"""
Rewards by rule: is the completion in the format, and is its answer equal to the gold answer?

    format_reward(text)          0, 1, 1.5 or 10     the tags
    accuracy_reward(text, gold)  0 or 10             the answer, only in the full format
    reward_parts(text, gold)     both by name        their sum is what training is paid
    extract_answer(text)         the answer as text, or None
    answers_equal(pred, gold)    True or False       how answers are compared: lib/grading.py

A completion that earns everything, 20, for the gold answer 4:

    <reasoning>2 + 2 = 4</reasoning><answer>4</answer>

No model judges, and no text is evaluated: all are pure functions of strings, fast on any text, and
give the same verdict every time. Pass the completion alone, never the prompt (its instructions name
the tags). `python rewards.py` prints a table of hard cases.
"""
import argparse

from lib.grading import answers_equal, is_empty, last_boxed, print_table, unboxed

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def after_thought(text):
    """What a completion says: what follows its last </think>; nothing when a <think> never ends.
    Neither format nor answer are looked for in a thought."""
    said = text.rpartition("</think>")[2]
    return "" if "<think>" in said else said


def format_reward(text):
    """Reward for the format as in the GTPO paper (arXiv 2508.03772): 10.0, 1.5, 1.0 or 0.0.

    10.0  `<reasoning>..</reasoning>` and then `<answer>..</answer>`: each of the four tags exactly
          once, in this order, an answer that holds something, and nothing but white space after
          the last tag. Text before the first block and between the two is allowed, as it is in
          the authors' code.
    1.5   one block is right and a tag of the other is present: an empty answer, both blocks in the
          wrong order, text after the end.
    1.0   one block is right and there is no tag of the other.
    0.0   neither is right.
    A block is right when its two tags occur exactly once each, in order; the answer block must also
    hold something and end the text.

    The authors' code differs in two points. It lets tags repeat; here a repeated tag spoils its
    block, so that a text that starts over earns less than a clean one. And it pays 10 for an empty
    answer block, which a policy finds within a dozen steps.
    """
    text = after_thought(text)
    once = [text.find(tag) if text.count(tag) == 1 else -1 for tag in TAGS]
    start, end, answer_start, answer_end = once
    reasoning = 0 <= start < end
    answer = (0 <= answer_start < answer_end and not text[answer_end + len(TAGS[3]):].strip()
              and not is_empty(text[answer_start + len(TAGS[2]):answer_end]))
    if reasoning and answer and end < answer_start:
        return 10.0
    if not reasoning and not answer:
        return 0.0
    other = TAGS[2:] if reasoning else TAGS[:2]
    return 1.5 if any(tag in text for tag in other) else 1.0


def accuracy_reward(text, gold):
    """10.0 when the completion has the full format and the answer in its answer block equals gold,
    else 0.0. A gold that is no answer (empty, `proof`, `unknown`, `see figure`) pays nobody."""
    right = format_reward(text) == 10.0 and answers_equal(extract_answer(text), gold)
    return 10.0 if right else 0.0


def reward_parts(text, gold=None):
    """What a completion is paid for, by name; its reward is the sum. train.py and sample.py take it
    from here: add your own parts here. Without a gold answer only the format counts."""
    accuracy = 0.0 if gold is None else accuracy_reward(text, gold)
    return {"format": format_reward(text), "accuracy": accuracy}


def extract_answer(text):
    """The final answer of a completion, or None: the last complete <answer> block (or the \\boxed{}
    in it), else the last \\boxed{...}.

    A number found elsewhere is never taken, nor what stands in a thought, nor a box in the
    reasoning: before </reasoning>, or in a block that never ends."""
    text = after_thought(text)
    begun = text.split("<answer>")[1:]
    blocks = [part.partition("</answer>")[0] for part in begun if "</answer>" in part]
    if blocks:
        return unboxed(blocks[-1])
    said = text.rpartition("</reasoning>")[2]
    return None if "<reasoning>" in said else last_boxed(said)


if __name__ == "__main__":
    argparse.ArgumentParser(description="Prints a table of hard cases.").parse_args()
    print_table()
