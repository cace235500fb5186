// Vector instructions in the form that takes the number of elements.
#pragma once

#include <algorithm>
#include <type_traits>

#include "tensor.h"

namespace AscendC {

enum class RoundMode : uint8_t { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };
enum class CMPMODE : uint8_t { LT, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };

namespace detail {

template <typename T, typename... Allowed>
constexpr bool one_of = (std::is_same_v<T, Allowed> || ...);

// The elements that arithmetic takes on both architectures: bfloat16 has none.
template <typename T>
constexpr bool is_arithmetic = one_of<T, float, half, int16_t, int32_t>;
template <typename T>
constexpr bool is_word = one_of<T, int16_t, uint16_t>;
template <typename T>
constexpr bool is_floating = one_of<T, float, half>;

inline void check_count(int64_t count) {
  if (count <= 0) twin::core().fail("a count of " + std::to_string(count) + ", which not every chip takes as nothing");
}

// A source and a destination are the same bytes or have none in common: whole repeats are read before they are written.
template <typename D, typename S>
void check_overlap(const LocalTensor<D>& to, size_t to_bytes, const LocalTensor<S>& from, size_t from_bytes) {
  if (to.space() != from.space()) return;
  const bool apart = to.offset() + to_bytes <= from.offset() || from.offset() + from_bytes <= to.offset();
  const bool same = to.offset() == from.offset() && to_bytes == from_bytes;
  if (!apart && !same) twin::core().fail("the destination overlaps a source in part");
}

template <typename T>
void read(uint32_t tick, const LocalTensor<T>& from, int64_t count) {
  from.require(size_t(count) * sizeof(T), 32);
  twin::core().access(twin::kV, tick, from.space(), from.offset(), size_t(count) * sizeof(T), false);
}
template <typename T>
void write(uint32_t tick, const LocalTensor<T>& to, int64_t count, size_t alignment = 32) {
  to.require(size_t(count) * sizeof(T), alignment);
  twin::core().access(twin::kV, tick, to.space(), to.offset(), size_t(count) * sizeof(T), true);
}

inline void count_repeats(int64_t bytes) { twin::core().work().vector_repeats += (bytes + 255) / 256; }

// to[i] = f(from[i]...)
template <typename D, typename F, typename... S>
void elementwise(const char* name, const LocalTensor<D>& to, int64_t count, F f, const LocalTensor<S>&... from) {
  const uint32_t tick = twin::core().issue(twin::kV, name);
  check_count(count);
  (check_overlap(to, size_t(count) * sizeof(D), from, size_t(count) * sizeof(S)), ...);
  (read(tick, from, count), ...);
  write(tick, to, count);
  count_repeats(count * int64_t(std::max({sizeof(D), sizeof(S)...})));
  D* out = to.raw();
  [&](const S*... in) {
    for (int64_t i = 0; i < count; ++i) out[i] = f(in[i]...);
  }(from.raw()...);
}

// The arithmetic of an element type: floats of 16 bits are computed in 32 and rounded.
template <typename T, typename F, typename... A>
T compute(F f, A... a) {
  if constexpr (is_floating<T>) return twin::from_float<T>(f(twin::to_float(a)...));
  else return T(f(a...));
}

}  // namespace detail

#define TWIN_UNARY(name, expression)                                                              \
  template <typename T>                                                                           \
  void name(const LocalTensor<T>& to, const LocalTensor<T>& from, int32_t count) {                \
    static_assert(detail::is_floating<T>, #name " takes half and float");                         \
    detail::elementwise(#name, to, count,                                                         \
                        [](T a) { return detail::compute<T>([](auto x) { return expression; }, a); }, from); \
  }
TWIN_UNARY(Abs, std::fabs(x))
TWIN_UNARY(Exp, std::exp(x))
TWIN_UNARY(Ln, std::log(x))
TWIN_UNARY(Sqrt, std::sqrt(x))
TWIN_UNARY(Rsqrt, 1.f / std::sqrt(x))
TWIN_UNARY(Reciprocal, 1.f / x)
#undef TWIN_UNARY

#define TWIN_BINARY(name, allowed, expression)                                                                        \
  template <typename T>                                                                                               \
  void name(const LocalTensor<T>& to, const LocalTensor<T>& left, const LocalTensor<T>& right, int32_t count) {        \
    static_assert(allowed<T>, #name " does not take this element type");                                              \
    detail::elementwise(                                                                                              \
        #name, to, count,                                                                                             \
        [](T a, T b) { return detail::compute<T>([](auto x, auto y) { return expression; }, a, b); }, left, right);   \
  }
TWIN_BINARY(Add, detail::is_arithmetic, x + y)
TWIN_BINARY(Sub, detail::is_arithmetic, x - y)
TWIN_BINARY(Mul, detail::is_arithmetic, x * y)
TWIN_BINARY(Div, detail::is_floating, x / y)
TWIN_BINARY(Max, detail::is_arithmetic, x < y ? y : x)
TWIN_BINARY(Min, detail::is_arithmetic, y < x ? y : x)
TWIN_BINARY(And, detail::is_word, x & y)
#undef TWIN_BINARY

#define TWIN_SCALAR(name, expression)                                                                       \
  template <typename T>                                                                                     \
  void name(const LocalTensor<T>& to, const LocalTensor<T>& from, T scalar, int32_t count) {                \
    static_assert(detail::is_arithmetic<T>, #name " does not take this element type");                      \
    detail::elementwise(                                                                                    \
        #name, to, count,                                                                                   \
        [=](T a) { return detail::compute<T>([](auto x, auto y) { return expression; }, a, scalar); }, from); \
  }
TWIN_SCALAR(Adds, x + y)
TWIN_SCALAR(Muls, x * y)
TWIN_SCALAR(Maxs, x < y ? y : x)
TWIN_SCALAR(Mins, y < x ? y : x)
#undef TWIN_SCALAR

#define TWIN_SHIFT(name, expression)                                                            \
  template <typename T>                                                                         \
  void name(const LocalTensor<T>& to, const LocalTensor<T>& from, T bits, int32_t count) {      \
    static_assert(detail::one_of<T, int16_t, uint16_t, int32_t, uint32_t>);                     \
    if (bits < T(0) || bits > T(8 * sizeof(T))) twin::core().fail(#name " by more bits than there are"); \
    detail::elementwise(#name, to, count, [=](T x) { return T(expression); }, from);            \
  }
TWIN_SHIFT(ShiftLeft, std::make_unsigned_t<T>(x) << bits)
TWIN_SHIFT(ShiftRight, x >> bits)
#undef TWIN_SHIFT

template <typename T>
void Duplicate(const LocalTensor<T>& to, T value, int32_t count) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Duplicate takes elements of 2 and 4 bytes");
  detail::elementwise("Duplicate", to, count, [=] { return value; });
}

// to[i] = the element at byte `base + offsets[i]` of `from`.
template <typename T>
void Gather(const LocalTensor<T>& to, const LocalTensor<T>& from, const LocalTensor<uint32_t>& offsets, uint32_t base,
            uint32_t count) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4);
  const uint32_t tick = twin::core().issue(twin::kV, "Gather");
  detail::check_count(count);
  detail::read(tick, offsets, count);
  detail::count_repeats(8 * int64_t(count) * int64_t(sizeof(T)));  // element by element: an eighth of the speed, a guess
  from.require(0, 32);
  std::vector<T> values;
  for (uint32_t i = 0; i < count; ++i) {
    const size_t at = size_t(base) + offsets.raw()[i];
    if (at % sizeof(T)) twin::core().fail("an offset that is not a multiple of the element");
    from.require(at + sizeof(T), 1);
    twin::core().access(twin::kV, tick, from.space(), from.offset() + at, sizeof(T), false);
    values.push_back(from.raw()[at / sizeof(T)]);
  }
  detail::write(tick, to, count);
  std::copy(values.begin(), values.end(), to.raw());
}

namespace detail {

// Whether the mode is one that the table of conversions lists for these types; CAST_NONE only where nothing is lost.
template <typename To, typename From>
bool converts(RoundMode mode) {
  const bool rounds = mode >= RoundMode::CAST_RINT && mode <= RoundMode::CAST_TRUNC;
  if (twin::core().arch().number >= 3510) {
    if (std::is_same_v<From, float> && std::is_same_v<To, fp8_e4m3fn_t>) return mode == RoundMode::CAST_RINT;
    if (std::is_same_v<From, fp8_e4m3fn_t> && std::is_same_v<To, float>) return mode == RoundMode::CAST_NONE;
    if (std::is_same_v<From, int32_t> && std::is_same_v<To, uint8_t>) return mode == RoundMode::CAST_NONE;
  }
  if (std::is_same_v<From, float>)
    return rounds && one_of<To, half, bfloat16_t, int16_t, int32_t, float>;
  if (std::is_same_v<From, half>)
    return (std::is_same_v<To, float> && mode == RoundMode::CAST_NONE) ||
           (rounds && one_of<To, int8_t, uint8_t, int16_t, int32_t>);
  if (std::is_same_v<From, bfloat16_t>)
    return (std::is_same_v<To, float> && mode == RoundMode::CAST_NONE) || (rounds && std::is_same_v<To, int32_t>);
  if (std::is_same_v<From, int16_t>)
    return (std::is_same_v<To, float> && mode == RoundMode::CAST_NONE) || (rounds && std::is_same_v<To, half>);
  if (one_of<From, int8_t, uint8_t>) return std::is_same_v<To, half> && mode == RoundMode::CAST_NONE;
  if (std::is_same_v<From, int32_t>) return rounds && std::is_same_v<To, float>;
  return false;
}

inline float round_by(RoundMode mode, float x) {
  switch (mode) {
    case RoundMode::CAST_FLOOR: return std::floor(x);
    case RoundMode::CAST_CEIL: return std::ceil(x);
    case RoundMode::CAST_ROUND: return std::round(x);
    case RoundMode::CAST_TRUNC: return std::trunc(x);
    default: return std::nearbyint(x);
  }
}

template <typename To, typename From>
To convert(RoundMode mode, From x) {
  float value;
  if constexpr (std::is_same_v<From, int32_t> && std::is_same_v<To, uint8_t>) {
    if (x < 0 || x > 255) twin::core().fail("an integer that the destination does not hold");
  }
  if constexpr (std::is_same_v<To, fp8_e4m3fn_t>) {
    if (std::isnan(x)) twin::core().fail("a NaN, of which each mode of the chip makes another code");
    if (std::fabs(x) >= 464) twin::core().fail("a value that e4m3 does not hold, of which modes make other codes");
  }
  if constexpr (std::is_integral_v<From>) value = float(x);
  else value = twin::to_float(x);
  if constexpr (std::is_integral_v<To>) {
    if (std::isnan(value)) return 0;
    const double rounded = round_by(mode, value);
    return To(std::clamp(rounded, double(std::numeric_limits<To>::min()), double(std::numeric_limits<To>::max())));
  } else if constexpr (std::is_same_v<To, From>) {
    return twin::from_float<To>(round_by(mode, value));
  } else {
    return twin::from_float<To>(value);
  }
}

}  // namespace detail

// Between floats, only rounding to nearest even is modelled.
template <typename To, typename From>
void Cast(const LocalTensor<To>& to, const LocalTensor<From>& from, const RoundMode& mode, uint32_t count) {
  twin::core().name_instruction("Cast");
  if (!detail::converts<To, From>(mode)) twin::core().fail("this conversion does not exist with this rounding");
  if (!std::is_integral_v<To> && !std::is_same_v<To, From> && mode > RoundMode::CAST_RINT)
    twin::core().fail("this rounding is not modelled");
  detail::elementwise("Cast", to, count, [=](From x) { return detail::convert<To>(mode, x); }, from);
}

namespace detail {

// Repeats of 256 bytes, each folded as a binary tree of neighbours; their results one after the other.
template <typename T>
float reduce(const T* in, int64_t count, float (*f)(float, float)) {
  constexpr int64_t kRepeat = 256 / sizeof(T);
  float total = 0;
  for (int64_t begin = 0; begin < count; begin += kRepeat) {
    float values[kRepeat];
    int64_t left = std::min(count - begin, kRepeat);
    for (int64_t i = 0; i < left; ++i) values[i] = twin::to_float(in[begin + i]);
    for (; left > 1; left = (left + 1) / 2) {
      for (int64_t i = 0; i < left / 2; ++i) values[i] = f(values[2 * i], values[2 * i + 1]);
      if (left % 2) values[left / 2] = values[left - 1];
    }
    total = begin == 0 ? values[0] : f(total, values[0]);
  }
  return total;
}

// The instruction and its working space, `kept` elements in which some chips keep the results of the repeats.
template <typename T>
uint32_t begin_reduction(const char* name, const LocalTensor<T>& from, const LocalTensor<T>& work, int32_t count,
                         int64_t kept) {
  static_assert(is_floating<T>);
  const uint32_t tick = twin::core().issue(twin::kV, name);
  check_count(count);
  read(tick, from, count);
  check_overlap(work, size_t(kept) * sizeof(T), from, size_t(count) * sizeof(T));
  write(tick, work, kept);
  twin::core().mark_undefined(work.space(), work.offset(), size_t(kept) * sizeof(T));
  count_repeats(int64_t(count) * int64_t(sizeof(T)));
  return tick;
}

inline int64_t up_to_blocks(int64_t elements, int64_t item) { return (elements * item + 31) / 32 * 32 / item; }

// Pairs of value and index, level by level; without an index the levels share one space.
template <typename T>
int64_t space_of_pairs(int64_t count, bool indexed) {
  constexpr int64_t kRepeat = 256 / sizeof(T);
  int64_t total = 0;
  do {
    count = 2 * ((count + kRepeat - 1) / kRepeat);
    total += up_to_blocks(count, sizeof(T));
  } while (indexed && count > 2);
  return total;
}

}  // namespace detail

template <typename T>
void ReduceSum(const LocalTensor<T>& to, const LocalTensor<T>& from, const LocalTensor<T>& work, int32_t count) {
  const int64_t repeats = std::max<int64_t>(1, int64_t(count) * int64_t(sizeof(T)) / 256);
  const uint32_t tick =
      detail::begin_reduction("ReduceSum", from, work, count, detail::up_to_blocks(repeats, sizeof(T)));
  const float sum = detail::reduce<T>(from.raw(), count, [](float x, float y) { return x + y; });
  detail::write(tick, to, 1, sizeof(T));
  to.raw()[0] = twin::from_float<T>(sum);
}

// With the index, as the bits of an integer, of the first of equal maxima. What comes of NaN is not documented: any
// value, and here no place.
template <typename T>
void ReduceMax(const LocalTensor<T>& to, const LocalTensor<T>& from, const LocalTensor<T>& work, int32_t count,
               bool indexed = false) {
  const uint32_t tick =
      detail::begin_reduction("ReduceMax", from, work, count, detail::space_of_pairs<T>(count, indexed));
  const float most = detail::reduce<T>(from.raw(), count, [](float x, float y) { return x < y ? y : x; });
  std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t> place = 0;
  while (int32_t(place) < count && twin::to_float(from.raw()[place]) != most) ++place;
  for (int32_t i = 0; i < count; ++i)
    if (std::isnan(twin::to_float(from.raw()[i]))) place = decltype(place)(-1) / 2;
  detail::write(tick, to, indexed ? 2 : 1, indexed ? 2 * sizeof(T) : sizeof(T));
  to.raw()[0] = twin::from_float<T>(most);
  if (indexed) std::memcpy(to.raw() + 1, &place, sizeof(place));
}

}  // namespace AscendC
