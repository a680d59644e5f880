// The library's functions. No exceptions leave them and nothing is checked here: the callers in Python do that.
#include "forward.h"

using namespace sluice;

namespace {

template <class T>
void attend(const Attend& args) {
  const std::vector<Item> items = Attention<T>::items(args.rows, args.heads / args.kv_heads);
  std::vector<float> parts;
#pragma omp parallel num_threads(args.num_threads)
  Attention<T>(args).run(items, parts, args.num_threads);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int32_t sluice_abi() { return kAbi; }

void sluice_forward(const Model* model, const Step* step) {
  if (model->is_bf16) {
    Forward<bf16>(*model, *step).run();
  } else {
    Forward<float>(*model, *step).run();
  }
}

void sluice_head(const Model* model, const void* hidden, int64_t rows, void* normed, float* logits, int64_t* largest,
                 int32_t num_threads) {
  if (model->is_bf16) {
    head(*model, as<bf16>(hidden), rows, static_cast<bf16*>(normed), logits, largest, num_threads);
  } else {
    head(*model, as<float>(hidden), rows, static_cast<float*>(normed), logits, largest, num_threads);
  }
}

void sluice_attend(const Attend* args) {
  if (args->is_bf16) {
    attend<bf16>(*args);
  } else {
    attend<float>(*args);
  }
}

}  // extern "C"
#pragma GCC visibility pop
