"""What README.md and docs/ say stays true: links, files, commands, messages, the worked example."""
import contextlib
import importlib
import json
import math
import re
import shlex
from pathlib import Path

import pytest
import torch

import eval as eval_py
import train
from gtpo import conflict_weights, group_advantages, token_weights

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [ROOT, ROOT / "lib", ROOT / "tools"]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in (
    ROOT / "README.md", *sorted(ROOT.glob("experiments/*.md")), *sorted(ROOT.glob("docs/*.md")))}
README = PAGES["README.md"]
ELSEWHERE = {"config.toml", "gtpo/gtpo_training.py"}  # in a run's folder, in the authors' code


def anchors(text):
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_files(page):
    """Regression: links to lines of the code were wrong after every edit. A link names a file, and
    the pieces of code shown behind it, in backticks, stand in that file."""
    text, wrong = PAGES[page], []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not target.startswith("https://") and not (
                file.exists() and (not anchor or anchor in anchors(file.read_text("utf-8")))):
            wrong.append(target)
    shown = r"\]\((?:\.\./)?([\w/]+\.py)\)((?:(?: \|| and)? `[^`]+`)+)"
    for file, pieces in re.findall(shown, text):
        source = (ROOT / file).read_text(encoding="utf-8")
        wrong += [f"{file}: {piece}" for piece in re.findall(r"`([^`]+)`", pieces)
                  if piece.replace("\\|", "|") not in source]
    named = set(re.findall(r"[\w./]*\w\.(?:py|toml)\b", text)) - ELSEWHERE
    wrong += [name for name in named
              if not any((folder / name.removeprefix("../")).exists() for folder in FOLDERS)]
    assert not wrong


def test_the_map_is_complete():
    """Every file of the root, of lib/ and of tools/ has its line."""
    tree = README.split("## The map")[1].split("```")[1]
    listed = re.findall(r"^ *(\w+\.py) ", tree, re.MULTILINE)
    there = [path.name for folder in FOLDERS for path in folder.glob("*.py")]
    assert sorted(listed) == sorted(name for name in there if name != "__init__.py")


def test_the_worked_example():
    """The weights of GRPO and GTPO on the shared first token, and the marks of the table."""
    rows = re.findall(r"^\| (\d+) \| ([+-]\d+) \| (\d+) \| (.*) \|$", README, re.MULTILINE)
    assert len(rows) == 4
    words = [re.sub(r"[*~`]+", "", text).split() for *_, text in rows]
    assert [len(w) for w in words] == [int(n) for _, _, n, _ in rows]
    number = {word: i for i, word in enumerate(dict.fromkeys(sum(words, [])))}
    ids, mask = torch.zeros(2, 4, max(map(len, words)), dtype=torch.long)  # (G, L)
    for i, row in enumerate(words):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor([number[w] for w in row]), 1
    advantages = group_advantages(torch.tensor([float(reward) for reward, *_ in rows]))  # (G,)
    assert advantages.tolist() == [float(a) for _, a, *_ in rows]
    lam = conflict_weights(ids, mask, advantages)  # (G, L)
    grpo, gtpo = (token_weights(advantages, mask, x)[:, 0].sum() for x in (1.0, lam))
    assert f"= {grpo:.3f}`: the tag is **punished**" in README and f"= +{gtpo:.3f}`" in README
    shown = []
    for *_, text in rows:
        for mark, piece in re.findall(r"(\*\*|~~)?`([^`]*)`(?:\*\*|~~)?", text):
            shown += [{"**": 2, "~~": 0, "": 1}[mark]] * len(piece.split())
    assert shown == lam[mask.bool()].tolist()


def commands():
    """(page, command) of all that is documented and starts one of our programs."""
    for page, text in PAGES.items():
        blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
        lines = [part for line in blocks.splitlines() for part in line.split(" #")[0].split("&&")]
        for line in [*lines, *re.findall(r"`([^`\n]+)`", text)]:
            if re.match(r"\s*(\S+=\S+ )?(\S+/)?(python|torchrun) .*\w", line) and "..." not in line:
                yield page, line.strip()


class Started(Exception):
    """In place of what a command does once its flags are read and checked."""


def started(*_):
    raise Started


@pytest.mark.parametrize("page, command", sorted(set(commands())))
def test_commands(page, command, tmp_path, monkeypatch, capsys):
    """Regression: documented commands had flags that the program did not know."""
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
    program = words[at + 1] if words[at] == "-m" else words[at]
    argv = [str(ROOT / w) if w.startswith("config/") else w for w in words[at + 1 :]]
    counts = [int(word.split("=")[1]) for word in words[:at] if word.startswith("--n")]
    monkeypatch.setenv("WORLD_SIZE", str(math.prod(counts)))
    monkeypatch.setattr(train, "Processes", started)
    monkeypatch.chdir(tmp_path)
    if program == "train.py" and "--help" not in argv:
        with pytest.raises(Started):
            train.main([word for word in argv if word != "--plan"])
    elif program == "eval.py" and "--help" not in argv:
        eval_py.parse(argv)
    elif flags := {word.split("=")[0] for word in argv if word.startswith("--")}:
        names = {"data.py": "tools.download"}
        module = importlib.import_module(names.get(program, program.removesuffix(".py")))
        with contextlib.suppress(SystemExit):
            module.main(["--help"])
        text = capsys.readouterr().out
        assert all(re.search(rf"{flag}\b", text) for flag in flags - {"--help"})


def test_the_glossary_names_every_figure(tmp_path):
    train.main([f"--out={tmp_path}", "--sft_steps=1", "--sft_batch_size=1", "--steps=1",
                "--prompts_per_step=1", "--group_size=2", "--eval_problems=0"])
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    names = set().union(*map(json.loads, rows)) - {"step", "phase"}
    first_column = re.findall(r"^\| ([^|]+) \|", PAGES["docs/metrics.md"], re.MULTILINE)
    assert len(names) > 16 and names <= set(re.findall(r"\w+", " ".join(first_column)))


def test_the_messages_of_the_guide_are_those_of_the_code():
    source = "".join(path.read_text("utf-8") for folder in FOLDERS for path in folder.glob("*.py"))
    source = re.sub(r'"\s+f?"', "", source)  # texts that go over lines
    table = PAGES["docs/models.md"].split("| message | do |")[1]
    pieces = [piece.strip() for message in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
              for piece in message.split("...")]
    assert len(pieces) > 12 and all(piece in source for piece in pieces)
