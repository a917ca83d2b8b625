// What ends the collectives of a graph in an error, when other ranks do something else instead (hvkeras/mismatch.py).
// Python raises in eager mode; graphs have HvkerasRefusable behind their collectives, of whatever backend.
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>

#include "c_api.h"

namespace hvkeras {
namespace {

struct Refusals {
  std::atomic<size_t> count{0};  // so that what is not refused takes no lock
  std::mutex mutex;
  std::map<std::string, std::string> texts;
};

Refusals& refusals() {
  static Refusals* const only = new Refusals;  // never destroyed: threads may outlive the end of main()
  return *only;
}

bool take(const std::string& key, std::string& text) {
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
  TF_Status* const status = TF_NewStatus();
  int32_t list = 0, length = 0;
  TF_OpKernelConstruction_GetAttrSize(construction, "key", &list, &length, status);
  auto* const key = new std::string(static_cast<size_t>(length), '\0');
  if (TF_GetCode(status) == TF_OK)
    TF_OpKernelConstruction_GetAttrString(construction, "key", key->data(), key->size(), status);
  if (TF_GetCode(status) != TF_OK) TF_OpKernelConstruction_Failure(construction, status);
  TF_DeleteStatus(status);
  return key;
}

void compute(void* kernel, TF_OpKernelContext* context) {
  TF_Status* const status = TF_NewStatus();
  std::string text;
  if (take(*static_cast<std::string*>(kernel), text)) TF_SetStatus(status, TF_FAILED_PRECONDITION, text.c_str());
  for (int index = 0; index < TF_NumInputs(context) && TF_GetCode(status) == TF_OK; ++index) {
    TF_Tensor* tensor = nullptr;
    TF_GetInput(context, index, &tensor, status);
    if (TF_GetCode(status) == TF_OK) TF_SetOutput(context, index, tensor, status);
    if (tensor != nullptr) TF_DeleteTensor(tensor);
  }
  if (TF_GetCode(status) != TF_OK) TF_OpKernelContext_Failure(context, status);
  TF_DeleteStatus(status);
}

void destroy(void* kernel) { delete static_cast<std::string*>(kernel); }

void shapes_stay(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* const handle = TF_NewShapeHandle();
  for (int index = 0; index < TF_ShapeInferenceContextNumInputs(context) && TF_GetCode(status) == TF_OK; ++index) {
    TF_ShapeInferenceContextGetInput(context, index, handle, status);
    if (TF_GetCode(status) == TF_OK) TF_ShapeInferenceContextSetOutput(context, index, handle, status);
  }
  TF_DeleteShapeHandle(handle);
}

void register_operation() {
  const char* const name = "HvkerasRefusable";
  TF_Status* const status = TF_NewStatus();
  TF_OpDefinitionBuilder* const builder = TF_NewOpDefinitionBuilder(name);
  TF_OpDefinitionBuilderAddAttr(builder, "T: list(type)");
  TF_OpDefinitionBuilderAddAttr(builder, "key: string");
  TF_OpDefinitionBuilderAddInput(builder, "inputs: T");
  TF_OpDefinitionBuilderAddOutput(builder, "outputs: T");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, shapes_stay);
  // Not stateful: TensorFlow would run those of a graph in the order of the program.
  TF_RegisterOpDefinition(builder, status);
  for (const char* const device : {"CPU", "GPU"})  // it touches no memory
    if (TF_GetCode(status) == TF_OK)
      TF_RegisterKernelBuilder(name, TF_NewKernelBuilder(name, device, create, compute, destroy), status);
  if (TF_GetCode(status) != TF_OK)
    std::fprintf(stderr, "hvkeras: TensorFlow does not take %s: %s\n", name, TF_Message(status));
  TF_DeleteStatus(status);
}

[[maybe_unused]] const bool registered = (register_operation(), true);

}  // namespace
}  // namespace hvkeras

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

EXPORTED void hvkeras_refuse(const char* key, const char* text) {
  hvkeras::Refusals& all = hvkeras::refusals();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.texts[key] = text;
  all.count.store(all.texts.size(), std::memory_order_release);
}

// The text, which lives until the thread's next call, and which is taken away with it; nullptr if there is none.
EXPORTED const char* hvkeras_take_refusal(const char* key) {
  thread_local std::string text;
  return hvkeras::take(key, text) ? text.c_str() : nullptr;
}

}  // extern "C"
