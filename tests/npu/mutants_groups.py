"""Faults in the instructions that many groups of quantisation share."""

import calls
from mutant import WRONG_VALUES, Mutant

MUTANTS = {
    "groups: signs cleared of all but the last repeats": Mutant(
        "groups.h", "for (int32_t first = 0; first < whole; first += kMostRepeats)",
        "for (int32_t first = 0; first + kMostRepeats <= whole; first += kMostRepeats)",
        "Max: a read of byte .* that nothing has written", calls.quant_groups,
    ),
    "groups: more repeats than an instruction takes": Mutant(
        "groups.h", "kMostRepeats = 255;", "kMostRepeats = 256;", "repeatTime is 0",
        calls.quant_groups_many,
    ),
    "groups: pairs folded before their signs are cleared": Mutant(
        "groups.h", "mask, n);\n    PipeBarrier<PIPE_V>();\n", "mask, n);\n",
        "Max: a read of byte .* on pipe V is not ordered after a write on pipe V", calls.quant_groups,
    ),
    "groups: levels folded while the last one is": Mutant(
        "groups.h", "strides);\n  });\n  PipeBarrier<PIPE_V>();\n", "strides);\n  });\n",
        "(And|Max): a (read|write) of byte .* on pipe V is not ordered after a (read|write) on pipe V",
        calls.quant_groups,
    ),
    "groups: pairs that are the next blocks but one": Mutant(
        "groups.h", "from[2 * at + kLanesOfBlock]", "from[2 * at + 2 * kLanesOfBlock]",
        "nothing has written|past the tensor|bytes of a tensor", calls.quant_groups,
    ),
    "groups: folded into what is still to be folded": Mutant(
        "groups.h", "other = folded[uint32_t(groups * size / 2)]", "other = folded[uint32_t(groups * size / 4)]",
        "Max: the destination overlaps a source in part|bytes of a tensor", calls.quant_groups,
    ),
    "groups: strides of the other operand": Mutant(
        "groups.h", "strides(1, 2, 2, 8, 16, 16)", "strides(1, 2, 1, 8, 16, 16)", WRONG_VALUES, calls.quant_groups,
    ),
    "groups: signs that are kept": Mutant(
        "groups.h", "And(to[at], from[at], mask,", "And(to[at], from[at], from[at],", WRONG_VALUES, calls.quant_groups,
    ),
    "groups: factors that are not spread": Mutant(
        "quantizer.h", "scale_groups(values, spread_, groups, size)", "scale_groups(values, factors_, groups, size)",
        "nothing has written|bytes of a tensor", calls.quant_groups,
    ),
    "groups: factors multiplied before they are spread": Mutant(
        "quantizer.h", "    hand_over<HardEvent::V_S>(*pipe_);\n    if (together_)", "    if (together_)",
        "GetValue: a read of byte .* on pipe S is not ordered after a write on pipe V", calls.quant_groups,
    ),
    "groups: one without a scale is missed": Mutant(
        "quantizer.h", "any_bad_ = any_.GetValue(0) != 0.0f;", "any_bad_ = any_.GetValue(0) > 0.0f;",
        "Cast: a NaN, of which each mode of the chip makes another code", calls.quant_groups_bad,
    ),
}  # fmt: skip
