"""What a reader runs first: the examples, the notebooks and the code of README.md and of the pages."""

import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import jax_attn_bwd

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
WITH_FILES = [path for path in EXAMPLES if '"--out"' in path.read_text()]
README = ROOT / "README.md"
BLOCKS = {
    path.stem: re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    for path in [README, *sorted((ROOT / ".docs" / "pages").rglob("*.md"))]
}
PAGES_WITH_CODE = [name for name, blocks in BLOCKS.items() if blocks]


@pytest.fixture(autouse=True)
def _examples_on_path(monkeypatch):
    """Examples import one another, as Python lets a script import its neighbours."""
    monkeypatch.syspath_prepend(ROOT / "examples")


def environment() -> dict[str, str]:
    """One CPU device, and this package first, as for a reader who works in the repository."""
    settings = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    path = os.pathsep.join(filter(None, [str(ROOT), settings.get("PYTHONPATH")]))
    return settings | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "MPLBACKEND": "Agg"}


def run(folder: Path, script: Path, *arguments: object, seconds: int = 300) -> str:
    """What a script prints that is run in `folder`."""
    done = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
        env=environment(),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("layer", [(), ("--layer",)], ids=["attention", "layer"])
def test_language_model_trains_and_plots(layer, tmp_path):
    pytest.importorskip("optax")
    pytest.importorskip("flax")
    script = ROOT / "examples" / "train_language_model.py"
    printed = run(tmp_path, script, "--steps", "2", "--context", "32", *layer, "--out", tmp_path)
    for words in (
        r"held-out text: loss \d+\.\d+, unigram entropy \d+\.\d+ bits per byte",
        r"step 2 of 2: training loss \d+\.\d+ bits per byte",
        r"Held-out text(.|\n)*continued by the model",
        r"loss curve: \S*",
        r"One training step \(median\), context 32",
        r"jax\.nn / jax_attn_bwd",
    ):
        assert re.search(words, printed), f"{words} not in\n{printed}"
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert "nan" not in printed.lower().split("continued by the model")[0]


@pytest.mark.thorough
def test_hybrid_model_trains_beside_softmax(tmp_path):
    for module in ("flax", "matplotlib", "optax", "rich"):
        pytest.importorskip(module)
    script = ROOT / "examples" / "train_hybrid_model.py"
    printed = run(tmp_path, script, "--steps", "2", "--context", "32", "--out", tmp_path)
    for words in (
        r"held-out text: hybrid \d+\.\d+, softmax \d+\.\d+, unigram entropy \d+\.\d+ bits per byte",
        r"loss curves: \S*",
        r"softmax / hybrid",
    ):
        assert re.search(words, printed), f"{words} not in\n{printed}"
    assert (tmp_path / "hybrid.png").stat().st_size > 10_000
    assert "nan" not in printed.lower()


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("train_language_model.py", ("--attention", "jax.nn", "--layer"), "--layer: it is a rule of jax"),
        ("train_graph_attention.py", ("--graph", "missing.npz"), "missing.npz: there is no such file"),
        *((path.name, ("--out", "file"), "--out: cannot create") for path in WITH_FILES),
    ],
    ids=["layer_of_another", "missing_graph", *(path.stem for path in WITH_FILES)],
)
def test_examples_refuse_what_they_cannot_do(script, arguments, words, monkeypatch, tmp_path, capsys):
    for module in ("flax", "matplotlib", "optax", "rich", "scipy", "sklearn"):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    Path("file").write_text("no folder")
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_say_what_they_do(path, monkeypatch, capsys):
    pytest.importorskip("flax")
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(path), run_name="__main__")
    usage, description, *_ = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: {path.name}")
    assert re.match(r"[A-Z].*\.$", description.replace("\n", " ")), description


@pytest.mark.thorough
def test_ported_calls_are_the_operators(tmp_path):
    printed = run(tmp_path, ROOT / "examples" / "port_vendor_calls.py")
    differences = [float(x) for x in re.findall(r"\de[+-]\d\d", printed)]
    assert len(differences) == 10
    assert max(differences) < 1e-5


@pytest.mark.thorough
def test_finetuning_of_a_flax_model_differs_in_one_line(tmp_path):
    for name in ("flax", "matplotlib", "optax", "rich"):
        pytest.importorskip(name)
    script = ROOT / "examples" / "finetune_flax_linen.py"
    printed = run(tmp_path, script, "--steps", "3", "--context", "32", "--out", tmp_path)
    (largest,) = re.findall(r"largest difference of a loss: (\S+) bits", printed)
    assert float(largest) < 1e-4
    rows = [re.findall(r"\d\.\d{5}", line) for line in printed.splitlines()]
    assert [len(row) for row in rows if row] == [3, 3, 3]
    for name in ("Flax's own", "attention_fn=", "our layer"):
        assert re.search(rf"{name}\W+\d+\W+\d+\.\d", printed), printed
    assert (tmp_path / "finetune.png").stat().st_size > 10_000
    assert "nan" not in printed


@pytest.mark.thorough
def test_deformable_detector_trains_and_draws(tmp_path):
    for name in ("flax", "matplotlib", "optax", "rich", "scipy", "sklearn"):
        pytest.importorskip(name)
    script = ROOT / "examples" / "train_deformable_detector.py"
    printed = run(tmp_path, script, "--steps", "2", "--out", tmp_path)
    for words in (
        r"step 0: held-out AP50 0\.\d+, AP 0\.\d+",
        r"step 2: held-out AP50 0\.\d+, AP 0\.\d+",
        r"loss \d+\.\d+",
        r"detections: \S*",
        r"operator, forward and backward: \d+\.\d ms; gather form, by JAX: \d+\.\d ms",
    ):
        assert re.search(words, printed), f"{words} not in\n{printed}"
    assert (tmp_path / "detections.png").stat().st_size > 10_000
    assert "nan" not in printed.lower()


@pytest.mark.thorough
def test_meanflow_trains_and_draws(tmp_path):
    for module in ("matplotlib", "optax", "rich", "sklearn"):
        pytest.importorskip(module)
    script = ROOT / "examples" / "train_meanflow.py"
    printed = run(tmp_path, script, "--steps", "2", "--batch", "8", "--repeats", "1", "--out", tmp_path)
    assert re.search(r"step 2: loss \d\.\d{4}", printed), printed
    ours, plain = re.findall(r"\d+\.\d{5}", printed)  # the losses of a step
    assert abs(float(ours) - float(plain)) < 1e-4
    assert (tmp_path / "meanflow.png").stat().st_size > 10_000


@pytest.mark.thorough
def test_mesh_transformer_trains_and_draws(tmp_path):
    for module in ("matplotlib", "optax", "rich", "scipy"):
        pytest.importorskip(module)
    script = ROOT / "examples" / "train_mesh_transformer.py"
    options = {"steps": 2, "batch": 1, "refinements": 1, "hops": 1, "repeats": 1}
    arguments = [word for name, n in options.items() for word in (f"--{name}", str(n))]
    printed = run(tmp_path, script, *arguments, "--out", tmp_path)
    assert "42 nodes, 282 pairs" in printed  # 12 nodes have 5 neighbours, 30 have 6, and each has itself
    assert re.search(r"step 2: squared error \d+\.\d{4} of that of no change", printed), printed
    differences = [float(x) for x in re.findall(r"\de[+-]\d\d", printed)]
    assert len(differences) == 5
    assert max(differences) < 1e-5
    assert (tmp_path / "mesh.png").stat().st_size > 10_000
    assert "nan" not in printed


@pytest.mark.thorough
def test_minibatches_share_one_trace(tmp_path):
    for module in ("matplotlib", "optax", "rich", "sklearn"):
        pytest.importorskip(module)
    script = ROOT / "examples" / "train_minibatches.py"
    printed = run(tmp_path, script, "--quick", "--batch", "16", "--out", tmp_path)
    fewest, most = re.findall(r"5 batches of ([\d,]+) to ([\d,]+) edges; the step was traced once", printed)[
        0
    ]
    assert fewest != most
    assert re.search(r"step 5: loss \d+\.\d+, test accuracy \d+\.\d%", printed), printed
    assert re.search(r"the whole graph\W+1,797\W+[\d,]+\W+\d+\.\d", printed), printed
    assert (tmp_path / "minibatches.png").stat().st_size > 10_000


@pytest.mark.thorough
@pytest.mark.parametrize("source", ["digits", "file"])
def test_graph_attention_trains_and_plots(source, tmp_path):
    for module in ("optax", "sklearn"):
        pytest.importorskip(module)
    arguments = ["--steps", "2", "--draws", "1", "--neighbours", "3"]
    if source == "file":  # 40 nodes in two rings, one for each class, and an edge between them
        nodes, labelled = np.arange(40), np.arange(40)[None] % 4 == 0
        edges = np.stack([nodes, (nodes + 1) % 20 + nodes // 20 * 20], axis=1)
        np.savez(
            tmp_path / "rings.npz",
            edges=np.concatenate([edges, [[0, 20]]]),
            node_labels=nodes // 20,
            node_features=np.random.default_rng(0).standard_normal((40, 3)),
            train_masks=labelled,
            val_masks=np.roll(labelled, 1),
            test_masks=np.roll(labelled, 2),
        )
        arguments += ["--graph", tmp_path / "rings.npz", "--undirected"]
    script = ROOT / "examples" / "train_graph_attention.py"
    printed = run(tmp_path, script, *arguments, "--out", tmp_path)
    for words in (
        {"digits": r"1,797 nodes, [\d,]+ edges", "file": r"40 nodes, 122 edges"}[source],
        r"split 0: (50|10) labels, test accuracy \d+\.\d%",
        r"logistic regression .*\d%",
        r"graph attention network .*\d%",
        r"One training step \(median\), [\d,]+ edges, 4 heads",
        r"attention and accuracy: \S*",
    ):
        assert re.search(words, printed), f"{words} not in\n{printed}"
    losses = re.findall(r"(\d+\.\d{4})", printed)
    assert losses
    assert losses[::2] == losses[1::2]  # the same with segment operations
    assert "nan" not in printed
    assert (tmp_path / "attention.png").stat().st_size > 10_000


def test_there_is_a_notebook_for_every_operator():
    operators = {p.parent.name for p in (ROOT / "jax_attn_bwd" / "ops").glob("*/api.py")}
    assert {p.stem for p in NOTEBOOKS} == operators | {"mods", "parallel"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_notebook_is_small_and_complete(path):
    """It is read on the web, unexecuted: so it holds its outputs, in order, and no error."""
    nbformat = pytest.importorskip("nbformat")
    assert path.stat().st_size < 300_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert all(output.output_type != "error" for output in outputs)
    assert not [o for o in outputs if o.get("name") == "stderr"]


@pytest.mark.thorough
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)
    for name, value in environment().items():
        if name != "MPLBACKEND":  # the kernel draws inline
            monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    with warnings.catch_warnings():
        # zmq and the event loop close their sockets late; that is no concern of the notebook
        warnings.simplefilter("ignore")
        client = nbclient.NotebookClient(
            notebook,
            timeout=300,
            allow_errors=False,
            kernel_name="python3",
            resources={"metadata": {"path": str(tmp_path)}},
        )
        client.execute()


def test_readme_and_pages_show_code():
    assert {"README", "recipes", "sharding", "which_call_when"} <= set(PAGES_WITH_CODE)


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES_WITH_CODE)
def test_each_block_of_a_page_runs_alone(page, tmp_path):
    """In a namespace of its own, as a reader pastes one, on four devices; stdout may be anything."""
    script = tmp_path / "page.py"
    devices = "import jax\njax.config.update('jax_num_cpu_devices', 4)\n"
    script.write_text(f"{devices}for block in {BLOCKS[page]!r}:\n    exec(block, {{}})\n")
    run(tmp_path, script, seconds=600)


def test_the_version_has_its_notes():
    notes = (ROOT / ".docs" / "pages" / "versions.md").read_text()
    assert re.findall(r"^## (\S+)$", notes, re.MULTILINE)[0] == jax_attn_bwd.__version__
