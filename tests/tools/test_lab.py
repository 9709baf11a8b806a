"""The lab that asks a GPU: its questions run, on tiny arrays, and what it says follows of its figures."""

import json

import jax
import pytest
from gpu import lab
from helpers import thorough

VARIANT = lab.Variant("other", lambda x: x, 0.8, "something changes")


@pytest.mark.parametrize(
    ("other_ms", "said"),
    [
        (0.8, "as predicted: something changes"),
        (0.5, "0.50, not 0.80: something changes"),
        (0.95, "0.95, not 0.80: nothing changes"),
        (2.0, "2.00, not 0.80: nothing changes"),
    ],
)
def test_the_verdict_compares_with_what_was_predicted(other_ms, said):
    assert lab.verdict(VARIANT, 1.0, other_ms) == said


def asked(folder, *options):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
        assert lab.main(["--tiny", "--out", str(folder), *options]) == 0
    answers = json.loads((folder / "answers.json").read_text())["answers"]
    table = (folder / "answers.md").read_text().splitlines()
    assert len([line for line in table if line.startswith("| ")]) == len(answers) + 1
    return answers


def test_a_question_is_measured_and_kept(tmp_path):
    (answer,) = asked(tmp_path, "--only", "softmax [4096")
    assert (answer["ours"], answer["other"]) == ("xla", "plain")
    assert answer["ours_ms"] > 0 < answer["other_ms"]
    assert answer["said"].endswith(("nothing changes", "portable code is mended there"))


def test_what_there_is_no_time_for_is_listed(tmp_path):
    answers = asked(tmp_path, "--minutes", "-1")
    assert len(answers) == sum(len(question.others) for question in lab.questions())
    assert {answer["said"] for answer in answers} == {"not asked: the time was up"}


@thorough
def test_all_questions_run(tmp_path):
    """But for the kernels of a GPU, which say why they do not run here; all variants agree."""
    for answer in asked(tmp_path):
        kernels = {"mosaic_gpu", "cudnn"} & {answer["ours"], answer["other"]}
        assert (answer["ours_ms"] is None) == bool(kernels), answer["said"]
        assert not kernels or "it is a gpu kernel and the target platform is cpu" in answer["said"]
