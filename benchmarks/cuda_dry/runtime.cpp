// A libcudart without a GPU. Device memory is host memory, copies and fills are done, kernels are counted and left out.
// Recording a stream follows CUDA's rules: work is kept and not done, and calls that CUDA refuses meanwhile are violations.
#include "counting.h"

#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <sys/mman.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

using Work = std::function<void()>;

struct Graph {
  std::array<uint64_t, kKinds> counts{};
  std::vector<Work> work;
};

struct Recording {
  std::unique_ptr<Graph> graph;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
};

struct Block {
  size_t bytes;
  bool pinned;
};

struct State {
  std::recursive_mutex mutex;
  std::array<uint64_t, kKinds> counts{};
  std::map<uintptr_t, Block> blocks;
  std::unordered_map<void*, Recording> recordings;  // by stream
  std::unordered_map<const void*, std::string> kernels;
  std::map<std::string, uint64_t> names;  // how often a kernel ran or was recorded
  std::vector<std::string> violations;
};

State& state() {
  static State* all = new State;  // never destroyed: libraries are unloaded in any order
  return *all;
}

using Lock = std::lock_guard<std::recursive_mutex>;

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t violation(const std::string& what) {
  state().counts[kViolations]++;
  if (state().violations.size() < 100) state().violations.push_back(what);
  return last_error = cudaErrorStreamCaptureUnsupported;
}

// Whether this thread may not make calls that could wait or free.
bool restricted() {
  for (auto& [stream, recording] : state().recordings) {
    bool own = recording.thread == std::this_thread::get_id();
    if (recording.mode == cudaStreamCaptureModeGlobal || (own && recording.mode == cudaStreamCaptureModeThreadLocal))
      return true;
  }
  return false;
}

bool records_here() {
  for (auto& [stream, recording] : state().recordings)
    if (recording.thread == std::this_thread::get_id()) return true;
  return false;
}

cudaError_t enqueue(void* stream, int kind, const std::string& name, Work work) {
  Lock lock(state().mutex);
  if (kind == kKernels) state().names[name]++;
  auto found = state().recordings.find(stream);
  if (found != state().recordings.end()) {
    found->second.graph->counts[kind]++;
    if (work) found->second.graph->work.push_back(std::move(work));
    return cudaSuccess;
  }
  if (records_here()) return violation(name + " on a stream that is not recorded");
  state().counts[kind]++;
  state().counts[kLaunches]++;
  if (work) work();
  return cudaSuccess;
}

enum class Place { kPageable, kPinned, kDevice };

Place place_of(const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = state().blocks.upper_bound(address);
  if (next == state().blocks.begin()) return Place::kPageable;
  auto& [start, block] = *--next;
  if (address >= start + block.bytes) return Place::kPageable;
  return block.pinned ? Place::kPinned : Place::kDevice;
}

int copy_kind(const void* target, const void* source) {
  if (place_of(target) != Place::kDevice) return kCopiesToHost;
  return place_of(source) == Place::kDevice ? kCopiesOnDevice : kCopiesToDevice;
}

cudaError_t copy(void* target, const void* source, cudaStream_t stream, Work work) {
  Lock lock(state().mutex);
  bool pageable = place_of(target) == Place::kPageable || place_of(source) == Place::kPageable;
  if (pageable && state().recordings.count(stream)) return violation("a copy of pageable memory");
  return enqueue(stream, copy_kind(target, source), "copy", std::move(work));
}

cudaError_t allocate(void** pointer, size_t bytes, bool pinned) {
  Lock lock(state().mutex);
  if (restricted()) return violation(pinned ? "an allocation of pinned memory" : "an allocation");
  bytes = bytes ? bytes : 1;
  // Pages that nothing writes take no memory: kernels are left out, so most of it is never written. Addresses ascend, as
  // those of a GPU do in general.
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  constexpr uintptr_t step = 2 << 20;
  static uintptr_t next = uintptr_t{1} << 45;
  void* found = mmap(reinterpret_cast<void*>(next), bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (found == MAP_FAILED) return last_error = cudaErrorMemoryAllocation;
  next += (bytes + step - 1) / step * step;
  state().blocks[reinterpret_cast<uintptr_t>(found)] = {bytes, pinned};
  state().counts[pinned ? kHostAllocations : kAllocations]++;
  *pointer = found;
  return cudaSuccess;
}

cudaError_t release(void* pointer, bool pinned) {
  if (!pointer) return cudaSuccess;
  Lock lock(state().mutex);
  if (restricted()) return violation(pinned ? "freeing pinned memory" : "freeing memory");
  auto found = state().blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == state().blocks.end()) return last_error = cudaErrorInvalidValue;
  munmap(pointer, found->second.bytes);
  state().blocks.erase(found);
  state().counts[pinned ? kHostFrees : kFrees]++;
  return cudaSuccess;
}

cudaError_t wait(const char* what) {
  Lock lock(state().mutex);
  if (restricted()) return violation(what);
  state().counts[kWaits]++;
  return cudaSuccess;
}

cudaError_t launch(const void* kernel, cudaStream_t stream) {
  Lock lock(state().mutex);
  auto found = state().kernels.find(kernel);
  return enqueue(stream, kKernels, found == state().kernels.end() ? "unknown" : found->second, nullptr);
}

std::string readable(const char* mangled) {
  int status = 0;
  char* text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 ? text : mangled;
  std::free(text);
  return name;
}

template <class Handle>
cudaError_t make(Handle* handle) {
  *handle = reinterpret_cast<Handle>(std::calloc(1, 64));
  return cudaSuccess;
}

struct Launch {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local Launch configuration;

}  // namespace

// For the other stand-ins and for the program that reads the counts.
API void dry_enqueue(void* stream, int kind, const char* name) { enqueue(stream, kind, name, nullptr); }
API void dry_count(int kind) {
  Lock lock(state().mutex);
  state().counts[kind]++;
}
API int dry_counts(uint64_t* counts) {
  Lock lock(state().mutex);
  std::memcpy(counts, state().counts.data(), sizeof(uint64_t) * kKinds);
  return kKinds;
}
// A line for each violation; the text lasts until the next call.
API const char* dry_violations() {
  static std::string text;
  Lock lock(state().mutex);
  text.clear();
  for (auto& line : state().violations) text += line + "\n";
  return text.c_str();
}
// A line for each kernel: how often it was launched or recorded, and its name.
API const char* dry_kernels() {
  static std::string text;
  Lock lock(state().mutex);
  text.clear();
  for (auto& [name, count] : state().names) text += std::to_string(count) + " " + readable(name.c_str()) + "\n";
  return text.c_str();
}
API void dry_forget_kernels() {
  Lock lock(state().mutex);
  state().names.clear();
}

#include "launches.h"

// Memory.
API cudaError_t cudaMalloc(void** pointer, size_t bytes) { return allocate(pointer, bytes, false); }
API cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return allocate(pointer, bytes, true); }
API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) { return allocate(pointer, bytes, true); }
API cudaError_t cudaFree(void* pointer) { return release(pointer, false); }
API cudaError_t cudaFreeHost(void* pointer) { return release(pointer, true); }
API cudaError_t cudaMallocFromPoolAsync(void** pointer, size_t bytes, cudaMemPool_t, cudaStream_t) {
  return allocate(pointer, bytes, false);
}
API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return release(pointer, false); }
API cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) { return make(pool); }
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = size_t{70} << 30, *total = size_t{80} << 30;
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
  Lock lock(state().mutex);
  if (restricted()) return violation("a copy that waits");
  std::memmove(target, source, bytes);
  state().counts[copy_kind(target, source)]++;
  state().counts[kWaits]++;
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(target, source, stream, [=] { std::memmove(target, source, bytes); });
}
API cudaError_t cudaMemcpy2DAsync(void* target, size_t target_step, const void* source, size_t source_step, size_t width,
                                  size_t height, cudaMemcpyKind, cudaStream_t stream) {
  return copy(target, source, stream, [=] {
    for (size_t row = 0; row < height; row++)
      std::memmove(static_cast<char*>(target) + row * target_step, static_cast<const char*>(source) + row * source_step, width);
  });
}
API cudaError_t cudaMemcpyFromSymbol(void* target, const void*, size_t bytes, size_t, cudaMemcpyKind) {
  std::memset(target, 0, bytes);
  return wait("a copy that waits");
}
API cudaError_t cudaMemset(void* target, int value, size_t bytes) {
  return enqueue(nullptr, kFills, "fill", [=] { std::memset(target, value, bytes); });
}
API cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
  return enqueue(stream, kFills, "fill", [=] { std::memset(target, value, bytes); });
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  Lock lock(state().mutex);
  Place place = place_of(pointer);
  *attributes = {};
  attributes->type = place == Place::kDevice   ? cudaMemoryTypeDevice
                     : place == Place::kPinned ? cudaMemoryTypeHost
                                               : cudaMemoryTypeUnregistered;
  attributes->devicePointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

// Streams, events and recorded graphs.
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return make(stream); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return make(stream); }
API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::free(stream);
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Lock lock(state().mutex);
  if (state().recordings.count(stream)) return violation("waiting for the recorded stream");
  return wait("waiting for a stream");
}
API cudaError_t cudaDeviceSynchronize() {
  Lock lock(state().mutex);
  return state().recordings.empty() ? wait("waiting for the device") : violation("waiting for the device");
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return make(event); }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return make(event); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  std::free(event);
  return cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t) { return wait("waiting for an event"); }
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 0.01f;
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Lock lock(state().mutex);
  if (!stream) return violation("recording the default stream");
  if (state().recordings.count(stream)) return violation("recording a stream twice at once");
  state().recordings[stream] = {std::make_unique<Graph>(), mode, std::this_thread::get_id()};
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Lock lock(state().mutex);
  auto found = state().recordings.find(stream);
  if (found == state().recordings.end()) return last_error = cudaErrorIllegalState;
  bool elsewhere = found->second.thread != std::this_thread::get_id() && found->second.mode != cudaStreamCaptureModeRelaxed;
  if (elsewhere) return violation("a recording that ends in another thread");
  *graph = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<Graph>(std::move(found->second.graph)));
  state().recordings.erase(found);
  state().counts[kRecordings]++;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Lock lock(state().mutex);
  *status = state().recordings.count(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  Lock lock(state().mutex);
  auto copied = new std::shared_ptr<Graph>(*reinterpret_cast<std::shared_ptr<Graph>*>(graph));
  *executable = reinterpret_cast<cudaGraphExec_t>(copied);
  state().counts[kGraphs]++;
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  Lock lock(state().mutex);
  if (state().recordings.count(stream)) return violation("a graph within a recording");
  auto& graph = **reinterpret_cast<std::shared_ptr<Graph>*>(executable);
  for (int kind = 0; kind < kKinds; kind++) state().counts[kind] += graph.counts[kind];
  for (auto& work : graph.work) work();
  state().counts[kReplays]++;
  state().counts[kLaunches]++;
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<std::shared_ptr<Graph>*>(graph);
  return cudaSuccess;
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  Lock lock(state().mutex);
  delete reinterpret_cast<std::shared_ptr<Graph>*>(executable);
  state().counts[kGraphs]--;
  return cudaSuccess;
}

#include "device.h"

API const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorStreamCaptureUnsupported ? "cudaErrorStreamCaptureUnsupported" : "cudaErrorOfAStandIn";
}
API const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
