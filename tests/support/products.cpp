// Products of every shape against sums in double precision; compiled and run by test_native_products.py.
//
// The matrix ends at a page that nobody may read. Prints the first fault and returns 1, or the number of shapes.
#include <sys/mman.h>

#include <cstdio>
#include <random>
#include <vector>

#include "linear.h"

using namespace sluice;

template <class T>
struct Guarded {
  T* items;

  explicit Guarded(size_t count) {
    const size_t page = 4096, bytes = (count * sizeof(T) + page - 1) / page * page;
    char* area = static_cast<char*>(mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(area + bytes, page, PROT_NONE);
    items = reinterpret_cast<T*>(area + bytes) - count;
    area_ = area;
    size_ = bytes + page;
  }
  ~Guarded() { munmap(area_, size_); }

 private:
  char* area_;
  size_t size_;
};

template <int kMatrices, class T>
std::vector<float> multiply(const T* in, int64_t m, const T* weight, const T* bias, int64_t n, int64_t k) {
  std::vector<float> out(kMatrices * m * n, -1e30f);
  const Packed<T> room(m, k);
  const Crew crew(2);
#if SLUICE_AMX
  const Tiles tiles;
#endif
  linear<kMatrices>(crew, in, m, weight, bias, n, k, room, [&](int64_t row, int rows, int64_t column, int columns, const Sums* sums) {
    for (int i = 0; i < kMatrices; i++)
      for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) out[(i * m + row + r) * n + column + c] = sums[i][r * kColumns + c];
  });
  return out;
}

template <int kMatrices, class T>
bool holds(int64_t m, int64_t n, int64_t k, std::mt19937& random) {
  std::normal_distribution<float> draw;
  Guarded<T> weight(kMatrices * n * k), in(m * k);
  std::vector<T> bias(kMatrices * n);
  for (int64_t i = 0; i < kMatrices * n * k; i++) weight.items[i] = from_float<T>(draw(random));
  for (int64_t i = 0; i < m * k; i++) in.items[i] = from_float<T>(draw(random));
  for (T& value : bias) value = from_float<T>(draw(random));
  const std::vector<float> out = multiply<kMatrices>(in.items, m, weight.items, bias.data(), n, k);
  for (int64_t i = 0; i < kMatrices; i++)
    for (int64_t r = 0; r < m; r++)
      for (int64_t c = 0; c < n; c++) {
        double sum = to_float(bias[i * n + c]), size = std::fabs(sum);
        for (int64_t e = 0; e < k; e++) {
          const double part = double{to_float(in.items[r * k + e])} * to_float(weight.items[(i * n + c) * k + e]);
          sum += part;
          size += std::fabs(part);
        }
        const float found = out[(i * m + r) * n + c];
        if (!(std::fabs(found - sum) <= 1e-5 * size)) {
          std::printf("%d matrices, m %ld, n %ld, k %ld: element %ld, %ld of %ld is %g, not %g\n", kMatrices, m, n, k, r, c, i, found, sum);
          return false;
        }
      }
  for (const int64_t r : {int64_t{0}, m / 2, m - 1}) {
    const std::vector<float> alone = multiply<kMatrices>(in.items + r * k, 1, weight.items, bias.data(), n, k);
    for (int64_t i = 0; i < kMatrices; i++)
      if (std::memcmp(&alone[i * n], &out[(i * m + r) * n], n * sizeof(float)) != 0) {
        std::printf("%d matrices, m %ld, n %ld, k %ld: row %ld has other bits alone\n", kMatrices, m, n, k, r);
        return false;
      }
  }
  return true;
}

template <class T>
int run() {
  std::mt19937 random(1);
  int num_shapes = 0;
  for (const int64_t k : {1, 31, 32, 33, 80, 1056})
    for (const int64_t n : {1, 15, 16, 17, 33, 50})
      for (const int64_t m : {1, 2, 3, 5, 16, 17, 32, 33, 70, 300}) {
        if (k > 100 && m > 100 && n > 20) continue;  // the reference takes its time
        if (!holds<1, T>(m, n, k, random) || !holds<2, T>(m, n, k, random)) return 0;
        num_shapes++;
      }
  return num_shapes;
}

int main() {
#if SLUICE_AMX
  if (!may_use_tiles()) return 2;
#endif
  const int num_float = run<float>(), num_bf16 = run<bf16>();
  if (num_float > 0 && num_bf16 > 0) std::printf("%d shapes\n", num_float + num_bf16);
  return num_float > 0 && num_bf16 > 0 ? 0 : 1;
}
