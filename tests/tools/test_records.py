"""The record that `check --enable` keeps of a kind of device: what makes it stale, and what damage does."""

import json
from pathlib import Path

import pytest
from tools import test_waiting_kernels as waiting
from tools.test_waiting_kernels import H200, QUERY, keep

from jax_attn_bwd import dot_product_attention, explain, scaled_masked_softmax
from jax_attn_bwd._core import records

_cache, told = waiting._cache, waiting.told  # fixtures


def test_a_record_is_of_one_kind_of_device_and_one_folder():
    keep(H200, "softmax", mosaic_gpu={"a": 1.0}, xla={"a": 2.0})
    assert explain(scaled_masked_softmax, QUERY, platform="H200")["mosaic_gpu"] == "ok"
    assert "no record" in explain(scaled_masked_softmax, QUERY, platform="H100")["mosaic_gpu"]
    assert (
        "no record" in explain(*(dot_product_attention, QUERY, QUERY, QUERY), platform="H200")["mosaic_gpu"]
    )


def test_kinds_that_share_a_file_share_no_record():
    keep(H200, "softmax", mosaic_gpu={"a": 1.0}, xla={"a": 2.0})
    assert records.path("NVIDIA-H200", "softmax") == records.path(H200, "softmax")
    assert records.record("NVIDIA-H200", "softmax") == f"the record is of {H200}"


@pytest.mark.parametrize("variable", ["JAX_ATTN_BWD_CACHE", "XDG_CACHE_HOME"])
def test_another_folder_has_another_record(variable, monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_ATTN_BWD_CACHE")
    monkeypatch.setenv(variable, str(tmp_path / "one"))
    keep(H200, "softmax", mosaic_gpu={"a": 1.0}, xla={"a": 2.0})
    assert not isinstance(records.record(H200, "softmax"), str)
    monkeypatch.setenv(variable, str(tmp_path / "another"))
    assert records.record(H200, "softmax") == "there is no record"


@pytest.mark.parametrize("name", ["jax", "jaxlib"])
def test_another_version_makes_it_stale(name):
    """Another patch release, too."""
    file = keep(H200, "softmax", mosaic_gpu={"a": 1.0}, xla={"a": 2.0})
    held = json.loads(file.read_text())
    now = held["versions"][name].split(".")
    then = held["versions"][name] = ".".join([*now[:2], f"{now[2]}1", *now[3:]])
    file.write_text(json.dumps(held))
    got = explain(scaled_masked_softmax, QUERY, platform="H200")["mosaic_gpu"]
    assert f"not proven on {H200}: the record is of {name} {then}" in got


@pytest.mark.parametrize(
    ("edited", "is_stale"),
    [
        ("_core/numerics.py", True),
        ("ops/softmax/kernels/rows.py", True),
        ("ops/softmax/forward.py", True),
        ("ops/graph/forward.py", False),
        ("layers/graph.py", False),
    ],
)
def test_an_edited_file_that_makes_the_kernels_makes_it_stale(edited, is_stale, monkeypatch, tmp_path):
    file = tmp_path / "package" / edited
    file.parent.mkdir(parents=True)
    file.write_text("a = 1")
    monkeypatch.setattr(records, "_PACKAGE", tmp_path / "package")
    found = []
    for text in ("a = 1", "a = 2"):
        file.write_text(text)
        records.versions.cache_clear()
        found.append(records.versions("softmax"))
    records.versions.cache_clear()
    assert (found[0] != found[1]) == is_stale


def test_a_record_of_other_files_is_stale():
    file = keep(H200, "softmax", mosaic_gpu={"a": 1.0}, xla={"a": 2.0})
    held = json.loads(file.read_text())
    held["versions"]["jax_attn_bwd"] = "0"
    file.write_text(json.dumps(held))
    got = explain(scaled_masked_softmax, QUERY, platform="H200")["mosaic_gpu"]
    assert f"not proven on {H200}: the record is of other files of jax" in got


@pytest.mark.parametrize(
    "damage",
    [
        lambda held: None,
        lambda held: [held],
        lambda held: {**held, "kernels": {"mosaic_gpu": {"failed": None, "times": {"b": 1.0}}}},
        lambda held: {**held, "sizes": {"a": 3}},
        lambda held: {k: v for k, v in held.items() if k != "versions"},
    ],
    ids=["null", "list", "unknown case", "size", "no versions"],
)
def test_a_damaged_record_is_ignored_and_told_once(damage, told):
    file = keep(H200, "softmax", mosaic_gpu={"a": 1.0}, xla={"a": 2.0})
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    for _ in range(2):
        got = explain(scaled_masked_softmax, QUERY, platform="H200")
        assert "the record is damaged" in got["mosaic_gpu"]
    (words,) = told()
    assert str(file) in words
    assert "is damaged" in words


def test_half_a_record_is_ignored(told):
    file = keep(H200, "softmax", mosaic_gpu={"a": 1.0}, xla={"a": 2.0})
    file.write_text(file.read_text()[:40])
    assert "damaged" in explain(scaled_masked_softmax, QUERY, platform="H200")["mosaic_gpu"]
    assert "it is not JSON" in told()[0]


def test_a_process_reads_it_once():
    file = keep(H200, "softmax", mosaic_gpu={"a": 1.0}, xla={"a": 2.0})
    for _ in range(2):
        assert explain(scaled_masked_softmax, QUERY, platform="H200")["mosaic_gpu"] == "ok"
        file.unlink(missing_ok=True)


def test_where_records_lie(monkeypatch, tmp_path):
    assert records.folder() == tmp_path
    monkeypatch.delenv("JAX_ATTN_BWD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert records.folder() == Path("/there/jax_attn_bwd")
    for base in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        monkeypatch.setenv("HOME", "/home/me")
        assert records.folder() == Path("/home/me/.cache/jax_attn_bwd")
    assert records.path(H200, "softmax").name == "NVIDIA-H200_softmax.json"


def test_what_is_written_is_there_at_once_or_not_at_all(tmp_path, monkeypatch):
    keep(H200, "softmax", mosaic_gpu="old")
    monkeypatch.setattr(json, "dump", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        keep(H200, "softmax", mosaic_gpu="new")
    (file,) = tmp_path.iterdir()
    assert "old" in file.read_text()
