"""lib/config.py: a dataclass of settings as TOML, flags and help; and the presets in config/."""
import pathlib
import tomllib
from dataclasses import asdict, dataclass, field

import pytest

import train
from lib.config import check_ranges, help_text, read_config, to_toml

PRESETS = sorted((pathlib.Path(__file__).parents[1] / "config").glob("*.toml"))


@dataclass
class Settings:
    # what to train
    out: str = "out/demo"  # folder of the run
    algo: str = "gtpo"  # gtpo, grpo or sft
    # a long comment, for which there is no room behind, stands above its field, --like-this
    model: str = ""

    # how
    steps: int = 3
    rate: float = 3e-4  # peak
    overwrite: bool = False
    resume: str = "no"
    template_variables: dict = field(default_factory=dict)  # of the chat template

    # switches
    gamma: float = 0.1
    conflict: bool = True


RULES = dict(
    gone={"out_dir": "use --out=FOLDER", "merge": "save the merged model"},
    aliases={"name": "out=out/{}"},
    bare={"resume": "yes"},
    defaults_of={"algo": {"grpo": {"gamma": 0.0, "conflict": False}, "gtpo": {"gamma": 0.1}}},
)


def read(*argv, **more):
    return read_config(Settings, argv, **RULES, **more)


def written(folder, text):
    (folder / "a.toml").write_text(text, encoding="utf-8")
    return str(folder / "a.toml")


# ---- flags and files

def test_flags_take_the_type_of_the_field():
    """`--rate=1` was refused as no float, `--out=2024` as no text; `--flag value`, `-` and `_`,
    booleans and `bare` flags that stand alone."""
    c, given = read("--rate=1", "--out=2024", "--conflict=false", "--overwrite", "--resume",
                    "--steps", "-7", "--model", "", '--template-variables={"thinking": false}')
    assert c == Settings(rate=1.0, out="2024", conflict=False, overwrite=True, resume="yes",
                         steps=-7, template_variables={"thinking": False})
    assert type(c.rate) is float and Settings(**given) == c and len(given) == 8


def test_a_tilde_is_the_users_home(tmp_path, monkeypatch):
    """--out=~/x made a folder named ~; no shell expands it there."""
    monkeypatch.setenv("HOME", "/home/me")
    assert read("--out=~/x")[0].out == "/home/me/x" == read(written(tmp_path, "out = '~/x'"))[0].out
    assert read("--model=~/a.jsonl,gsm8k,~/b")[0].model == "/home/me/a.jsonl,gsm8k,/home/me/b"
    assert read("--out=a~/b,c~")[0].out == "a~/b,c~"


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    """A flag that can stand alone leaves the next word; a file given by the caller, as by a run
    that goes on, takes the place of the preset."""
    path = written(tmp_path, "steps = 5\nrate = 1\n")
    assert read(path, "--steps=6") == (Settings(steps=6, rate=1.0), {"steps": 6})
    assert read("--overwrite", path)[0] == Settings(steps=5, rate=1.0, overwrite=True)
    assert read("preset.toml", "--steps=6", file=path)[0] == Settings(steps=6, rate=1.0)


@pytest.mark.parametrize("flag, text", [
    ("--name={mine}", 'name = "{mine}"'),  # an alias of out
    ('--template_variables={"thinking": false, "tools": ["a", {"b": 2}]}',
     "[template_variables]\nthinking = false\ntools = ['a', {b = 2}]")])
def test_a_file_says_the_same_as_a_flag(tmp_path, flag, text):
    c, given = read(flag)
    assert c == read(written(tmp_path, text))[0] != Settings()


@pytest.mark.parametrize("argv, says", [
    (["--stpes=1"], "flag --stpes does not exist; the nearest is steps "),
    (["--steps=1.5"], "flag --steps: expected a whole number, found '1.5'"),
    (["--rate=nan"], "a number"), (["--rate=1e999"], "a number"),
    (["--conflict=maybe"], "true or false, found 'maybe'"),
    (["--steps", "--resume"], "flag --steps needs a value: --steps=..."),
    (["a.toml", "b.toml"], "two configuration files given, a.toml and b.toml"),
    (["--merge"], "flag --merge is gone: save the merged model"),
    (["--template_variables={a: 1}"], r"command line, found '{a: 1}'"),
    (['--template_variables={"a": [NaN]}'], "nan cannot be kept"),
    (["--template_variables=" + '{"a":' * 2000 + "1" + "}" * 2000], "names with values"),
    (["--out=\udcff"], "expected text"),
    (["steps=5"], "steps=5: no such configuration file (presets are in config/; a flag is --name="),
])
def test_bad_flags_are_named(argv, says):
    with pytest.raises((ValueError, FileNotFoundError)) as e:
        read(*argv)
    assert says in str(e.value)


@pytest.mark.parametrize("text, says", [
    ("stpes = 1", "key 'stpes' does not exist; the nearest is steps "),
    ("steps = '5'x", "not valid TOML"), ("steps = " + "9" * 5000, "not valid TOML"),
    ("x = " + "[" * 5000, "not valid TOML"), ("steps = true", "key 'steps': expected a whole"),
    ("rate = 1" + "0" * 400, "a number"), ("out = 2024", "text, found 2024"),
    ("merge = true", "key 'merge' is gone: save the merged model"),
    ("[template_variables]\nday = 2026-01-01", "2026-01-01 cannot be kept"),
])
def test_bad_toml_is_named(tmp_path, text, says):
    """A whole number of 400 digits for a float, and one of 5,000, were tracebacks once."""
    path = written(tmp_path, text)
    with pytest.raises(ValueError) as e:
        read(path)
    assert says in str(e.value) and path in str(e.value)


# ---- settings that decide the defaults of others

@pytest.mark.parametrize("file, flags, gamma, conflict", [
    ("", [], 0.1, True),
    ("", ["--algo=grpo"], 0.0, False),
    ("algo = 'grpo'", [], 0.0, False),
    ("gamma = 0.5\nalgo = 'grpo'", [], 0.5, False),               # a key of the file wins
    ("algo = 'grpo'\ngamma = 0.5", ["--gamma=0.7"], 0.7, False),  # a flag wins over the key
    ("gamma = 0.5\nconflict = true", ["--algo=grpo"], 0.0, False),  # --algo resets both keys
    ("gamma = 0.5", ["--gamma=0.7", "--algo=grpo"], 0.7, False),  # but no flag
    ("algo = 'grpo'\ngamma = 0.5", ["--algo=sft"], 0.1, True),    # sft has no row: the fields'
])
def test_algo_sets_the_defaults_of_the_switches(tmp_path, file, flags, gamma, conflict):
    """Field < row of algo < file (without the switches if --algo is a flag) < flag."""
    c = read(written(tmp_path, file + "\nsteps = 9"), *flags)[0] if file else read(*flags)[0]
    assert (c.gamma, c.conflict) == (gamma, conflict)
    assert c.steps == (9 if file else 3)                          # no switch: never reset


# ---- ranges

@pytest.mark.parametrize("change, says", [
    ({"algo": "ppo"}, "algo='ppo': should be one of gtpo, grpo, sft"),
    ({"steps": -1}, "steps=-1: should be >= 0"), ({"rate": 0.0}, "rate=0.0: should be > 0"),
    ({"steps": 2**31}, "steps=2147483648: should be >= 0 and < 2147483648"),
    ({"gamma": 1.0}, "gamma=1.0: should be >= 0 and < 1"),
])
def test_values_that_cannot_work_are_refused(change, says):
    choices, ranges = {"algo": ("gtpo", "grpo", "sft")}, {"rate": "> 0", "gamma": ">= 0 and < 1"}
    for right in ({}, {"steps": 0}, {"steps": 2**31 - 1}, {"gamma": 0.0}, {"rate": 1e-9}):
        check_ranges(Settings(**right), choices, ranges)
    with pytest.raises(ValueError) as e:
        check_ranges(Settings(**change), choices, ranges)
    assert str(e.value).startswith(says)


# ---- written and shown

def test_a_written_configuration_reads_back(tmp_path):
    """An emoji was written as two surrogates, DEL as it is: no TOML, and the run did not resume."""
    c = Settings(out='say "hi"\n\\ <b>\t\x01\x7f 😀', rate=1e-6, gamma=1e300, template_variables={
        "thinking": False, "no \"bare\" key": [1, "é😀\x7f", {"a": {}, "b": 2.5}, []], "date": ""})
    assert Settings(**tomllib.loads(to_toml(c))) == c == read(written(tmp_path, to_toml(c)))[0]


def test_help_shows_each_field_with_default_and_comment():
    text = help_text(Settings, "Trains.\n")
    assert text.startswith(f"""Trains.

what to train
{'  --out="out/demo"':36} folder of the run
{'  --algo="gtpo"':36} gtpo, grpo or sft
{'  --model=""':36} a long comment, for which there is no room behind, stands above
{'':36} its field, --like-this

how
""")
    assert f"{'  --rate=0.0003':36} peak\n  --overwrite=false" in text
    assert "  --template_variables={}            of the chat template\n\nswitches\n" in text


# ---- the presets in config/

def training(*words):
    c, _ = train.settings([str(word) for word in words])
    train.check(c, 1)
    return asdict(c)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets(path):
    """They begin with their command and set only what differs. Those for pretrained models cut
    completions at 128 tokens: the answers of Qwen2.5-3B-Instruct have 205 to 443, so no completion
    earned anything."""
    text = path.read_text(encoding="utf-8")
    keys, defaults, c = tomllib.loads(text), training(), training(path)
    assert text.startswith("# ") and f"train.py config/{path.name}" in text.split("\nout = ")[0]
    assert keys["out"] == f"out/{path.stem}" and c == {**defaults, **keys}
    same = [key for key in keys if keys[key] == defaults[key]]
    assert same == (["out", "data"] if path.stem == "arithmetic" else [])
    if path.stem not in ("arithmetic", "gsm8k_random", "smollm2_135m"):  # which have short answers
        assert c["max_new_tokens"] >= 512 and c["max_prompt_tokens"] >= 384
        assert c["learning_rate"] <= 1e-5


@pytest.mark.parametrize("name", ("qwen2.5_3b", "llama3.1_8b"))
@pytest.mark.parametrize("data, problems", (("gsm8k", 7473), ("math", 7500)))
def test_the_papers_presets_have_its_settings(name, data, problems):
    """Those of the preset and those that it leaves at their defaults; one epoch on 8 GPUs."""
    c = training(PRESETS[0].parent / f"{name}_{data}.toml")
    paper = dict(algo="gtpo", data=data, lora_rank=128, learning_rate=1e-6, grad_clip=0.1,
                 gamma=0.1, conflict=True, entropy_filter=True, scale="none", epsilon=0.0,
                 temperature=1.0, sft_steps=0, group_size=8, max_prompt_tokens=4000,
                 max_new_tokens=1500)
    assert {key: c[key] for key in paper} == paper
    assert c["prompts_per_step"] % 8 == 0 and c["steps"] == problems // c["prompts_per_step"]
