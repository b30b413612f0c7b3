"""Every kernel variant as machine code for every chip: no spills, accesses as wide and
conversions as native as promised, and the numbers of the checked-in table."""

import re

import pytest

import kernel_table
from graphfuse.base.device import Device
from graphfuse.base.dtypes import data_type
from graphfuse.engines.rows.across import AcrossKnobs
from graphfuse.engines.rows.across.split import AcrossSplit
from graphfuse.engines.rows.by_row import ByRowKnobs
from graphfuse.engines.rows.by_row.split import ByRowSplit
from graphfuse.engines.rows.over_grid import OverGridKnobs
from graphfuse.engines.rows.over_grid.split import OverGridSplit
from graphfuse.engines.rows.persistent import PersistentKnobs
from graphfuse.engines.rows.persistent.split import PersistentSplit
from graphfuse.rows.steps import Join
from support import cubin
from support.variants import TARGETS, VARIANTS

pytestmark = pytest.mark.compile

REGISTER_FILE = 65536  # of a CTA, on all of these chips
RESERVED = 1024  # bytes of shared memory that are the system's, counted as a kernel's that has some, from SM90 on
ALLOWANCE = 256  # bytes that an engine may take a kernel to declare for a reduction beyond what it does
SPLITS = {
    ByRowKnobs: ByRowSplit.of,
    PersistentKnobs: PersistentSplit.of,
    AcrossKnobs: AcrossSplit.of,
    OverGridKnobs: OverGridSplit.of,
}


@pytest.mark.parametrize(("name", "arch"), kernel_table.checked())
def test_kernel(name, arch, note):
    variant, device = VARIANTS[name], TARGETS[arch]
    facts, knobs = variant.facts(), variant.knobs_on(device)
    assert variant.engine.why_not(facts, device) is None
    assert variant.engine.illegal(facts, knobs, device) is None

    code = kernel_table.code(name, arch)
    row = kernel_table.row(variant, arch, code)
    assert code.stack == code.local == code.spills == 0
    assert code.registers * variant.engine.launch(facts, knobs).block <= REGISTER_FILE
    source = variant.source(device)
    if isinstance(knobs, PersistentKnobs):
        check_accesses_of_those_that_stay(code, source)
    else:
        check_accesses(code, source, {4} if isinstance(knobs, OverGridKnobs) else set())
    check_conversions(code, facts, arch)
    reductions = sum(len(facts.program.reductions(join)) for join in Join)
    check_shared_memory(code, SPLITS[type(knobs)](facts).static_bytes(knobs), device, reductions)
    recorded, now = kernel_table.read().nvrtc, kernel_table.compiler()
    if recorded != now:
        note(f"registers were not held against {kernel_table.PATH.name}: it is of NVRTC {recorded}, this is {now}")
    else:
        assert not kernel_table.difference(name, arch, row)


def check_accesses(code: cubin.Code, source: str, left: set[int]) -> None:
    """The widths that the kernel's text promises are there, and none is wider than its tensor is aligned for. left: of
    what CTAs leave each other."""
    text = source.split("namespace problem", 1)[1]
    loads = {int(w) for w in re.findall(r"gf::load<\d+, (\d+), ROW_READS>", text)}
    columns = {int(w) for w in re.findall(r"gf::load<\d+, (\d+), COLUMN_READS>", text)}
    stores = {int(w) for w in re.findall(r"gf::store_(?:piece<|blocks<[\w:]+, \d+, )(\d+)", text)}
    narrow = {int(w) for w in re.findall(r"gf::store_pack<(\d+)>\(row", text)}
    may_move = "COLUMN_READS = gf::Access::READ_ONLY" in text
    assert max(code.loads) == max(loads | left)
    assert columns <= (code.read_only if may_move else code.loads)
    scales = {4 if "_by_float" in text else 1} if "store_blocks" in text else set()
    assert stores <= code.stores <= stores | narrow | scales | left
    # Of what there is one a row, or in all, an element takes up to 4 bytes, INT64 8.
    assert max(code.read_only, default=0) <= max((*columns, 8 if "const long long*" in text else 4))


def check_accesses_of_those_that_stay(code: cubin.Code, source: str) -> None:
    """Rows are copied in the widths that the text promises, and read back as shared memory, not as any."""
    text = source.split("namespace problem", 1)[1]
    (partial,) = re.findall(r"PARTIAL_WIDTH = (\d+)", text)
    copied = {int(w) for w in re.findall(r"gf::copy_apart<\d+, (\d+)", text)}
    rows = {int(w) for w in re.findall(r"gf::load<\d+, (\d+), ROW_READS>", text)}
    columns = {int(w) for w in re.findall(r"gf::load<\d+, (\d+), COLUMN_READS>", text)}
    stores = {int(w) for w in re.findall(r"gf::store_piece<(\d+)", text)}
    totals = {int(w) for w in re.findall(r"gf::store_pack<(\d+)>\(gf::offset\(totals", text)}
    assert code.copies == copied
    assert rows <= code.loads <= rows | {4, int(partial)}
    assert columns <= code.read_only <= columns | {4}
    assert stores | totals <= code.stores <= stores | totals | {4, int(partial)}
    per_row, cta = (int(re.search(rf"int {name} = (\d+)", text)[1]) for name in ("THREADS_PER_ROW", "THREADS"))
    if per_row <= cta:  # of other CTAs' shared memory all reads are of any memory; so is that of the grid's barrier
        assert all("STRONG" in opcode for opcode in code.opcodes if opcode.partition(".")[0] == "LD")


def check_conversions(code: cubin.Code, facts, arch: str) -> None:
    """Outputs are quantized by instructions exactly where the chip, under this name, has them."""
    fp8, fp4 = int(arch[3:].rstrip("a")) >= 89, arch in ("sm_100a", "sm_103a", "sm_120a")
    known = {
        data_type.BFLOAT16: {"BF16"},
        data_type.FP8_E4M3: {"E4M3"} if fp8 else set(),
        data_type.FP8_E5M2: {"E5M2"} if fp8 else set(),
        data_type.FP4_E2M1: {"E4M3", "E2M1" if fp4 else "E5M2"} if fp8 else set(),
    }
    written = (*facts.program.stores, *facts.program.sums)
    wanted = set().union(*(known.get(s.view.dtype, set()) for s in written))
    assert code.conversions - {"F16"} == wanted


def check_shared_memory(code: cubin.Code, taken: int, device: Device, reductions: int) -> None:
    """What the engine takes the kernel's structs for, by which knobs are legal, is no less than they are, nor much
    more for each reduction of a row. taken: bytes."""
    declared = code.shared - RESERVED if device.sm >= 90 and code.shared else code.shared
    assert declared <= taken
    assert taken <= declared + ALLOWANCE * reductions or not declared  # rows that share a warp need none


def test_the_table_lists_these_variants():
    assert list(kernel_table.read().rows) == [(name, arch) for name in VARIANTS for arch in TARGETS]


def test_the_table_is_of_the_compiler_that_its_command_brings():
    assert kernel_table.read().nvrtc == kernel_table.pinned()


def test_a_change_is_named():
    (name, arch), row = next(iter(kernel_table.read().rows.items()))
    assert kernel_table.difference(name, arch, row) == ""
    more = (row[0], row[1] + 7, *row[2:])
    assert f"registers {row[1]} -> {row[1] + 7}. If that is meant, run make kernel-table" in kernel_table.difference(
        name, arch, more
    )
    assert "is not in kernel-resources.csv: run make kernel-table" in kernel_table.difference("new", arch, row)


SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) spills(float4* memory, int last) {
  float values[96];
  for (int i = 0; i < 96; ++i) values[i] = reinterpret_cast<float*>(memory)[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int i = 0; i < 96; ++i) values[i] = __fsqrt_rn(values[i]) + values[(i + last) % 96];
  float4 sum = {};
  for (int i = 0; i < 96; ++i) sum.x += values[i] * values[95 - i];
  memory[threadIdx.x] = sum;
}
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_spills_and_widths_are_seen(arch):
    from graphfuse.runtime import nvrtc

    (code,) = cubin.read([nvrtc.compile(SPILLING, arch, "spills.cu")], arch)
    assert code.stack > 0 and code.spills > 0
    assert code.loads == {4} and code.stores == {16} and not code.read_only
