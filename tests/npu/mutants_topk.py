"""Faults of top-k."""

import calls
from mutant import WRONG_VALUES, Mutant

LIST, KERNEL = "topk_list.h", "topk_kernel.h"
UNDEFINED = r"a read of byte \d+(, undefined padding| that nothing has written)"

MUTANTS = {
    "topk: elements selected before they are compared": Mutant(
        LIST, "uint32_t(words(size) * 16));\n    PipeBarrier<PIPE_V>();", "uint32_t(words(size) * 16));",
        r"(GatherMask|Not): a read of byte \d+ on pipe V is not ordered after a write on pipe V", calls.topk,
    ),
    "topk: places read before they are gathered": Mutant(
        LIST, "      hand_over<HardEvent::V_S>(pipe_);\n      boundary.index", "      boundary.index",
        "GetValue: a read of byte .* on pipe S is not ordered after a write on pipe V", calls.topk,
    ),
    "topk: gap in the list": Mutant(
        LIST, "for (int32_t i = count_; i < at; ++i) put(i, kLeast, 0);", "", f"(Cast|Muls): {UNDEFINED}", calls.topk,
    ),
    "topk: list beyond its room": Mutant(
        LIST, "return round_up(count_) + chunk > room_;", "return false;",
        r"an offset of \d+ elements, past the tensor|bytes of a tensor that has", calls.topk,
    ),
    "topk: one of equal elements too many": Mutant(
        LIST, "compare(low_, places_, first_left_out, CMPMODE::LT, n);",
        "compare(low_, places_, first_left_out, CMPMODE::LE, n);", WRONG_VALUES, calls.topk,
    ),
    "topk: the level of one element more": Mutant(
        LIST, "(reach >= want ? lowest_ : high) = middle;", "(reach > want ? lowest_ : high) = middle;", WRONG_VALUES,
        calls.topk,
    ),
    "topk: chunk after the last": Mutant(
        KERNEL, "if (begin + tiling_.chunk < size_) load(begin + tiling_.chunk);", "load(begin + tiling_.chunk);",
        "DataCopyPad to the core: |AllocTensor: (the queue has no free buffer|an offset of)", calls.topk,
    ),
    "topk: result out before it is complete": Mutant(
        KERNEL, "    hand_over<HardEvent::V_MTE3>(pipe_);\n    if constexpr (C::values)",
        "    if constexpr (C::values)",
        "DataCopyPad from the core: a read of byte .* on pipe MTE3 is not ordered after a write on pipe V", calls.topk,
    ),
    "topk: next row over the last result": Mutant(
        KERNEL, "      copy_out(indices_, index, n, at);\n    }\n    hand_over<HardEvent::MTE3_V>(pipe_);",
        "      copy_out(indices_, index, n, at);\n    }",
        "a write of byte .* on pipe V is not ordered after a read on pipe MTE3", calls.topk,
    ),
    "topk: rows on two cores": Mutant(
        KERNEL, "row_ = GetBlockIdx();", "row_ = GetBlockIdx() / 2;", "global memory, which core . has written",
        calls.topk,
    ),
    "topk: zeros of both signs": Mutant(
        KERNEL, "    Adds(keys_, keys_, 0.0f, n);  // of -0 and 0 one number\n", "", "Sort32: a score of NaN or -0",
        calls.topk_sorted,
    ),
    "topk: NaN in the sort": Mutant(
        KERNEL, "List::below(keep_, Level{0, true}, want);", "List::up_to(keep_, Level{0, true}, want);",
        "Sort32: a score of NaN or -0", calls.topk_sorted,
    ),
    "topk: last run as long as the others": Mutant(
        KERNEL, "uint16_t(whole - at < run ? whole - at : run)", "uint16_t(run)",
        f"MrgSort: ({UNDEFINED}|a queue that is not sorted|.* bytes of a tensor that has)", calls.topk_sorted,
    ),
    "topk: keys off their addresses": Mutant(
        KERNEL, "uint32_t(tiling.window) * 2 * sizeof(float));", "uint32_t(tiling.window) * 2 * sizeof(float) + 16);",
        "Sort32: the address .* is not a multiple of (128|256)", calls.topk_sorted,
    ),
    "topk: last of a window twice": Mutant(
        LIST, "CMPMODE::GT, size);", "CMPMODE::GE, size);", WRONG_VALUES, calls.topk_windows,
    ),
    "topk: indices read before they are made": Mutant(
        KERNEL, "      hand_over<HardEvent::V_S>(pipe_);\n      for (int32_t i = 0; i < n; ++i) staged_",
        "      for (int32_t i = 0; i < n; ++i) staged_",
        "GetValue: a read of byte .* on pipe S is not ordered after a write on pipe V", calls.topk_windows,
    ),
}  # fmt: skip
