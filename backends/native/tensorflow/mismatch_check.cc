// Makes the collectives of a graph fail when other ranks run something else instead (hvkeras/collectives/mismatch.py).
// In eager mode Python raises. Graphs have the operation HvkerasCheckMismatch after their collectives, on every
// backend.
#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "../exported.h"
#include "c_api_helpers.h"
#include "libstdcxx.h"

namespace hvkeras {
namespace {

// A pending operation, which fails as soon as mismatches are no longer held back.
struct HeldOp {
  HeldOp(TF_OpKernelContext* where, const void* done, Status why)
      : context(where), mismatch(std::move(why)), done_callback(done) {}

  TF_OpKernelContext* context;
  Status mismatch;
  libstdcxx::Function done_callback;
};

struct Mismatches {
  std::atomic<size_t> count{0};  // avoids taking the lock when there are none
  std::mutex mutex;
  std::map<std::string, Status, std::less<>> by_key;
  int holds = 0;
  std::list<HeldOp> held_ops;
};

Mismatches& mismatches() {
  static Mismatches* const only = new Mismatches;  // never destroyed: threads may outlive the end of main()
  return *only;
}

// Removes and returns the mismatch of a key; success if there is none.
Status take_mismatch(std::string_view key) {
  Mismatches& all = mismatches();
  if (all.count.load(std::memory_order_acquire) == 0) return Status();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.by_key.find(key);
  if (found == all.by_key.end()) return Status();
  Status mismatch = std::move(found->second);
  all.by_key.erase(found);
  all.count.store(all.by_key.size(), std::memory_order_release);
  return mismatch;
}

void* create(TF_OpKernelConstruction* construction) {
  return create_kernel(construction,
                       [&] { return std::make_unique<std::string>(string_attribute(construction, "key")); });
}

// Holds back a failing operation if that has been requested; then `done` is called later. Returns whether it is held
// back.
bool hold_back(TF_OpKernelContext* context, const void* done, const Status& mismatch) {
  Mismatches& all = mismatches();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.holds == 0) return false;
  all.held_ops.emplace_back(context, done, mismatch);
  return true;
}

// Asynchronous, as a blocked thread could be the one that the other ranks' collectives need.
void compute(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  try {
    const Status mismatch = take_mismatch(*static_cast<std::string*>(kernel));
    if (!mismatch.ok()) {
      if (hold_back(context, done, mismatch)) return;
      fail(context, mismatch);
    } else {
      const TfStatus status = new_status();
      for (int index = 0; index < TF_NumInputs(context); ++index) {
        TF_SetOutput(context, index, input_of(context, index).get(), status.get());
        require_ok(status);
      }
    }
  } catch (const std::exception& failure) {
    fail(context, status_of(failure));
  }
  TF_RunAsyncOpKernelDoneCallback(done);
}

void destroy(void* kernel) { delete static_cast<std::string*>(kernel); }

void register_operation() {
  const char* const name = "HvkerasCheckMismatch";
  const TfStatus status = new_status();
  TF_OpDefinitionBuilder* const builder = TF_NewOpDefinitionBuilder(name);
  TF_OpDefinitionBuilderAddAttr(builder, "T: list(type)");
  TF_OpDefinitionBuilderAddAttr(builder, "key: string");
  TF_OpDefinitionBuilderAddInput(builder, "inputs: T");
  TF_OpDefinitionBuilderAddOutput(builder, "outputs: T");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, same_shapes<>);
  // Not stateful: TensorFlow would otherwise run those of a graph in program order.
  TF_RegisterOpDefinition(builder, status.get());
  for (const char* const device : {"CPU", "GPU"})  // it does not access the tensors' memory
    if (TF_GetCode(status.get()) == TF_OK)
      TF_RegisterKernelBuilder(name, TF_NewAsyncKernelBuilder(name, device, create, compute, destroy), status.get());
  warn_unless_registered(name, status);
}

[[maybe_unused]] const bool registered = (register_operation(), true);

}  // namespace
}  // namespace hvkeras

extern "C" {

EXPORTED ExportedStatus hvkeras_set_mismatch(const char* key, const char* text) {
  return hvkeras::guarded([&] {
    hvkeras::Mismatches& all = hvkeras::mismatches();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.by_key[key] = hvkeras::Status(hvkeras::Code::kMismatch, text);
    all.count.store(all.by_key.size(), std::memory_order_release);
  });
}

// Starts (1) or stops (-1) holding back failing operations. They fail once each start has been matched by a stop.
EXPORTED void hvkeras_hold_mismatches(int change) {
  hvkeras::Mismatches& all = hvkeras::mismatches();
  std::list<hvkeras::HeldOp> released;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.holds += change;
    if (all.holds == 0) released.swap(all.held_ops);
  }
  for (const hvkeras::HeldOp& op : released) {
    hvkeras::fail(op.context, op.mismatch);
    op.done_callback();
  }
}

// Clears the mismatch of a key. Returns whether there was one.
EXPORTED bool hvkeras_clear_mismatch(const char* key) { return !hvkeras::take_mismatch(key).ok(); }

}  // extern "C"
