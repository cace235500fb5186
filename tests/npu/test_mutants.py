"""Faults seeded into the kernels: the model of a core has to find each one, and nothing in the kernels as they are.

Each runs in a forked child with a kernel source folder of its own.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import calls
import mutants_gemm
import mutants_groups
import mutants_rows
import mutants_topk
import pytest
from forking import Child
from mutant import WRONG_VALUES, Mutant

import torch_deepinfer

pytestmark = calls.needs_standin

V_BARRIER = "\n    PipeBarrier<PIPE_V>();"

MUTANTS = {
    "norm: barrier after the squares": Mutant(
        "norm_kernel.h", "Mul(squares_, values, values, size);" + V_BARRIER, "Mul(squares_, values, values, size);",
        r"Add: a (read|write) of byte \d+ on pipe V is not ordered after a write on pipe V", calls.norm_full,
    ),
    "norm: scalar read before the vector pipe is done": Mutant(
        "norm_kernel.h", "hand_over<HardEvent::V_S>(pipe_);", "",
        "GetValue: a read of byte .* on pipe S is not ordered after a write on pipe V", calls.norm_full,
    ),
    "norm: vector write before the scalar read is over": Mutant(
        "norm_kernel.h", "hand_over<HardEvent::S_V>(pipe_);", "",
        "Duplicate: a write of byte .* on pipe V is not ordered after a read on pipe S", calls.norm_full,
    ),
    "norm: tensor never freed": Mutant(
        "norm_kernel.h", "    x_queue_.FreeTensor(x);\n", "",
        "AllocTensor: the queue has no free buffer", calls.norm_full,
    ),
    "norm: tensor freed twice": Mutant(
        "row_norms.h", "    queue_.FreeTensor(raw);\n", "    queue_.FreeTensor(raw);\n    queue_.FreeTensor(raw);\n",
        "FreeTensor: a tensor is freed that nobody holds", calls.norm,
    ),
    "norm: result copied out before it is queued": Mutant(
        "norm_kernel.h",
        "      out_queue_.EnQue(out);\n      out = out_queue_.template DeQue<Out>();\n"
        "      out_.write(out, row, count, begin, size, pitch);\n",
        "      out_.write(out, row, count, begin, size, pitch);\n"
        "      out_queue_.EnQue(out);\n      out = out_queue_.template DeQue<Out>();\n",
        "on pipe MTE3 is not ordered after a write on pipe V", calls.norm,
    ),
    "norm: rows dealt to two cores": Mutant(
        "norm_kernel.h", "int64_t tile = GetBlockIdx();", "int64_t tile = GetBlockIdx() / 2;",
        "global memory, which core . has written", calls.norm,
    ),
    "norm: buffers beyond the unified buffer": Mutant(
        "norm_kernel.h", "pipe_.InitBuffer(squares_buffer_, elements * sizeof(float));",
        "pipe_.InitBuffer(squares_buffer_, 3 * elements * sizeof(float));",
        r"InitBuffer: the buffers take \d+ bytes, the memory has", calls.norm_full,
    ),
    "rows: destination of an addition overlaps its source": Mutant(
        "rows.h", "upper = values[uint32_t(lower)]", "upper = values[8]",
        "Add: the destination overlaps a source in part", calls.norm_long,
    ),
    "norm: a stray element beside those written": Mutant(
        "row_norms.h", "widen(values_, raw.template ReinterpretCast<W>(), size);",
        "widen(values_, raw.template ReinterpretCast<W>(), size + 1);",
        "Cast: a read of byte .*, undefined padding", calls.norm,
    ),
    "norm: sums read again before they are written": Mutant(
        "norm_kernel.h", "hand_over<HardEvent::MTE3_MTE2>(pipe_);", "",
        "global memory is not ordered after its write on pipe MTE3", calls.norm_long,
    ),
    "gated: barrier after the exponential": Mutant(
        "activation_kernel.h", "    Exp(x, x, n_);\n    PipeBarrier<PIPE_V>();\n", "    Exp(x, x, n_);\n",
        r"Adds: a read of byte \d+ on pipe V is not ordered after a write on pipe V", calls.silu,
    ),
    "gated: input given back before it is used": Mutant(
        "activation_kernel.h",
        "    gate_queue_.FreeTensor(gate);\n    up_queue_.FreeTensor(up);\n", "    gate_queue_.FreeTensor(up);\n",
        "FreeTensor: the tensor does not belong to this queue", calls.silu,
    ),
    "gated: an input widened before it has arrived": Mutant(
        "activation_kernel.h", "    gate_queue_.EnQue(gate);\n    up_queue_.EnQue(up);\n",
        "    gate_queue_.EnQue(gate);\n", "DeQue: the queue is empty", calls.silu,
    ),
    "gated: every core takes all parts of a row": Mutant(
        "activation_kernel.h", "int64_t tile = GetBlockIdx();", "int64_t tile = 0;",
        "global memory, which core . has written", calls.gelu_long,
    ),
    "gated: too little room for the floats": Mutant(
        "activation_kernel.h", "(2 + kScratch) * elements", "(1 + kScratch) * elements",
        r"an offset of \d+ elements, past the tensor|bytes of a tensor that has", calls.gelu_long,
    ),
    "quant: factors read by the scalar unit too early": Mutant(
        "quantizer.h", "    hand_over<HardEvent::V_S>(*pipe_);\n", "",
        "GetValue: a read of byte .* on pipe S is not ordered after a write on pipe V", calls.quant,
    ),
    "quant: scales copied from where they do not lie": Mutant(
        "scales.h", "bytes[uint32_t(piece * kBlockBytes)], params", "bytes[uint32_t(piece * 4)], params",
        "DataCopyPad from the core: the address .* is not a multiple of 32", calls.quant,
    ),
    "quant: conversion that does not exist": Mutant(
        "codes.h", "halves, RoundMode::CAST_RINT, n);\n  } else", "whole, RoundMode::CAST_RINT, n);\n  } else",
        "Cast: this conversion does not exist", calls.quant,
    ),
    "quant: values not cleared between the groups": Mutant(
        "quant_kernel.h", "if (!blocks_.fill_tiles()) {", "if (false) {",
        "Abs: a read of byte .* that nothing has written", calls.quant_uneven,
    ),
    "quant: codes of a long group before they are made": Mutant(
        "quant_kernel.h", "        code_queue_.EnQue(codes);\n        codes = code_queue_.template DeQue<uint8_t>();\n"
        "        store(codes, part, 0);\n",
        "        store(codes, part, 0);\n"
        "        code_queue_.EnQue(codes);\n        codes = code_queue_.template DeQue<uint8_t>();\n",
        "on pipe MTE3 is not ordered after a write on pipe V", calls.quant_long,
    ),
    "quant: a NaN cast to e4m3": Mutant(
        "codes.h", "  And(words, words, more.template ReinterpretCast<uint16_t>(), 2 * elements);\n", "",
        "Cast: a NaN, of which each mode of the chip makes another code", calls.quant_given,
    ),
    "quant: values beyond e4m3": Mutant(
        "codes.h", "Mins(values, values, Format<code>::kMost, elements);", "Mins(values, values, 1e9f, elements);",
        "Cast: a value that e4m3 does not hold", calls.quant_given,
    ),
    "quant: scales of the next tile over those in use": Mutant(
        "quant_blocks.h", "{ hand_over<HardEvent::S_V>(*pipe_); }", "{}",
        "DataCopyPad to the core: a write of byte .* on pipe MTE2 is not ordered after a read on pipe S",
        calls.dequant_int8,
    ),
    "quant: a block below the last row": Mutant(
        "quant_blocks.h", "run.rows = rows < tiling_.block_rows ? rows : tiling_.block_rows;",
        "run.rows = tiling_.block_rows;", "of a buffer of|an offset of|which core . has written", calls.quant_e4m3,
    ),
    "quant: words of scales filled up past their end": Mutant(
        "scales.h", "uint32_t(3 - column % 4)", "uint32_t(4 - column % 4)",
        "of a buffer of|is not ordered after its write|which core . has written", calls.quant_e4m3,
    ),
    "quant: scales of columns on their way before they are spread": Mutant(
        "quant_columns_kernel.h", "    hand_over<HardEvent::S_MTE3>(*pipe_);\n", "",
        "DataCopyPad from the core: a read of byte .* on pipe MTE3 is not ordered after a write on pipe S",
        calls.quant_columns_int8,
    ),
    "quant: nibbles packed while they are shifted": Mutant(
        "codes.h", "    ShiftRight(shifted, pairs, int16_t(4), elements / 2);\n    PipeBarrier<PIPE_V>();\n",
        "    ShiftRight(shifted, pairs, int16_t(4), elements / 2);\n",
        "Add: a read of byte .* on pipe V is not ordered after a write on pipe V", calls.quant_columns,
    ),
    "norm, quantised: codes on their way before they are made": Mutant(
        "norm_kernel.h", "    out_queue_.EnQue(codes);\n    codes = out_queue_.template DeQue<uint8_t>();\n"
        "    codes_.write(codes, row, count, 0, code_bytes<C::code>(size), code_bytes<C::code>(pitch));\n",
        "    codes_.write(codes, row, count, 0, code_bytes<C::code>(size), code_bytes<C::code>(pitch));\n"
        "    out_queue_.EnQue(codes);\n    codes = out_queue_.template DeQue<uint8_t>();\n",
        "on pipe MTE3 is not ordered after a write on pipe V", calls.norm_quant,
    ),
    "norm, quantised: room for the scales of one group a row": Mutant(
        "norm_kernel.h", "tiling.scales, tiling.rows * across);", "tiling.scales, tiling.rows);",
        r"\d+ bytes of a tensor that has|past the tensor", calls.norm_quant,
    ),
    "gated, quantised: rows cleared while they are rounded": Mutant(
        "activation_kernel.h", "                whole_blocks<T>(tile.size));\n    }\n    PipeBarrier<PIPE_V>();\n",
        "                whole_blocks<T>(tile.size));\n    }\n",
        "Cast: a read of byte .* on pipe V is not ordered after a write on pipe V", calls.silu_quant,
    ),
    "gated, quantised: weights of slots past the last": Mutant(
        "activation_kernel.h", "weights_.GetValue(uint64_t(slot))", "weights_.GetValue(uint64_t(slot + 1))",
        "of a buffer of", calls.silu_quant,
    ),
    "dequant: results copied out before they are queued": Mutant(
        "dequant_kernel.h", "    out_queue_.EnQue(out);\n    out = out_queue_.template DeQue<T>();\n"
        "    blocks_.for_runs(first, count, [&](const Run& run) { write(out, run); });\n",
        "    blocks_.for_runs(first, count, [&](const Run& run) { write(out, run); });\n"
        "    out_queue_.EnQue(out);\n    out = out_queue_.template DeQue<T>();\n",
        "on pipe MTE3 is not ordered after a write on pipe V", calls.dequant_int8,
    ),
    "dequant: rows decoded where nothing was read": Mutant(
        "dequant_kernel.h", "size = whole_blocks<uint8_t>(", "size = 32 + whole_blocks<uint8_t>(",
        r"Cast: (a read of byte|\d+ bytes of a tensor that has)|an offset of", calls.dequant,
    ),
    "expert map: slots numbered before the last numbers are out": Mutant(
        "expert_map_kernel.h", "      hand_over<HardEvent::MTE3_S>(pipe_);\n", "",
        "SetValue: a write of byte .* on pipe S is not ordered after a read on pipe MTE3", calls.expert_map_long,
    ),
    "expert map: ids read before they have arrived": Mutant(
        "expert_map_kernel.h", "    hand_over<HardEvent::MTE2_S>(*pipe_);\n", "",
        "GetValue: a read of byte .* on pipe S is not ordered after a write on pipe MTE2", calls.expert_map,
    ),
    "expert map: all chunks begin at the same rows": Mutant(
        "expert_map_kernel.h", "chunk < GetBlockIdx()", "chunk < 0",
        "of a piece in global memory, which core . has written", calls.expert_map,
    ),
    "expert map: counts out before they are complete": Mutant(
        "expert_map_kernel.h", "  hand_over<HardEvent::S_MTE3>(pipe);\n", "",
        "DataCopyPad from the core: a read of byte .* on pipe MTE3 is not ordered after a write on pipe S",
        calls.expert_map,
    ),
    "expert map: numbers too close for copies": Mutant(
        "expert_map_kernel.h", "kStep = 8;", "kStep = 4;", "is not a multiple of 32", calls.expert_map,
    ),
    "permute: the map of the next tile over the last one": Mutant(
        "slots.h", "    hand_over<HardEvent::S_MTE2>(pipe);\n", "",
        "DataCopyPad to the core: a write of byte .* on pipe MTE2 is not ordered after a read on pipe S", calls.permute,
    ),
    "permute: zeros copied before they are there": Mutant(
        "permute_kernel.h", "    hand_over<HardEvent::V_MTE3>(pipe_);\n", "",
        "DataCopyPad from the core: a read of byte .* on pipe MTE3 is not ordered after a write on pipe V",
        calls.permute,
    ),
    "permute: rows of another token": Mutant(
        "permute_kernel.h", "slot / tiling_.topk * tiling_.row_stride", "slot * tiling_.row_stride",
        "DataCopyPad to the core: bytes .* of a buffer of|an offset of", calls.permute,
    ),
    "unpermute: weights before they are floats": Mutant(
        "unpermute_kernel.h", "      hand_over<HardEvent::V_S>(pipe_);\n", "",
        "GetValue: a read of byte .* on pipe S is not ordered after a write on pipe V", calls.unpermute,
    ),
    "unpermute: row summed while it is scaled": Mutant(
        "unpermute_kernel.h", "      Muls(term_, term_, factor, n);\n      PipeBarrier<PIPE_V>();\n",
        "      Muls(term_, term_, factor, n);\n", "Add: a read of byte .* on pipe V is not ordered", calls.unpermute,
    ),
    "unpermute: chunk beyond the row": Mutant(
        "unpermute_kernel.h", "left < tiling_.chunk ? int32_t(left) : tiling_.chunk, n =", "tiling_.chunk, n =",
        "of a buffer of|of a piece in global memory is not ordered", calls.unpermute,
    ),
    "permute scales: blocks copied out before they have arrived": Mutant(
        "permute_scales_kernel.h", "      queue_.EnQue(blocks);\n      blocks = queue_.template DeQue<T>();\n"
        "      write(row, begin, count, blocks);\n",
        "      write(row, begin, count, blocks);\n"
        "      queue_.EnQue(blocks);\n      blocks = queue_.template DeQue<T>();\n",
        "DataCopyPad from the core: a read of byte .* on pipe MTE3 is not ordered after a write on pipe MTE2",
        calls.permute_scales,
    ),
    "permute scales: rows of another token": Mutant(
        "permute_scales_kernel.h", "read(blocks, slot / tiling_.topk,", "read(blocks, slot,",
        "of a buffer of|an offset of", calls.permute_scales,
    ),
    "unpermute, scaled: the scale of a row past the last": Mutant(
        "unpermute_kernel.h", "row_scales_.GetValue(uint64_t(row))", "row_scales_.GetValue(uint64_t(row + 4000))",
        "of a buffer of", calls.unpermute_scales,
    ),
    "rope: permutations used before the scalar unit has written them": Mutant(
        "rope_kernel.h", "    hand_over<HardEvent::S_V>(pipe_);\n", "",
        "Gather: a read of byte .* on pipe V is not ordered after a write on pipe S", calls.rope,
    ),
    "rope: partner beyond the row": Mutant(
        "rope_kernel.h", "uint32_t(second ? a : b)", "uint32_t(second ? a : b + dim)",
        r"Gather: \d+ bytes of a tensor that has|Gather: a read of byte .* that nothing has written", calls.rope,
    ),
    "rope: tables of a row past the cache": Mutant(
        "rope_kernel.h", "position * tiling_.cos_row_stride", "(position + 60) * tiling_.cos_row_stride",
        "an offset of .* into a buffer of", calls.rope,
    ),
    "rope: products added while they are made": Mutant(
        "rope_kernel.h", "      Mul(partner_, partner_, sin_, dim);\n      PipeBarrier<PIPE_V>();\n",
        "      Mul(partner_, partner_, sin_, dim);\n", "(Cast|Add): a read of byte .* on pipe V is not ordered",
        calls.rope,
    ),
    "router: a key taken out before the reductions have read it": Mutant(
        "moe_router_kernel.h", "        PipeBarrier<PIPE_V>();\n      }\n      hand_over<HardEvent::V_S>(pipe_);\n"
        "      for (int32_t i = 0; i < tokens; ++i) {\n        if (!is_finite(i)) continue;\n        const int32_t",
        "        PipeBarrier<PIPE_V>();\n      }\n"
        "      for (int32_t i = 0; i < tokens; ++i) {\n        if (!is_finite(i)) continue;\n        const int32_t",
        "GetValue: a read of byte .* on pipe S is not ordered after a write on pipe V", calls.router,
    ),
    "router: the next reduction before the key is out": Mutant(
        "moe_router_kernel.h", "        pick(i, choice, expert);\n      }\n      hand_over<HardEvent::S_V>(pipe_);\n",
        "        pick(i, choice, expert);\n      }\n",
        "ReduceMax: a (read|write) of byte .* on pipe V is not ordered after a (read|write) on pipe S", calls.router,
    ),
    "router: ids of the next tile over the last ones": Mutant(
        "moe_router_kernel.h", "    hand_over<HardEvent::MTE3_S>(pipe_);  // the ids of the last tile are out\n", "",
        "SetValue: a write of byte .* on pipe S is not ordered after a read on pipe MTE3", calls.router_tiles,
    ),
    "router: reductions without room for their indices": Mutant(
        "moe_router_kernel.h", "uint32_t(tiling.work) * sizeof(float)", "4 * sizeof(float)",
        r"Reduce(Max|Sum): \d+ bytes of a tensor that has", calls.router,
    ),
    "router: a NaN ranked by reductions": Mutant(
        "moe_router_kernel.h", "return bad_.GetValue(uint32_t(token * kStep)) == 0.0f;", "return true;",
        "past the tensor|bytes of a tensor that has", calls.router_any_row,
    ),
    "router: groups that start anywhere": Mutant(
        "moe_router_kernel.h", "const bool whole = group_ % kStep == 0 && is_finite(token);",
        "const bool whole = is_finite(token);", "is not a multiple of 32|past the tensor|bytes of a tensor that has",
        calls.router_any_row,
    ),
    "rows: event id 9": Mutant(
        "rows.h", "SetFlag<event>(id);\n  WaitFlag<event>(id);", "SetFlag<event>(9);\n  WaitFlag<event>(9);",
        "SetFlag: event ids are 0 to 7, got 9", calls.norm_full,
    ),
    "rows: flag set twice": Mutant(
        "rows.h", "  SetFlag<event>(id);\n", "  SetFlag<event>(id);\n  SetFlag<event>(id);\n",
        "SetFlag: a flag is set twice without a wait", calls.norm_full,
    ),
    "quant: flag without a wait": Mutant(
        "quantizer.h", "hand_over<HardEvent::S_V>(*pipe_); }", "SetFlag<HardEvent::S_V>(0); }",
        "end of kernel: a flag was set and never waited for: S to V, event 0", calls.quant,
    ),
    "rows: wait without a flag": Mutant(
        "rows.h", "  SetFlag<event>(id);\n", "", "would wait for ever", calls.norm_full,
    ),
    "rows: padding left undefined": Mutant(
        "rows.h", "padding.isPad = true;", "padding.isPad = false;", "undefined padding", calls.norm,
    ),
    "rows: one element past the buffer": Mutant(
        "rows.h", "params.blockLen = uint32_t(size) * uint32_t(sizeof(T));\n    params.srcStride = uint32_t(pitch",
        "params.blockLen = uint32_t(size + 1) * uint32_t(sizeof(T));\n    params.srcStride = uint32_t(pitch",
        r"DataCopyPad from the core: (bytes \d+ to \d+ of a buffer|a write of byte)", calls.norm,
    ),
    "rows: rounding mode that loses bits unseen": Mutant(
        "rows.h", "RoundMode::CAST_RINT", "RoundMode::CAST_NONE",
        "Cast: this conversion does not exist with this rounding", calls.norm,
    ),
    "rows: offset of a strided row": Mutant(
        "rows.h", "row * stride + begin", "(row + 1) * stride + begin",
        "DataCopyPad to the core: (bytes|an offset)", calls.norm,
    ),
    **mutants_gemm.MUTANTS,
    **mutants_groups.MUTANTS,
    **mutants_rows.MUTANTS,
    **mutants_topk.MUTANTS,
}  # fmt: skip


def folder_with(mutant: Mutant, target: Path) -> None:
    source = Path(torch_deepinfer.__file__).parent / "csrc"
    for part in ("npu", "ops", "cpu"):
        shutil.copytree(source / part, target / part, ignore=shutil.ignore_patterns("*.cpp"))
    file = target / "npu" / mutant.file
    text = file.read_text()
    assert mutant.old in text, f"{mutant.file} has changed: the fault has no place"
    file.write_text(text.replace(mutant.old, mutant.new))


NEED_950 = {
    calls.quant_e4m3, calls.quant_groups_bad, calls.quant_given, calls.quant_columns, calls.dequant,
    calls.unpermute_scales,
}  # fmt: skip


def skip_without_float8(call: Callable[[], None]) -> None:
    if calls.OLD and call in NEED_950:
        pytest.skip("this NPU has no float8")


@pytest.mark.parametrize("name", MUTANTS)
def test_fault_is_found(name, tmp_path):
    mutant = MUTANTS[name]
    skip_without_float8(mutant.call)
    folder_with(mutant, tmp_path / "csrc")
    environment = {"DEEPINFER_SOURCE_DIR": str(tmp_path / "csrc"), "DEEPINFER_CACHE_DIR": str(tmp_path / "cache")}
    if mutant.message == WRONG_VALUES:
        with pytest.raises(AssertionError, match=WRONG_VALUES):
            Child(mutant.call, environment).result()
        return
    with pytest.raises(RuntimeError, match=f"ACL error 507035 .*{mutant.message}"):
        Child(mutant.call, environment).result()


@pytest.mark.parametrize("call", sorted({m.call for m in MUTANTS.values()}, key=lambda c: c.__name__))
@pytest.mark.parametrize(("mode", "seed"), [("strict", "1"), ("strict", "2"), ("autosync", "1"), ("values", "2")])
def test_no_fault_in_the_kernels_as_they_are(call, mode, seed):
    skip_without_float8(call)
    Child(call, {"DEEPINFER_TWIN_MODE": mode, "DEEPINFER_TWIN_SEED": seed}).result()


def test_the_compiler_adds_vector_barriers(tmp_path):
    """With its default synchronisation, a missing barrier within the vector pipe is no fault."""
    folder_with(MUTANTS["norm: barrier after the squares"], tmp_path / "csrc")
    environment = {"DEEPINFER_SOURCE_DIR": str(tmp_path / "csrc"), "DEEPINFER_TWIN_MODE": "autosync"}
    Child(calls.norm_full, environment).result()
