"""What only a chip can say: `PYTHONPATH=tests python -m gpu.lab [--minutes 10] [--out out/lab] [--tiny]`.

A question is a training step by several variants, ours first. Each other one has the quotient of its time
over ours as it is predicted, and what follows where it is faster: which rule of a plan stays, which line
changes. The most important come first; what there is no time for is listed as not asked. Each answer is
printed and kept at once, so that a run that is cut off loses one. `--tiny` tries the lab itself, on sizes
that say nothing.

Graphs and the kernels of deformable attention need JAX 0.12; all else runs on JAX 0.11.2, too.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from bench import measure, plain, report

import jax_attn_bwd as jab
from jax_attn_bwd._core import choices

REPEATS, SECONDS = 3, 0.4  # rounds, and how long they go on
CLOSE = 1.15  # quotients that differ by less than this factor are what was predicted
HEADS = 8

Function = Callable[..., jax.Array]


class Variant(NamedTuple):
    """Another way to compute what is asked about.

    Attributes:
      name: of the implementation, or of the formula.
      function: of the arrays, without the cotangent.
      predicted: its time over that of ours.
      follows: of it being faster; where ours is, nothing changes.
      without: rules that are switched off.
    """

    name: str
    function: Function
    predicted: float
    follows: str
    without: tuple[str, ...] = ()


class Question(NamedTuple):
    """A training step: how its arrays are drawn, the cotangent first, tiny ones on demand; its variants."""

    name: str
    arrays: Callable[[bool], tuple[jax.Array, ...]]
    ours: tuple[str, Function]
    others: tuple[Variant, ...]


class Answer(NamedTuple):
    """What was measured of a variant beside ours; `said` is the verdict, or why there is none."""

    question: str
    ours: str
    other: str
    ours_ms: float | None
    other_ms: float | None
    predicted: float
    said: str


def verdict(variant: Variant, ours_ms: float, other_ms: float) -> str:
    """Says what follows of two times."""
    quotient = other_ms / ours_ms
    near = max(quotient, variant.predicted) < CLOSE * min(quotient, variant.predicted)
    words = "as predicted" if near else f"{quotient:.2f}, not {variant.predicted:.2f}"
    return f"{words}: {variant.follows if quotient < 1 / CLOSE else 'nothing changes'}"


# ---- the questions


def _draw(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True))


def _dense_arrays(B: int, T: int, N: int, H: int, dtype: Any, bias: bool, tiny: bool) -> tuple:
    B, T, N = (1, 128, 2) if tiny else (B, T, N)
    of_bias = [(1, N, T, T)] if bias else []
    return _draw(*[(B, T, N, H)] * 4, *of_bias, dtype=dtype)


def _padding(query: jax.Array) -> jax.Array:
    B, T = query.shape[:2]
    return jnp.arange(T) < jnp.linspace(T // 2, T, B).astype(int)[:, None, None, None]


def _attend(q, k, v, bias=None, *, padding=False, **options) -> jax.Array:
    mask = _padding(q) if padding else None
    return jab.dot_product_attention(q, k, v, bias, mask, **options)


def _jax_nn(q, k, v, bias=None, *, padding=False, **options) -> jax.Array:
    mask = _padding(q) if padding else None
    return jax.nn.dot_product_attention(q, k, v, bias, mask, **options)


def _dense() -> Iterator[Question]:
    """Asks where cuDNN is ahead of Hopper's kernels, and where the portable path is behind `jax.nn`."""
    causal = {"is_causal": True}
    for B, T, N, H, options, bias, predicted in (
        (4, 4096, 16, 128, causal, False, 0.86),
        (4, 4096, 16, 128, {}, False, 0.82),
        (1, 2048, 16, 64, {}, True, 0.68),
        (1, 16384, 16, 128, causal, False, 0.91),
        (8, 512, 16, 64, causal, False, 1.10),
        (32, 128, 12, 64, {}, False, 2.0),
    ):
        ours, other = (partial(_attend, **options, implementation=name) for name in ("mosaic_gpu", "cudnn"))
        kind = ", bias" if bias else ", causal" if options else ""
        follows = "None picks cuDNN on Hopper for such calls"
        yield Question(
            f"dense B{B} T{T} N{N} H{H}{kind}",
            partial(_dense_arrays, B, T, N, H, jnp.bfloat16, bias),
            ("mosaic_gpu", ours),
            (Variant("cudnn", other, predicted, follows),),
        )
    planes = {"planes": 1.3, "whole_rows": 1.2, "fused_dp": 1.1}  # rules, and the quotient without each
    for B, T, N, H, dtype, bias, options, of_plain, rules in (
        (4, 4096, 16, 128, jnp.bfloat16, False, {}, 1.01, planes),
        (4, 4096, 16, 128, jnp.bfloat16, False, causal, 1.06, {"strips": 1.3}),
        (32, 512, 12, 64, jnp.bfloat16, False, {"padding": True}, 1.01, planes),
        (1, 2048, 16, 64, jnp.bfloat16, True, {}, 1.03, {"planes": 2.3, "fused_dp": 1.1}),
        (4, 4096, 16, 128, jnp.bfloat16, True, {}, 0.97, {"planes": 1.5, "fused_dp": 1.1}),
        (32, 128, 12, 64, jnp.float32, False, {}, 0.98, planes),
        (4, 2048, 16, 64, jnp.float32, False, {}, 0.98, {"planes": 1.3, "fused_dp": 1.1}),
        (4, 2048, 16, 64, jnp.float32, False, causal, 1.1, {"strips": 1.3}),
    ):
        kind = ", ".join([jnp.dtype(dtype).name, *options, *(["bias"] if bias else [])])
        ours = partial(_attend, **options, implementation="xla")
        formula = partial(_jax_nn, **options, implementation="xla")
        follows = "the portable path is mended there, or its way is not taken at such sizes"
        others = [Variant("jax.nn", formula, of_plain, follows)]
        for rule, quotient in rules.items():
            follows = f"the rule `{rule}` does not hold at such sizes"
            others.append(Variant(f"xla, without {rule}", ours, quotient, follows, (rule,)))
        arrays = partial(_dense_arrays, B, T, N, H, dtype, bias)
        yield Question(f"dense B{B} T{T} N{N} H{H}, {kind}", arrays, ("xla", ours), tuple(others))


def _gated(tiny: bool) -> tuple[jax.Array, ...]:
    B, T, N, H = (1, 128, 2, 16) if tiny else (1, 4096, 8, 128)
    *rows, decay, beta = _draw(*[(B, T, N, H)] * 4, (B, T, N), (B, T, N))
    narrow = (x.astype(jnp.bfloat16) for x in (*rows, -jax.nn.softplus(decay), jax.nn.sigmoid(beta)))
    return tuple(narrow)


def _linear() -> Iterator[Question]:
    """Asks whether Hopper's kernels of linear attention are ahead, and what pieces of the sequence gain."""

    def formula(*arrays):
        return plain.chunk_form(1e-6, *(x.astype(jnp.float32) for x in arrays)).astype(arrays[0].dtype)

    named = lambda name: partial(jab.gated_delta_rule, l2_norm_epsilon=1e-6, implementation=name)
    kernels, portable = named("mosaic_gpu"), named("xla")
    no_pieces, no_product = "linear_pieces", "linear_one_product"
    chunks = (Variant("plain", formula, 4.0, "portable code is mended there"),)
    drawn = "B1 T4096 N8 H128"
    yield Question(
        f"gated delta rule {drawn}",
        _gated,
        ("mosaic_gpu", kernels),
        (
            Variant("xla", portable, 8.0, "no line of `GENERATIONS` for these kernels"),
            Variant(
                f"mosaic_gpu, without {no_pieces}", kernels, 1.8,
                f"the rule `{no_pieces}` does not hold at such sizes", (no_pieces,),
            ),
        ),
    )  # fmt: skip
    yield Question(
        f"gated delta rule {drawn}, portable",
        _gated,
        ("xla", portable),
        (
            *(chunks if plain.solves_end() else ()),
            Variant(
                f"xla, without {no_product}", portable, 2.0,
                f"the rule `{no_product}` does not hold at such sizes", (no_product,),
            ),
        ),
    )  # fmt: skip


def _softmax() -> Iterator[Question]:
    for shape, predicted, follows in (
        ((8, 16, 1024, 1024), 1.36, "the backward's one kernel is not taken for rows of that length"),
        ((4096, 32000), 1.0, "portable code is mended there"),
    ):
        ours = partial(jab.scaled_masked_softmax, scale=0.3, implementation="xla")
        formula = lambda x: jax.nn.softmax(x * jnp.asarray(0.3, x.dtype))
        yield Question(
            f"softmax {list(shape)}",
            lambda tiny, shape=shape: _draw(*[(4, 128) if tiny else shape] * 2, dtype=jnp.bfloat16),
            ("xla", ours),
            (Variant("plain", formula, predicted, follows),),
        )


LEVELS = ((64, 64), (32, 32), (16, 16), (8, 8))
TINY_LEVELS = ((4, 3), (2, 2), (1, 3), (1, 1))


def _levels(pixels: int) -> tuple[tuple[int, int], ...]:
    return next(levels for levels in (LEVELS, TINY_LEVELS) if sum(h * w for h, w in levels) == pixels)


def _sampled(queries: int, tiny: bool) -> tuple[jax.Array, ...]:
    B, Q, points, levels = (1, 5, 4, TINY_LEVELS) if tiny else (2, queries, 4, LEVELS)
    pixels = sum(h * w for h, w in levels)
    weights = (B, Q, HEADS, len(levels), points)
    dout, value, logits = _draw((B, Q, HEADS * 32), (B, pixels, HEADS, 32), weights)
    at = jax.random.uniform(jax.random.key(1), (*weights, 2), jnp.float32)
    return dout, value, at, jax.nn.softmax(logits, (-2, -1))


def _deformable() -> Iterator[Question]:
    """Asks from how many queries on the plain formula is faster, and what a fixed order costs."""

    def call(value, *rest, **options):
        return jab.multi_scale_deformable_attention(value, _levels(value.shape[1]), *rest, **options)

    formula = lambda value, *rest: plain.gather_form(_levels(value.shape[1]), value, *rest)
    ours, ordered = (partial(call, implementation="xla", deterministic_sums=sums) for sums in (None, True))
    kernel = partial(call, implementation="mosaic_gpu")
    rule = ("deformable_by_level",)
    for queries, of_plain, of_ordered, of_kernel, of_at_once in (
        (5440, 1.0, 3.2, 2.1, 1.9),
        (300, 2.1, 3.4, 2.6, 1.0),
        (800, 1.0, 2.5, 2.0, 1.0),
        (1600, 1.0, 2.7, 2.0, 1.5),
    ):
        variants = (
            Variant("plain", formula, of_plain, "the plain formula's form is taken there, or mended"),
            Variant("xla, all points at once", ours, of_at_once, "`deformable_by_level` begins later", rule),
            Variant("xla, fixed order", ordered, of_ordered, "None takes a fixed order there"),
            Variant("mosaic_gpu", kernel, of_kernel, "None picks the kernel there"),
        )
        yield Question(f"deformable, {queries} queries", partial(_sampled, queries), ("xla", ours), variants)


def _graphs() -> Iterator[Question]:
    """Asks from which size on a graph's kernel is faster than portable code, and that than segment sums."""
    operators = ("graph_attention", "graph_attention_v2", "graph_transformer_attention")
    sizes = (
        (2708, 13_000, 8, 8, 0.6, 0.63),
        (40_000, 500_000, 8, 16, 0.45, 1.15),
        (11_758, 1_038_000, 4, 64, 0.7, 3.2),
    )
    for nodes, edges, heads, width, of_kernel, of_plain in sizes:
        for operator in operators:
            made = partial(_graph_call, operator, nodes, edges, heads, width)
            yield Question(
                f"{operator}, {nodes} nodes, {edges} edges, {heads} x {width}",
                lambda tiny, made=made: made(tiny)[0],
                ("xla", _Late(made, "xla")),
                (
                    Variant("mosaic_gpu", _Late(made, "mosaic_gpu"), of_kernel, "the kernel is picked there"),
                    Variant("plain", _Late(made, "plain"), of_plain, "portable code is mended there"),
                ),
            )


class _Late(NamedTuple):
    """A function of a graph that is drawn when it is first called, and drawn again alike."""

    make: Callable[[bool], tuple[tuple, dict[str, Function]]]
    name: str

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        with jax.ensure_compile_time_eval():
            functions = self.make(arrays[0].shape[0] < 100)[1]
        return functions[self.name](*arrays)


def _graph_call(operator: str, nodes: int, edges: int, heads: int, width: int, tiny: bool) -> tuple:
    nodes, edges = (20, 60) if tiny else (nodes, edges)
    rng, columns = np.random.default_rng(0), heads * width
    graph = jab.BipartiteCSC.from_coo(
        rng.integers(0, nodes, edges), rng.integers(0, nodes, edges), nodes, nodes
    )
    three = operator == "graph_transformer_attention"
    last = (nodes, columns) if three else (columns * (2 if operator == "graph_attention" else 1),)
    arrays = _draw(*[(nodes, columns)] * 3, last)
    function = partial(getattr(jab, operator), graph, num_heads=heads)
    formula = plain.segment_ops(plain.edges_of(graph, columns, width), operator)
    ours = {name: partial(function, implementation=name) for name in ("xla", "mosaic_gpu")}
    return arrays, ours | {"plain": formula}


def questions() -> tuple[Question, ...]:
    """Lists all, the most important first."""
    return (*_deformable(), *_graphs(), *_dense(), *_linear(), *_softmax())


# ---- the answers


def ask(question: Question, tiny: bool) -> Iterator[Answer]:
    """Measures a question; what a variant refuses, or gets wrong, is the answer."""
    name, function = question.ours
    arrays = question.arrays(tiny)
    compiled = lambda name, function: measure.compiled_contender(name, measure.step(function), *arrays)
    try:
        ours: measure.Contender | str = compiled(name, function)
    except Exception as error:
        ours = report.sentence(error)
    for variant in question.others:
        said = partial(Answer, question.name, name, variant.name)
        try:
            if isinstance(ours, str):
                raise RuntimeError(ours)
            with choices.without(*variant.without):
                if variant.without:
                    jax.clear_caches()  # what was traced with these rules
                other = compiled(variant.name, variant.function)
            tolerance = measure.TOLERANCES[arrays[0].dtype.name]
            workload = measure.Workload(question.name, [ours, other], tolerance=tolerance)
            rounds, seconds = (1, 0.0) if tiny else (REPEATS, SECONDS)
            ours_ms, other_ms = (
                float(row.milliseconds or 0) for row in measure.measure(workload, rounds, seconds)
            )
        except Exception as error:
            yield said(None, None, variant.predicted, report.sentence(error))
        else:
            yield said(ours_ms, other_ms, variant.predicted, verdict(variant, ours_ms, other_ms))


def table(answers: list[Answer]) -> str:
    """Returns the answers as a table of Markdown."""
    ms = lambda x: "-" if x is None else f"{x:.3g}"
    lines = ["| question | ours | other | ms | ms | predicted | so |", "|---|---|---|---|---|---|---|"]
    for a in answers:
        cells = a.question, a.ours, a.other, ms(a.ours_ms), ms(a.other_ms), f"{a.predicted:.2f}", a.said
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Asks all questions for which there is time."""
    description = "What only a chip can say: variants of training steps side by side, and what follows."
    parser = argparse.ArgumentParser(prog="PYTHONPATH=tests python -m gpu.lab", description=description)
    parser.add_argument("--minutes", type=float, default=10.0, help="no question is begun after that")
    parser.add_argument(
        "--out", type=Path, default=Path("out") / "lab", help="folder of answers.md and .json"
    )
    parser.add_argument("--only", default="", help="questions whose name has these words")
    parser.add_argument("--tiny", action="store_true", help="sizes that say nothing, to try the lab itself")
    given = parser.parse_args(argv)

    given.out.mkdir(parents=True, exist_ok=True)
    end, about = time.monotonic() + 60 * given.minutes, report.environment()
    answers: list[Answer] = []
    for question in questions():
        if given.only not in question.name:
            continue
        up = time.monotonic() > end
        for answer in _unasked(question) if up else ask(question, given.tiny):
            answers.append(answer)
            print(table([answer]).splitlines()[-1], flush=True)
            kept = {"about": about, "answers": [x._asdict() for x in answers]}
            (given.out / "answers.json").write_text(json.dumps(kept, indent=1))
            (given.out / "answers.md").write_text(f"{_lines(about)}\n{table(answers)}")
    return 0


def _unasked(question: Question) -> Iterator[Answer]:
    for variant in question.others:
        names = question.name, question.ours[0], variant.name
        yield Answer(*names, None, None, variant.predicted, "not asked: the time was up")


def _lines(about: dict[str, str]) -> str:
    return "".join(f"* {name}: {x}\n" for name, x in about.items())


if __name__ == "__main__":
    raise SystemExit(main())
