// A model's layers over one step's tokens, in one parallel region.
#pragma once

#include <omp.h>

#include "attention.h"
#include "linear.h"
#include "model.h"

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

// Adds up where the time goes, on the first thread of a parallel region.
class Clock {
 public:
  explicit Clock(double* seconds) : seconds_(omp_get_thread_num() == 0 ? seconds : nullptr) {
    if (seconds_ != nullptr) last_ = omp_get_wtime();
  }

  void end(Part part) {
    if (seconds_ == nullptr) return;
    const double now = omp_get_wtime();
    seconds_[part] += now - last_;
    last_ = now;
  }

 private:
  double* seconds_;
  double last_ = 0.0;
};

template <class T>
class Forward {
 public:
  Forward(const Model& model, const Step& step)
      : model_(model), step_(step), items_(Attention<T>::items(step.rows, model.heads / model.kv_heads)) {}

  void run() {
#pragma omp parallel num_threads(step_.num_threads)
    {
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
        attend(layer);
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
    }
  }

 private:
  int64_t tokens() const { return step_.rows.num_tokens; }
  int64_t heads_width() const { return (model_.heads + 2 * model_.kv_heads) * model_.head_dim; }
  T* hidden() const { return static_cast<T*>(step_.hidden); }

  void embed() const {
    const int64_t size = model_.hidden;
    const T* places = as<T>(model_.position_embedding);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens(); t++) {
      const T* row = as<T>(model_.embedding) + step_.tokens[t] * size;
      T* out = hidden() + t * size;
      std::memcpy(out, row, size * sizeof(T));
      if (places == nullptr) continue;
      const T* place = places + step_.positions[t] * size;
      for (int64_t i = 0; i < size; i++) out[i] = from_float<T>(to_float(out[i]) + to_float(place[i]));
    }
  }

  void norm(const void* weight, const void* bias) const {
    const int64_t size = model_.hidden;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens(); t++)
      norm_row(hidden() + t * size, as<T>(weight), as<T>(bias), size, model_.norm_eps, model_.layer_norm != 0,
               static_cast<T*>(step_.normed) + t * size);
  }

  void project(const Layer& layer) const {
    const int64_t width = heads_width();
    T* out = static_cast<T*>(step_.heads);
    linear<1>(as<T>(step_.normed), tokens(), as<T>(layer.qkv), as<T>(layer.qkv_bias), width, model_.hidden,
              [=](int64_t row, int rows, int64_t column, int columns, const Sums* sums) {
                for (int r = 0; r < rows; r++)
                  for (int c = 0; c < columns; c++)
                    out[(row + r) * width + column + c] = from_float<T>(sums[0][r * kColumns + c]);
              });
  }

  // Normalises and turns queries and keys where they stand, and puts keys and values into the cache.
  void turn_and_store(const Layer& layer) const {
    const int64_t size = model_.head_dim, kv_width = model_.kv_heads * size;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens(); t++) {
      T* row = static_cast<T*>(step_.heads) + t * heads_width();
      for (int64_t h = 0; h < model_.heads + model_.kv_heads; h++) {
        const void* weight = h < model_.heads ? layer.q_norm : layer.k_norm;
        if (weight != nullptr) norm_row<T>(row + h * size, as<T>(weight), nullptr, size, model_.norm_eps, false, row + h * size);
        if (model_.rotary_dim > 0) turn(row + h * size, step_.positions[t]);
      }
      T* keys = row + model_.heads * size;
      std::memcpy(static_cast<T*>(layer.keys) + step_.slots[t] * kv_width, keys, kv_width * sizeof(T));
      std::memcpy(static_cast<T*>(layer.values) + step_.slots[t] * kv_width, keys + kv_width, kv_width * sizeof(T));
    }
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

  void attend(const Layer& layer) {
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
    Attention<T>(args).run(items_, parts_, step_.num_threads);
  }

  // hidden += in * weight^T + bias
  void add(const T* in, int64_t k, const void* weight, const void* bias) const {
    const int64_t size = model_.hidden;
    T* out = hidden();
    linear<1>(in, tokens(), as<T>(weight), as<T>(bias), size, k,
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
      linear<1>(in, tokens(), weight, bias, size, model_.hidden,
                [=](int64_t row, int rows, int64_t column, int columns, const Sums* sums) {
                  for (int r = 0; r < rows; r++)
                    for (int c = 0; c < columns; c++)
                      out[(row + r) * size + column + c] = from_float<T>(activate(activation, sums[0][r * kColumns + c]));
                });
      return;
    }
    linear<2>(in, tokens(), weight, bias, size, model_.hidden,
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

  // Copies each row's last token out, and says whether it is made of numbers.
  void gather() const {
    const int64_t size = model_.hidden;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < step_.rows.num_rows; row++) {
      const T* from = hidden() + (step_.rows.row_first[row] + step_.rows.row_tokens[row] - 1) * size;
      std::memcpy(static_cast<T*>(step_.last) + row * size, from, size * sizeof(T));
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < size; i++) sum += to_float(from[i]);
      step_.finite[row] = std::isfinite(sum);
    }
  }

  const Model& model_;
  const Step& step_;
  const std::vector<Item> items_;
  std::vector<float> parts_;
};

// Returns the place of the largest of some numbers, the first one on a tie.
inline int64_t place_of_largest(const float* values, int64_t count) {
  float largest = values[0];
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; i++) largest = std::max(largest, values[i]);
  return std::find(values, values + count, largest) - values;
}

// logits [rows, vocab] behind hidden [rows, hidden], and the id of the largest of each row; normed is workspace of
// hidden's size. An id of `vocab` says that a row has no largest: it holds what is not a number.
template <class T>
void head(const Model& model, const T* hidden, int64_t rows, T* normed, float* logits, int64_t* largest, int num_threads) {
  const int64_t vocab = model.vocab;
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++)
      norm_row(hidden + r * model.hidden, as<T>(model.norm), as<T>(model.norm_bias), model.hidden, model.norm_eps,
               model.layer_norm != 0, normed + r * model.hidden);
    linear<1>(normed, rows, as<T>(model.head), as<T>(model.head_bias), vocab, model.hidden,
              [=](int64_t row, int count, int64_t column, int columns, const Sums* sums) {
                for (int r = 0; r < count; r++)
                  for (int c = 0; c < columns; c++)
                    logits[(row + r) * vocab + column + c] = sums[0][r * kColumns + c];
              });
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) largest[r] = place_of_largest(logits + r * vocab, vocab);
  }
}

}  // namespace sluice
