"""What mkdocs calls: formulas become MathML, which browsers draw without a script or a network."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
TAG = re.compile(r"\\tag\{(\w+)\}")


def on_page_content(content: str, **_: Any) -> str:
    """The page with its formulas drawn."""
    return INLINE.sub(lambda m: convert(html.unescape(m[1])), BLOCK.sub(_block, content))


def _block(match: re.Match) -> str:
    tex = html.unescape(match[1])
    number = TAG.search(tex)
    drawn = convert(TAG.sub("", tex).strip(), display="block")
    return f'<div class="equation">{drawn}<span>{f"({number[1]})" if number else ""}</span></div>'
