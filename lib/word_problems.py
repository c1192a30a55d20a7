"""
One-step word problems, made on the spot: a task for a small pretrained model, which can do it now
and then, on a laptop CPU (config/smollm2_135m.toml).
"""
from data import Problem, digest, on_side

# (story, its operation); {a} {sign} {b} = {c}
STORIES = (
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", "+"),
    ("There are {a} {things} in one box and {b} in another. How many {things} are there?", "+"),
    ("{name} has {a} {things}. {other} has {b} more than {name}. How many {things} does {other} "
     "have?", "+"),
    ("After giving away {b} {things}, {name} has {a} left. How many {things} did {name} have "
     "before?", "+"),
    ("{name} has {a} {things} and gives {b} of them to {other}. How many {things} are left?", "-"),
    ("{name} needs {a} {things} and has {b}. How many {things} are missing?", "-"),
    ("{name} has {a} {things}. {other} has {b} fewer. How many {things} does {other} have?", "-"),
    ("Of {a} {things} in a shop, {b} are red and the others are blue. How many are blue?", "-"),
    ("{name} fills {a} boxes with {b} {things} each. How many {things} are in the boxes?", "*"),
    ("{name} buys {a} {things} for {b} dollars each. How many dollars does {name} pay?", "*"),
    ("{name} collects {b} {things} a day. How many {things} does {name} collect in {a} days?", "*"),
    ("{name} has {b} {things}, and {other} has {a} times as many. How many {things} does {other} "
     "have?", "*"),
    ("{name} shares {a} {things} equally among {b} friends. How many {things} does each get?", "/"),
    ("{name} puts {a} {things} into bags of {b}. How many bags does {name} need?", "/"),
    ("{name} pays {a} dollars for {b} {things}. How many dollars does one cost?", "/"),
    ("A row has {b} {things}. How many rows do {a} {things} make?", "/"))
NAMES = "Ana Ben Chloe David Emma Felix Grace Hugo Ivy Jack Kim Leo Mia Noah Olga Paul".split()
THINGS = "apples balls cards coins eggs flowers keys lamps maps nuts pens plates shells".split()


def word_problem(number):
    """The problem of this number: all choices follow from it."""
    draw = iter(digest("word problem", number))
    story, sign = STORIES[next(draw) % len(STORIES)]
    name, other = NAMES[::2][next(draw) % 8], NAMES[1::2][next(draw) % 8]  # never the same
    things = THINGS[next(draw) % len(THINGS)]
    if sign in "+-":
        a, b = 10 + next(draw) % 50, 2 + next(draw) % 30
        c = a + b
        if sign == "-":
            a, c = c, a
    else:
        a, b = 3 + next(draw) % 10, 2 + next(draw) % 8
        c = a * b
        if sign == "/":
            a, c = c, a
    question = story.format(name=name, other=other, things=things, a=a, b=b)
    return Problem(question, str(c), f"{a} {sign} {b} = {c}", subject=sign)


def word_problems(split="train"):
    """The problems of a split; of both there are about 7,800."""
    problems = dict.fromkeys(map(word_problem, range(8000)))
    return [p for p in problems if on_side(p.question, split)]
