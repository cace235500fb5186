"""The tilings alone, over shapes that no test could run: plain C++ that needs no NPU and no model of one."""

import ctypes
import subprocess
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUFFER = {2201: 192 * 1024 - 256 - 8 * 1024, 3510: 248 * 1024}
L0C = {2201: 128 * 1024, 3510: 256 * 1024}
MOST_BLOCKS, MOST_PIECES, LONGEST_PIECE = 65535, 4095, 2**21 - 1


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("native") / "libtilings.so"
    sources = [HERE / "native" / "tilings.cpp", *(ROOT / "csrc/npu").glob("*_plan.cpp")]
    flags = ["-std=c++20", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}"]
    subprocess.run(["g++", *flags, *map(str, sources), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def blocks32(size: int) -> int:
    return -(-size // 32) * 32


dtypes = st.sampled_from([0, 1, 2])
sizes = st.one_of(st.integers(1, 300), st.integers(1, 70_000), st.integers(1, 2**33))
chips = st.tuples(st.sampled_from([2201, 3510]), st.integers(1, 80))


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(
    dtype=dtypes, weight=dtypes, wide=st.booleans(), form=st.integers(0, 3), add=st.booleans(), rows=sizes,
    hidden=sizes, gap=st.integers(0, 2**20), chip=chips,
)  # fmt: skip
def test_norm(native, dtype, weight, wide, form, add, rows, hidden, gap, chip):
    arch, cores = chip
    hypothesis.assume(rows * (hidden + gap) < 2**60)
    out = 0 if wide and form == 0 else dtype
    result = (ctypes.c_int64 * 7)()
    long = ctypes.c_int64
    native.norm_tiling(dtype, weight, out, form, add, long(rows), long(hidden), long(hidden + gap), arch, cores, result)
    tile, chunk, pitch, buffers, blocks, x_bytes, out_bytes = result
    item, weight_item, out_item = (4 if t == 0 else 2 for t in (dtype, weight, out))

    # What norm_kernel.h asks of the unified buffer.
    queues = 2 * [(buffers, tile * pitch * item)] if add else []
    queues += [(buffers, tile * pitch * item), (buffers, tile * pitch * out_item)]
    single = [tile * pitch * 4] * 2 + [tile * 32] * 2 + [256]
    if form != 3:
        single += [pitch * weight_item, pitch * 4]
    taken = sum(count * blocks32(size) for count, size in queues) + sum(map(blocks32, single))
    assert taken <= BUFFER[arch]

    assert 1 <= blocks <= min(cores, MOST_BLOCKS) and blocks <= -(-rows // tile)
    assert 1 <= tile <= MOST_PIECES and buffers in (1, 2)
    assert pitch >= chunk and pitch * item % 32 == 0 and pitch - chunk < 32 // item
    assert chunk * max(item, weight_item, out_item) <= LONGEST_PIECE
    if chunk < hidden:
        assert tile == 1 and chunk % 2048 == 0
    else:
        assert chunk == hidden
    assert x_bytes == ((rows - 1) * (hidden + gap) + hidden) * item
    assert out_bytes == rows * hidden * out_item


def test_tiles_fill_the_buffer(native):
    """Rows of 4096 in bf16: two buffers, and more than one row a tile."""
    result = (ctypes.c_int64 * 7)()
    long = ctypes.c_int64
    for arch, least in ((2201, 2), (3510, 3)):
        native.norm_tiling(1, 1, 1, 0, 0, long(4096), long(4096), long(4096), arch, 40, result)
        assert result[0] >= least and result[3] == 2 and result[4] == 40


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(
    dtype=dtypes, weights=dtypes, wide=st.booleans(), score=st.integers(0, 2), bias=st.booleans(),
    tokens=st.integers(1, 2**40), groups=st.integers(1, 2048), group=st.integers(1, 2048), data=st.data(), chip=chips,
)  # fmt: skip
def test_router(native, dtype, weights, wide, score, bias, tokens, groups, group, data, chip):
    arch, cores = chip
    experts = groups * group
    hypothesis.assume(experts <= 16384)
    topk = data.draw(st.integers(1, group))
    result = (ctypes.c_int64 * 7)()
    shape = map(ctypes.c_int64, (tokens, groups, group, topk))
    native.router_tiling(dtype, weights, wide, score, bias, *shape, arch, cores, result)
    tile, pitch, choices, buffers, work, blocks, fits = result
    assert fits or experts > 4096 or topk > 2048
    if not fits:
        return
    item, weight = (4 if t == 0 else 2 for t in (dtype, weights))

    # What moe_router_kernel.h asks of the unified buffer.
    sizes = [tile * pitch * item] * buffers + [tile * choices * size for size in (weight, 8 if wide else 4, 4)]
    sizes += [tile * pitch * 4 * (4 if score == 2 else 3), 2 * tile * 32, work * 4]
    sizes += [groups * 32 if group % 8 == 0 else 32, -(-groups // 8) * 32] + bias * [pitch * 4]
    assert sum(map(blocks32, sizes)) <= BUFFER[arch]
    assert 1 <= tile <= 32 and 1 <= blocks <= min(cores, -(-tokens // tile))
    assert experts <= pitch < experts + 16 and topk <= choices < topk + 16 and work >= 64


sides = st.one_of(st.integers(1, 40), st.integers(1, 70_000), st.integers(1, 2**31 - 1))
gaps = st.one_of(st.just(0), st.integers(0, 2**20))


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(
    dtype=dtypes, wide=st.booleans(), rows=sides, columns=sides, depth=sides, dense=st.tuples(*[st.booleans()] * 2),
    gap=gaps, chip=chips,
)  # fmt: skip
def test_gemm(native, dtype, wide, rows, columns, depth, dense, gap, chip):
    arch, cores = chip
    hypothesis.assume(max(rows, columns, depth) * (min(rows, columns, depth) + gap) < 2**60)
    hypothesis.assume(rows * columns < 2**58 and depth * max(rows, columns) < 2**58)
    dense = (True, True) if dtype == 0 or depth == 1 else dense
    out = 0 if wide else dtype
    a_runs, a_length = (rows, depth) if dense[0] else (depth, rows)
    b_runs, b_length = (columns, depth) if dense[1] else (depth, columns)
    result = (ctypes.c_int64 * 9)()
    long = ctypes.c_int64
    strides = [long(length + gap) for length in (a_length, b_length, columns)]
    native.gemm_tiling(
        dtype, out, long(rows), long(columns), long(depth), *map(int, dense), *strides, arch, cores, result
    )
    tile_rows, tile_columns, chunk, step, sums, blocks, *extents = result
    item, out_item = (4 if t == 0 else 2 for t in (dtype, out))

    assert 2 * (tile_rows + tile_columns) * chunk * item <= 512 * 1024
    assert 2 * max(tile_rows, tile_columns) * step * item <= 64 * 1024
    assert sums in (1, 2) and sums * tile_rows * tile_columns * 4 <= L0C[arch]
    assert all(size >= 16 and size % 16 == 0 for size in (tile_rows, tile_columns, step)) and chunk % step == 0
    # What the instructions take: fractals and elements in a direction, products, columns of a copy out.
    assert step * item // 32 <= 255 and max(tile_rows, tile_columns) // 16 <= 255 and step <= 4095
    assert chunk <= 16384 and tile_columns <= 4095
    assert 1 <= blocks <= min(cores, MOST_BLOCKS)
    assert blocks <= -(-rows // tile_rows) * -(-columns // tile_columns)
    assert extents == [
        ((a_runs - 1) * (a_length + gap) + a_length) * item,
        ((b_runs - 1) * (b_length + gap) + b_length) * item,
        ((rows - 1) * (columns + gap) + columns) * out_item,
    ]


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(out=dtypes, rows=sides, columns=sides, gap=gaps, chip=chips)
def test_gemm_finish(native, out, rows, columns, gap, chip):
    arch, cores = chip
    hypothesis.assume(rows * (columns + gap) < 2**60)
    result = (ctypes.c_int64 * 7)()
    long = ctypes.c_int64
    native.gemm_finish_tiling(out, *map(long, (rows, columns, columns, columns + gap)), arch, cores, result)
    tile, chunk, pitch, blocks, *extents = result
    item = 4 if out == 0 else 2
    elements = tile * pitch
    queues = 2 * (blocks32(elements * 4) + 2 * blocks32(elements * item)) + blocks32(pitch * item)
    assert queues + 2 * blocks32(elements * 4) + blocks32(pitch * 4) <= BUFFER[arch]
    assert 1 <= tile <= MOST_PIECES and 1 <= blocks <= min(cores, MOST_BLOCKS)
    assert 1 <= chunk <= columns and pitch >= chunk and pitch * item % 32 == 0 and chunk * 4 <= LONGEST_PIECE
    assert tile == 1 or (columns + gap - chunk) * item < 2**32  # the gap of a copy
    last = (rows - 1) * (columns + gap) + columns
    assert extents == [rows * columns * 4, rows * columns * item, last * item]


def test_a_product_takes_all_cores(native):
    """The shapes of decoding and of prefill; the largest tile where it leaves no core idle in the last turn."""
    result = (ctypes.c_int64 * 9)()
    long = ctypes.c_int64
    for arch, rows, least in ((2201, 1, 16 * 128), (2201, 4096, 128 * 256), (3510, 5120, 256 * 256)):
        strides = [long(4096), long(4096), long(7168)]
        native.gemm_tiling(1, 1, long(rows), long(7168), long(4096), 1, 1, *strides, arch, 20, result)
        assert result[0] * result[1] >= least and result[5] == 20


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(
    dtype=dtypes, wide=st.booleans(), by_value=st.booleans(), table=st.booleans(), rows=st.integers(1, 2**28),
    size=st.one_of(st.integers(0, 5000), st.integers(0, 2**31 - 1)), gap=gaps, chip=chips,
    k=st.one_of(st.integers(1, 5000), st.integers(1, 2**31 - 1)),
)  # fmt: skip
def test_topk(native, dtype, wide, by_value, table, rows, size, gap, chip, k):
    arch, cores = chip
    result = (ctypes.c_int64 * 5)()
    shape = map(ctypes.c_int64, (rows, size, k, size + gap))
    native.topk_tiling(dtype, wide, by_value, table, *shape, arch, cores, result)
    window, chunk, room, blocks, x_bytes = result
    item = 4 if dtype == 0 else 2

    # What topk_list.h and topk_kernel.h ask of the unified buffer.
    sizes = [room * 4] * 4 + [room * item] * 2 + [room // 8] * 3 + [chunk * item] * 2
    sizes += [window * 8] * 2 if by_value else []
    sizes += [max(window, chunk) * (8 if wide else 4)] if wide or table else []
    assert sum(map(blocks32, sizes)) <= BUFFER[arch]
    assert all(n >= 64 and n % 64 == 0 for n in (window, chunk, room)) and room >= window + chunk
    assert window <= 4096  # so that no run of a sort is longer than MrgSort takes
    assert window >= min(k, size, 1024)
    assert 1 <= blocks <= min(cores, rows)
    assert x_bytes == ((rows - 1) * (size + gap) + size) * item


def code_bytes(code: int, elements: int) -> int:
    return elements // 2 if code == 2 else elements


@hypothesis.settings(deadline=None, max_examples=600)
@hypothesis.given(
    back=st.booleans(), dtype=dtypes, code=st.integers(0, 2), scale=st.integers(0, 3), given=st.booleans(),
    rows=sizes, columns=sizes, block_rows=sizes, block_columns=st.one_of(st.just(1), sizes), chip=chips,
)  # fmt: skip
def test_quantisation(native, back, dtype, code, scale, given, rows, columns, block_rows, block_columns, chip):
    arch, cores = chip
    columns *= 2
    block_rows, block_columns = min(block_rows, rows), min(block_columns, columns)
    if code == 2 and block_columns > 1:
        block_columns += block_columns % 2
    hypothesis.assume(rows * columns < 2**60)
    down, across = -(-rows // block_rows), -(-columns // block_columns)
    hypothesis.assume(down < 2**32 and across < 2**32)
    result = (ctypes.c_int64 * 8)()
    shape = map(ctypes.c_int64, (rows, columns, block_rows, block_columns))
    native.quant_tiling(back, dtype, code, scale, given, *shape, arch, cores, result)
    pieces, chunk_rows, chunk, pitch, blocks, strided, dense, scales = result
    item, alignment = 4 if dtype == 0 else 2, 64 if code == 2 else 32

    # What quant_kernel.h, dequant_kernel.h and quant_columns_kernel.h ask of the unified buffer.
    by_column = block_columns == 1
    elements = chunk_rows * pitch * (1 if by_column else pieces)
    buffers = [elements * item, code_bytes(code, elements)] * 2 + [32]
    if by_column:
        buffers += [(3 * elements + 4 * pitch) * 4, pieces * 32]
    else:
        more = code == 2 or (given and not back)
        buffers += [elements * 4] * (3 if more else 2)
        buffers += [2 * pieces * 32] if back or given else [pieces * 32, 3 * pieces * 32, 512]
    assert sum(map(blocks32, buffers)) <= BUFFER[arch]

    assert 1 <= pieces <= 1024 and 1 <= chunk_rows <= min(block_rows, MOST_PIECES)
    assert pitch >= (pieces if by_column else chunk) and pitch % alignment == 0
    assert chunk * item <= LONGEST_PIECE
    if not by_column:
        assert pieces == 1 or (chunk_rows, chunk) == (block_rows, block_columns)
        assert chunk_rows == 1 or chunk == block_columns
    tiles = down * -(-across // pieces) if by_column else -(-down * across // pieces)
    assert 1 <= blocks <= min(cores, tiles)
    values, codes = rows * columns * item, code_bytes(code, rows * columns)
    assert (strided, dense) == ((codes, values) if back else (values, codes))
    assert scales == down * {0: 4 * across, 1: 4 * across, 2: across, 3: 4 * -(-across // 4)}[scale]


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(
    dtype=dtypes, add=st.booleans(), code=st.integers(0, 2), rows=st.integers(1, 2**31), hidden=sizes,
    group=st.one_of(st.sampled_from([32, 64, 128]), sizes), chip=chips,
)  # fmt: skip
def test_norm_that_quantises(native, dtype, add, code, rows, hidden, group, chip):
    arch, cores = chip
    hidden *= 32
    group = min(group, hidden)
    result = (ctypes.c_int64 * 6)()
    shape = map(ctypes.c_int64, (rows, hidden, group))
    native.norm_quant_tiling(dtype, add, code, *shape, arch, cores, result)
    together, tile, pitch, buffers, out_bytes, scale_bytes = result
    alignment = 64 if code == 2 else 32

    def needed(tile, buffers):
        item, groups = 4 if dtype == 0 else 2, tile * -(-hidden // group)
        queues = [(buffers, tile * hidden * item)] * (3 if add else 1) + [(buffers, code_bytes(code, tile * hidden))]
        single = [tile * hidden * 4] * (3 if code == 2 else 2) + [tile * hidden * item, tile * 32, tile * 32, 256]
        single += [hidden * item, hidden * 4, groups * 32, groups * 96, 512]
        return sum(n * blocks32(size) for n, size in queues) + sum(map(blocks32, single))

    if not together:
        nearly = BUFFER[arch] - 4096  # a plan leaves room for what is rounded up
        assert hidden % alignment or group % alignment or needed(1, 1) > nearly
        return
    assert pitch == hidden and group % alignment == 0
    assert needed(tile, buffers) <= BUFFER[arch]
    assert out_bytes == code_bytes(code, rows * hidden) and scale_bytes == 4 * rows * -(-hidden // group)
