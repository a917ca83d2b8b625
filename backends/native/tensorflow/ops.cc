// The collectives as TensorFlow operations. Each is asynchronous: it submits a request to its group's engine, and
// TensorFlow runs other operations until the request is done.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../core/engine.h"
#include "../registry.h"
#include "c_api_helpers.h"
#include "libstdcxx.h"
#include "recorder.h"

namespace hvkeras {
namespace {

std::vector<int64_t> shape_of(const Tensor& tensor) {
  std::vector<int64_t> shape;
  for (int index = 0; index < TF_NumDims(tensor.get()); ++index) shape.push_back(TF_Dim(tensor.get(), index));
  return shape;
}

std::string to_string(const std::vector<int64_t>& shape, size_t from = 0) {
  std::string text = "[";
  for (size_t index = 0; index < shape.size(); ++index) {
    if (index != 0) text += ", ";
    text += index < from ? "?" : std::to_string(shape[index]);
  }
  return text + "]";
}

// The attributes of an operation.
struct Kernel {
  std::string key;  // empty in eager mode, see `key_in`
  int64_t group = 0, reduction = 0, root = 0, count = 1, results = 0;
  bool compresses = false;  // between hosts, see compressed_allreduce.h
  std::string bounds;       // of parts, see `Bounds`
  double prescale = 1.0, postscale = 1.0;

  explicit Kernel(TF_OpKernelConstruction* construction) : construction_(construction) {
    key = text("key");
    group = number("group");
  }
  std::string text(const char* name) { return string_attribute(construction_, name); }
  int64_t number(const char* name) {
    const TfStatus status = new_status();
    int64_t value = 0;
    TF_OpKernelConstruction_GetAttrInt64(construction_, name, &value, status.get());
    require_ok(status);
    return value;
  }
  void read_reduction() {
    reduction = number("reduction");
    prescale = std::strtod(text("before").c_str(), nullptr);
    postscale = std::strtod(text("after").c_str(), nullptr);
  }
  ScaleFactors factors() const { return {prescale, postscale}; }

 private:
  TF_OpKernelConstruction* construction_;
};

// An operation that waits for a collective.
//
// The callback that TF_RunAsyncOpKernelDoneCallback takes is on TensorFlow's stack, and is destroyed when the kernel's
// compute function returns, although it is meant to be called later (TensorFlow 2.16 to 2.21). It is a std::function,
// so this keeps a copy of it.
class Waiter {
 public:
  Waiter(TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) : context_(context), done_(done) {}

  void finish(const Status& status) const {
    if (!status.ok()) fail(context_, status);
    done_();
  }

 private:
  TF_OpKernelContext* context_;
  const libstdcxx::Function done_;
};

// A collective that one operation starts, and another one waits for.
class Started {
 public:
  void finish(const Status& status) {
    std::unique_ptr<Waiter> waiter;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      status_ = status;
      is_done_ = true;
      waiter = std::move(waiter_);
    }
    if (waiter) waiter->finish(status);
  }
  void wait(std::unique_ptr<Waiter> waiter) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!is_done_) {
        waiter_ = std::move(waiter);
        return;
      }
    }
    waiter->finish(status_);
  }

 private:
  std::mutex mutex_;
  bool is_done_ = false;
  Status status_;
  std::unique_ptr<Waiter> waiter_;
};

// The memory of the tensor that leads from the operation that starts a collective to the one that waits for it. It
// lives as long as the tensor does, even if a failed graph never waits. TensorFlow copies memory that is not aligned.
struct alignas(64) Ticket {
  const void* self;
  std::shared_ptr<Started> started;
};

// One execution of an operation, until its result is available.
class Call {
 public:
  Call(const std::string& key, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done)
      : key_(key), context_(context), waiter_(std::make_unique<Waiter>(context, done)) {}
  // For an operation that only starts a collective: the context may be used until it returns.
  Call(const std::string& key, TF_OpKernelContext* context, std::shared_ptr<Started> started)
      : key_(key), context_(context), started_(std::move(started)) {}

  const std::string& key() const { return key_; }
  Tensor input(int index) {
    Tensor tensor = input_of(context_, index);
    input_bytes_ += TF_TensorByteSize(tensor.get());
    return tensor;
  }
  size_t input_bytes() const { return input_bytes_; }  // of the inputs so far
  // Whether only this keeps an input, as the operation ends before its collective does.
  bool must_hold_inputs() const { return started_ != nullptr; }
  // Allocates an output of this shape, or forwards the input of the same index if nothing else needs its memory.
  Tensor output_for(int index, const std::vector<int64_t>& shape) const {
    const TfStatus status = new_status();
    const int output = started_ ? index + 1 : index;  // after the ticket
    int forwarded = 0;
    Tensor made(TF_ForwardInputOrAllocateOutput(context_, &index, 1, output, shape.data(),
                                                static_cast<int>(shape.size()), &forwarded, status.get()));
    require_ok(status);
    return made;
  }
  Tensor output(int index, Type type, const std::vector<int64_t>& shape) const {
    const TfStatus status = new_status();
    size_t bytes = size_of(type);
    for (const int64_t size : shape) bytes *= static_cast<size_t>(size);
    Tensor made(TF_AllocateOutput(context_, index, static_cast<int32_t>(type), shape.data(),
                                  static_cast<int>(shape.size()), bytes, status.get()));
    require_ok(status);
    return made;
  }
  void finish(const Status& status) {
    if (status.ok()) {
      const double run[] = {start_, recorder::now()};
      recorder::record(key_, run, 2);
    }
    if (started_) {
      started_->finish(status);
    } else {
      waiter_->finish(status);
    }
  }

 private:
  const std::string key_;
  const double start_ = recorder::now();
  size_t input_bytes_ = 0;
  TF_OpKernelContext* context_;
  const std::unique_ptr<Waiter> waiter_;  // one of the two
  const std::shared_ptr<Started> started_;
};

// The type of a tensor. Throws Failure if it is not supported.
Type type_of(const Tensor& tensor) {
  const Type type = static_cast<Type>(TF_TensorType(tensor.get()));
  if (size_of(type) == 0)
    throw Failure("unsupported dtype. Received: TensorFlow's type number " +
                  std::to_string(TF_TensorType(tensor.get())) + ". HINT: tf.cast the tensor");
  return type;
}

char* data_of(const Tensor& tensor) { return static_cast<char*>(TF_TensorData(tensor.get())); }

// The inputs and outputs of a request, which are kept until it has run; TensorFlow keeps inputs until an operation
// ends. If a request finishes immediately, TensorFlow runs the dependent operations before this file's functions
// return. So operations that forward inputs to outputs move these references into the request, and keep none.
struct HeldTensors {
  std::vector<Tensor> tensors;
};

void submit(const Kernel& kernel, const std::shared_ptr<Call>& call, const std::string& details,
            std::function<void(Channel&)> run, std::shared_ptr<const Allreduce> all = {}) {
  const std::shared_ptr<Engine> engine = engine_of(kernel.group);
  auto request = std::make_unique<Request>();
  request->key = key_of(call->key());
  request->details = details;
  request->run = std::move(run);
  request->allreduce = std::move(all);
  request->bytes = call->input_bytes();
  request->done = [call](const Status& status) { call->finish(status); };
  engine->submit(std::move(request));
}

// The output for an input of the same index, in the same memory if possible.
char* hold_output(Call& call, int index, const char* in, const std::vector<int64_t>& shape, HeldTensors& held) {
  held.tensors.push_back(call.output_for(index, shape));
  char* const out = data_of(held.tensors.back());
  if (out != in && call.must_hold_inputs()) held.tensors.push_back(call.input(index));
  return out;
}

void allreduce_call(const Kernel& kernel, const std::shared_ptr<Call>& call) {
  auto held = std::make_shared<HeldTensors>();
  std::vector<Span> spans;
  std::string details;
  Type type = Type::kFloat32;
  for (int index = 0; index < kernel.count; ++index) {
    Tensor input = call->input(index);
    type = type_of(input);
    const std::vector<int64_t> shape = shape_of(input);
    details += (index == 0 ? "" : ";") + to_string(shape);
    const char* const in = data_of(input);
    const size_t count = static_cast<size_t>(TF_TensorElementCount(input.get()));
    input.reset();  // otherwise the input could not be forwarded
    spans.push_back({in, hold_output(*call, index, in, shape, *held), count});
  }
  const auto all = std::make_shared<const Allreduce>(Allreduce{
      Spans(std::move(spans), size_of(type)), type, static_cast<Reduction>(kernel.reduction), kernel.factors()});
  const std::shared_ptr<Engine> engine = engine_of(kernel.group);
  if (kernel.compresses && engine->spans_hosts()) {
    if (type != Type::kFloat32 || all->reduction != Reduction::kSum)
      throw Failure(std::string("only sums of float32 are compressed. Received: ") + name_of(type));
    const std::shared_ptr<ErrorFeedback> feedback = engine->feedback(key_of(call->key()));
    return submit(kernel, call, "int8 " + details, [held = std::move(held), all, feedback](Channel& channel) {
      between_hosts::compressed_allreduce(channel, all->spans, all->factors, *feedback);
    });
  }
  submit(kernel, call, details, [held = std::move(held), all](Channel& channel) { allreduce(channel, *all); }, all);
}

void broadcast_call(const Kernel& kernel, const std::shared_ptr<Call>& call) {
  auto held = std::make_shared<HeldTensors>();
  Tensor input = call->input(0);
  type_of(input);
  const std::vector<int64_t> shape = shape_of(input);
  const char* const in = data_of(input);
  const size_t bytes = TF_TensorByteSize(input.get());
  input.reset();
  held->tensors.push_back(call->output_for(0, shape));
  char* const out = data_of(held->tensors.back());
  submit(kernel, call, to_string(shape),
         [held = std::move(held), in, out, bytes, root = static_cast<int>(kernel.root)](Channel& channel) {
           broadcast(channel, in, out, bytes, root);
         });
}

// The size of a row in bytes. Whether a tensor is a scalar may be known only when the graph runs.
size_t row_bytes(Type type, const std::vector<int64_t>& shape) {
  if (shape.empty())
    throw Failure("a tensor that is split into rows must have at least one dimension. Received: a scalar");
  size_t bytes = size_of(type);
  for (size_t index = 1; index < shape.size(); ++index) bytes *= static_cast<size_t>(shape[index]);
  return bytes;
}

void allgather_call(const Kernel& kernel, const std::shared_ptr<Call>& call) {
  const auto held = std::make_shared<HeldTensors>();
  held->tensors.push_back(call->input(0));
  const Type type = type_of(held->tensors[0]);
  const std::vector<int64_t> shape = shape_of(held->tensors[0]);
  const char* const in = data_of(held->tensors[0]);
  const size_t row = row_bytes(type, shape);
  submit(kernel, call, to_string(shape, 1), [held, call, type, shape, in, row](Channel& channel) {
    allgather(channel, in, static_cast<size_t>(shape[0]), row, [&](const std::vector<size_t>& rows_of_rank) {
      std::vector<int64_t> result_shape = shape;
      result_shape[0] = 0;
      for (const size_t rows : rows_of_rank) result_shape[0] += static_cast<int64_t>(rows);
      held->tensors.push_back(call->output(0, type, result_shape));
      return data_of(held->tensors.back());
    });
  });
}

void alltoall_call(const Kernel& kernel, const std::shared_ptr<Call>& call) {
  const auto held = std::make_shared<HeldTensors>();
  held->tensors.push_back(call->input(0));
  const Tensor splits = call->input(1);
  const Type type = type_of(held->tensors[0]);
  const std::vector<int64_t> shape = shape_of(held->tensors[0]);
  const char* const in = data_of(held->tensors[0]);
  const size_t row = row_bytes(type, shape);
  const size_t ranks = static_cast<size_t>(engine_of(kernel.group)->ranks());
  if (TF_TensorType(splits.get()) != static_cast<int32_t>(Type::kInt64) ||
      static_cast<size_t>(TF_TensorElementCount(splits.get())) != ranks)
    throw Failure("splits must hold one int64 number for each rank. Received: splits of shape " +
                  to_string(shape_of(splits)) + ", ranks=" + std::to_string(ranks));
  const int64_t* const rows = static_cast<const int64_t*>(TF_TensorData(splits.get()));
  std::vector<size_t> rows_to;
  int64_t total = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (rows[rank] < 0) throw Failure("splits must not be negative. Received: " + std::to_string(rows[rank]));
    if (rows[rank] > shape[0] - total) total = -1;  // otherwise an overflow of the sum could go unnoticed
    if (total < 0) break;
    rows_to.push_back(static_cast<size_t>(rows[rank]));
    total += rows[rank];
  }
  if (total != shape[0])
    throw Failure("splits must add up to the first dimension. Received: a sum of " +
                  (total < 0 ? "more" : std::to_string(total)) + ", rows=" + std::to_string(shape[0]));
  submit(kernel, call, to_string(shape, 1), [held, call, type, shape, in, row, rows_to](Channel& channel) {
    alltoall(channel, in, rows_to, row, [&](const std::vector<size_t>& rows_of_rank) {
      std::vector<int64_t> result_shape = shape;
      result_shape[0] = 0;
      held->tensors.push_back(call->output(1, Type::kInt64, {static_cast<int64_t>(rows_of_rank.size())}));
      int64_t* const received = static_cast<int64_t*>(TF_TensorData(held->tensors.back().get()));
      for (size_t rank = 0; rank < rows_of_rank.size(); ++rank) {
        received[rank] = static_cast<int64_t>(rows_of_rank[rank]);
        result_shape[0] += received[rank];
      }
      held->tensors.push_back(call->output(0, type, result_shape));
      return data_of(held->tensors.back());
    });
  });
}

// If the rows do not divide evenly, the first ranks get one row more.
void reducescatter_call(const Kernel& kernel, const std::shared_ptr<Call>& call) {
  const auto held = std::make_shared<HeldTensors>();
  held->tensors.push_back(call->input(0));
  const Type type = type_of(held->tensors[0]);
  std::vector<int64_t> shape = shape_of(held->tensors[0]);
  const std::string details = to_string(shape);
  const char* const in = data_of(held->tensors[0]);
  const size_t row = row_bytes(type, shape) / size_of(type);
  const std::shared_ptr<Engine> engine = engine_of(kernel.group);
  const int64_t each = shape[0] / engine->ranks(), more = shape[0] % engine->ranks();
  std::vector<size_t> starts{0};
  for (int rank = 0; rank < engine->ranks(); ++rank) {
    const int64_t rows = each + (rank < more ? 1 : 0);
    if (rank == engine->rank()) shape[0] = rows;
    starts.push_back(starts.back() + static_cast<size_t>(rows) * row);
  }
  held->tensors.push_back(call->output(0, type, shape));
  char* const out = data_of(held->tensors.back());
  submit(
      kernel, call, details,
      [held, in, out, starts, type, reduction = static_cast<Reduction>(kernel.reduction), factors = kernel.factors()](
          Channel& channel) { reducescatter(channel, in, out, starts, type, reduction, factors); });
}

// The partition of each tensor: of tensor t, rank r has elements [of(t, r), of(t, r + 1)).
class Bounds {
 public:
  Bounds(const std::string& text, int ranks) : width_(static_cast<size_t>(ranks) + 1) {
    const char* next = text.c_str();
    for (char* end = nullptr;; next = end) {
      const size_t one = std::strtoull(next, &end, 10);
      if (end == next) break;
      all_.push_back(one);
    }
  }
  size_t tensors() const { return all_.size() / width_; }
  size_t of(size_t tensor, size_t rank) const { return all_[tensor * width_ + rank]; }
  size_t count(size_t tensor, size_t rank) const { return of(tensor, rank + 1) - of(tensor, rank); }
  size_t elements(size_t tensor) const { return of(tensor, width_ - 1); }

 private:
  std::vector<size_t> all_;
  size_t width_;
};

void reduce_parts_call(const Kernel& kernel, const std::shared_ptr<Call>& call) {
  const std::shared_ptr<Engine> engine = engine_of(kernel.group);
  const Bounds bounds(kernel.bounds, engine->ranks());
  auto held = std::make_shared<HeldTensors>();
  std::vector<std::vector<Span>> spans(static_cast<size_t>(engine->ranks()));
  std::string details;
  Type type = Type::kFloat32;
  for (int index = 0; index < kernel.count; ++index) {
    Tensor input = call->input(index);
    type = type_of(input);
    const std::vector<int64_t> shape = shape_of(input);
    details += (index == 0 ? "" : ";") + to_string(shape);
    const char* const in = data_of(input);
    const size_t tensor = static_cast<size_t>(index), size = size_of(type);
    if (tensor >= bounds.tensors() ||
        bounds.elements(tensor) != static_cast<size_t>(TF_TensorElementCount(input.get())))
      throw Failure("the bounds of parts must match the tensors. Received: a tensor of shape " + to_string(shape));
    input.reset();  // otherwise the input could not be forwarded
    char* const out = hold_output(*call, index, in, shape, *held);
    for (size_t rank = 0; rank < spans.size(); ++rank) {
      if (const size_t count = bounds.count(tensor, rank))
        spans[rank].push_back({in + bounds.of(tensor, rank) * size, out + bounds.of(tensor, rank) * size, count});
    }
  }
  std::vector<Spans> parts;
  for (std::vector<Span>& part : spans) parts.emplace_back(std::move(part), size_of(type));
  submit(kernel, call, details,
         [held = std::move(held), parts = std::move(parts), type, reduction = static_cast<Reduction>(kernel.reduction),
          factors = kernel.factors()](Channel& channel) { reduce_parts(channel, parts, type, reduction, factors); });
}

// The inputs are one tensor per result, whose memory the result may reuse, followed by this rank's parts. Empty parts
// are left out, and so are results for tensors of which this rank has all elements.
void gather_parts_call(const Kernel& kernel, const std::shared_ptr<Call>& call) {
  const std::shared_ptr<Engine> engine = engine_of(kernel.group);
  const size_t me = static_cast<size_t>(engine->rank());
  const Bounds bounds(kernel.bounds, engine->ranks());
  auto held = std::make_shared<HeldTensors>();
  std::vector<std::vector<Span>> spans(static_cast<size_t>(engine->ranks()));
  int result = 0, part = static_cast<int>(kernel.results);
  for (size_t tensor = 0; tensor < bounds.tensors(); ++tensor) {
    const char* own = nullptr;
    size_t size = 0;
    const auto take_own_part = [&] {
      if (bounds.count(tensor, me) == 0) return;
      if (part >= kernel.count) throw Failure("gathering parts needs this rank's part of each tensor");
      held->tensors.push_back(call->input(part++));
      size = size_of(type_of(held->tensors.back()));
      own = data_of(held->tensors.back());
      if (static_cast<size_t>(TF_TensorElementCount(held->tensors.back().get())) != bounds.count(tensor, me))
        throw Failure("a part must have as many elements as its bounds. Received: shape " +
                      to_string(shape_of(held->tensors.back())));
    };
    take_own_part();
    char* out = nullptr;
    if (bounds.count(tensor, me) != bounds.elements(tensor)) {
      Tensor memory = call->input(result);
      size = size_of(type_of(memory));
      const std::vector<int64_t> shape = shape_of(memory);
      memory.reset();
      held->tensors.push_back(call->output_for(result++, shape));
      out = data_of(held->tensors.back());
    }
    for (size_t rank = 0; rank < spans.size(); ++rank) {
      const size_t count = bounds.count(tensor, rank) * size, start = bounds.of(tensor, rank) * size;
      if (count == 0) continue;
      const bool is_mine = rank == me;
      char* const target = out == nullptr ? const_cast<char*>(own)
                                          : out + start;  // this rank has all of the tensor, so it is not copied
      spans[rank].push_back({is_mine ? own : nullptr, target, count});
    }
  }
  std::vector<Spans> parts;
  for (std::vector<Span>& one : spans) parts.emplace_back(std::move(one), 1);
  submit(kernel, call, kernel.bounds,
         [held = std::move(held), parts = std::move(parts)](Channel& channel) { gather_parts(channel, parts); });
}

// The key as the last input of an operation. Eager mode passes it as an input, as TensorFlow caches a kernel forever
// for each value of an attribute.
std::string key_in(TF_OpKernelContext* context) {
  const Tensor bytes = input_of(context, TF_NumInputs(context) - 1);
  return std::string(data_of(bytes), TF_TensorByteSize(bytes.get()));
}

template <void (*read)(Kernel&)>
void* create(TF_OpKernelConstruction* construction) {
  return create_kernel(construction, [&] {
    auto kernel = std::make_unique<Kernel>(construction);
    read(*kernel);
    return kernel;
  });
}

template <void (*start)(const Kernel&, const std::shared_ptr<Call>&)>
void compute(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  const std::string& key = static_cast<Kernel*>(kernel)->key;
  const auto call = std::make_shared<Call>(key.empty() ? key_in(context) : key, context, done);
  try {
    start(*static_cast<Kernel*>(kernel), call);
  } catch (const std::exception& failure) {
    call->finish(status_of(failure));
  }
}

// Starts a collective. Its results are in the other outputs once HvkerasWait has run, which takes the first one.
template <void (*start)(const Kernel&, const std::shared_ptr<Call>&)>
void compute_start(void* kernel, TF_OpKernelContext* context) {
  const Kernel& attributes = *static_cast<Kernel*>(kernel);
  const TfStatus status = new_status();
  try {
    const auto started = std::make_shared<Started>();
    auto ticket = std::make_unique<Ticket>();
    *ticket = {ticket.get(), started};
    const int64_t bytes = sizeof(Ticket);
    const Tensor handle(TF_NewTensor(
        static_cast<int32_t>(Type::kUint8), &bytes, 1, ticket.release(), sizeof(Ticket),
        [](void* data, size_t, void*) { delete static_cast<Ticket*>(data); }, nullptr));
    TF_SetOutput(context, 0, handle.get(), status.get());
    require_ok(status);
    start(attributes, std::make_shared<Call>(attributes.key, context, started));
  } catch (const std::exception& failure) {
    fail(context, status_of(failure));
  }
}

void compute_wait(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  auto waiter = std::make_unique<Waiter>(context, done);
  std::shared_ptr<Started> started;
  try {
    const TfStatus status = new_status();
    for (int index = 0; index < static_cast<Kernel*>(kernel)->count; ++index) {
      TF_SetOutput(context, index, input_of(context, index + 1).get(), status.get());
      require_ok(status);
    }
    const Tensor handle = input_of(context, 0);
    const auto* const ticket = reinterpret_cast<const Ticket*>(data_of(handle));
    if (TF_TensorByteSize(handle.get()) != sizeof(Ticket) || ticket->self != ticket)
      throw Failure("internal error: TensorFlow has copied the handle of a collective");
    started = ticket->started;
  } catch (const std::exception& failure) {
    return waiter->finish(status_of(failure));
  }
  started->wait(std::move(waiter));
}

void destroy(void* kernel) { delete static_cast<Kernel*>(kernel); }

void unknown_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
}

struct Definition {
  const char* name;
  std::vector<const char*> attributes, inputs, outputs;
  void (*shapes)(TF_ShapeInferenceContext*, TF_Status*);
  void* (*create)(TF_OpKernelConstruction*);
  // One of the two.
  void (*compute)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
  void (*compute_now)(void*, TF_OpKernelContext*) = nullptr;
};

void read_list(Kernel& kernel) {
  kernel.count = kernel.number("N");
  kernel.read_reduction();
}
void read_allreduce(Kernel& kernel) {
  read_list(kernel);
  kernel.compresses = kernel.number("compression") != 0;
}
void read_nothing(Kernel&) {}
void read_count(Kernel& kernel) { kernel.count = kernel.number("N"); }
void read_parts(Kernel& kernel) {
  read_list(kernel);
  kernel.bounds = kernel.text("bounds");
}
void read_bounds(Kernel& kernel) {
  kernel.count = kernel.number("N");
  kernel.results = kernel.number("R");
  kernel.bounds = kernel.text("bounds");
}
void read_root(Kernel& kernel) { kernel.root = kernel.number("root"); }
void read_reduction(Kernel& kernel) { kernel.read_reduction(); }

void register_all() {
  // Scale factors are strings, since TensorFlow's attributes have no double precision.
  const std::vector<const char*> reduction = {"reduction: int", "before: string", "after: string"};
  std::vector<const char*> of_parts = reduction, of_sums = reduction;
  of_parts.push_back("bounds: string");
  of_sums.push_back("compression: int = 0");
  // clang-format off
  const Definition definitions[] = {
      {"HvkerasAllreduce", of_sums, {"inputs: N * T"}, {"outputs: N * T"}, same_shapes<>, create<read_allreduce>,
       compute<allreduce_call>},
      {"HvkerasBroadcast", {"root: int"}, {"input: T"}, {"output: T"}, same_shapes<>, create<read_root>,
       compute<broadcast_call>},
      {"HvkerasAllgather", {}, {"input: T"}, {"output: T"}, unknown_shapes, create<read_nothing>,
       compute<allgather_call>},
      {"HvkerasAlltoall", {}, {"input: T", "splits: int64"}, {"output: T", "received: int64"}, unknown_shapes,
       create<read_nothing>, compute<alltoall_call>},
      {"HvkerasReduceParts", of_parts, {"inputs: N * T"}, {"outputs: N * T"}, same_shapes<>, create<read_parts>,
       compute<reduce_parts_call>},
      {"HvkerasGatherParts", {"bounds: string", "R: int >= 0"}, {"inputs: N * T"}, {"outputs: R * T"}, same_shapes<>,
       create<read_bounds>, compute<gather_parts_call>},
      {"HvkerasReducescatter", reduction, {"input: T"}, {"output: T"}, unknown_shapes, create<read_reduction>,
       compute<reducescatter_call>},
      {"HvkerasAllreduceStart", of_sums, {"inputs: N * T"}, {"handle: uint8", "outputs: N * T"}, same_shapes<0, 1>,
       create<read_allreduce>, nullptr, compute_start<allreduce_call>},
      {"HvkerasReducePartsStart", of_parts, {"inputs: N * T"}, {"handle: uint8", "outputs: N * T"}, same_shapes<0, 1>,
       create<read_parts>, nullptr, compute_start<reduce_parts_call>},
      {"HvkerasWait", {}, {"handle: uint8", "inputs: N * T"}, {"outputs: N * T"}, same_shapes<1, 0>, create<read_count>,
       compute_wait},
  };
  // clang-format on
  for (const Definition& definition : definitions) {
    const TfStatus status = new_status();
    TF_OpDefinitionBuilder* const builder = TF_NewOpDefinitionBuilder(definition.name);
    if (std::strstr(definition.inputs.back(), "N *") != nullptr) TF_OpDefinitionBuilderAddAttr(builder, "N: int >= 1");
    TF_OpDefinitionBuilderAddAttr(builder, "T: type");
    TF_OpDefinitionBuilderAddAttr(builder, "key: string");
    TF_OpDefinitionBuilderAddAttr(builder, "group: int");
    for (const char* attribute : definition.attributes) TF_OpDefinitionBuilderAddAttr(builder, attribute);
    for (const char* input : definition.inputs) TF_OpDefinitionBuilderAddInput(builder, input);
    // TensorFlow runs stateful operations in program order, unless they declare the resources that they access. With
    // these, only collectives of the same key are ordered.
    TF_OpDefinitionBuilderAddAttr(builder, "M: int >= 0");
    TF_OpDefinitionBuilderAddInput(builder, "order: M * resource");
    TF_OpDefinitionBuilderAddAttr(builder, "K: int >= 0");
    TF_OpDefinitionBuilderAddInput(builder, "named: K * uint8");
    for (const char* output : definition.outputs) TF_OpDefinitionBuilderAddOutput(builder, output);
    TF_OpDefinitionBuilderSetIsStateful(builder, true);  // must not be pruned or merged, and must run in program order
    TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, definition.shapes);
    TF_RegisterOpDefinition(builder, status.get());
    if (TF_GetCode(status.get()) == TF_OK)
      TF_RegisterKernelBuilder(
          definition.name,
          definition.compute_now != nullptr
              ? TF_NewKernelBuilder(definition.name, "CPU", definition.create, definition.compute_now, destroy)
              : TF_NewAsyncKernelBuilder(definition.name, "CPU", definition.create, definition.compute, destroy),
          status.get());
    warn_unless_registered(definition.name, status);
  }
}

[[maybe_unused]] const bool registered = (register_all(), true);

}  // namespace
}  // namespace hvkeras
