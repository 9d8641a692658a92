// What the stand-ins of the CUDA libraries share: work on a stream, counted. libcudart defines it, the others call it.
#pragma once
#include <cstddef>

enum Kind {
  kKernels,         // kernels that the GPU would run, also those within a replayed graph
  kCopiesToDevice,  // host to device
  kCopiesToHost,    // device to host
  kCopiesOnDevice,
  kFills,           // memset
  kLaunches,        // calls of the host that start work: kernels, copies, fills, and one for a whole graph
  kReplays,         // launches of a recorded graph
  kWaits,           // times the host waits for the GPU
  kAllocations,     // of the GPU's memory
  kFrees,
  kHostAllocations,  // of pinned memory
  kHostFrees,
  kRecordings,  // graphs recorded
  kGraphs,      // recorded graphs that exist
  kPlans,       // attention plans that cuDNN was asked to build
  kViolations,  // calls that CUDA refuses while a stream is recorded, or that would not be part of the recording
  kKinds
};

extern "C" {
// Enqueue one piece of work of this kind that does nothing.
void dry_enqueue(void* stream, int kind, const char* name);
void dry_count(int kind);
}
