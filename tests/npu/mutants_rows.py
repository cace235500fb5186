"""Faults in the instructions that short rows share: norms, and rotations by halves."""

import calls
from mutant import WRONG_VALUES, Mutant

MUTANTS = {
    "short rows: summed while they are squared": Mutant(
        "row_norms.h", "Duplicate(small, 1.0f, 2 * n);\n  PipeBarrier<PIPE_V>();\n", "Duplicate(small, 1.0f, 2 * n);\n",
        "Add: a read of byte .* on pipe V is not ordered after a write on pipe V", calls.norm,
    ),
    "short rows: folded onto their next block": Mutant(
        "row_norms.h", "to[uint32_t(lower)]", "to[8]", "Add: the destination overlaps a source in part", calls.norm,
    ),
    "short rows: a pitch of one block more": Mutant(
        "row_norms.h", "step = pitch / kLanesOfBlock;", "step = pitch / kLanesOfBlock + 1;",
        "nothing has written|bytes of a tensor that has|past the tensor", calls.norm,
    ),
    "short rows: factors spread before they are made": Mutant(
        "row_norms.h", "Div(sums, ones, sums, n);\n  PipeBarrier<PIPE_V>();\n", "Div(sums, ones, sums, n);\n",
        "Brcb: a read of byte .* on pipe V is not ordered after a write on pipe V", calls.norm,
    ),
    "short rows: as many sums as there are columns": Mutant(
        "row_norms.h", "lanes, rows, 1, 1, step);", "lanes, rows, 8, 1, step);",
        WRONG_VALUES, calls.norm,
    ),
    "short rows: each row with the next columns of the weight": Mutant(
        "groups.h", "uint8_t(pitch / kLanesOfBlock), 0);", "uint8_t(pitch / kLanesOfBlock), 1);",
        "bytes of a tensor that has|nothing has written", calls.norm,
    ),
    "short rows: their norm kept in float": Mutant(
        "rope_kernel.h", "      PipeBarrier<PIPE_V>();\n      widen(values_, out, elements);\n", "", WRONG_VALUES,
        calls.qk_norm,
    ),
    "rope: halves that stay in their places": Mutant(
        "rope_kernel.h", "values_[uint32_t(middle)], pitch_, sin_", "values_, pitch_, sin_", WRONG_VALUES,
        calls.rope_halves,
    ),
    "rope: the sine of the other half": Mutant(
        "rope_kernel.h", "pitch_, sin_[uint32_t(middle)]", "pitch_, sin_", WRONG_VALUES, calls.rope_halves,
    ),
    "rope: halves rounded while they are multiplied": Mutant(
        "rope_kernel.h", "count, middle);\n    PipeBarrier<PIPE_V>();\n", "count, middle);\n",
        "(Cast|Add): a read of byte .* on pipe V is not ordered after a write on pipe V", calls.rope_halves,
    ),
}  # fmt: skip
