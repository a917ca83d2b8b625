// What several operations need of TensorFlow's C kernel API, with destructors and exceptions.
#pragma once

#include <memory>
#include <string>

#include "../core/waiting.h"
#include "c_api.h"

namespace hvkeras {

struct DeleteStatus {
  void operator()(TF_Status* status) const { TF_DeleteStatus(status); }
};
struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { TF_DeleteTensor(tensor); }
};
using Status = std::unique_ptr<TF_Status, DeleteStatus>;
using Tensor = std::unique_ptr<TF_Tensor, DeleteTensor>;

inline Status new_status() { return Status(TF_NewStatus()); }

inline void require_ok(const Status& status) {
  if (TF_GetCode(status.get()) != TF_OK) throw Failure(TF_Message(status.get()));
}

inline Tensor input_of(TF_OpKernelContext* context, int index) {
  const Status status = new_status();
  TF_Tensor* tensor = nullptr;
  TF_GetInput(context, index, &tensor, status.get());
  require_ok(status);
  return Tensor(tensor);
}

inline std::string text_attribute(TF_OpKernelConstruction* construction, const char* name) {
  const Status status = new_status();
  int32_t list = 0, length = 0;
  TF_OpKernelConstruction_GetAttrSize(construction, name, &list, &length, status.get());
  require_ok(status);
  std::string value(static_cast<size_t>(length), '\0');
  TF_OpKernelConstruction_GetAttrString(construction, name, value.data(), value.size(), status.get());
  require_ok(status);
  return value;
}

// What `make` makes for a kernel, which TensorFlow hands back to `destroy`; a failure becomes that of the graph.
template <typename Make>
void* made_or_failed(TF_OpKernelConstruction* construction, Make&& make) {
  try {
    return make().release();
  } catch (const std::exception& failure) {
    const Status status = new_status();
    TF_SetStatus(status.get(), TF_INVALID_ARGUMENT, message_of(failure).c_str());
    TF_OpKernelConstruction_Failure(construction, status.get());
    return nullptr;
  }
}

inline void shapes_stay(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* const handle = TF_NewShapeHandle();
  for (int index = 0; index < TF_ShapeInferenceContextNumInputs(context) && TF_GetCode(status) == TF_OK; ++index) {
    TF_ShapeInferenceContextGetInput(context, index, handle, status);
    if (TF_GetCode(status) == TF_OK) TF_ShapeInferenceContextSetOutput(context, index, handle, status);
  }
  TF_SetStatus(status, TF_OK, "");  // the last inputs, which order collectives, have no outputs
  TF_DeleteShapeHandle(handle);
}

}  // namespace hvkeras
