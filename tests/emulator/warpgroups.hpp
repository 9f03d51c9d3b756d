// Products of warpgroups, which are done at once, or with a seed when they are waited for.
namespace cutlass::arch {
template <int kRegisters>
void warpgroup_reg_dealloc() {}
template <int kRegisters>
void warpgroup_reg_alloc() {}
}  // namespace cutlass::arch
namespace cute {
void warpgroup_arrive();
void warpgroup_commit_batch();
void wait_for_products(int pending);
template <int kPending>
void warpgroup_wait() {
  wait_for_products(kPending);
}
inline void warpgroup_fence_operand(float&) {}
namespace SM90::GMMA {
enum class Major { K, MN };
enum class ScaleOut { Zero, One };
// An argument of a product behind its operands: where a sum is, or whether sums begin at 0.
struct Sum {
  float* place = nullptr;
  bool adds = false;
  Sum(float& sum) : place(&sum) {}
  Sum(ScaleOut scale) : adds(scale == ScaleOut::One) {}
};
enum class Number { kHalf, kBFloat16, kFloat8E4M3 };
template <typename Type>
constexpr Number kNumber = std::is_same_v<Type, jitattn::Half>       ? Number::kHalf
                           : std::is_same_v<Type, jitattn::BFloat16> ? Number::kBFloat16
                                                                     : Number::kFloat8E4M3;
struct Product {
  Number number;
  bool is_b_transposed;
  const Sum* sums;
  int num_sums;
};
void multiply(const Product& product, uint64_t a, uint64_t b);
void multiply(const Product& product, uint4 a, uint64_t b);
template <typename Type, Major kA = Major::K, Major kB = Major::K>
struct FromShared {
  template <typename... Sums>
  static void fma(uint64_t a, uint64_t b, Sums&&... sums) {
    const Sum all[] = {sums...};
    multiply({kNumber<Type>, kB == Major::MN, all, sizeof...(sums)}, a, b);
  }
};
template <typename Type, Major kA = Major::K, Major kB = Major::K>
struct FromRegisters {
  template <typename... Sums>
  static void fma(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, Sums&&... sums) {
    const Sum all[] = {sums...};
    const uint4 a = {a0, a1, a2, a3};
    multiply({kNumber<Type>, kB == Major::MN, all, sizeof...(sums)}, a, b);
  }
};
}  // namespace SM90::GMMA
}  // namespace cute
