// What the provider needs of cuBLAS and cuBLASLt beyond functions that do nothing, which build.py adds. Each product is one
// kernel on the stream of its handle. Functions take their arguments as C does, so those that are not read are not named.
#include "counting.h"

#include <cstdlib>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

struct Handle {
  void* stream;
  int math_mode;
};

#ifdef CUBLAS

API int cublasCreate_v2(Handle** handle) {
  *handle = static_cast<Handle*>(std::calloc(1, sizeof(Handle)));
  return 0;
}
API int cublasDestroy_v2(Handle* handle) {
  std::free(handle);
  return 0;
}
API int cublasSetStream_v2(Handle* handle, void* stream) {
  handle->stream = stream;
  return 0;
}
API int cublasGetMathMode(Handle* handle, int* mode) {
  *mode = handle->math_mode;
  return 0;
}
API int cublasSetMathMode(Handle* handle, int mode) {
  handle->math_mode = mode;
  return 0;
}
API const char* cublasGetStatusName(int) { return "a status of a stand-in"; }
API const char* cublasGetStatusString(int) { return "a status of a stand-in"; }

// `product` is a macro so that build.py can name every function of cuBLAS that starts a kernel.
#define PRODUCT(name)                                 \
  API int name(Handle* handle) {                      \
    dry_enqueue(handle->stream, kKernels, #name);     \
    return 0;                                         \
  }
#include "cublas_products.inc"

#else

// Every descriptor is some memory of its own.
#define DESCRIPTOR(name)            \
  API int name(void** descriptor) { \
    *descriptor = std::calloc(1, 256); \
    return 0;                       \
  }
DESCRIPTOR(cublasLtCreate)
DESCRIPTOR(cublasLtMatmulDescCreate)
DESCRIPTOR(cublasLtMatmulPreferenceCreate)
DESCRIPTOR(cublasLtMatrixLayoutCreate)
DESCRIPTOR(cublasLtMatrixTransformDescCreate)

API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* found) {
  std::memset(results, 0, 64);  // an algorithm that needs no memory; its state is the success
  *found = 1;
  return 0;
}
API int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                       void*, void*, const void*, void*, size_t, void* stream) {
  dry_enqueue(stream, kKernels, "cublasLtMatmul");
  return 0;
}

#endif
