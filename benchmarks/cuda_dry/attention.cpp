// What the provider's frontend of cuDNN calls: descriptors without contents, plans that are counted, and one kernel a plan.
#include "counting.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

struct Handle {
  void* stream;
};

struct Descriptor {
  int type;
};

namespace {
// Numbers of cudnn_backend_v9.h.
constexpr int kExecutionPlan = 5;
constexpr int kEngineHeuristicResults = 202;
constexpr int kKnobs[] = {302, 1302, 1303, 1305};  // lists, which are empty here
constexpr int kChar = 25, kInt64 = 3, kInt32 = 23, kBoolean = 2;
}  // namespace

API int cudnnCreate(Handle** handle) {
  *handle = static_cast<Handle*>(std::calloc(1, sizeof(Handle)));
  return 0;
}
API int cudnnDestroy(Handle* handle) {
  std::free(handle);
  return 0;
}
API int cudnnSetStream(Handle* handle, void* stream) {
  handle->stream = stream;
  return 0;
}
API int cudnnGetStream(Handle* handle, void** stream) {
  *stream = handle->stream;
  return 0;
}
API size_t cudnnGetVersion() { return 91900; }
API size_t cudnnGetCudartVersion() { return 13000; }
API const char* cudnnGetErrorString(int) { return "an error of a stand-in"; }
API void cudnnGetLastErrorString(char* text, size_t size) {
  if (size) text[0] = 0;
}
API int cudnnBackendCreateDescriptor(int type, Descriptor** descriptor) {
  *descriptor = static_cast<Descriptor*>(std::calloc(1, 256));
  (*descriptor)->type = type;
  return 0;
}
API int cudnnBackendDestroyDescriptor(Descriptor*) { return 0; }  // small, and the frontend keeps copies of the address
API int cudnnBackendInitialize(Descriptor*) { return 0; }
API int cudnnBackendFinalize(Descriptor* descriptor) {
  if (descriptor->type == kExecutionPlan) dry_count(kPlans);
  return 0;
}
API int cudnnBackendSetAttribute(Descriptor*, int, int, int64_t, const void*) { return 0; }
API int cudnnBackendGetAttribute(Descriptor*, int name, int type, int64_t wanted, int64_t* count, void* values) {
  int64_t unused;
  if (!count) count = &unused;
  *count = 1;
  for (int knob : kKnobs)
    if (name == knob) *count = 0;
  if (*count == 0 || name == kEngineHeuristicResults || !values || wanted < 1) return 0;
  if (type == kInt64) std::memset(values, 0, sizeof(int64_t));
  if (type == kInt32) std::memset(values, 0, sizeof(int32_t));
  if (type == kBoolean) std::memset(values, 0, 1);
  if (type == kChar) {
    *count = 2;
    std::memcpy(values, "{}", wanted < 2 ? wanted : 2);
  }
  return 0;
}
API int cudnnBackendExecute(Handle* handle, Descriptor*, Descriptor*) {
  dry_enqueue(handle->stream, kKernels, "cudnnBackendExecute");
  return 0;
}
API int cudnnBackendPopulateCudaGraph(Handle*, Descriptor*, Descriptor*, void*) { return 0; }
