"""
A dataclass of settings as a TOML file, as --flags and as --help.

A field is one line, `name: type = default`, its type str, int, float, bool or dict. Its help is
the comment behind it, or in the line above it. A comment after a blank line is a heading.
"""
import inspect
import json
import math
import operator
import re
import textwrap
import tomllib
from dataclasses import asdict
from typing import get_type_hints

from lib.files import expand_home, nearest

PATHS = "out", "model", "adapter", "data", "eval_data", "rescore"
EXPECTED = {str: "text", int: "a whole number", float: "a number", bool: "true or false",
            dict: 'names with values, {"name": value} on the command line'}
BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
BOUNDS = {">=": operator.ge, ">": operator.gt, "<": operator.lt, "<=": operator.le}


def help_text(config_class, introduction):
    """--help: every field with its default and its comment, read from the source."""
    defaults = asdict(config_class())
    lines, before, above = [introduction.strip()], "", ""
    for line in map(str.strip, inspect.getsource(config_class).splitlines()):
        field = re.match(r"(\w+): .*?(?:  # (.*))?$", line)
        if line.startswith("#") and (not before or before.startswith("class ")):
            lines.append("\n" + line.lstrip("# "))
        elif line.startswith("#"):
            above = line.lstrip("# ")
        elif field and field[1] in defaults:
            flag = f"  --{field[1]}={toml_value(defaults[field[1]])}".ljust(36) + " "
            lines.append(textwrap.fill(field[2] or above, 100, initial_indent=flag,
                                       subsequent_indent=" " * 37, break_on_hyphens=False) or flag)
            above = ""
        before = line
    return "\n".join(lines)


def read_config(config_class, argv, file=None, gone={}, aliases={}, bare={}, defaults_of={}):
    """
    The words of a command line, [FILE.toml] and flags -> (config, {setting: value} of the flags).
    A flag is --name=value or --name value, with - or _; one that can stand alone, a bool (which
    is true then) or one in `bare`, takes a value only with "=". Flags win over the file, the file
    over the defaults.

    file         read in place of the one in argv (a run that goes on reads its own)
    gone         {name: what to do instead} of settings that are no more
    aliases      {name: "setting=pattern"}: {"name": "out=out/{}"} reads --name=x as --out=out/x
    bare         {setting: what a flag without value means}
    defaults_of  {setting: {value: {other: default}}}: defaults that hang on another setting's
                 value. That one given as a flag also resets the others that stand in the file.

    ValueError and OSError name the flag, or file and key, and say what would be right.
    """
    kinds = get_type_hints(config_class)
    alone = {name: "true" for name, kind in kinds.items() if kind is bool} | bare

    def setting(name, value, what):
        if name in gone:
            raise ValueError(f"{what} is gone: {gone[name]}")
        if name not in kinds and name not in aliases:
            near = nearest(name, [*kinds, *aliases])
            raise ValueError(f"{what} does not exist; the nearest is {near} (--help lists all)")
        if value is None:
            raise ValueError(f"{what} needs a value: --{name}=...")
        if name in aliases:
            name, _, pattern = aliases[name].partition("=")
            value = pattern.format(value)
        value = convert(kinds[name], value, what)
        return name, expand_home(value) if name in PATHS else value

    found, flags = split_words(argv, alone)
    file = file or found
    given = dict(setting(name, text, f"flag --{name}") for name, text in flags)
    table = read_toml(file) if file is not None else {}
    values = dict(setting(name, value, f"{file}: key {name!r}") for name, value in table.items())

    start = {}
    for name, rows in defaults_of.items():
        if name in given:
            others = set().union(*rows.values())
            values = {key: value for key, value in values.items() if key not in others}
        choice = (values | given).get(name, getattr(config_class, name))
        start |= rows.get(choice, {})
    return config_class(**start | values | given), given


def split_words(argv, alone):
    """Words -> (the one that is no flag, or None; [(name of a flag, its text or None)])."""
    file, flags, words = None, [], list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if file is not None:
                raise ValueError(f"two configuration files given, {file} and {word}; give one, "
                                 "and flags as --name=value")
            file = word
            continue
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        if not equals:
            text = alone.get(name)
            if text is None and words and not words[0].startswith("--"):
                text = words.pop(0)
        flags.append((name, text))
    return file, flags


def read_toml(path):
    """What a TOML file holds, as a dict."""
    try:
        with open(path, "rb") as f:
            return tomllib.load(f)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such configuration file (presets are in config/; "
                                "a flag is --name=value)") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: not valid TOML: {e}") from None


def convert(kind, value, what):
    """The text of a flag, or the value of a TOML key, as the type of the field."""
    given, reason = value, ""
    try:
        if isinstance(value, str) and kind in (bool, dict):
            value = BOOLEANS[value.lower()] if kind is bool else json.loads(value)
        elif isinstance(value, str) or (kind is float and type(value) is int):
            value = kind(value)
        toml_value(value).encode()  # it will be written to the run's config.toml
    except (ValueError, KeyError, OverflowError, RecursionError) as e:
        reason = f" ({e})"
    if reason or type(value) is not kind:
        raise ValueError(f"{what}: expected {EXPECTED[kind]}, found {given!r}{reason}")
    return value


def check_ranges(config, choices, ranges):
    """Refuses a value that is none of choices[name], and a number outside ranges[name], a text such
    as ">= 1" or "> 0 and <= 1", by default ">= 0". Whole numbers stay below 2**31, too."""
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ValueError(f"{name}={value!r}: should be one of {', '.join(allowed)}")
    for name, value in asdict(config).items():
        if type(value) not in (int, float):
            continue
        text = ranges.get(name, ">= 0")
        if type(value) is int:
            text += f" and < {2**31}"
        for bound in text.split(" and "):
            sign, number = bound.split()
            if not BOUNDS[sign](value, float(number)):
                raise ValueError(f"{name}={value}: should be {text}")


def to_toml(config):
    """The text of a TOML file from which read_config makes the same config."""
    return "".join(f"{name} = {toml_value(value)}\n" for name, value in asdict(config).items())


def toml_value(value):
    """One value in TOML. Text, numbers and booleans look as in JSON, but for the DEL character."""
    if isinstance(value, dict):
        items = (f"{toml_value(str(key))} = {toml_value(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, (str, int, float)) or not finite:
        raise ValueError(f"{value} cannot be kept in a settings file")
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
