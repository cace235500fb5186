"""Faults of the matrix product."""

import calls
from mutant import WRONG_VALUES, Mutant

CUBE, FINISH = "gemm_kernel.h", "gemm_finish_kernel.h"
UNDEFINED = r"a read of byte \d+(, undefined padding| that nothing has written)"

MUTANTS = {
    "gemm: product before its operands are there": Mutant(
        CUBE, "const uint32_t used = uint32_t(steps_in_l0_.use());", "const uint32_t used = filled;",
        "Mmad: a read of byte .* on pipe M is not ordered after a write on pipe MTE1", calls.gemm,
    ),
    "gemm: operands over those that are in use": Mutant(
        CUBE, "      steps_in_l0_.empty();\n", "", "would wait for ever, no flag is set: MTE1 to M", calls.gemm,
    ),
    "gemm: sums out before they are complete": Mutant(
        CUBE, "    sums_in_l0c_.use();\n", "",
        "Fixpipe: a read of byte .* on pipe FIX is not ordered after a write on pipe M", calls.gemm,
    ),
    "gemm: chunk given back before it is used": Mutant(
        CUBE, "    const uint32_t stage = uint32_t(chunks_in_l1_.use());\n",
        "    const uint32_t stage = uint32_t(chunks_in_l1_.use());\n    chunks_in_l1_.empty();\n",
        "DataCopy to L1: a write of byte .* on pipe MTE2 is not ordered after a read on pipe MTE1", calls.gemm,
    ),
    "gemm: chunk used before it has arrived": Mutant(
        CUBE, "    chunks_in_l1_.full();\n  }", "  }", "would wait for ever, no flag is set: MTE1 to MTE2", calls.gemm,
    ),
    "gemm: the other one of two buffers": Mutant(
        CUBE, "    return next_full_;", "    return count_ - 1 - next_full_;",
        f"LoadData: a read of byte .* is not ordered after a write on pipe MTE2|Mmad: {UNDEFINED}", calls.gemm,
    ),
    "gemm: products that nothing keeps in order": Mutant(
        CUBE, "if (params.m / kEdge * (params.n / kEdge) < kFractalsInOrder) PipeBarrier<PIPE_M>();", "",
        "Mmad: a read of byte .* on pipe M is not ordered after a write on pipe M", calls.gemm_row,
    ),
    "gemm: sums that are never set to zero": Mutant(
        CUBE, "params.cmatrixInitVal = chunk.begin == 0 && begin == 0;", "params.cmatrixInitVal = false;",
        f"Mmad: {UNDEFINED}", calls.gemm,
    ),
    "gemm: sums set to zero in each chunk": Mutant(
        CUBE, "params.cmatrixInitVal = chunk.begin == 0 && begin == 0;", "params.cmatrixInitVal = begin == 0;",
        WRONG_VALUES, calls.gemm,
    ),
    "gemm: columns of fractals too close in L1": Mutant(
        CUBE, "uint16_t(ceil_div(runs, kEdge) * kEdge)", "uint16_t(runs)", f"Mmad: {UNDEFINED}", calls.gemm,
    ),
    "gemm: columns of fractals that overlap in L1": Mutant(
        CUBE, "uint16_t(ceil_div(runs, kEdge) * kEdge)", "kEdge", "DataCopy to L1: what is written to L1 overlaps",
        calls.gemm,
    ),
    "gemm: columns of fractals too close in L0C": Mutant(
        CUBE, "params.srcStride = uint16_t(ceil_div(rows, kEdge) * kEdge);", "params.srcStride = uint16_t(rows);",
        f"Fixpipe: {UNDEFINED}", calls.gemm,
    ),
    "gemm: depth of the last step rounded up": Mutant(
        CUBE, "params.k = uint16_t(step);", "params.k = uint16_t(ceil_div(step, kDepth) * kDepth);",
        f"Mmad: {UNDEFINED}", calls.gemm,
    ),
    "gemm: columns past the result": Mutant(
        CUBE, "params.nSize = uint16_t(columns_of(tile));", "params.nSize = uint16_t(tiling_.tile_columns);",
        f"Fixpipe: ({UNDEFINED}|bytes .* of a buffer of|rows of the result overlap)", calls.gemm,
    ),
    "gemm: a single row taken for a vector": Mutant(
        CUBE, "rows == 1 ? 2 : rows", "rows", f"Mmad: {UNDEFINED}", calls.gemm_row,
    ),
    "gemm: more sums than L0C holds": Mutant(
        CUBE, "uint32_t(tiling.sums) * sum_ * sizeof(float)", "uint32_t(tiling.sums) * 32 * sum_ * sizeof(float)",
        r"InitBuffer: the buffers take \d+ bytes, the memory has", calls.gemm,
    ),
    "gemm: room for one of two sums": Mutant(
        CUBE, "uint32_t(tiling.sums) * sum_ * sizeof(float)", "sum_ * sizeof(float)",
        "past the tensor|bytes of a tensor that has", calls.gemm_tiles,
    ),
    "gemm: the flags that the pipe itself uses": Mutant(
        CUBE, "emptied_[i] = pipe.AllocEventID<emptied>();", "emptied_[i] = int8_t(i);",
        "SetFlag: a flag is set twice without a wait: M to MTE1, event 0", calls.gemm,
    ),
    "gemm: fractals off their addresses": Mutant(
        CUBE, "a2_[filled * a_step_], a1_", "a2_[filled * a_step_ + 16], a1_",
        "LoadData: the address .* is not a multiple of 512", calls.gemm,
    ),
    "gemm: tiles on two cores": Mutant(
        CUBE, "Chunk now{GetBlockIdx(), 0}", "Chunk now{0, 0}", "global memory, which core . has written", calls.gemm,
    ),
    "finish: addend before it has arrived": Mutant(
        FINISH, "      addend_queue_.EnQue(addend);\n", "", "DeQue: the queue is empty", calls.gemm_finish,
    ),
    "finish: sums rounded before all is added": Mutant(
        FINISH, "row(terms_, i), size);\n      PipeBarrier<PIPE_V>();\n", "row(terms_, i), size);\n",
        "Cast: a read of byte .* on pipe V is not ordered after a write on pipe V", calls.gemm_finish,
    ),
    "finish: bias of other columns": Mutant(
        FINISH, "bias_.read(raw, 0, 1, column_of(tile), size", "bias_.read(raw, 0, 1, column_of(tile) + 1, size",
        "DataCopyPad to the core: bytes .* of a buffer of", calls.gemm_finish,
    ),
}  # fmt: skip
