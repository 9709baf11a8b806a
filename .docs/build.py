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

HERE = Path(__file__).resolve().parent
SILENT = {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement
MODULES = ["parallel", "mods", *(f"layers.{x}" for x in ("flax_nnx", "flax_linen", "haiku", "equinox"))]
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
    for path, text in pages.items():
        path.write_text(linked(reference.expanded(text, HERE / "pages"), path, where))
    (markdown / "names.md").write_text(index(where, markdown))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", HERE / "mkdocs.yml"]
    subprocess.run([*command, "-d", OUT / "html"], check=True, env=os.environ | SILENT)
    check.pages(OUT / "html")


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
    """The page with names in backticks made links to where they are documented."""
    short: dict[str, str] = {}
    for name in where:
        short[name] = name
        if name.startswith(("mods.", "parallel.")):
            short[name.split(".")[-1]] = name

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
        lines.append(line if kept else re.sub(r"(?<![\[`])`([\w.]+)`(?![\]`])", link, line))
    return "\n".join(lines) + "\n"


def index(where: dict[str, tuple[Path, str]], root: Path) -> str:
    """Every public name, in alphabetical order."""
    rows = sorted((name.split(".")[-1].lower(), name) for name in where)
    links = [f"* [`{name}`]({where[name][0].relative_to(root)}#{where[name][1]})" for _, name in rows]
    return "# All names\n\n" + "\n".join(links) + "\n"


if __name__ == "__main__":
    main()
