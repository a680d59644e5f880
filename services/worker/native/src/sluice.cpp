// The library's functions. No exception leaves them; they return a `Result`. Beyond what that names nothing is checked here:
// the callers in Python do that.
#include "forward.h"

using namespace sluice;

namespace {

template <class T>
Result forward(const Model& model, const Step& step) {
  const Places places(model, step);
  if (!places.is_inside()) return kOutside;
  return Forward<T>(model, step, places).run();
}

template <class T>
Result attend(const Attend& args) {
  AttentionWork work(args.rows, args.heads, args.kv_heads, args.head_dim, args.num_threads);
  const Crew crew(args.num_threads);
#if SLUICE_AMX
  const Tiles tiles;
#endif
  Attention<T>(args).run(crew, work);
  return kDone;
}

// Only memory can be missing: nothing else throws.
template <class F>
Result guarded(F f) noexcept {
  try {
    return f();
  } catch (...) {
    return kNoMemory;
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int32_t sluice_abi() { return kAbi; }

// Makes the process ready for the library; 0 if the system does not let it use what the library was compiled for.
int32_t sluice_open() {
#if SLUICE_AMX
  return may_use_tiles();
#else
  return 1;
#endif
}

// Runs the step's layers and, for the rows that are to be sampled, the head.
int32_t sluice_forward(const Model* model, const Step* step) {
  return guarded([=] { return model->is_bf16 ? forward<bf16>(*model, *step) : forward<float>(*model, *step); });
}

// Attention by itself.
int32_t sluice_attend(const Attend* args) {
  return guarded([=] { return args->is_bf16 ? attend<bf16>(*args) : attend<float>(*args); });
}

}  // extern "C"
#pragma GCC visibility pop
