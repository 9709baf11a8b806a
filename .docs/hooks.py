"""What mkdocs calls: formulas become MathML, which browsers draw without a script or a network.

It also tells how much a page counts in a search, and where code in a table may break.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.pages import Page

BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
TAG = re.compile(r"\\tag\{(\w+)\}")
CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]*")
# where a long name may break: behind punctuation, and between long words
JOINT = re.compile(r"(?<=[.(,={])(?=[A-Za-z(])|(?<=\w{5}_)(?=\w{6})|(?<=[a-z]{3})(?=[A-Z][a-z]{4})")
# How much a page counts in a search; others count 1.
WEIGHTS = {
    r"models": 4.0,
    r"operators/|which_call_when": 2.0,
    r"notebooks/": 0.5,
    r"reference/(bnns|cann|cugraph|megengine|torch)": 0.25,
}


def on_page_markdown(markdown: str, page: Page, **_: Any) -> None:
    """Weighs the page for searches: a model by its name, an operator's own page before a derivation."""
    for pattern, weight in WEIGHTS.items():
        if re.match(pattern, page.file.src_uri):
            page.meta["search"] = {"boost": weight}


def on_page_content(content: str, **_: Any) -> str:
    """The page with its formulas drawn, and long names in tables in lines that end where a word does."""
    content = CELL.sub(lambda cell: CODE.sub(lambda code: JOINT.sub("<wbr>", code[0]), cell[0]), content)
    return INLINE.sub(lambda m: _drawn(html.unescape(m[1])), BLOCK.sub(_block, content))


def _drawn(tex: str, **options: Any) -> str:
    """Returns MathML, in which a large angle bracket stands as itself."""
    drawn = convert(tex, **options)
    return drawn.replace(r">\langle<", ">&#x27E8;<").replace(r">\rangle<", ">&#x27E9;<")


def _block(match: re.Match) -> str:
    tex = html.unescape(match[1])
    number = TAG.search(tex)
    drawn = _drawn(TAG.sub("", tex).strip(), display="block")
    return f'<div class="equation">{drawn}<span>{f"({number[1]})" if number else ""}</span></div>'
