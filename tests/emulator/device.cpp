// The device of device.hpp: lanes as coroutines, memory, copies, barriers, products; built once
// for all kernels.
#include <setjmp.h>
#include <ucontext.h>
#include <algorithm>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

Index threadIdx, blockIdx, gridDim;
alignas(1024) uint8_t emulator::smem[kSmem];

using emulator::kSmem;
using emulator::smem;
struct Copy {
  uint32_t smem;
  const uint8_t* source;
  int size;
  bool valid;
};
using Writes = std::vector<std::pair<uint32_t, uint16_t>>;  // words of shared memory, and by whom
struct Lane {
  Index index;
  ucontext_t context;  // where it begins
  bool has_begun = false, is_done = false;
  jmp_buf place;
  uint64_t seen = 0;  // events, when it began to wait
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
  std::deque<std::vector<std::function<void()>>> products;
  std::vector<std::function<void()>> issued;
  struct Accumulator {
    int pending = 0;
    std::vector<float> values;
  };
  std::map<float*, Accumulator> accumulators;
  std::vector<uint32_t> unfenced;  // words of shared memory that it wrote since its last fence
  Writes acquired;                 // those of others
};
static std::vector<Lane> lanes;
static Lane* current;
static jmp_buf host;
static uint32_t seed;      // 0: everything happens at once, and lanes take turns
static const char* fault;  // what a launch did wrong
static uint64_t events;    // after each, somebody's wait may be over
static std::vector<std::function<void()>> boxes;  // under way
static uint32_t draw(uint32_t count) {
  seed ^= seed << 13, seed ^= seed >> 17, seed ^= seed << 5;
  return seed % count;
}
// Jumps between stacks, since swapcontext() asks the system for a signal mask each time. Neither
// function has locals, which a jump would forget.
__attribute__((noinline)) static void yield() {
  current->seen = events;
  if (_setjmp(current->place) == 0) _longjmp(host, 1);
}
__attribute__((noinline)) static void resume() {
  threadIdx = current->index;
  if (_setjmp(host) != 0) return;
  if (current->has_begun) _longjmp(current->place, 1);
  current->has_begun = true;
  setcontext(&current->context);
}

struct Barrier {
  unsigned waiting = 0, phase = 0, expected = 0;
  bool arrive(unsigned count) {
    if (waiting > 0 && count != expected) fault = "a barrier is met with different counts";
    expected = count;
    if (++waiting < count) return false;
    waiting = 0, ++phase, ++events;
    return true;
  }
  void wait(unsigned count) {
    const unsigned entered = phase;
    if (!arrive(count))
      while (phase == entered) yield();
  }
};
static Barrier cta_barrier, named_barriers[16];
static Barrier warp_barriers[32][32];  // of a warp, of lanes from one on
static int lane() { return threadIdx.x % 32; }
static int warp() { return threadIdx.x / 32; }
void __syncthreads() { cta_barrier.wait(lanes.size()); }
void __syncwarp(unsigned mask) {
  warp_barriers[warp()][__builtin_ctz(mask)].wait(__builtin_popcount(mask));
}
int __syncthreads_or(int vote) {
  static int votes;
  __syncthreads();
  votes = 0;
  __syncthreads();
  votes |= vote;
  __syncthreads();
  return votes;
}
// A lane gives anew when all have come to the next meeting, and so have read what this one gave.
const emulator::Words* emulator::meet(const void* mine, int size, uint32_t mask) {
  static Words given[2][32][32];
  Barrier& barrier = warp_barriers[warp()][__builtin_ctz(mask)];
  Words* all = given[barrier.phase % 2][warp()];
  std::memcpy(all[lane()], mine, size);
  barrier.wait(__builtin_popcount(mask));
  return all;
}
uint32_t __ballot_sync(unsigned, bool value) {
  const uint32_t mine = value;
  const emulator::Words* all = emulator::meet(&mine, sizeof mine);
  uint32_t votes = 0;
  for (int i = 0; i < 32; ++i) votes |= all[i][0] << i;
  return votes;
}
bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, !value) == 0; }
int atomicMax(int* place, int value) {
  const int old = *place;
  *place = std::max(old, value);
  return old;
}
int atomicAdd(int* place, int value) {
  const int old = *place;
  *place += value;
  return old;
}
int atomicCAS(int* place, int expected, int value) {
  const int old = *place;
  if (old == expected) *place = value;
  return old;
}

namespace jitattn {
float sin_approx(float x) { return std::sin(x); }
float cos_approx(float x) { return std::cos(x); }
float exp2_approx(float x) { return std::exp2(x); }
float log2_approx(float x) { return std::log2(x); }
float reciprocal_approx(float x) { return 1.f / x; }
bool elect_one() {
  __syncwarp();
  return lane() == 0;
}

uint32_t smem_address(const void* pointer) { return static_cast<const uint8_t*>(pointer) - smem; }
static uint8_t* at(uint32_t place, int size) {
  if (place % size || place + size > kSmem) std::abort();
  return smem + place;
}
// Who wrote a word in the way that products and boxes need a fence to know of: a lane + 1.
static uint16_t writers[kSmem / 4];
static uint8_t* written(uint32_t smem, int size) {
  uint8_t* place = at(smem, size);
  if (!seed) return place;
  for (uint32_t word = smem / 4; word < (smem + size + 3) / 4; ++word) {
    writers[word] = threadIdx.x + 1;
    current->unfenced.push_back(word);
  }
  return place;
}
// Of what this thread wrote, and of what it has waited for.
void fence_before_tma() {
  for (uint32_t word : current->unfenced) {
    if (writers[word] == threadIdx.x + 1) writers[word] = 0;
  }
  current->unfenced.clear();
  for (const auto& [word, writer] : current->acquired) {
    if (writers[word] == writer) writers[word] = 0;
  }
  current->acquired.clear();
}
template <typename T>
static T read(const void* source) {
  T words;
  std::memcpy(&words, source, sizeof words);
  return words;
}
uint4 ld_global_16(const void* source, bool exists) {
  if (reinterpret_cast<uintptr_t>(source) % 16) std::abort();
  return exists ? read<uint4>(source) : uint4{};
}
uint4 ld_past_l1_16(const void* source) { return ld_global_16(source, true); }
uint2 ld_past_l1_8(const void* source) { return ld_global_8(source, true); }
uint2 ld_global_8(const void* source, bool exists) {
  if (reinterpret_cast<uintptr_t>(source) % 8) std::abort();
  return exists ? read<uint2>(source) : uint2{};
}
uint32_t ld_global_4(const void* source, bool exists) {
  return exists ? read<uint32_t>(source) : 0;
}
uint2 load_8(const void* source) { return read<uint2>(source); }
uint32_t ld_shared_byte(uint32_t smem) { return *at(smem, 1); }
uint32_t ld_shared_4(uint32_t smem) { return read<uint32_t>(at(smem, 4)); }
uint2 ld_shared_8(uint32_t smem) { return read<uint2>(at(smem, 8)); }
uint4 ld_shared_16(uint32_t smem) { return read<uint4>(at(smem, 16)); }
void st_shared_byte(uint32_t smem, uint32_t value) { *written(smem, 1) = value; }
void st_shared_4(uint32_t smem, uint32_t value) { std::memcpy(written(smem, 4), &value, 4); }
void st_shared_8(uint32_t smem, uint2 value) { std::memcpy(written(smem, 8), &value, 8); }
void st_shared_16(uint32_t smem, uint4 value) { std::memcpy(written(smem, 16), &value, 16); }

static void land(const Copy& copy, uint8_t* place) {
  if (copy.valid)
    std::memcpy(place, copy.source, copy.size);
  else
    std::memset(place, 0, copy.size);
}
void copy_later(uint32_t smem, const void* source, int size, bool valid) {
  if (valid && reinterpret_cast<uintptr_t>(source) % size) std::abort();
  uint8_t* place = at(smem, size);
  if (seed) std::memset(place, 0xff, size);
  current->open.push_back({smem, static_cast<const uint8_t*>(source), size, valid});
}
void cp_async_commit() {
  current->groups.push_back(std::move(current->open));
  current->open.clear();
}
void wait_for_copies(int pending) {
  while (current->groups.size() > pending) {
    for (const Copy& copy : current->groups.front()) land(copy, written(copy.smem, copy.size));
    current->groups.pop_front();
  }
}
void cp_async_wait_all() {
  cp_async_commit();
  wait_for_copies(0);
}

struct Phases {
  int count, pending, bytes;
  uint32_t parity;
  Writes arriving, arrived;  // without a fence, by those who arrive in this phase and the last

  void finish() {
    if (pending < 0) fault = "more arrive than a barrier counts";
    if (pending != 0 || bytes != 0) return;
    pending = count, parity ^= 1, ++events;
    arrived = std::move(arriving);
    arriving.clear();
  }
};
static std::map<uint32_t, Phases> phases;
void mbarrier_init(uint32_t barrier, int count) { phases[barrier] = {count, count, 0, 0, {}, {}}; }
void mbarrier_expect(uint32_t barrier, int bytes) {
  Phases& now = phases.at(barrier);
  --now.pending, now.bytes += bytes;
  now.finish();
}
// One lane arrives for its warp, which has met before. Others of it may have written more since,
// which they publish again when that is said to be there.
void mbarrier_arrive(uint32_t barrier) {
  const size_t first = threadIdx.x / 32 * 32;
  for (size_t i = first; i < std::min(first + 32, lanes.size()); ++i) {
    std::vector<uint32_t>& words = lanes[i].unfenced;
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    words.erase(std::remove_if(words.begin(), words.end(),
                               [&](uint32_t word) { return writers[word] != i + 1; }),
                words.end());
    for (uint32_t word : words) phases.at(barrier).arriving.push_back({word, writers[word]});
  }
  mbarrier_expect(barrier, 0);
}
void mbarrier_arrive_later(uint32_t barrier) {
  std::vector<Copy> copies;
  copies.swap(current->open);
  const auto land_all = [=] {
    for (const Copy& copy : copies) land(copy, at(copy.smem, copy.size));
    mbarrier_expect(barrier, 0);
  };
  if (!seed) return land_all();
  boxes.push_back(land_all);
}
void mbarrier_inval(uint32_t barrier) { phases.erase(barrier); }
void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  const Phases& now = phases.at(barrier);
  while (now.parity == parity) yield();
  for (const auto& [word, writer] : now.arrived) {  // but for what has met a fence since
    if (writers[word] == writer) current->acquired.push_back({word, writer});
  }
}
void meet_at(int barrier, int count, bool waits) {
  Barrier& named = named_barriers[barrier];
  if (waits)
    named.wait(count);
  else
    named.arrive(count);
}

// A tensor map as launch_recorder.py writes it.
struct Map {
  uint64_t pointer, item_bytes, sizes[5], strides[4];
  uint32_t box[5];
};
// `from` counts in the map's dimensions but the first, of which a tile has 128 bytes from `column`.
static void land_box(uint32_t smem, const Map& it, uint32_t barrier, const int (&from)[4],
                     int column) {
  const int row_bytes = it.box[0] * it.item_bytes;
  if (row_bytes != 128 || smem % 1024 || it.box[4] != 1) std::abort();
  const int rows = it.box[1] * it.box[2] * it.box[3];
  for (int r = 0; r < rows; ++r) {
    const int steps[4] = {r % int(it.box[1]), r / int(it.box[1]) % int(it.box[2]),
                          r / int(it.box[1] * it.box[2]), 0};
    const auto* row = reinterpret_cast<const uint8_t*>(it.pointer);
    bool exists = true;
    for (int d = 0; d < 4; ++d) {
      const int64_t place = from[d] + steps[d];
      exists &= place >= 0 && place < int64_t(it.sizes[d + 1]);
      row += place * int64_t(it.strides[d]);
    }
    const uint32_t place = smem + r * 128;
    for (int v = 0; v < 8; ++v) {
      uint8_t* vector = at(place + (v ^ place / 128 % 8) * 16, 16);
      const uint64_t begin = column * it.item_bytes + v * 16;
      if (exists && begin < it.sizes[0] * it.item_bytes)
        std::memcpy(vector, row + begin, 16);
      else
        std::memset(vector, 0, 16);
    }
  }
  Phases& now = phases.at(barrier);
  now.bytes -= rows * row_bytes;
  now.finish();
}
void copy_tma(uint32_t smem, const void* map, uint32_t barrier, int token, int segment, int head,
              int page, int column) {
  const Map it = read<Map>(map);
  const auto land = [=] { land_box(smem, it, barrier, {token, segment, head, page}, column); };
  if (!seed) return land();
  const int size = it.box[1] * it.box[2] * it.box[3] * 128;
  for (uint32_t word = smem / 4; word < (smem + size) / 4; ++word) {
    if (writers[word]) fault = "a box overwrites what was written without a fence";
  }
  std::memset(at(smem, 128), 0xff, size);
  boxes.push_back(land);
}

// Matrix `m` of an ldmatrix, of the lane's two elements.
static uint32_t matrix(const emulator::Words* places, int m, bool is_transposed) {
  const int g = lane() / 4, t = lane() % 4;
  uint16_t pair[2];
  for (int i = 0; i < 2; ++i) {
    const int row = is_transposed ? 2 * t + i : g, column = is_transposed ? g : 2 * t + i;
    pair[i] = read<uint16_t>(at(places[8 * m + row][0], 16) + 2 * column);
  }
  return pair[0] | uint32_t(pair[1]) << 16;
}
template <bool kIsTransposed>
static uint2 two_matrices(uint32_t smem) {
  const emulator::Words* p = emulator::meet(&smem, sizeof smem);
  return {matrix(p, 0, kIsTransposed), matrix(p, 1, kIsTransposed)};
}
template <bool kIsTransposed>
static uint4 four_matrices(uint32_t smem) {
  const emulator::Words* p = emulator::meet(&smem, sizeof smem);
  return {matrix(p, 0, kIsTransposed), matrix(p, 1, kIsTransposed), matrix(p, 2, kIsTransposed),
          matrix(p, 3, kIsTransposed)};
}
uint2 ldmatrix_x2(uint32_t smem) { return two_matrices<false>(smem); }
uint2 ldmatrix_x2_trans(uint32_t smem) { return two_matrices<true>(smem); }
uint4 ldmatrix_x4(uint32_t smem) { return four_matrices<false>(smem); }
uint4 ldmatrix_x4_trans(uint32_t smem) { return four_matrices<true>(smem); }
uint32_t movmatrix_trans(uint32_t fragment) {
  const emulator::Words* all = emulator::meet(&fragment, sizeof fragment);
  const int g = lane() / 4, t = lane() % 4;
  uint32_t word = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t source = all[(2 * t + i) * 4 + g / 2][0];
    word |= (source >> g % 2 * 16 & 0xffff) << 16 * i;
  }
  return word;
}

// Lane l has elements 2 t and 2 t + 1 of row g of each matrix, whose rows lanes name.
void stmatrix_x4(uint32_t smem, uint4 value) {
  const emulator::Words* places = emulator::meet(&smem, sizeof smem);
  const uint32_t words[4] = {value.x, value.y, value.z, value.w};
  for (int m = 0; m < 4; ++m) {
    if (places[8 * m + lane() / 4][0] % 16) std::abort();
    st_shared_4(places[8 * m + lane() / 4][0] + lane() % 4 * 4, words[m]);
  }
}
// The nearest number of 8 bits, ties to even.
static uint32_t rounded_e4m3(float x) {
  if (x != x) return 0x7f;
  const uint32_t sign = std::signbit(x) ? 0x80 : 0;
  const float size = std::min(std::fabs(x), 448.f);
  const int exponent = size < 0x1p-6f ? -6 : std::ilogb(size);
  // In units of the last digit; of the next binade where it rounds up to that.
  const uint32_t digits = std::lrint(std::ldexp(size, 3 - exponent));
  return sign | (digits + 8 * (exponent + 6));
}
uint32_t cvt_e4m3x4(float a, float b, float c, float d) {
  return rounded_e4m3(a) | rounded_e4m3(b) << 8 | rounded_e4m3(c) << 16 | rounded_e4m3(d) << 24;
}

// Pairs of numbers that a lane gives in words.
template <typename Type, int kWords>
struct Fragment {
  float pairs[kWords][2];
  explicit Fragment(const uint32_t (&words)[kWords]) {
    for (int i = 0; i < kWords; ++i) {
      pairs[i][0] = Type::low(words[i]), pairs[i][1] = Type::high(words[i]);
    }
  }
};
template <typename Type>
void multiply(float (&d)[4], uint4 a, uint2 b) {
  using Given = Fragment<Type, 6>;
  static_assert(sizeof(Given) == sizeof(emulator::Words), "");
  const Given mine({a.x, a.y, a.z, a.w, b.x, b.y});
  const auto* all = reinterpret_cast<const Given*>(emulator::meet(&mine, sizeof mine));
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int lower = i / 2, column = 2 * t + i % 2;
    float sum = 0.f;
    for (int k = 0; k < 16; ++k) {
      const float left = all[g * 4 + k % 8 / 2].pairs[lower + k / 8 * 2][k % 2];
      sum += left * all[column * 4 + k % 8 / 2].pairs[4 + k / 8][k % 2];
    }
    d[i] += sum;
  }
}
template void multiply<Half>(float (&)[4], uint4, uint2);
template void multiply<BFloat16>(float (&)[4], uint4, uint2);
}  // namespace jitattn

namespace cute {
// A warp's lanes are together at each of these instructions.
static void meet() {
  if (seed) __syncwarp();
}
static void finish_products(int pending) {
  while (current->products.size() > pending) {
    for (const auto& product : current->products.front()) product();
    current->products.pop_front();
  }
}
void warpgroup_arrive() { meet(); }
void warpgroup_commit_batch() {
  if (!seed) return;
  current->products.push_back(std::move(current->issued));
  current->issued.clear();
  if (draw(4) == 0) finish_products(0);
}
void wait_for_products(int pending) {
  finish_products(pending);
  meet();
}
namespace SM90::GMMA {
// Elements of a row of a product: 32 bytes of them.
constexpr int kMaxDepth = 32;
static int size_of(const Product& product) { return product.number == Number::kFloat8E4M3 ? 1 : 2; }
static int depth_of(const Product& product) { return 32 / size_of(product); }
static float value_of(const Product& product, uint16_t bits) {
  switch (product.number) {
    case Number::kHalf:
      return jitattn::Half::to_float(bits);
    case Number::kBFloat16:
      return jitattn::BFloat16::to_float(bits);
    default:
      return jitattn::Half::to_float(jitattn::Float8E4M3::half(bits));
  }
}
// The elements of a row of a matrix with the 128-byte swizzle, in float32: a row of them lies in
// its rows of 128 bytes, or across these when it is transposed.
static void read_row(float (&values)[kMaxDepth], const Product& product, uint64_t matrix, int row,
                     bool is_transposed) {
  const uint32_t begin = (matrix & 0x3fff) * 16, leap = (matrix >> 16 & 0x3fff) * 16;
  const uint32_t step = (matrix >> 32 & 0x3fff) * 16;
  const int size = size_of(product), width = 128 / size;
  for (int k = 0; k < depth_of(product); ++k) {
    const int down = is_transposed ? k : row, along = is_transposed ? row : k;
    const uint32_t place =
        begin + down / 8 * step + down % 8 * 128 + along / width * leap + along % width * size;
    const uint32_t swizzled = place ^ (place >> 7 & 7) << 4;
    const uint8_t* at = jitattn::at(swizzled, size);
    if (jitattn::writers[swizzled / 4]) fault = "a product reads what was written without a fence";
    values[k] = value_of(product, size == 1 ? *at : jitattn::read<uint16_t>(at));
  }
}
// This lane's sums: of two rows, and two columns in eight. `read_a` gives those rows.
template <typename ReadA>
static void run(const Product& product, ReadA read_a, uint64_t b, const std::vector<float*>& d,
                bool adds) {
  float rows[2][kMaxDepth], column[kMaxDepth];
  read_a(rows);
  const int t = lane() % 4;
  for (int i = 0; i < d.size(); i += 4) {
    for (int j = 0; j < 2; ++j) {
      read_row(column, product, b, i / 4 * 8 + 2 * t + j, product.is_b_transposed);
      for (int r = 0; r < 2; ++r) {
        float& place = *d[i + 2 * r + j];
        float sum = adds ? place : 0.f;
        for (int k = 0; k < depth_of(product); ++k) sum += rows[r][k] * column[k];
        place = sum;
      }
    }
  }
}
// Begins a product that has its sums in `d`, where nobody finds them until it is done.
template <typename ReadA>
static void begin(const Product& product, ReadA read_a, uint64_t b) {
  std::vector<float*> d;
  for (int i = 0; i < product.num_sums - 1; ++i) d.push_back(product.sums[i].place);
  const bool adds = product.sums[product.num_sums - 1].adds;
  if (!seed) return run(product, read_a, b, d, adds);
  Lane::Accumulator& sums = current->accumulators[d[0]];
  if (sums.pending++ == 0) {
    for (float* place : d) sums.values.push_back(*place), *place = NAN;
  }
  current->issued.push_back([=, &sums] {
    for (int i = 0; i < sums.values.size(); ++i) *d[i] = sums.values[i];
    sums.values.clear();
    run(product, read_a, b, d, adds);
    if (--sums.pending == 0) current->accumulators.erase(d[0]);
  });
}
void multiply(const Product& product, uint64_t a, uint64_t b) {
  const int first = warp() % 4 * 16 + lane() / 4;
  const auto read_a = [=](float (&rows)[2][kMaxDepth]) {
    for (int r = 0; r < 2; ++r) read_row(rows[r], product, a, first + 8 * r, false);
  };
  begin(product, read_a, b);
}
void multiply(const Product& product, uint4 a, uint64_t b) {
  const emulator::Words* all = emulator::meet(&a, sizeof a);
  struct {
    float of[2][kMaxDepth];
  } rows;
  // A word has elements that follow each other; four lanes have 16 bytes of a row, then 16 more.
  const int size = size_of(product), in_word = 4 / size;
  for (int r = 0; r < 2; ++r) {
    for (int k = 0; k < depth_of(product); ++k) {
      const int word = k / in_word;
      const uint32_t bits =
          all[lane() / 4 * 4 + word % 4][r + word / 4 * 2] >> k % in_word * 8 * size;
      rows.of[r][k] = value_of(product, size == 1 ? bits & 0xff : bits);
    }
  }
  begin(product, [=](float (&mine)[2][kMaxDepth]) { std::memcpy(mine, rows.of, sizeof mine); }, b);
}
}  // namespace SM90::GMMA
}  // namespace cute

// Runs the kernel that a library has, with its parameters.
using Run = void(void* kernel, const void* params);
static Run* run;
static void* kernel;
alignas(64) static uint8_t params[1 << 15];
static void run_lane() {
  run(kernel, params);
  current->is_done = true;
  yield();
}
static void begin_cta(int num_threads) {
  constexpr int kStack = 256 * 1024;
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() < num_threads) stacks.emplace_back(new char[kStack]);
  std::memset(smem, 0xff, sizeof smem);
  std::memset(jitattn::writers, 0, sizeof jitattn::writers);
  jitattn::phases.clear();
  boxes.clear();
  cta_barrier = {};
  for (auto& barriers : warp_barriers) std::fill_n(barriers, 32, Barrier());
  for (Barrier& barrier : named_barriers) barrier = {};
  for (int i = 0; i < num_threads; ++i) {
    Lane& one = lanes[i];
    one = {};
    one.index.x = i;
    getcontext(&one.context);
    one.context.uc_stack.ss_sp = stacks[i].get();
    one.context.uc_stack.ss_size = kStack;
    one.context.uc_link = nullptr;
    makecontext(&one.context, run_lane, 0);
  }
}
// Lanes of a warp that can go on do so; says whether any could.
static bool run_warp(int warp) {
  bool is_running = false;
  const int first = seed ? draw(32) : 0;
  for (int i = 0; i < 32; ++i) {
    Lane& one = lanes[warp * 32 + (first + i) % 32];
    if (one.is_done || one.seen == events) continue;
    is_running = true;
    current = &one;
    resume();
    if (one.is_done) ++events;
  }
  return is_running;
}
static void run_cta(int num_warps) {
  std::vector<int> rates(num_warps, 1);
  int num_idle = 0;
  for (uint64_t round = 0; !fault; ++round) {
    if (seed && round % 512 == 0) {
      // A warp goes on in one of so many rounds; those of a warpgroup alike.
      for (int w = 0; w < num_warps; ++w) rates[w] = w % 4 ? rates[w - w % 4] : 1 << draw(8);
    }
    bool is_running = false;
    const int first = seed ? draw(num_warps) : 0;
    for (int i = 0; i < num_warps; ++i) {
      const int w = (first + i) % num_warps;
      if (rates[w] > 1 && draw(rates[w])) continue;
      is_running |= run_warp(w);
    }
    if (!boxes.empty() && draw(8) == 0) {
      std::swap(boxes[draw(boxes.size())], boxes.back());
      boxes.back()();
      boxes.pop_back();
      is_running = true;
    }
    num_idle = is_running ? 0 : num_idle + 1;
    if (num_idle < (seed ? 4096 : 1)) continue;
    for (const Lane& one : lanes) {
      if (!one.is_done) fault = "a wait has no end";
    }
    return;
  }
}
extern "C" const char* launch(Run* run_kernel, void* function, const void* given, int size,
                              int grid, int num_threads, uint32_t random) {
  if (size > sizeof params) std::abort();
  run = run_kernel, kernel = function, seed = random, fault = nullptr, events = 1;
  std::memcpy(params, given, size);
  gridDim.x = grid;
  lanes = std::vector<Lane>(num_threads);
  std::vector<int> order(grid);
  for (int i = 0; i < grid; ++i) order[i] = i;
  if (seed)
    for (int i = grid - 1; i > 0; --i) std::swap(order[i], order[draw(i + 1)]);
  for (int n = 0; n < grid && !fault; ++n) {
    blockIdx.x = order[n];
    begin_cta(num_threads);
    run_cta(num_threads / 32);
  }
  return fault;
}
