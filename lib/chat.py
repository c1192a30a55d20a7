"""The chat template of a folder: found, run in a sandbox, and its markers kept apart from data.

A template is a program that came with a model. It is run as in transformers, but with bounds on
what it may compute. Text of the messages never becomes a control token: `hide_text` shows which
characters of a rendered chat are the messages' own.
"""
import datetime
import itertools
import json
import re
import sys
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from lib.files import read_json

# Lines that a template may execute; a long chat takes some thousands.
TEMPLATE_STEPS = 3_000_000


class Sandbox(ImmutableSandboxedEnvironment):
    """Refuses 9**9**9 and 'x' * 10**10 too: one such step would keep the machine busy for good."""
    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context, operator, left, right):
        def size(x):
            return abs(x) if isinstance(x, int) else len(x) if hasattr(x, "__len__") else 1

        if operator == "**" or size(left) * size(right) > 10**7:
            raise SecurityError(f"the template computes a huge or unbounded {operator}")
        return super().call_binop(context, operator, left, right)


def compile_template(source):
    """A jinja2 template, set up as in transformers."""
    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    # {% generation %} marks what the assistant says, for those who want a mask; here its content
    # is all that matters
    source = re.sub(r"(\{%-?\s*)generation(?=\s*-?%\})", r"\1if true", source)
    source = re.sub(r"(\{%-?\s*)endgeneration(?=\s*-?%\})", r"\1endif", source)
    env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson  # jinja's own filter escapes HTML
    env.globals["raise_exception"] = raise_exception
    # Llama 3's default date: ids must not depend on the day
    env.globals["strftime_now"] = datetime.datetime(2024, 7, 26).strftime
    return env.from_string(source)


def run_limited(function):
    """Calls function, with a ValueError after TEMPLATE_STEPS lines: nested loops must end."""
    left, before = TEMPLATE_STEPS, sys.gettrace()

    def count(frame, event, arg):
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"stopped after {TEMPLATE_STEPS} steps: the template is endless "
                             "or far too slow")
        return count

    sys.settrace(count)
    try:
        return function()
    finally:
        sys.settrace(before)


def read_templates(folder):
    """The chat templates of a folder by name, {} if it has none: chat_template.jinja, else
    tokenizer_config.json, else chat_template.json."""
    template = read_json(folder / "tokenizer_config.json", {}).get("chat_template")
    if not template:
        template = read_json(folder / "chat_template.json", {}).get("chat_template")
    try:
        if (file := folder / "chat_template.jinja").exists():
            template = file.read_text(encoding="utf-8")
        if isinstance(template, str):
            return {"default": template}
        return {t["name"]: t["template"] for t in template or []}
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder}: chat_template is neither a text nor a list of named "
                         f"templates: {error!r}") from None


class ChatTemplate:
    """The templates of a folder.

    sources: {name: text}; named: tokens that a template may write, {"bos_token": "<s>", ...}.
    """

    def __init__(self, folder, sources, named):
        self.folder, self.sources, self.named, self.compiled = folder, sources, named, {}

    def render(self, messages, add_generation_prompt=True, **variables):
        """The text of a chat. ValueError without a template, or when it refuses or fails."""
        if not self.sources:
            raise ValueError(f"{self.folder}: no chat template (chat_template in "
                             "tokenizer_config.json, or chat_template.jinja)")
        if not isinstance(messages, (list, tuple)) or not all(
                isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise ValueError("chat messages must be a list of dicts with role and content, "
                             f"got {messages!r:.200}")
        name = "tool_use" if variables.get("tools") and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ValueError(f"{self.folder}: has chat templates {sorted(self.sources)}, "
                             "but no default one")
        given = {"tools": None, "documents": None, **self.named,
                 "add_generation_prompt": add_generation_prompt, **variables}
        # as transformers: a content that is None is no content
        messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
        try:
            return self._run(name, messages, given)
        except Exception as error:  # a template is a program, it can fail in any way
            reason = str(error) or type(error).__name__
            if self._refuses_system(name, messages, given):
                reason += '; it takes these messages without the system turn: --system_prompt=""'
            raise ValueError(f"{self.folder}: chat template: {reason}") from error

    def _run(self, name, messages, given):
        if name not in self.compiled:
            self.compiled[name] = compile_template(self.sources[name])
        return run_limited(lambda: self.compiled[name].render(given, messages=messages))

    def _refuses_system(self, name, messages, given):
        """Whether messages that failed would not without their system turn."""
        others = [m for m in messages if m["role"] != "system"]
        if len(others) in (0, len(messages)):
            return False
        try:
            self._run(name, others, given)
        except Exception:
            return False
        return True


QUESTION, ANSWER = "gtpoquestion", "gtpoanswer"


def turn_end(template, split):
    """The id of the control token that the template writes after an assistant turn, if any.

    split(text) -> a list of stretches of text and ids of control tokens. None when plain text
    comes next or nothing, when the template refuses or changes the messages, and when the token
    opens a turn: it stands between a question and its answer, but does not follow an answer that
    another question follows.
    """
    def first(text):
        parts = [p for p in split(text) if isinstance(p, int) or p.strip()]
        return parts[0] if parts and isinstance(parts[0], int) else None

    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    try:
        text = template.render(turns, False)
        longer = template.render(turns + turns, False)
    except ValueError:
        return None
    before, found, after = text.rpartition(ANSWER)
    end = first(after) if found else None
    middle = longer.partition(ANSWER)[2]
    if end in split(before.rpartition(QUESTION)[2]) and end != first(middle):
        return None
    return end


# ------------------------------------------------------------------------------------------------
# which characters of a rendered chat are data

def any_of(strings):
    """A regex that captures any of the strings: the leftmost, and there the longest."""
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def map_text(value, change, key=None):
    """A copy of nested messages with change(string) for every string but the roles and types,
    which are the caller's."""
    if isinstance(value, dict):
        return {k: map_text(v, change, k) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_text(v, change, key) for v in value]
    return change(value) if isinstance(value, str) and key not in ("role", "type") else value


def hide_text(render, messages, tokens):
    """The rendered chat in which the messages' own characters are replaced, one for one, by
    private ones that occur nowhere else; and the table that turns them back.

    render(messages) -> text; tokens: all strings that are control tokens.

    The template runs again on messages made of private characters. If the result is the same but
    for those, they show what came from the messages. If not, the template looks at the messages:
    when it trims, white space must be left; when it looks for a token (Qwen3 cuts at </think>),
    the token must be left, or marked at one side.
    """
    def changed(change):
        number = itertools.count()  # strings are visited in a fixed order
        return render(map_text(messages, lambda s: change(next(number), s)))

    texts = []
    plain = changed(lambda n, s: texts.append(s) or s)
    characters, used = set().union(*texts), set().union(plain, *texts, *tokens)
    private = itertools.chain(range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
    private = (chr(c) for c in private if chr(c) not in used)
    mark = next(private, "")
    hidden = {ord(c): p for c, p in zip(sorted(characters), private)}
    if len(hidden) < len(characters):
        raise ValueError("the messages use up the private characters of Unicode")
    back = {ord(p): chr(c) for c, p in hidden.items()}
    visible = {c: p for c, p in hidden.items() if not chr(c).isspace()}

    def attempt(change, left=()):
        """The text with private characters, None when something else changed."""
        try:
            text = changed(change)
        except ValueError:
            return None
        for t in left:
            text = text.replace(t + mark, t.translate(hidden))
            text = text.replace(mark + t, t.translate(hidden))
        text = text.replace(mark, "")
        return text if text.translate(back) == plain else None

    for table in (hidden, visible):
        masked = attempt(lambda n, s: s.translate(table))
        if masked:
            return masked, back
    masked, forms, token = plain, {}, any_of(tokens)
    for n, t in dict.fromkeys((n, t) for n, s in enumerate(texts) for t in token.findall(s)):
        for form in (t.translate(hidden), t + mark, mark + t):
            trial = forms | {(n, t): form}
            text = attempt(lambda n, s: token.sub(lambda m: trial.get((n, m[0]), m[0]), s),
                           {t for _, t in trial})
            if text is not None:
                masked, forms = text, trial
                break
    return masked, back
