"""The Markdown of public names: `::: call dot_product_attention` on a page becomes what the docstring says.

Directives, one a line: `call` (signature, what it does, positional arguments, results, example), `gradients`,
`options` (keyword arguments), `sharding`, `errors`, `references` and `whole` (all of these) of one name,
`module` (all names of a module), `about` (a module's own text), `kernels` (an operator's row on the page of
what runs where), `readme` (what stands under a heading of README.md), `choices` (the tables of ways and rules
of a module), `version` (of the package).
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from docstrings import Sections, entries, prose, results, sections, signature

PACKAGE = "jax_attn_bwd"
# What the operators call on masks and scores, and Keras on layers.
HIDDEN = ("check", "get_config", "compute_output_spec")


def find(name: str) -> Any:
    """The object of a dotted name below the package."""
    if name == PACKAGE:
        return importlib.import_module(PACKAGE)
    parts, thing = name.split("."), importlib.import_module(PACKAGE)
    for i, part in enumerate(parts):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            thing = importlib.import_module(".".join([PACKAGE, *parts[: i + 1]]))
    return thing


def public(module: str) -> list[str]:
    """The names that a module exports, modules left out."""
    found = find(module)
    names = getattr(found, "__all__", None)
    if names is None:
        names = [n for n, x in vars(found).items() if getattr(x, "__module__", "") == found.__name__]
    names = [n for n in names if not n.startswith("_")]
    return [f"{module}.{n}" for n in names if not inspect.ismodule(getattr(found, n))]


def doc(name: str) -> Sections:
    """The docstring's sections."""
    return sections(find(name).__doc__, name)


def _positional(thing: Any) -> set[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {p.name for p in inspect.signature(thing).parameters.values() if p.kind in kinds}


def call(name: str) -> str:
    """What one writes, and gets."""
    thing, found = find(name), doc(name)
    first = _positional(thing)
    arguments = entries(found.get("Args", ""), lambda n: n in first)
    return _joined(
        signature(thing, name.split(".")[-1]), prose("\n\n".join(_paragraphs(name, is_about_devices=False))),
        arguments and f"**Arguments**\n\n{arguments}",
        _titled(found, "Returns", results), _titled(found, "Example", prose),
    )  # fmt: skip


def options(name: str) -> str:
    """The keyword arguments."""
    first = _positional(find(name))
    return entries(doc(name)["Args"], lambda n: n not in first)


def sharding(name: str) -> str:
    """What the docstring says of several devices."""
    return prose("\n\n".join(_paragraphs(name, is_about_devices=True)))


def _paragraphs(name: str, is_about_devices: bool) -> list[str]:
    found = re.split(r"\n\s*\n", doc(name)[""])
    return [x for x in found if x.startswith("Over several devices") == is_about_devices]


def gradients(name: str) -> str:
    """What is differentiable, and what is kept for it."""
    return results(doc(name)["Gradients"])


def errors(name: str) -> str:
    """What is raised."""
    return results(doc(name)["Raises"])


def references(name: str) -> str:
    """The papers."""
    return "\n".join(f"* {' '.join(x.split())}" for x in re.split(r"\n(?! )", doc(name)["References"]))


def whole(name: str, level: int = 3) -> str:
    """Everything of one name, under a heading of its own."""
    thing, short = find(name), name.split(".")[-1]
    pieces = [f"{'#' * level} `{short}` {{ #{anchor(name)} }}"]
    if inspect.isclass(thing):
        pieces += [_class(thing, name, level)]
    else:
        if inspect.isroutine(thing):
            pieces.append(signature(thing, short))
        pieces.append(_text(doc(name)))
    return _joined(*pieces)


def _class(cls: type, name: str, level: int) -> str:
    is_tuple = issubclass(cls, tuple)
    made = cls if is_tuple or "__init__" not in vars(cls) else cls.__init__
    pieces = [signature(made, name.split(".")[-1]), _text(doc(name))]
    for method, thing in sorted(_methods(cls).items(), key=lambda x: x[0] != "__call__"):
        title = (
            f"{'#' * (level + 1)} `{name.split('.')[-1]}.{method}` {{ #{anchor(name)}.{method.strip('_')} }}"
        )
        if isinstance(thing, property):
            pieces += [title, _text(sections(thing.__doc__ or "", f"{name}.{method}"))]
        else:
            function = getattr(thing, "__func__", thing)
            drop = ("self", "cls") if isinstance(thing, classmethod) or thing is function else ("",)
            called = "layer" if name.startswith("layers.") else name.split(".")[-1].lower()
            shown = called if method == "__call__" else method
            text = _text(sections(function.__doc__ or "", f"{name}.{method}"))
            pieces += [title, signature(function, shown, drop), text]
    return _joined(*pieces)


def _methods(cls: type) -> dict[str, Any]:
    """Public methods and properties that this package writes, its own bases' included."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if not base.__module__.startswith(PACKAGE):
            continue
        for name, x in vars(base).items():
            function = getattr(getattr(x, "fget", None) or getattr(x, "__func__", x), "__wrapped__", None)
            function = function or getattr(x, "fget", None) or getattr(x, "__func__", x)
            is_ours = str(getattr(function, "__module__", "")).startswith(PACKAGE)
            shown = name == "__call__" or not (name.startswith("_") or name in HIDDEN)
            if shown and is_ours and inspect.isfunction(function) and name not in found:
                found[name] = x
    return found


def module(name: str) -> str:
    """The module's own text, then each of its names."""
    return _joined(about(name), *(whole(x) for x in public(name)))


def about(name: str) -> str:
    """The module's own text."""
    return _text(doc(name))


def _text(found: Sections) -> str:
    arguments = _titled(found, "Args", entries, "Arguments")
    return _joined(
        prose(found[""]), arguments, _titled(found, "Attributes", entries),
        _titled(found, "Returns", results),
        _titled(found, "Gradients", results), _titled(found, "Raises", results, "Errors"),
        _titled(found, "Example", prose), _titled(found, "References", prose),
    )  # fmt: skip


def _titled(found: Sections, section: str, render: Any, title: str = "") -> str:
    return f"**{title or section}**\n\n{render(found[section])}" if found.get(section) else ""


def _joined(*pieces: str) -> str:
    return "\n\n".join(piece for piece in pieces if piece)


def anchor(name: str) -> str:
    """Where a name stands on its page."""
    return name


def kernels(name: str, pages: Path) -> str:
    """The row of an operator on the page that says what runs where, as a list."""
    lines = (pages / "what_runs_where.md").read_text().splitlines()
    titles = next(line for line in lines if line.startswith("| operator |")).split("|")[2:-1]
    row = next(line for line in lines if line.startswith("|") and f"`{name}`" in line.split("|")[1])
    cells = zip(titles, row.split("|")[2:-1], strict=True)
    return "\n".join(
        f"* **{title.strip()}**: {'nothing' if cell.strip() == '-' else cell.strip()}"
        for title, cell in cells
    )


def readme(heading: str, pages: Path) -> str:
    """What stands under a heading of README.md; links to pages lead there, and those to files name them."""
    text = (pages.parents[1] / "README.md").read_text()
    body = re.split("^## ", text.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0].strip()

    def link(match: re.Match) -> str:
        shown, target = match[1], match[2].removeprefix(".docs/pages/")
        if target != match[2] or re.match("#|https:", target):
            return f"[{shown}]({target})"
        return f"{shown} (`{target}` in the repository)"

    return re.sub(r"\[([^\]]+)\]\(([^)]+)\)", link, body)


def choices(module: str) -> str:
    """The tables of ways and of rules of a module."""
    found = find(module)
    row = lambda *cells: "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    tables = []
    if ways := getattr(found, "WAYS", ()):
        told = lambda w: row(
            w.name, f"`{w.file}`", w.taken, f"{w.gain} ({w.measured})" if w.measured else w.gain
        )
        tables.append([row("way", "file", "where", "gain"), row(*["---"] * 4), *map(told, ways)])
    if found.RULES:
        of = lambda r: r.reason + (f", until JAX {r.until}" if r.until else "")
        rules = [row(f"`{r.name}`", r.when, of(r), r.gain) for r in found.RULES]
        tables.append(
            [row("rule", "holds for", "for", "gain, or what goes wrong without"), row(*["---"] * 4), *rules]
        )
    return "\n\n".join("\n".join(table) for table in tables)


def version(name: str) -> str:
    """The version of the package, in a sentence."""
    return f"These pages are of version {find(name).__version__}."


DIRECTIVE = re.compile(r"^::: (\w+) (.+)$", re.MULTILINE)
ONE = dict(
    call=call, gradients=gradients, options=options, sharding=sharding, errors=errors, references=references,
    whole=whole, module=module, about=about, choices=choices,
    version=version,
)  # fmt: skip
FROM_PAGES = dict(kernels=kernels, readme=readme)


def expanded(text: str, pages: Path) -> str:
    """A page with its directives carried out."""

    def replaced(match: re.Match) -> str:
        if match[1] in FROM_PAGES:
            return FROM_PAGES[match[1]](match[2], pages)
        return ONE[match[1]](match[2])

    return DIRECTIVE.sub(replaced, text)


def names(text: str) -> dict[str, str]:
    """{public name: its anchor} of what a page documents."""
    found: dict[str, str] = {}
    for kind, name in DIRECTIVE.findall(text):
        if kind in ("call", "whole"):
            found[name] = anchor(name) if kind == "whole" else "call"
        elif kind == "module":
            found |= {x: anchor(x) for x in public(name)}
    return found


def modules(text: str) -> dict[str, str]:
    """{module: its anchor} of what a page tells about, which stands in the heading above."""
    return {name: anchor(name) for kind, name in DIRECTIVE.findall(text) if kind == "about"}
