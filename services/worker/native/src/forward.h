// A model's layers over one step's tokens: the caller goes from part to part, and shares out what is worth it.
#pragma once

#include "attention.h"
#include "linear.h"
#include "model.h"
#include "team.h"

namespace sluice {

template <class T>
inline const T* as(const void* pointer) {
  return static_cast<const T*>(pointer);
}

// Normalises one row; weight and bias may be null.
template <class T>
inline void norm_row(const T* in, const T* weight, const T* bias, int64_t size, float eps, bool subtract_mean, T* out) {
  float mean = 0.0f;
  if (subtract_mean) {
#pragma omp simd reduction(+ : mean)
    for (int64_t i = 0; i < size; i++) mean += to_float(in[i]);
    mean /= static_cast<float>(size);
  }
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < size; i++) {
    const float value = to_float(in[i]) - mean;
    squares += value * value;
  }
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
#pragma omp simd
  for (int64_t i = 0; i < size; i++) {
    const float value = (to_float(in[i]) - mean) * factor * (weight == nullptr ? 1.0f : to_float(weight[i]));
    out[i] = from_float<T>(value + (bias == nullptr ? 0.0f : to_float(bias[i])));
  }
}

inline float activate(int32_t activation, float x) {
  switch (activation) {
    case kSilu:
      return silu(x);
    case kRelu:
      return x > 0.0f ? x : 0.0f;
    case kGelu:
      return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
    default:
      return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x)));
  }
}

// Adds up where the caller's time goes.
class Clock {
 public:
  explicit Clock(double* seconds) : seconds_(seconds), last_(Time::now()) {}

  void end(Part part) {
    if (seconds_ == nullptr) return;
    const Time::time_point now = Time::now();
    seconds_[part] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  double* seconds_;
  Time::time_point last_;
};

// Returns the place of the largest of some numbers, the first one on a tie; `count` if one of them is not a number or the
// largest is infinite.
inline int64_t place_of_largest(const float* values, int64_t count) {
  float largest = -INFINITY;
  int32_t num_strange = 0;
#pragma omp simd reduction(max : largest) reduction(+ : num_strange)
  for (int64_t i = 0; i < count; i++) {
    largest = values[i] > largest ? values[i] : largest;
    num_strange += values[i] != values[i] ? 1 : 0;
  }
  if (num_strange > 0 || !std::isfinite(largest)) return count;
  return std::find(values, values + count, largest) - values;
}

// Where the tokens of a step stand.
class Places {
 public:
  Places(const Model& model, const Step& step) {
    positions_.reserve(static_cast<size_t>(step.rows.num_tokens));
    slots_.reserve(static_cast<size_t>(step.rows.num_tokens));
    ends_.reserve(static_cast<size_t>(step.rows.num_rows));
    is_inside_ = add_rows(model, step);
  }

  // Whether all tokens, positions and blocks of the step exist; if not, the places are not to be used.
  bool is_inside() const { return is_inside_; }

  int64_t position(int64_t token) const { return positions_[token]; }
  int64_t slot(int64_t token) const { return slots_[token]; }

  // The index in the batch of a row's last token.
  int64_t last(int64_t row) const { return ends_[row] - 1; }

 private:
  static bool is_below(int64_t value, int64_t limit) { return static_cast<uint64_t>(value) < static_cast<uint64_t>(limit); }

  bool add_rows(const Model& model, const Step& step) {
    const Rows& rows = step.rows;
    for (int64_t row = 0; row < rows.num_rows; row++) {
      const int64_t start = rows.row_start[row], count = rows.row_tokens[row], size = model.block_size;
      if (count < 1 || start < 0 || start + count > std::min(model.num_positions, rows.table_stride * size)) return false;
      const int32_t* table = rows.table(row);
      for (int64_t i = 0; i <= (start + count - 1) / size; i++)
        if (!is_below(block_of(table[i]), model.num_blocks)) return false;
      for (int64_t position = start; position < start + count; position++) {
        positions_.push_back(position);
        slots_.push_back(slot_of(table[position / size], position % size, size));
      }
      ends_.push_back(static_cast<int64_t>(positions_.size()));
    }
    for (int64_t t = 0; t < rows.num_tokens; t++)
      if (!is_below(step.tokens[t], model.vocab)) return false;
    return static_cast<int64_t>(positions_.size()) == rows.num_tokens;
  }

  bool is_inside_;
  std::vector<int64_t> positions_, slots_, ends_;
};

template <class T>
class Forward {
 public:
  // `places` are inside. Takes all memory that the step needs: nothing may throw while threads share work.
  Forward(const Model& model, const Step& step, const Places& places)
      : model_(model),
        step_(step),
        places_(places),
        work_(step.rows, model.heads, model.kv_heads, model.head_dim, step.num_threads, row_state(step),
              step.far == nullptr ? Which::kAll : Which::kNear),
        far_work_(far_rows(step), model.heads, model.kv_heads, model.head_dim, step.num_threads, row_state(step), Which::kFar),
        packed_(std::max(step.rows.num_tokens, step.num_sampled),
                std::max({model.hidden, model.heads * model.head_dim, model.inner})),
        crew_(step.num_threads) {}

  Result run() {
#if SLUICE_AMX
    const Tiles tiles;
#endif
    Clock clock(step_.seconds);
    if (step_.embed) embed();
    clock.end(kEmbed);
    for (int64_t i = step_.first_layer; i < step_.last_layer; i++) {
      const Layer& layer = model_.layers[i];
      norm(layer.attention_norm, layer.attention_norm_bias);
      clock.end(kNorms);
      project(layer);
      clock.end(kQkv);
      turn_and_store(layer);
      clock.end(kTurn);
      if (step_.far == nullptr) {
        attend(attention(layer), work_);
      } else if (!attend_with_far(i, layer)) {
        return kNotGiven;
      }
      clock.end(kAttention);
      add(as<T>(step_.attended), model_.heads * model_.head_dim, layer.output, layer.output_bias);
      clock.end(kOutput);
      norm(layer.mlp_norm, layer.mlp_norm_bias);
      clock.end(kNorms);
      widen(layer);
      clock.end(kUp);
      add(as<T>(step_.inner), model_.inner, layer.down, layer.down_bias);
      clock.end(kDown);
    }
    gather();
    clock.end(kGather);
    head();
    clock.end(kHead);
    return kDone;
  }

 private:
  int64_t tokens() const { return step_.rows.num_tokens; }
  int64_t heads_width() const { return (model_.heads + 2 * model_.kv_heads) * model_.head_dim; }
  T* hidden() const { return static_cast<T*>(step_.hidden); }

  void embed() const {
    const int64_t size = model_.hidden;
    const T* places = as<T>(model_.position_embedding);
    crew_.share(tokens(), size, [=](int, int64_t t) {
      const T* row = as<T>(model_.embedding) + step_.tokens[t] * size;
      T* out = hidden() + t * size;
      std::memcpy(out, row, size * sizeof(T));
      if (places == nullptr) return;
      const T* place = places + places_.position(t) * size;
      for (int64_t i = 0; i < size; i++) out[i] = from_float<T>(to_float(out[i]) + to_float(place[i]));
    });
  }

  void norm(const void* weight, const void* bias) const {
    const int64_t size = model_.hidden;
    crew_.share(tokens(), size, [=](int, int64_t t) {
      norm_row(hidden() + t * size, as<T>(weight), as<T>(bias), size, model_.norm_eps, model_.layer_norm != 0,
               static_cast<T*>(step_.normed) + t * size);
    });
  }

  void project(const Layer& layer) const {
    const int64_t width = heads_width();
    T* out = static_cast<T*>(step_.heads);
    linear<1>(crew_, as<T>(step_.normed), tokens(), as<T>(layer.qkv), as<T>(layer.qkv_bias), width, model_.hidden, packed_,
              [=](int64_t row, int rows, int64_t column, int columns, const Sums* sums) {
                for (int r = 0; r < rows; r++)
                  for (int c = 0; c < columns; c++)
                    out[(row + r) * width + column + c] = from_float<T>(sums[0][r * kColumns + c]);
              });
  }

  // Normalises and turns queries and keys where they stand, and puts keys and values into the cache.
  void turn_and_store(const Layer& layer) const {
    const int64_t size = model_.head_dim, kv_width = model_.kv_heads * size;
    crew_.share(tokens(), heads_width(), [=, &layer](int, int64_t t) {
      T* row = static_cast<T*>(step_.heads) + t * heads_width();
      for (int64_t h = 0; h < model_.heads + model_.kv_heads; h++) {
        const void* weight = h < model_.heads ? layer.q_norm : layer.k_norm;
        if (weight != nullptr) norm_row<T>(row + h * size, as<T>(weight), nullptr, size, model_.norm_eps, false, row + h * size);
        if (model_.rotary_dim > 0) turn(row + h * size, places_.position(t));
      }
      T* keys = row + model_.heads * size;
      std::memcpy(static_cast<T*>(layer.keys) + places_.slot(t) * kv_width, keys, kv_width * sizeof(T));
      std::memcpy(static_cast<T*>(layer.values) + places_.slot(t) * kv_width, keys + kv_width, kv_width * sizeof(T));
    });
  }

  void turn(T* head, int64_t position) const {
    const int64_t size = model_.rotary_dim, half = size / 2;
    const T *cos = as<T>(model_.cos) + position * size, *sin = as<T>(model_.sin) + position * size;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
      const float first = to_float(head[i]), second = to_float(head[half + i]);
      head[i] = from_float<T>(first * to_float(cos[i]) + second * to_float(sin[i]));
      head[half + i] = from_float<T>(second * to_float(cos[half + i]) + first * to_float(sin[half + i]));
    }
  }

  static const int32_t* row_state(const Step& step) { return step.far == nullptr ? nullptr : step.far->row_state; }

  // The step's rows if some of their keys lie elsewhere; else none.
  static Rows far_rows(const Step& step) {
    Rows rows = step.rows;
    if (step.far == nullptr) rows.num_rows = 0;
    return rows;
  }

  Attend attention(const Layer& layer) const {
    Attend args{};
    args.rows = step_.rows;
    args.heads = model_.heads;
    args.kv_heads = model_.kv_heads;
    args.head_dim = model_.head_dim;
    args.block_size = model_.block_size;
    args.window = layer.window;
    args.scale = model_.scale;
    args.keys = layer.keys;
    args.values = layer.values;
    args.queries = step_.heads;
    args.query_stride = heads_width();
    args.out = step_.attended;
    return args;
  }

  void attend(const Attend& args, AttentionWork& work) const { Attention<T>(args).run(crew_, work); }

  // Rows whose keys are all here are attended while others do the part that is not. Whether it went well.
  bool attend_with_far(int64_t index, const Layer& layer) {
    const Far& far = *step_.far;
    Attend before = attention(layer);
    before.row_state = far.row_state;
    before.states = far.states;
    before.row_end = far.row_first;
    attend(before, far_work_);
    if (far.ask(index) != 0) return false;
    attend(attention(layer), work_);
    if (far.take(index) != 0) return false;
    Attend after = before;
    after.row_first = far.row_end;
    after.row_end = nullptr;
    attend(after, far_work_);
    return true;
  }

  // hidden += in * weight^T + bias
  void add(const T* in, int64_t k, const void* weight, const void* bias) const {
    const int64_t size = model_.hidden;
    T* out = hidden();
    linear<1>(crew_, in, tokens(), as<T>(weight), as<T>(bias), size, k, packed_,
              [=](int64_t row, int rows, int64_t column, int columns, const Sums* sums) {
                for (int r = 0; r < rows; r++)
                  for (int c = 0; c < columns; c++) {
                    T& value = out[(row + r) * size + column + c];
                    value = from_float<T>(to_float(value) + sums[0][r * kColumns + c]);
                  }
              });
  }

  void widen(const Layer& layer) const {
    const int64_t size = model_.inner;
    const int32_t activation = model_.activation;
    const T *in = as<T>(step_.normed), *weight = as<T>(layer.up), *bias = as<T>(layer.up_bias);
    T* out = static_cast<T*>(step_.inner);
    if (!model_.gated) {
      linear<1>(crew_, in, tokens(), weight, bias, size, model_.hidden, packed_,
                [=](int64_t row, int rows, int64_t column, int columns, const Sums* sums) {
                  for (int r = 0; r < rows; r++)
                    for (int c = 0; c < columns; c++)
                      out[(row + r) * size + column + c] = from_float<T>(activate(activation, sums[0][r * kColumns + c]));
                });
      return;
    }
    linear<2>(crew_, in, tokens(), weight, bias, size, model_.hidden, packed_,
              [=](int64_t row, int rows, int64_t column, int columns, Sums* sums) {
                for (int r = 0; r < rows; r++) {
                  float* gate = sums[0] + r * kColumns;
                  if (activation == kSilu) {
#pragma omp simd
                    for (int c = 0; c < kColumns; c++) gate[c] = silu(gate[c]);
                  } else {
                    for (int c = 0; c < columns; c++) gate[c] = activate(activation, gate[c]);
                  }
                  for (int c = 0; c < columns; c++)
                    out[(row + r) * size + column + c] = from_float<T>(gate[c] * sums[1][r * kColumns + c]);
                }
              });
  }

  // Says whether each row's last token is made of numbers, and normalises those whose next token is wanted.
  void gather() const {
    const int64_t size = model_.hidden;
    crew_.share(step_.rows.num_rows, size, [=](int, int64_t row) {
      const T* from = hidden() + places_.last(row) * size;
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < size; i++) sum += to_float(from[i]);
      step_.finite[row] = std::isfinite(sum);
    });
    crew_.share(step_.num_sampled, size, [=](int, int64_t i) {
      norm_row(hidden() + places_.last(step_.sampled[i]) * size, as<T>(model_.norm), as<T>(model_.norm_bias), size, model_.norm_eps,
               model_.layer_norm != 0, static_cast<T*>(step_.normed) + i * size);
    });
  }

  void head() const {
    const int64_t vocab = model_.vocab;
    float* logits = step_.logits;
    linear<1>(crew_, as<T>(step_.normed), step_.num_sampled, as<T>(model_.head), as<T>(model_.head_bias), vocab, model_.hidden, packed_,
              [=](int64_t row, int rows, int64_t column, int columns, const Sums* sums) {
                for (int r = 0; r < rows; r++)
                  for (int c = 0; c < columns; c++)
                    logits[(row + r) * vocab + column + c] = sums[0][r * kColumns + c];
              });
    crew_.share(step_.num_sampled, vocab, [=](int, int64_t i) {
      step_.largest[i] = place_of_largest(logits + i * vocab, vocab);
    });
  }

  const Model& model_;
  const Step& step_;
  const Places& places_;
  AttentionWork work_, far_work_;
  const Packed<T> packed_;
  const Crew crew_;
};

}  // namespace sluice
