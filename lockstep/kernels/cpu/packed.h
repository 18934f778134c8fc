// Calls with all arguments in one block of 8-byte words: Python packs twenty arguments into
// a block in a third of a microsecond, and takes two to four to pass them one by one.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace lk {

// One argument: a pointer, an int64_t, or a float that travels as a double.
template <typename A>
A argument(const char* words, size_t index) {
  if constexpr (std::is_same<A, float>::value) {
    double value;
    std::memcpy(&value, words + 8 * index, 8);
    return float(value);
  } else {
    static_assert(sizeof(A) == 8, "arguments are words of 8 bytes");
    A value;
    std::memcpy(&value, words + 8 * index, 8);
    return value;
  }
}

template <typename... A, size_t... I>
void call_packed(void (*f)(A...), const char* words, std::index_sequence<I...>) {
  f(argument<A>(words, I)...);
}

template <typename... A>
void call_packed(void (*f)(A...), const char* words) {
  call_packed(f, words, std::index_sequence_for<A...>{});
}

}  // namespace lk

// Exports name##_packed beside name.
#define LK_PACKED(name) \
  void name##_packed(const char* words) { lk::call_packed(name, words); }
