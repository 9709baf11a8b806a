"""Checks HTML pages: links lead somewhere, nothing is fetched from a network, and no markup shows as text."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

LEFTOVERS = (r"</?(h\d|p|em|strong|code|div|span)\b[^>]*>", r"<function ", r" at 0x[0-9a-f]")  # anywhere
COMMANDS = (r"\\[A-Za-z]+",)  # in a formula
UNDRAWN = (r"\$", r"\\[a-z(\[]", r"^::: ", r"\*\*[A-Za-z`]", r"^#+ ", r"```", r"\{ ?#")  # outside of code
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src"}


class Page(HTMLParser):
    """What a page links to, loads, and shows."""

    def __init__(self, text: str) -> None:
        """Reads the page."""
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.code, self.prose, self.math = "", "", ""
        self.inside = {"code": 0, "hidden": 0, "math": 0}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        """Notes links and anchors."""
        given = dict(attrs)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in LOADED and given.get(LOADED[tag]) and given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(given[LOADED[tag]])
        self._enter(tag, 1)

    def handle_endtag(self, tag: str) -> None:
        """Leaves what is not shown as text."""
        self._enter(tag, -1)

    def _enter(self, tag: str, step: int) -> None:
        self.inside["hidden"] += step * (tag in ("script", "style"))
        self.inside["math"] += step * (tag == "math")
        self.inside["code"] += step * (tag in ("code", "pre"))

    def handle_data(self, data: str) -> None:
        """Notes text."""
        if self.inside["math"]:
            self.math += data
        elif self.inside["code"]:
            self.code += data
        elif not self.inside["hidden"]:
            self.prose += data


def pages(root: Path) -> None:
    """Raises with all that is wrong on the pages below `root`."""
    found = {path.resolve(): Page(path.read_text()) for path in sorted(root.rglob("*.html"))}
    wrong = [
        f"{path.relative_to(root.resolve())}: {what}"
        for path, page in found.items()
        for what in faults(path, page, found)
    ]
    if wrong:
        raise SystemExit("\n".join([f"{len(wrong)} faults in the pages:", *wrong[:50]]))
    print(f"{len(found)} pages checked")


def faults(path: Path, page: Page, found: dict[Path, Page]) -> list[str]:
    """The faults of one page."""
    out = [f"loads {url} from a network" for url in page.loaded if re.match("(https?:)?//", url)]
    for url in [*page.links, *page.loaded]:
        if re.match(r"(https?:|mailto:|data:|//)", url) or path.name == "404.html":
            continue
        place, at = urldefrag(unquote(url))
        target = (path.parent / place).resolve() if place else path
        if not target.exists():
            out.append(f"a dead link, {url}")
        elif at and target in found and at not in found[target].anchors:
            out.append(f"no such place, {url}")
    told = ((LEFTOVERS, page.code + page.prose), (UNDRAWN, page.prose), (COMMANDS, page.math))
    for patterns, text in told:
        for pattern in patterns:
            places = [
                text[max(m.start() - 30, 0) : m.end() + 30] for m in re.finditer(pattern, text, re.MULTILINE)
            ]
            out += [f"shows {place!r}" for place in places]
    return out
