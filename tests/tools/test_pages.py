"""The pages document every public name, and what checks them finds faults."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

import jax_attn_bwd

DOCS = Path(__file__).parents[2] / ".docs"


@pytest.fixture(autouse=True)
def _docs_on_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])


def test_every_public_name_has_a_page_and_a_docstring():
    for framework in ("flax", "haiku", "equinox", "keras"):
        pytest.importorskip(framework)
    build, reference = importlib.import_module("build"), importlib.import_module("reference")
    texts = [path.read_text() for path in sorted((DOCS / "pages").rglob("*.md"))]
    assert build.every_name() == {name for text in texts for name in reference.names(text)}
    for text in texts:
        assert ":::" not in reference.expanded(text, DOCS / "pages")  # raises for what has no docstring


def test_what_readme_says_is_on_the_pages_with_its_links():
    reference = importlib.import_module("reference")
    shown = reference.expanded(
        "::: readme Where to read on\n::: readme On an NVIDIA GPU today", DOCS / "pages"
    )
    assert "`notebooks` in the repository" in shown
    assert "[what cuDNN takes](what_runs_where.md#cudnn)" in shown
    assert "## " not in shown.replace("### ", "")


def test_links_of_the_readme_lead_somewhere():
    readme = DOCS.parent / "README.md"
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", readme.read_text())
    assert len(links) > 15
    for path, at in links:
        target = readme.parent / path if path else readme
        assert target.exists(), path
        headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE) if at else []
        assert not at or at in [re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in headings], at


def test_the_calls_of_models_name_what_there_is():
    """Public names, and functions of the page; `.ci/extras` runs them beside the models."""
    text = (DOCS / "pages" / "models.md").read_text()
    calls = re.findall(r"^\|[^|]*\|[^|]*\| `(.*?)` \| `", text, re.MULTILINE)
    assert len(calls) > 40
    known = {*jax_attn_bwd.__all__, *re.findall(r"^def (\w+)", text, re.MULTILINE), "layer"}
    for call in calls:
        nodes = [node for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Call)]
        assert {node.func.id for node in nodes if isinstance(node.func, ast.Name)} <= known, call


def test_what_people_type_is_on_a_page():
    pages = [path.read_text() for path in (DOCS / "pages").glob("*.md")]
    for words in (
        "MLA",
        "AlphaFold",
        "triangle attention",
        "gpt-oss",
        "KV cache",
        "sliding window",
        "packing",
    ):
        assert any(words in page for page in pages), words


def test_a_name_links_to_its_own_page_before_another_of_the_same_last_part():
    build = importlib.import_module("build")
    where = {
        name: (Path(f"{name}.md"), name) for name in ("attention_fn", "parallel.attention_fn", "mods.causal")
    }
    shown = build.linked("`attention_fn`, `jax_attn_bwd.attention_fn`, `causal`", Path("page.md"), where)
    assert shown.count("](attention_fn.md#attention_fn)") == 2
    assert "[`causal`](mods.causal.md#mods.causal)" in shown


def test_long_names_in_tables_break_between_words():
    pytest.importorskip("latex2mathml")
    pytest.importorskip("mkdocs")
    drawn = importlib.import_module("hooks").on_page_content
    code = "<code>dot_product_attention(q, log_decay, mod=MultiHeadAttention, 0.5)</code>"
    broken = "dot_product_<wbr>attention(<wbr>q, log_decay, mod=<wbr>MultiHead<wbr>Attention, 0.5)"
    assert drawn(f"<td>{code}</td><p>{code}</p>") == f"<td><code>{broken}</code></td><p>{code}</p>"


def test_a_method_call_is_shown_and_bases_are_not():
    pytest.importorskip("flax")
    shown = importlib.import_module("reference").whole("layers.flax_nnx.GATConv")
    assert "`GATConv.__call__`" in shown
    assert "layer(\n    x, graph" in shown
    assert not {"_build", "_Conv", "<function"} & set(shown.split())


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="gone.html">x</a>', "a dead link, gone.html"),
        ('<a href="other.html#gone">x</a>', "no such place, other.html#gone"),
        ('<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js from a network"),
        ("<pre><code>&lt;h1 id='x'></code></pre>", "shows"),
        ("<p>init=&lt;function f></p>", "shows"),
        (r"<p>\frac{1}{2}</p>", "shows"),
        ("<p>a price of $x</p>", "shows"),
        (r"<math><mo>\langle</mo></math>", "shows"),
        ("<p>## heading</p>", "shows"),
    ],
)
def test_faults_of_a_page_are_found(body, fault, tmp_path):
    check = importlib.import_module("check")
    (tmp_path / "other.html").write_text('<h1 id="here">x</h1>')
    (tmp_path / "page.html").write_text('<a href="other.html#here">x</a>')
    check.pages(tmp_path)
    (tmp_path / "page.html").write_text(body)
    with pytest.raises(SystemExit, match="1 faults") as raised:
        check.pages(tmp_path)
    assert f"page.html: {fault}" in str(raised.value)
