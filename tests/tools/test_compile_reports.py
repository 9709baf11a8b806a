"""What compile-only reads in the compilers' reports, what it refuses, and the pages it writes."""

import dataclasses
import json

import pytest
from compile_only import __main__ as command
from compile_only import compiling, devices, gpu, programs, tpu
from compile_only.programs import Program


def good_row(**changes):
    kernel = gpu.Kernel(
        "attention", "sm_90a", 384, 168, 0, 0, 0, 200_000, dict.fromkeys(gpu.COUNTED, 4) | {"total": 1000}
    )
    row = Program("H200", "dot_product_attention", "mosaic_gpu", "causal", "forward", 1, 0, [kernel])
    own = {name: x for name, x in changes.items() if name in {f.name for f in dataclasses.fields(row)}}
    of_kernel = {name: x for name, x in changes.items() if name not in own}
    return dataclasses.replace(row, **{"kernels": [dataclasses.replace(kernel, **of_kernel)], **own})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spill_stores": 4}, "spill_stores 4, at most 0"),
        ({"spill_loads": 4}, "spill_loads 4, at most 0"),
        ({"stack": 16}, "stack 16, at most 0"),
        ({"registers": 256}, "registers 256, at most 255"),
        ({"shared_memory": 232_449}, "shared_memory 232449, at most 232448"),
        ({"instructions": {"HGMMA": 3, "UTMALDG": 2}}, "no kernel has the instruction MUFU.EX2"),
        ({"instructions": {"HMMA": 3, "MUFU.EX2": 2}}, "no kernel has the instruction HGMMA"),
        ({"operator": "graph_attention"}, "a kernel has the instruction RED"),
        ({"operator": "graph_attention", "instructions": {"MUFU.EX2": 3}}, "has the instruction LD.E or LDG"),
        ({"kernels": []}, "1 launches and 0 kernels"),
        ({"expected": 0}, "0 launches and 1 kernels"),
        ({"error": "ValueError: no"}, "ValueError: no"),
        ({"implementation": "xla", "temporary_bytes": None}, "no memory was reported"),
    ],
    ids=str,
)
def test_budgets_refuse(changes, said):
    assert compiling.violations(good_row()) == []
    assert any(said in sentence for sentence in compiling.violations(good_row(**changes)))


@pytest.mark.parametrize(
    ("registers", "shared_memory", "architecture", "expected"),
    [
        (32, 0, "sm_80", 1.0),
        (64, 2048, "sm_90a", 0.5),  # 8 blocks of 4 warps
        (73, 0, "sm_100a", 0.375),  # counts as 80 registers: 6 blocks
        (64, 100 * 1024, "sm_90a", 0.125),  # 2 blocks
        (64, 100 * 1024, "sm_80", 0.0625),
    ],
)
def test_occupancy(registers, shared_memory, architecture, expected):
    figures = {"threads": 128, "registers": registers, "shared_memory": shared_memory}
    (kernel,) = good_row(**figures, architecture=architecture).kernels
    assert kernel.occupancy == expected


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR4][R2.64] ;
        /*0020*/              @UP0 UTMALDG.5D [UR8], [UR4] ;
        /*0030*/                   LDG.E R9, desc[UR4][R2.64] ;
        /*0040*/                   MUFU.EX2 R3, R3 ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR44], RZ, !UPT ;
        /*0060*/                   LDGSTS.E [R5], desc[UR4][R2.64] ;
        /*0070*/             @!UPT R2UR UR4, R2 ;
        /*0080*/                   LD.E.128 R8, [R2.64] ;
        /*0090*/               @P1 ST.E [R2.64], R8 ;
        /*00a0*/                   REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R8 ;
        /*00b0*/                   RED.E.ADD.STRONG.GPU [R2.64], R8 ;
        /*00c0*/                   REDUX.SUM UR6, R8 ;
        /*00d0*/                   ATOMG.E.CAS.STRONG.GPU PT, R8, [R2], R4, R5 ;
"""


def test_instructions_are_counted_by_opcode_and_variant():
    counted = gpu.count(SASS)
    expected = {"LDG": 2, "LDG.E.128": 1, "UTMALDG": 1, "MUFU.EX2": 1, "HGMMA": 1, "R2UR": 1}
    expected |= {"LD.E": 1, "ST.E": 1, "RED": 2, "ATOM": 1}
    assert {name: n for name, n in counted.items() if n} == {**expected, "total": 14}


PTX = ".version 9.0\n.target sm_90a\n.visible .entry softmax_mosaic_gpu_kernel(\n.maxntid 128, 1, 1\n"
PTXAS = """ptxas info    : Compiling entry function 'softmax_mosaic_gpu_kernel' for 'sm_90a'
    32 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1 bytes smem
"""
LOWERED = 'module @softmax attributes {mosaic_gpu.dump_basename = "softmax_0"} {}'
RESOURCES = (
    "Resources(smem_scratch_bytes=1024, tmem_scratch_cols=0, barrier_counts=Counter({"
    "Barrier(arrival_count=1, num_barriers=2, orders_tensor_core=False): 3, "
    "Barrier(arrival_count=2, num_barriers=1, orders_tensor_core=False): 1}))"
)


@pytest.fixture
def dump(tmp_path, monkeypatch):
    """What Mosaic GPU leaves of one kernel."""
    monkeypatch.setattr(gpu, "disassemble", lambda ptx, architecture: SASS)
    for suffix, text in {
        "before_layout_inference.txt": LOWERED,
        "ptx": PTX,
        "ptxas": PTXAS,
        "resources.txt": RESOURCES,
    }.items():
        (tmp_path / f"softmax_0.{suffix}").write_text(text)
    return tmp_path


def test_a_dump_is_read(dump):
    (kernel,) = gpu.dumped(dump, {})
    assert dataclasses.astuple(kernel)[:-1] == ("softmax", "sm_90a", 128, 40, 12, 8, 32, 1024 + 56)
    assert kernel.instructions["MUFU.EX2"] == 1


def test_a_kernel_compiled_before_is_remembered_and_an_unknown_one_is_an_error(dump):
    known: dict = {}
    first = gpu.dumped(dump, known)
    assert gpu.dumped(dump, known) == first  # compiled again, as older versions do
    (dump / "softmax_0.ptx").unlink()  # the second program of the process finds it compiled
    (dump / "softmax_0.before_layout_inference.txt").rename(dump / "softmax_7.before_layout_inference.txt")
    assert gpu.dumped(dump, known) == first
    with pytest.raises(RuntimeError, match="1 kernels are new and PTX was dumped of 0"):
        gpu.dumped(dump, {})


def test_a_report_of_another_form_is_an_error(dump):
    (dump / "softmax_0.ptxas").write_text("ptxas info: nothing known\n")
    with pytest.raises(RuntimeError, match=r"report has no 'Used"):
        gpu.dumped(dump, {})


def test_rows_survive_the_document_and_the_table_shows_them():
    rows = [
        good_row(),
        good_row(target="H100"),
        good_row(implementation="xla", kernels=[]),
        good_row(implementation="xla", kernels=[], target="B200", error="E: no", temporary_bytes=None),
    ]
    document = json.loads(json.dumps(compiling.document(rows)))
    assert compiling.read(document) == rows
    page = gpu.markdown(rows, {"jax": "1.2", "ptxas": "13.0.1"})
    assert "JAX 1.2, ptxas 13.0.1" in page
    assert "H200, H100" in page  # one line for two chips with the same figures
    assert page.count("| attention |") == 1
    assert "| 0.0 | failed |" in page
    assert "E: no" in page


def test_a_case_that_does_not_compile_is_a_row_with_its_error(monkeypatch):
    (softmax,) = programs.registered("xla", ("scaled_masked_softmax",))
    case = programs.cases(softmax, "xla", "H200")[0]

    def refuse(*_):
        raise NotImplementedError("no such layout")

    monkeypatch.setattr(devices, "lower", refuse)
    row = Program("H200", softmax.name, "xla", case.name, "forward")
    row = compiling._compile(row, softmax, case, None, {})
    assert row.error.startswith("NotImplementedError at test_compile_reports.py:")
    assert row.error.endswith(": no such layout")
    assert compiling.violations(row)


def test_without_the_packages_one_sentence_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(devices, "missing", lambda *_, **__: "compiling for H200 needs a thing")
    assert command.main(["--target", "H200"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "compiling for H200 needs a thing\n"
    assert not captured.out


def test_an_implementation_that_nothing_has_is_not_a_pass(monkeypatch, capsys):
    monkeypatch.setattr(devices, "missing", lambda *_, **__: None)
    asked = ["--target", "H200", "--implementation", "mosaic_gpu", "--operator", "edge_softmax"]
    assert command.main(asked) == 2
    assert "no operator asked for has an implementation 'mosaic_gpu'" in capsys.readouterr().err


BUNDLES = """
     0   :  { %s1 = smov 0  ;;  %s2 = inlined_call_operand.vmem [shape: bf16[8,128]] }
   0x1 LB: > { %v3 = vld [vmem:[%s2] sm:$0xff]  ;;  %s4 = sadd.s32 1, %s1 }
   0x2   : > > { %v5 = vadd.f32 %v3, %v3 }
   0x3 PF: > { %v6 = vmatmul.bf16 %v5 }
"""
USE = """bundle utilisation
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
4 2 4 2 1 3 3 1 1 2
-
0 0 0 0 0 0 0 0 0 2
2 0 0 0 0 1 1 1 1 1
0 0 4 0 0 0 0 0 0 0
2 0 0 0 1 0 0 1 0 0
"""
CALL = (
    '  %attention_forward_1024x512_full.1 = (bf16[1]) custom-call(%q), custom_call_target="tpu_custom_call",'
    ' backend_config={"used_scoped_memory_configs":[{"memory_space":"1","size":"4096"}]}\n'
)


def test_the_text_of_bundles_is_read():
    name = "attention_forward_1024x512_full.1"
    assert tpu.custom_calls(CALL) == {name: 4096}
    broken = CALL.replace(", backend_config", ",\n\nbackend_config")  # a call that has metadata looks so
    assert tpu.custom_calls(CALL + broken.replace(name, "other")) == {name: 4096, "other": 4096}
    kernel = tpu.parse(name, BUNDLES, USE, 4096)
    assert (kernel.name, kernel.tile, kernel.programs) == (name[:-2], (1024, 512), 1)
    assert (kernel.bundles, kernel.inner, kernel.vmem) == (4, 3, 4096)
    assert (kernel.spill_stores, kernel.spill_loads) == (1, 1)
    assert kernel.slots["MXU"] == 25
    assert kernel.slots["VSTORE"] == 50
    assert kernel.per_score == 3 / 2**19
    both = tpu.parse(name.replace("full", "both"), BUNDLES, USE, 4096)
    assert (both.programs, both.per_score) == (2, None)
    for bad in (("", USE), (BUNDLES, "a\nMXU\n1\n-\n")):
        with pytest.raises(RuntimeError):
            tpu.parse(name, *bad, 0)
    with pytest.raises(RuntimeError, match="another form"):
        tpu.custom_calls(CALL.replace("used_scoped", "unused"))


def test_of_calls_of_one_kernel_the_compiler_tells_once(monkeypatch, tmp_path):
    monkeypatch.setattr(tpu, "dump_folder", lambda: tmp_path)
    again = CALL + CALL.replace("full.1", "full.2")
    with pytest.raises(RuntimeError, match=r"left no file of \['attention_forward_1024x512_full'\]"):
        tpu.dumped(again)
    stem = "1-attention_forward_1024x512_full.2-0-final_"
    (tmp_path / f"{stem}bundles.txt").write_text(BUNDLES)
    (tmp_path / f"{stem}hlo-static-per-bundle-utilization.txt").write_text(USE)
    (kernel,) = tpu.dumped(again)
    assert (kernel.name, kernel.vmem) == ("attention_forward_1024x512_full", 4096)
    with pytest.raises(RuntimeError, match="other"):
        tpu.dumped(again + CALL.replace("attention_forward_1024x512_full.1", "other"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vmem": 57 * 2**20}, "vmem 59768832, at most 58720256"),
        ({"spill_stores": 4097}, "spill_stores 4097, at most 4096"),
        ({"slots": {"MXU": 0}}, "does not use the matrix unit"),
        ({"kernels": []}, "1 launches and 0 kernels"),
        ({"error": "ValueError: no"}, "ValueError: no"),
    ],
    ids=["vmem", "spills", "mxu", "kernels", "error"],
)
def test_budgets_of_tpus_refuse(changes, said):
    slots = dict.fromkeys(tpu.SLOTS, 80)
    kernel = tpu.Kernel("attention_forward_1024x512_full", (1024, 512), 1, 9, 8, 7, 6, 5, slots)
    own = {n: x for n, x in changes.items() if n in ("kernels", "error")}
    kernel_changes = {n: x for n, x in changes.items() if n not in own}

    def row(**changed):
        changed = {"kernels": [dataclasses.replace(kernel, **kernel_changes)]} | changed
        return Program("v5e", "dot_product_attention", "mosaic_tpu", "H=128", "gradients", 1, 0, **changed)

    assert any(said in sentence for sentence in compiling.violations(row(**own)))
    good = row(kernels=[kernel])
    assert compiling.violations(good) == []
    assert compiling.read(json.loads(json.dumps(compiling.document([good])))) == [good]
    page = tpu.markdown([good], {"jax": "1.2", "libtpu": "0.0"})
    assert page.count("attention_forward_1024x512_full") == 2
