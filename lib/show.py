"""One group of completions as GTPO sees it: as text for the screen, as a page for the browser.

Marked is every token whose weight lambda is not 1, as what it is: [[..]] has weight 2, ((..))
weight 0, and any other weight stands behind its mark, [[..]]x3.
"""
import html
import os
import sys

MEANING = {2: "conflict tokens where A > 0", 0: "conflict tokens where A < 0, not punished"}
# of a weight: what stands before and behind its tokens, their color on a terminal
MARKS = {2: ("[[", "]]", "1;32"), 0: ("((", "))", "34")}


def printable(text):
    """Control characters escaped: a line stays a line, and nothing that a model or a data set
    writes can steer the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def weighted_runs(tokenizer, ids, lam):
    """The text of a completion as (piece, weight), one for each run of tokens of one weight.
    ids and lam: lists. No piece ends inside a character: one that a run's end cuts goes whole
    into the later run."""
    text, start, place = tokenizer.decode(ids), 0, 0
    for t in range(1, len(ids) + 1):
        if t < len(ids) and lam[t] == lam[start]:
            continue
        whole = len(tokenizer.decode(ids[:t]).rstrip("\ufffd"))
        end = len(text) if t == len(ids) else whole
        if end > place:
            yield printable(text[place:end]), lam[start]
        start, place = t, max(place, end)


def completions(tokenizer, ids, mask, lam):
    """For each completion of a group, ids, mask, lam (G, L): its number of tokens, its runs."""
    for row, real, weights in zip(ids.tolist(), mask.tolist(), lam.tolist()):
        n = sum(real)
        yield n, list(weighted_runs(tokenizer, row[:n], weights[:n]))


def heading(question, gold):
    return printable(question if gold is None else f"{question}   (gold: {gold})")


def legend(mask, lam, mark, sample=".."):
    """What the marks that occur mean."""
    weights = sorted(set(lam[mask.bool()].tolist()) - {1}, reverse=True)
    parts = [f"{mark(sample, w)} weight {w:g}" + (f": {MEANING[w]}" if w in MEANING else "")
             for w in weights]
    return "; ".join([*parts, "all else weight 1"])


# ---- on the screen -------------------------------------------------------------------------------

def text_mark(piece, weight, color=False):
    """A piece with the marks of its weight, and in color if asked for."""
    if weight == 1:
        return piece
    before, behind, code = MARKS.get(weight, ("[[", f"]]x{weight:g}", "35"))
    piece = before + piece + behind
    return f"\x1b[{code}m{piece}\x1b[0m" if color else piece


def show_group(tokenizer, question, gold, ids, mask, rewards, advantages, entropy, kept, lam):
    """One group as text, in color on a screen. ids, mask, lam (G, L): lam holds the weights that
    were used; rewards, advantages, entropy, kept (G,). gold may be None."""
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    lines = [heading(question, gold), "reward  advantage  entropy  tokens"]
    for g, (n, runs) in enumerate(completions(tokenizer, ids, mask, lam)):
        figures = f"{rewards[g]:6.1f} {advantages[g]:+10.2f} {entropy[g]:8.3f} {n:7d}"
        text = "".join(text_mark(piece, weight, color) for piece, weight in runs)
        lines.append(f"{figures}  {'' if kept[g] else '(filtered) '}{text}")
    return "\n".join([*lines, legend(mask, lam, text_mark)])


# ---- in the browser ------------------------------------------------------------------------------

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>A group as GTPO sees it</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff;
       max-width: 44rem; margin: 1rem auto; padding: 0 .8rem; }
h1 { font-size: 1.3rem; margin: .5rem 0; } p { margin: .5rem 0; } ol { padding: 0; margin: 0; }
li { list-style: none; margin: .6rem 0; padding: .1rem .7rem; border-left: .3rem solid #999; }
li.good { border-color: #2a9d4a; } li.bad { border-color: #4a5fd0; } .filtered code { opacity: .5; }
small { color: #555; font-variant-numeric: tabular-nums; }
code { display: block; font-size: 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.x2 { background: #bfeac8; font-weight: bold; }
.x0 { background: #d5dcfa; text-decoration: underline; }
.other { background: #fbe3a6; }
</style>
<h1>A group as GTPO sees it</h1>
"""


def page_mark(piece, weight):
    """A piece as HTML, marked as its weight asks for."""
    piece = html.escape(piece)
    if weight == 1:
        return piece
    if weight in (0, 2):
        return f'<span class="x{weight:g}" title="weight {weight:g}">{piece}</span>'
    return f'<span class="other" title="weight {weight:g}">{piece}<sub>x{weight:g}</sub></span>'


def group_page(tokenizer, question, gold, ids, mask, rewards, advantages, entropy, kept, lam):
    """The same as show_group, as one self-contained HTML page that a phone has room for."""
    items = []
    for g, (n, runs) in enumerate(completions(tokenizer, ids, mask, lam)):
        sign = "good" if advantages[g] > 1e-6 else "bad" if advantages[g] < -1e-6 else "tied"
        figures = (f"reward {rewards[g]:.1f}, A {advantages[g]:+.2f}, entropy {entropy[g]:.3f}, "
                   f"{n} tokens{'' if kept[g] else ', filtered'}")
        text = "".join(page_mark(piece, weight) for piece, weight in runs)
        items.append(f'<li class="{sign}{"" if kept[g] else " filtered"}">'
                     f"<small>{figures}</small><code>{text}</code></li>")
    asked = html.escape(heading(question, gold))
    return (f"{PAGE}<p>{asked}</p>\n<ol>\n" + "\n".join(items) + "\n</ol>\n"
            + f"<p>{legend(mask, lam, page_mark, 'like this')}.</p>\n"
            + "<p>A: the advantage. Entropy: mean over the tokens, in nats.</p>\n</html>\n")
