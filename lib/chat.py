"""The chat template of a folder: found, run in a sandbox, and its markers kept apart from data.

A template is a program that came with a model; it is run as in transformers. Text of the messages
never becomes a control token: `hide_text` shows which characters of a rendered chat are the
messages' own.
"""
import datetime
import json
import re

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lib.files import read_json, refuse_lfs_pointer


def compile_template(source):
    """(jinja2 template, set up as in transformers; names of the variables that it reads)."""
    def raise_exception(message):
        raise jinja2.TemplateError(message)

    # {% generation %} marks what the assistant says; here its content is all that matters
    source = re.sub(r"(\{%-?\s*)(end)?generation(?=\s*-?%\})",
                    lambda m: m[1] + ("endif" if m[2] else "if true"), source)
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    # Llama 3's default date: ids must not depend on the day
    env.globals["strftime_now"] = datetime.datetime(2024, 7, 26).strftime
    return env.from_string(source), jinja2.meta.find_undeclared_variables(env.parse(source))


def read_template(folder):
    """The chat template of a folder, None if it has none: chat_template.jinja, else that of
    tokenizer_config.json; the default one where there are several."""
    file = folder / "chat_template.jinja"
    if file.exists():
        template = file.read_text(encoding="utf-8")
        refuse_lfs_pointer(file, template.encode())
        return template
    template = read_json(folder / "tokenizer_config.json", {}).get("chat_template")
    if isinstance(template, list):
        template = next((t.get("template") for t in template
                         if isinstance(t, dict) and t.get("name") == "default"), None)
    return template


class ChatTemplate:
    """A chat template; source None: there is none.

    folder: named in messages; named: tokens that a template may write, {"bos_token": "<s>", ...}.
    """

    def __init__(self, folder, source, named):
        self.folder, self.source, self.named, self.compiled = folder, source, named, None

    def render(self, messages, add_generation_prompt=True, **variables):
        """The text of a chat. ValueError without a template, or when it refuses or fails."""
        if not self.source:
            raise ValueError(f"{self.folder}: no chat template (chat_template in "
                             "tokenizer_config.json, or chat_template.jinja)")
        # as in transformers: a content that is None is no content
        messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
        given = {"tools": None, "documents": None, **self.named,
                 "add_generation_prompt": add_generation_prompt, **variables}
        try:
            self.compiled = self.compiled or compile_template(self.source)
            template, reads = self.compiled
            for name in variables.keys() - reads:
                names = ", ".join(sorted(reads - {"messages", "add_generation_prompt"}))
                raise ValueError(f"it reads no variable {name!r} (template_variables), "
                                 f"only: {names}")
            return template.render(given, messages=messages)
        except Exception as error:  # a template is a program, it can fail in any way
            reason = str(error) or type(error).__name__
            # it says no by raise_exception, which is a TemplateError and no kind of it
            if type(error) is jinja2.TemplateError and any(m["role"] == "system" for m in messages):
                reason += '; if it takes no system turn, give --system_prompt=""'
            raise ValueError(f"{self.folder}: chat template: {reason}") from error


def check_variables(variables):
    """ValueError if template variables have a name that the call of the template takes itself."""
    taken = {"self", "messages", "add_generation_prompt"} & set(variables)
    if taken:
        raise ValueError(f"template_variables: {min(taken)!r} cannot be set, the template is given "
                         "its own; take another name")


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


# ---- which characters of a rendered chat are data ------------------------------------------------

def any_of(strings):
    """A regex that captures any of the strings: the leftmost, and there the longest."""
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def map_text(value, change, key=None):
    """A copy of nested messages with change(string) for every string, in a fixed order, but the
    roles and types, which are the caller's."""
    if isinstance(value, dict):
        return {k: map_text(v, change, k) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_text(v, change, key) for v in value]
    return change(value) if isinstance(value, str) and key not in ("role", "type") else value


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """transformers' filter of this name: jinja's own escapes HTML. What hide_text put in is never
    escaped, or it could not find it again."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)
    private = r"\\udb[89ab][0-9a-f]\\ud[c-f][0-9a-f]{2}"  # from U+F0000, as a pair of surrogates
    return re.sub(private, lambda pair: json.loads(f'"{pair[0]}"'), text)


def hide_text(render, messages, tokens):
    """The rendered chat in which the messages' own characters are replaced, one for one, by
    private ones that occur nowhere else; and the table that turns them back.

    render(messages) -> text; tokens: all strings that are control tokens.

    The template runs again on messages made of private characters. If the result is the same but
    for those, they show what came from the messages. If not, the template looks at the messages:
    when it trims, white space must be left; when it looks for a token (Qwen3 cuts at </think>),
    the token must be left, or marked at one side.
    """
    texts = []
    plain = render(map_text(messages, lambda s: texts.append(s) or s))
    characters = set().union(*texts)
    used = characters.union(plain, *tokens)
    private = (chr(c) for c in range(0xF0000, 0xFFFFE) if chr(c) not in used)
    hidden = {ord(c): p for c, p in zip(sorted(characters), private)}
    visible = {c: p for c, p in hidden.items() if not chr(c).isspace()}
    # each token has its own marks: if the template cuts it away, they hide no other beside them
    found = dict.fromkeys((n, t) for n, s in enumerate(texts) for t in any_of(tokens).findall(s))
    marks = {t: (next(private), next(private)) for _, t in found}
    marked = any_of(form for t, (a, b) in marks.items() for form in (a + t, t + b))
    back = str.maketrans({p: chr(c) for c, p in hidden.items()}
                         | {mark: "" for both in marks.values() for mark in both})

    def attempt(trial):
        """The chat with these texts in the messages, None when something else changed, too."""
        parts = iter(trial)
        try:
            text = render(map_text(messages, lambda s: next(parts)))
        except ValueError:
            return None
        text = marked.sub(lambda m: m[0].translate(hidden), text)
        return text if text.translate(back) == plain else None

    for table in (hidden, visible):
        masked = attempt(s.translate(table) for s in texts)
        if masked:
            return masked, back
    masked = plain
    for n, t in found:
        before, behind = marks[t]
        for form in (t + behind, before + t):
            trial = [s.replace(t, form) if i == n else s for i, s in enumerate(texts)]
            text = attempt(trial)
            if text is not None:
                masked, texts = text, trial
                break
    return masked, back
