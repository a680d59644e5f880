// What Python hands over: plain structures of pointers and sizes, mirrored in structures.py. Pointers are borrowed.
#pragma once

#include <cstdint>

namespace sluice {

constexpr int32_t kAbi = 6;  // raise it with every change of a structure or a function's arguments

// What every function returns.
enum Result : int32_t {
  kDone = 0,
  kNoMemory = 1,
  kOutside = 2,  // a token, position or block does not exist; nothing was computed
  kNotGiven = 3,  // attention over keys elsewhere was not to be had; what was computed is of no use
};

enum Activation : int32_t { kSilu = 0, kRelu = 1, kGelu = 2, kGeluTanh = 3 };

// One layer: parameters (null: the model has none of that kind) and its pools of keys and values.
struct Layer {
  const void *attention_norm, *attention_norm_bias;  // [hidden]
  const void *qkv, *qkv_bias;                        // [(heads + 2 kv_heads) * head_dim, hidden]
  const void *q_norm, *k_norm;                       // [head_dim]
  const void *output, *output_bias;                  // [hidden, heads * head_dim]
  const void *mlp_norm, *mlp_norm_bias;              // [hidden]
  const void *up, *up_bias;                          // gated: gate above up, [2 inner, hidden]; else [inner, hidden]
  const void *down, *down_bias;                      // [hidden, inner]
  void *keys, *values;                               // [blocks, block_size, kv_heads, head_dim]
  int64_t window;                                    // keys that a query sees, itself included; 0: all
};

struct Model {
  int32_t is_bf16;
  int32_t layer_norm;  // 1: mean and variance, 0: root mean square
  int32_t activation;
  int32_t gated;
  int64_t hidden, inner, vocab;
  int64_t num_layers, heads, kv_heads, head_dim;
  int64_t rotary_dim;  // first dimensions of each head that turn; 0: none
  int64_t block_size, num_blocks;
  int64_t num_positions;  // rows of the tables of positions and angles
  float norm_eps;
  float scale;                               // of scores
  const void *embedding;                     // [vocab, hidden]
  const void *position_embedding;            // row 0 belongs to position 0; null: none
  const void *norm, *norm_bias;              // [hidden], behind the last layer
  const void *head, *head_bias;              // [vocab, hidden]
  const void *cos, *sin;                     // [positions, rotary_dim]; sin's first half negated
  const Layer* layers;
};

// An entry of a block table that is below 0 is ~id: that block is filled from the right.
inline int64_t block_of(int64_t entry) { return entry ^ (entry >> 63); }

// Where the key of a position lies: `offset` slots from the end of its block at which the row began to fill it.
inline int64_t slot_of(int64_t entry, int64_t offset, int64_t block_size) {
  const int64_t slot = entry * block_size + offset;
  return slot ^ (slot >> 63);  // ~id * size + offset = ~(id * size + size - 1 - offset)
}

// From the slot of a position to that of the next one of its block.
inline int64_t step_of(int64_t entry) { return entry < 0 ? -1 : 1; }

// The rows of one step: row i's tokens are the next row_tokens[i] ones of the batch.
struct Rows {
  int64_t num_rows, num_tokens;
  const int32_t* row_tokens;  // [num_rows]
  const int32_t* row_start;   // [num_rows] position of the first token
  const int32_t* row_table;   // [num_rows] which of the tables is the row's; null: the row's own number
  const int32_t* tables;      // [.., table_stride] block tables, see `slot_of`
  int64_t table_stride;

  const int32_t* table(int64_t row) const { return tables + (row_table == nullptr ? row : row_table[row]) * table_stride; }
};

// Rows some of whose keys lie elsewhere. Ranges of keys begin and end at multiples of 256 (kSplit of attention_work.h).
//
// A state is what attention over a row's first keys leaves: [heads, head_dim + 2] of one token, the weighted values of
// each head, then the largest score, in units of log2, and the sum of 2^(score - largest). Whoever has the keys that
// follow folds them in, split by split, to the very bits that one pass over all of them gives.
struct Far {
  const int32_t* row_state;  // [num_rows] place of the row's first token in `states`; -1: all of its keys are here
  const int32_t* row_first;  // [num_rows] keys before are here, and come first
  const int32_t* row_end;    // [num_rows] keys from here on are here again; those between lie elsewhere
  float* states;             // [.., heads, head_dim + 2]
  // In every layer: `ask` when queries and states are there, `take` to have the states of what lies elsewhere; called
  // by the thread that called the library. 0: it went well; else the step ends.
  int32_t (*ask)(int64_t layer);
  int32_t (*take)(int64_t layer);
};

// Parts of a step, as they are timed.
enum Part { kEmbed, kNorms, kQkv, kTurn, kAttention, kOutput, kUp, kDown, kGather, kHead, kNumParts };

struct Step {
  Rows rows;
  int32_t num_threads;
  int32_t embed;                    // 1: hidden is made from tokens first
  int64_t first_layer, last_layer;  // layers [first, last)
  const int32_t* tokens;            // [num_tokens]
  void* hidden;                     // [num_tokens, hidden] in and out
  void* normed;                     // [num_tokens, hidden] workspace
  void* heads;                      // [num_tokens, (heads + 2 kv_heads) * head_dim] workspace
  void* attended;                   // [num_tokens, heads * head_dim] workspace
  void* inner;                      // [num_tokens, inner] workspace
  uint8_t* finite;                  // [num_rows] out: 1 if the hidden state of the last token is made of numbers
  int64_t num_sampled;
  const int64_t* sampled;           // [num_sampled] rows of the step whose next token is wanted
  float* logits;                    // [num_sampled, vocab] out
  int64_t* largest;                 // [num_sampled] out: the id of the largest logit, the lowest one on a tie; vocab if a
                                    // logit is not a number or the largest one is infinite
  double* seconds;                  // [kNumParts] out: added to; null: not timed
  const Far* far;                   // null: all keys are here
};

// Attention by itself, for queries from anywhere.
struct Attend {
  Rows rows;
  int32_t num_threads;
  int32_t is_bf16;
  int64_t heads, kv_heads, head_dim, block_size, window;
  float scale;
  int32_t any_head_dim;   // 1: by the code for heads of any size, even where this size has its own; same bits
  const void *keys, *values;
  const void* queries;    // [num_tokens, query_stride]
  int64_t query_stride;   // elements between two tokens
  void* out;              // [num_tokens, heads * head_dim]
  const int32_t* row_first;  // [num_rows] multiple of 256: keys before are in the states; null: none are
  const int32_t* row_end;    // [num_rows] multiple of 256: keys from here on are left out, and the result is a state
                             // instead of `out`; null: all keys that a query sees
  const int32_t* row_state;  // [num_rows] place of the row's first token in `states`; null: no states
  float* states;             // [.., heads, head_dim + 2], see `Far`
};

}  // namespace sluice
