// The part of ONNX Runtime's C interface that a library of operators needs. With it, the library builds without ONNX Runtime's
// headers, which no Python package contains. The interface's table of functions and its struct of an operator only grow at their
// ends: a function keeps its number below in all versions, and an operator declares how much of the struct it fills in.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <utility>
#include <vector>

struct OrtStatus;
struct OrtSessionOptions;
struct OrtKernelContext;
struct OrtKernelInfo;
struct OrtValue;
struct OrtCustomOpDomain;

using OrtApi = void*;  // the table is an array of functions

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
};

namespace tfexport {

constexpr uint32_t kOperatorVersion = 16;  // of the struct: the first with operators that can return an error
constexpr uint32_t kVersion = 24;          // of the table: the first that returns shapes without allocating memory

enum Function {
  kCreateStatus = 0,
  kCreateCustomOpDomain = 26,
  kCustomOpDomain_Add = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kKernelInfoGetAttribute_float = 85,
  kKernelContext_GetInput = 90,
  kKernelContext_GetOutput = 91,
  kKernelInfoGetConstantInput_tensor = 249,
  kKernelContext_ParallelFor = 274,
  kGetTensorElementTypeAndShapeDataReference = 414,
};

constexpr int kInvalidArgument = 2;

constexpr double kTask = 4e-6;  // seconds of work for which waking up a thread is worthwhile

enum Type { kFloat = 1, kUint8 = 2, kInt8 = 3, kInt32 = 6, kInt64 = 7, kBool = 9 };

template <typename... Arguments>
OrtStatus* call(const OrtApi* api, Function function, Arguments... arguments) {
  return reinterpret_cast<OrtStatus* (*)(Arguments...)>(api[function])(arguments...);
}

// The sizes of a tensor's axes. It allocates no memory; a step of a small model would allocate a hundred times.
class Dims {
 public:
  static constexpr size_t kMost = 4;

  Dims() = default;
  Dims(std::initializer_list<int64_t> sizes) : Dims(sizes.begin(), sizes.size()) {}
  Dims(const int64_t* sizes, size_t count) : count_(count) { std::copy_n(sizes, count, sizes_); }

  const int64_t* data() const { return sizes_; }
  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  int64_t operator[](size_t axis) const { return sizes_[axis]; }
  int64_t& back() { return sizes_[count_ - 1]; }
  int64_t back() const { return sizes_[count_ - 1]; }
  bool operator==(const Dims& other) const { return std::equal(sizes_, sizes_ + count_, other.sizes_, other.sizes_ + other.count_); }

 private:
  int64_t sizes_[kMost] = {};
  size_t count_ = 0;
};

// A dense tensor. `data` belongs to ONNX Runtime.
struct Tensor {
  void* data = nullptr;
  Dims dims;
  int64_t size = 1;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
  int64_t last() const { return dims.empty() ? 1 : dims.back(); }
};

// Fills `tensor` with the content of a value. Returns the error, if any.
inline OrtStatus* read(const OrtApi* api, const OrtValue* value, Tensor& tensor) {
  int type = 0;
  const int64_t* sizes = nullptr;
  size_t count = 0;
  OrtStatus* failed = call(api, kGetTensorElementTypeAndShapeDataReference, value, &type, &sizes, &count);
  if (failed) return failed;
  if (count > Dims::kMost) return call(api, kCreateStatus, kInvalidArgument, "an operator takes tensors of 4 axes at most");
  tensor.dims = Dims(sizes, count);
  for (size_t axis = 0; axis < count; ++axis) tensor.size *= sizes[axis];
  return call(api, kGetTensorMutableData, const_cast<OrtValue*>(value), &tensor.data);
}

// The data of an operator's node, for all of its runs.
struct Given {
  float attribute = 0;
  std::vector<Tensor> constants;  // of each input; without data if it differs from run to run
};

// The inputs and outputs of one run of an operator. The operator returns the first failure.
class Context {
 public:
  Context(const OrtApi* api, OrtKernelContext* context, const Given& given)
      : attribute(given.attribute), api_(api), context_(context), constants_(given.constants) {}

  const float attribute;  // the numeric attribute of the operator's node, if it has one

  Tensor input(size_t index) {
    if (constants_[index].data) return constants_[index];
    Tensor tensor;
    const OrtValue* value = nullptr;
    if (!failed(call(api_, kKernelContext_GetInput, const_cast<const OrtKernelContext*>(context_), index, &value))) {
      failed(read(api_, value, tensor));
    }
    return tensor;
  }

  void* output(size_t index, const Dims& dims) {
    OrtValue* value = nullptr;
    void* data = nullptr;
    if (!failed(call(api_, kKernelContext_GetOutput, context_, index, dims.data(), dims.size(), &value))) {
      failed(call(api_, kGetTensorMutableData, value, &data));
    }
    return data;
  }

  // Returns `holds`. If it is false, the operator fails.
  bool require(bool holds, const char* otherwise) {
    if (status_ == nullptr && !holds) status_ = call(api_, kCreateStatus, kInvalidArgument, otherwise);
    return status_ == nullptr;
  }

  // Calls `task(i)` for all i below `tasks`, with the threads of the session. If a task throws, the operator fails after the
  // others: an exception that left a thread would end the process.
  template <typename Task>
  void parallel(int64_t tasks, const Task& task) {
    if (tasks == 1) return task(0);
    struct Shared {
      const Task& task;
      std::atomic<bool> has_thrown;
    } shared{task, {false}};
    void (*const run)(void*, size_t) = [](void* data, size_t index) {
      auto* own = static_cast<Shared*>(data);
      try {
        own->task(index);
      } catch (...) {
        own->has_thrown = true;
      }
    };
    void* const data = &shared;
    failed(call(api_, kKernelContext_ParallelFor, const_cast<const OrtKernelContext*>(context_), run,
                static_cast<size_t>(tasks), static_cast<size_t>(0), data));
    require(!shared.has_thrown, "there is not enough memory");
  }

  OrtStatus* status() const { return status_; }

 private:
  bool failed(OrtStatus* status) {
    if (status_ == nullptr) status_ = status;
    return status != nullptr;
  }

  const OrtApi* api_;
  OrtKernelContext* context_;
  const std::vector<Tensor>& constants_;
  OrtStatus* status_ = nullptr;
};

// An operator that only keeps the data of its node between runs, with at most one attribute, a float.
class Operator : public OrtCustomOp {
 public:
  using Compute = void (*)(Context&);

  Operator(const char* name, Compute compute, std::initializer_list<Type> inputs, std::initializer_list<Type> outputs,
           const char* attribute = nullptr)
      : OrtCustomOp{}, name_(name), compute_(compute), inputs_(inputs), outputs_(outputs), attribute_(attribute) {
    version = kOperatorVersion;
    GetName = [](const OrtCustomOp* op) { return self(op).name_; };
    GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };  // the CPU's
    GetInputType = [](const OrtCustomOp* op, size_t index) { return static_cast<int>(self(op).inputs_[index]); };
    GetInputTypeCount = [](const OrtCustomOp* op) { return self(op).inputs_.size(); };
    GetOutputType = [](const OrtCustomOp* op, size_t index) { return static_cast<int>(self(op).outputs_[index]); };
    GetOutputTypeCount = [](const OrtCustomOp* op) { return self(op).outputs_.size(); };
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    GetInputCharacteristic = GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return 0; };  // required
    GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };                                // the default
    GetVariadicInputMinArity = GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
    GetVariadicInputHomogeneity = GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
    CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
      try {
        Given given;
        OrtStatus* failed = self(op).read_given(api, info, given);
        if (!failed) *kernel = new Kernel{api, self(op).compute_, std::move(given)};
        return failed;
      } catch (const std::exception& error) {  // no exception may leave a function that C calls
        return call(api, kCreateStatus, 1, error.what());
      }
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      const auto* own = static_cast<Kernel*>(kernel);
      Context run(own->api, context, own->given);
      try {
        own->compute(run);
      } catch (const std::exception& error) {
        run.require(false, error.what());
      }
      return run.status();
    };
  }

 private:
  struct Kernel {
    const OrtApi* api;
    Compute compute;
    Given given;
  };

  OrtStatus* read_given(const OrtApi* api, const OrtKernelInfo* info, Given& given) const {
    OrtStatus* failed =
        attribute_ ? call(api, kKernelInfoGetAttribute_float, info, attribute_, &given.attribute) : nullptr;
    given.constants.resize(inputs_.size());
    for (size_t index = 0; index < inputs_.size() && !failed; ++index) {
      int is_constant = 0;
      const OrtValue* value = nullptr;
      failed = call(api, kKernelInfoGetConstantInput_tensor, info, index, &is_constant, &value);
      if (!failed && is_constant) failed = read(api, value, given.constants[index]);
    }
    return failed;
  }

  static const Operator& self(const OrtCustomOp* op) { return *static_cast<const Operator*>(op); }

  const char* name_;
  Compute compute_;
  std::vector<Type> inputs_, outputs_;
  const char* attribute_;
};

}  // namespace tfexport
