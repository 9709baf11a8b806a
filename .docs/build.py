"""Builds the pages into out/docs/html: those of `pages`, the reference of every public name, the notebooks.

A warning, a dead link, a public name without a page and a formula that would need a network are errors.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import check
import reference
from docstrings import prose

HERE = Path(__file__).resolve().parent
SILENT = {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement
MODULES = [
    "parallel",
    "mods",
    *(f"layers.{x}" for x in ("flax_nnx", "flax_linen", "haiku", "equinox", "keras")),
]
MODULES += [f"compat.{x}" for x in ("bnns", "cann", "cugraph", "megengine", "torch")]


OUT = HERE.parent / "out" / "docs"


def main() -> None:
    """Builds and checks."""
    shutil.rmtree(OUT, ignore_errors=True)
    markdown = OUT / "markdown"  # mkdocs.yml names it
    shutil.copytree(HERE / "pages", markdown)
    for path in sorted((HERE.parent / "notebooks").glob("*.ipynb")):
        notebook(path, markdown / "notebooks")
    pages = {path: path.read_text() for path in sorted(markdown.rglob("*.md"))}
    where = {name: (path, at) for path, text in pages.items() for name, at in reference.names(text).items()}
    if missing := every_name() - where.keys():
        raise SystemExit(f"public names without a page: {', '.join(sorted(missing))}")
    told = {name: (path, at) for path, text in pages.items() for name, at in reference.modules(text).items()}
    for path, text in pages.items():
        path.write_text(linked(reference.expanded(text, HERE / "pages"), path, where | told))
    (markdown / "names.md").write_text(index(where, markdown))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", HERE / "mkdocs.yml"]
    site = OUT / "html"
    subprocess.run([*command, "-d", site], check=True, env=os.environ | SILENT)
    check.pages(site)
    print(f"open {site / 'index.html'}, or, to search, {sys.executable} -m http.server -d {site}")


def every_name() -> set[str]:
    """All that users may import, modules left out."""
    import jax_attn_bwd

    modules = ("compat", "layers", "mods", "parallel")
    found = {name for name in jax_attn_bwd.__all__ if name not in modules}
    return found | {name for module in MODULES for name in reference.public(module)}


def notebook(path: Path, folder: Path) -> None:
    """Writes a stored notebook as Markdown, its pictures beside it."""
    folder.mkdir(exist_ok=True)
    pieces, pictures = [], 0
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            pieces.append(re.sub(r"^\$\$|\$\$$", "\n$$\n", source, flags=re.MULTILINE))
        elif source:
            pieces.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                pieces.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif "image/png" in output.get("data", {}):
                pictures += 1
                name = f"{path.stem}_{pictures}.png"
                (folder / name).write_bytes(base64.b64decode("".join(output["data"]["image/png"])))
                pieces.append(f"![What the code above draws]({name})")
    (folder / f"{path.stem}.md").write_text("\n\n".join(pieces) + "\n")


def linked(text: str, page: Path, where: dict[str, tuple[Path, str]]) -> str:
    """The page with links from names in backticks to where they are documented, and from numbers of arXiv."""
    short = {name.split(".")[-1]: name for name in where if name.startswith(("mods.", "parallel."))}
    short |= {name: name for name in where}

    def link(match: re.Match) -> str:
        name = short.get(match[1].removeprefix("jax_attn_bwd."))
        if name is None or where[name][0] == page:
            return match[0]
        target, at = where[name]
        return f"[{match[0]}]({os.path.relpath(target, page.parent)}#{at})"

    lines, is_code = [], False
    for line in text.splitlines():
        is_code ^= line.lstrip().startswith("```")
        kept = is_code or line.startswith(("#", "```"))
        if not kept:
            line = re.sub(r"(?<![\[`])`([\w.]+)`(?![\]`])", link, line)
            line = re.sub(r"(?<=\d) to (?=\d)", "\u00a0to\u00a0", line)  # a range stays on one line
            line = re.sub(r"(?<!\[)\barXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def index(where: dict[str, tuple[Path, str]], root: Path) -> str:
    """Every public name with the first line of its docstring, by the page that it stands on."""
    lines, last = ["# All names"], None
    for name, (path, at) in where.items():
        if path != last:
            title = path.read_text().splitlines()[0].removeprefix("# ")
            lines += ["", f"## {title}", ""]
        last = path
        first = (reference.find(name).__doc__ or "").strip().splitlines()[0]
        lines.append(f"* [`{name}`]({path.relative_to(root)}#{at}): {prose(first)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
