// Bound layers, one after the other, in one call. If Python called each, a forward of 30 layers would take 150 calls,
// between which the other threads wait.
#include "attention.h"
#include "linear.h"

extern "C" {

struct sd_experts_args;
void sd_experts(const sd_experts_args* args, int32_t rows);

enum { SD_LINEAR = 0, SD_EXPERTS = 1, SD_ATTENTION = 2 };

// Mirrors LayerRecord in verify_kernels/cpu/native_backend.py.
struct sd_layer {
  int64_t kind;
  const void* args;
};

// batch: of these rows; null if no layer is attention.
void sd_run(const sd_layer* layers, int32_t count, int32_t rows, const sd_batch* batch) {
  for (const sd_layer* layer = layers; layer < layers + count; ++layer) {
    switch (layer->kind) {
      case SD_LINEAR: sd_linear((const sd_linear_args*)layer->args, rows); break;
      case SD_EXPERTS: sd_experts((const sd_experts_args*)layer->args, rows); break;
      case SD_ATTENTION: sd_attention((const sd_attention_args*)layer->args, batch); break;
    }
  }
}
}
