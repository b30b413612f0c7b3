// Follows a kernel's source: calls the kernel, GF_ENTRY, with arguments that are packed as in C. Without a header of the
// system's, which would take a tenth of a kernel's compilation.

namespace gf {
namespace host {

template <unsigned... I>
struct Indices {};

/// Indices<0, ..., COUNT - 1>.
template <unsigned COUNT, unsigned... I>
struct IndicesOf : IndicesOf<COUNT - 1, COUNT - 1, I...> {};
template <unsigned... I>
struct IndicesOf<0, I...> {
  using Type = Indices<I...>;
};

template <class... A>
struct Packed {
  static constexpr unsigned COUNT = sizeof...(A);

  /// Where argument `index` begins.
  static unsigned long long offset(unsigned index) {
    constexpr unsigned long long sizes[] = {sizeof(A)..., 0};
    constexpr unsigned long long alignments[] = {alignof(A)..., 1};
    unsigned long long at = 0;
    for (unsigned i = 0; i < index; ++i) {
      at += sizes[i];
      at = (at + alignments[i + 1] - 1) / alignments[i + 1] * alignments[i + 1];
    }
    return at;
  }

  template <class T>
  static T read(const unsigned char* arguments, unsigned index) {
    T value;
    __builtin_memcpy(&value, arguments + offset(index), sizeof(T));
    return value;
  }

  template <unsigned... I>
  static void call(void (*kernel)(A...), const unsigned char* arguments, Indices<I...>) {
    kernel(read<A>(arguments, I)...);
  }
};

template <class... A>
void call(void (*kernel)(A...), const unsigned char* arguments) {
  Packed<A...>::call(kernel, arguments, typename IndicesOf<sizeof...(A)>::Type{});
}

}  // namespace host
}  // namespace gf

extern "C" void gf_kernel(const unsigned char* arguments) { gf::host::call(GF_ENTRY, arguments); }
