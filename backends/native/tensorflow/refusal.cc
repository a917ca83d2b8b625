// What ends the collectives of a graph in an error, when other ranks do something else instead
// (hvkeras/collectives/mismatch.py). Python raises in eager mode; graphs have HvkerasRefusable behind their
// collectives, of whatever backend.
#include <atomic>
#include <cstdio>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "../exported.h"
#include "libstdcxx.h"
#include "wrapped.h"

namespace hvkeras {
namespace {

// An operation that fails as soon as refusals are no longer held.
struct Held {
  Held(TF_OpKernelContext* where, const void* done, std::string why)
      : context(where), text(std::move(why)), end(done) {}

  TF_OpKernelContext* context;
  std::string text;
  libstdcxx::Function end;
};

struct Refusals {
  std::atomic<size_t> count{0};  // so that what is not refused takes no lock
  std::mutex mutex;
  std::map<std::string, std::string, std::less<>> texts;
  int holds = 0;
  std::list<Held> held;
};

Refusals& refusals() {
  static Refusals* const only = new Refusals;  // never destroyed: threads may outlive the end of main()
  return *only;
}

bool take(std::string_view key, std::string& text) {
  Refusals& all = refusals();
  if (all.count.load(std::memory_order_acquire) == 0) return false;
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.texts.find(key);
  if (found == all.texts.end()) return false;
  text = std::move(found->second);
  all.texts.erase(found);
  all.count.store(all.texts.size(), std::memory_order_release);
  return true;
}

void* create(TF_OpKernelConstruction* construction) {
  return made_or_failed(construction,
                        [&] { return std::make_unique<std::string>(text_attribute(construction, "key")); });
}

void fail(TF_OpKernelContext* context, const std::string& text) {
  const Status status = new_status();
  TF_SetStatus(status.get(), TF_FAILED_PRECONDITION, text.c_str());
  TF_OpKernelContext_Failure(context, status.get());
}

// Whether an operation that is refused must wait; then its end is called later.
bool hold(TF_OpKernelContext* context, const void* done, const std::string& text) {
  Refusals& all = refusals();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.holds == 0) return false;
  all.held.emplace_back(context, done, text);
  return true;
}

// Asynchronous, as a thread that waits could be the one that the others' collectives need.
void compute(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  const Status status = new_status();
  try {
    std::string text;
    if (take(*static_cast<std::string*>(kernel), text)) {
      if (hold(context, done, text)) return;
      fail(context, text);
    } else {
      for (int index = 0; index < TF_NumInputs(context); ++index) {
        TF_SetOutput(context, index, input_of(context, index).get(), status.get());
        require_ok(status);
      }
    }
  } catch (const std::exception& failure) {
    TF_SetStatus(status.get(), TF_ABORTED, message_of(failure).c_str());
    TF_OpKernelContext_Failure(context, status.get());
  }
  TF_RunAsyncOpKernelDoneCallback(done);
}

void destroy(void* kernel) { delete static_cast<std::string*>(kernel); }

void register_operation() {
  const char* const name = "HvkerasRefusable";
  const Status status = new_status();
  TF_OpDefinitionBuilder* const builder = TF_NewOpDefinitionBuilder(name);
  TF_OpDefinitionBuilderAddAttr(builder, "T: list(type)");
  TF_OpDefinitionBuilderAddAttr(builder, "key: string");
  TF_OpDefinitionBuilderAddInput(builder, "inputs: T");
  TF_OpDefinitionBuilderAddOutput(builder, "outputs: T");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, shapes_stay);
  // Not stateful: TensorFlow would run those of a graph in the order of the program.
  TF_RegisterOpDefinition(builder, status.get());
  for (const char* const device : {"CPU", "GPU"})  // it touches no memory
    if (TF_GetCode(status.get()) == TF_OK)
      TF_RegisterKernelBuilder(name, TF_NewAsyncKernelBuilder(name, device, create, compute, destroy), status.get());
  if (TF_GetCode(status.get()) != TF_OK)
    std::fprintf(stderr, "hvkeras: TensorFlow does not take %s: %s\n", name, TF_Message(status.get()));
}

[[maybe_unused]] const bool registered = (register_operation(), true);

}  // namespace
}  // namespace hvkeras

extern "C" {

EXPORTED const char* hvkeras_refuse(const char* key, const char* text) {
  return hvkeras::guarded([&] {
    hvkeras::Refusals& all = hvkeras::refusals();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.texts[key] = text;
    all.count.store(all.texts.size(), std::memory_order_release);
  });
}

// Holds back the operations that are refused, or (-1) ends that: they fail once it is ended as often as it was begun.
EXPORTED void hvkeras_hold_refusals(int change) {
  hvkeras::Refusals& all = hvkeras::refusals();
  std::list<hvkeras::Held> over;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.holds += change;
    if (all.holds == 0) over.swap(all.held);
  }
  for (const hvkeras::Held& one : over) {
    hvkeras::fail(one.context, one.text);
    one.end();
  }
}

// The text, which lives until the thread's next call, and which is taken away with it; nullptr if there is none.
EXPORTED const char* hvkeras_take_refusal(const char* key) {
  thread_local std::string text;
  return hvkeras::take(key, text) ? text.c_str() : nullptr;
}

}  // extern "C"
