// How the attention of one step is cut into pieces for the threads, and the memory that they take.
//
// All of it is taken before the threads begin: no exception could leave a helper.
#pragma once

#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "model.h"
#include "values.h"

namespace sluice {

constexpr int kItemRows = 16;   // query rows (tokens times heads of a group) of one work item, unless a group has more
constexpr int kMaxGroup = 64;   // query heads that may share a key head
constexpr int kMaxRows = kItemRows > kMaxGroup ? kItemRows : kMaxGroup;
constexpr int kSpread = 4;      // items per thread below which long contexts are cut by splits
constexpr int64_t kMaxParts = 16 << 20;  // floats of splits that are computed side by side; the reserve counts them

// Tokens of one row that share a key head: the unit of work, times kv_heads.
struct Item {
  int32_t row, count;
  int64_t token;     // index in the batch of the first one
  int64_t position;  // its place in the sequence
  int32_t offset;    // its place among the row's tokens of this step
};

// The fold over splits of one query row.
struct Running {
  float top = -INFINITY;  // largest score so far, in units of log2
  float total = 0.0f;     // sum of 2^(score - top)
};

// Which rows of a step.
enum class Which { kAll, kNear, kFar };  // kNear: all of whose keys are here, kFar: the others

// What all layers of a step share.
class AttentionWork {
 public:
  // `row_state` is that of `Far`; null for all rows.
  AttentionWork(const Rows& rows, int64_t heads, int64_t kv_heads, int64_t head_dim, int num_threads,
                const int32_t* row_state = nullptr, Which which = Which::kAll)
      : head_dim_(head_dim) {
    cut(rows, heads / kv_heads, row_state, which);
    scratch_.resize(static_cast<size_t>(num_threads * scratch_size()));
    const int64_t units = static_cast<int64_t>(items_.size()) * kv_heads;
    if (units < kSpread * num_threads && longest_ > 2 * kSplit) take_parts(units);
  }

  const std::vector<Item>& items() const { return items_; }

  // Splits of one item are computed side by side, since there are fewer items than the threads could use.
  bool splits_apart() const { return !parts_.empty(); }

  // Multiplications of the largest unit.
  int64_t unit_work() const { return 2 * longest_ * max_rows_ * head_dim_; }

  int64_t num_splits() const { return (longest_ + kSplit - 1) / kSplit; }

  // A thread's room for the results of an item and of one split of it: 2 [max_rows, head_dim].
  float* scratch(int thread) { return scratch_.data() + thread * scratch_size(); }

  // A unit's split by itself: `Running` of its query rows, and its values [max_rows, head_dim].
  Running* running(int64_t unit, int64_t split) { return reinterpret_cast<Running*>(slot(unit, split)); }
  float* part(int64_t unit, int64_t split) { return slot(unit, split) + 2 * max_rows_; }

 private:
  void cut(const Rows& rows, int64_t group, const int32_t* row_state, Which which) {
    const int32_t tokens = static_cast<int32_t>(std::max<int64_t>(1, kItemRows / group));
    items_.reserve(static_cast<size_t>(rows.num_rows));
    int64_t token = 0;
    for (int64_t row = 0; row < rows.num_rows; row++) {
      const int32_t start = rows.row_start[row], count = rows.row_tokens[row];
      const int64_t first_token = token;
      token += count;
      if (which != Which::kAll && (row_state[row] < 0) != (which == Which::kNear)) continue;
      longest_ = std::max<int64_t>(longest_, start + count);
      max_rows_ = std::max(max_rows_, std::min(tokens, count) * group);
      for (int32_t first = 0; first < count; first += tokens)
        items_.push_back({static_cast<int32_t>(row), std::min(tokens, count - first), first_token + first, start + first, first});
    }
  }

  // Makes room for all splits of all items; if that is too much, or there is no memory, they are computed in turn.
  void take_parts(int64_t units) {
    const int64_t size = units * num_splits() * slot_size();
    if (size > kMaxParts) return;
    try {
      parts_.resize(static_cast<size_t>(size));
    } catch (const std::bad_alloc&) {
      parts_.clear();
    }
  }

  int64_t scratch_size() const { return (2 * max_rows_ * head_dim_ + 15) / 16 * 16; }
  int64_t slot_size() const { return max_rows_ * (head_dim_ + 2); }
  float* slot(int64_t unit, int64_t split) { return parts_.data() + (unit * num_splits() + split) * slot_size(); }

  const int64_t head_dim_;
  int64_t longest_ = 0;   // keys of the longest row
  int64_t max_rows_ = 0;  // query rows of the largest item
  std::vector<Item> items_;
  std::vector<float> scratch_, parts_;
};

}  // namespace sluice
