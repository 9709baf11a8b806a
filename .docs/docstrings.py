"""Turns the signature and the docstring of a public name into Markdown."""

import inspect
import re
import textwrap
import typing
from typing import Any

SECTIONS = ("Args", "Attributes", "Returns", "Gradients", "Raises", "Example", "References")
ENTRY = re.compile(r"\*{0,2}[A-Za-z_][\w.]*(, (\.\.\.|\*{0,2}[A-Za-z_][\w.]*))*: ")
Sections = dict[str, str]  # the text of each section; "" is what comes before the first


def sections(text: str, name: str) -> Sections:
    """The docstring in pieces; a name without one is an error."""
    if not text or not text.strip():
        raise ValueError(f"{name} has no docstring")
    found, current = {"": []}, ""
    for line in inspect.cleandoc(text).splitlines():
        if line.endswith(":") and line[:-1] in SECTIONS:
            current = line[:-1]
            found[current] = []
        elif line and not line.startswith(" ") and current:  # prose after a section
            current = ""
            found[""] += ["", line]
        else:
            found[current].append(line)
    return {title: textwrap.dedent("\n".join(lines)).strip("\n") for title, lines in found.items()}


def prose(text: str) -> str:
    """Paragraphs and lists as they are; indented blocks, and what a doctest shows, as code."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", text.replace("::\n", ":\n")):
        if all(line.startswith("    ") for line in block.splitlines()):
            code, before = textwrap.dedent(block), out[-1] if out else ""
            if before.endswith("\n```"):  # blocks of code that an empty line parts are one
                out[-1] = f"{before[:-4]}\n\n{code}\n```"
            else:
                language = (
                    "python" if re.search(r"^(@|def |with |\w+ = \w+\.|nn)", code, re.MULTILINE) else "text"
                )
                out.append(f"```{language}\n{code}\n```")
        elif ">>>" in block:
            out.append(f"```pycon\n{block}\n```")
        else:
            lines = block.splitlines()
            starts = [i for i, line in enumerate(lines) if line.lstrip().startswith(("* ", "- "))]
            if starts and starts[0]:
                lines.insert(starts[0], "")  # a list needs an empty line before it
            out.append("\n".join(_escaped(line) for line in lines))
    return "\n\n".join(out)


def _escaped(line: str) -> str:
    """No tag, and no underscore or star that would be emphasis, outside of backticks."""
    pieces = re.split(r"(`[^`]*`)", line)
    for i in range(0, len(pieces), 2):
        pieces[i] = pieces[i].replace("<", "&lt;")
        pieces[i] = re.sub(
            r"(?<=\w) \* (?=\w)|(?<=[\w)])\*\*(?=[\w(])", lambda m: m[0].replace("*", "\\*"), pieces[i]
        )
    return "".join(pieces)


def entries(text: str, only: Any = None) -> str:
    """`name, name: text` with indented lines after it, as a list; `only` tells which names are wanted."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if not line.startswith(" ") and line:
            found.append([line])
        elif found:
            found[-1].append(line)
        else:
            raise ValueError(f"an entry begins with an indented line: {line!r}")
    told = []
    for lines in found:
        whole = " ".join(line.strip() for line in lines)
        names, colon, rest = whole.partition(": ")
        if not colon:
            told.append(_escaped(whole))
        elif only is None or any(only(name.strip().lstrip("*")) for name in names.split(",")):
            each = (name.strip() for name in names.split(","))
            shown = ", ".join(f"`{name}`" if " " not in name else name for name in each)
            told.append(f"* **{shown}**: {_escaped(rest)}")
    return "\n".join(told)


def results(text: str) -> str:
    """What is returned, or raised: a list where every line begins a named entry, else prose."""
    text = re.sub(r"(?<=\.) (?=[A-Z]\w+Error: )", "\n", text)
    heads = [line for line in text.splitlines() if line and not line.startswith(" ")]
    return entries(text) if heads and all(ENTRY.match(line) for line in heads) else prose(text)


def signature(thing: Any, name: str, drop: tuple[str, ...] = ("self", "parent", "name")) -> str:
    """The call with its defaults, without types: the text says shapes and kinds. Options are listed."""
    parameters = [p for p in inspect.signature(thing).parameters.values() if p.name not in drop]
    words, starred = [], False
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            starred = True
        if p.kind is p.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        prefix = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        words.append(prefix + p.name + ("" if p.default is p.empty else f"={_default(p.default)}"))
    line = f"{name}({', '.join(words)})"
    if len(line) > 84:
        body = textwrap.fill(", ".join(words), 80, break_long_words=False, break_on_hyphens=False)
        line = f"{name}(\n{textwrap.indent(body, '    ')}\n)"
    listed = [n for p in parameters if p.kind is p.VAR_KEYWORD for n in _listed(p.annotation)]
    options = f"\n\nThe options are {', '.join(f'`{n}`' for n in listed)}." if listed else ""
    if name.endswith("_bwd") and len(listed) > 4:
        options = "\n\nThe options are [those of the forward](#options) that change what is computed."
    return f"```python\n{line}\n```{options}"


def _listed(annotation: Any) -> list[str]:
    """The names that `Unpack[...]` of a TypedDict lists."""
    return [n for x in typing.get_args(annotation) for n in typing.get_type_hints(x)]


def _default(value: Any) -> str:
    if isinstance(value, type) or callable(value):
        name = getattr(value, "__qualname__", "<")
        return "..." if "<" in name else name
    text = repr(value)
    return "..." if " at 0x" in text or "<" in text else text
