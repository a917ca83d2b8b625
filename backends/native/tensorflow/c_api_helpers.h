// RAII and exceptions for TensorFlow's C kernel API.
#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include "../core/status.h"
#include "c_api.h"

namespace hvkeras {

struct DeleteStatus {
  void operator()(TF_Status* status) const { TF_DeleteStatus(status); }
};
struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { TF_DeleteTensor(tensor); }
};
using TfStatus = std::unique_ptr<TF_Status, DeleteStatus>;
using Tensor = std::unique_ptr<TF_Tensor, DeleteTensor>;

inline TfStatus new_status() { return TfStatus(TF_NewStatus()); }

inline void require_ok(const TfStatus& status) {
  if (TF_GetCode(status.get()) != TF_OK) throw Failure(TF_Message(status.get()));
}

// TensorFlow's status for a failure. TensorFlow maps its codes to Python exception classes.
inline TfStatus tf_status_of(const Status& failure, TF_Code others) {
  TfStatus status = new_status();
  TF_SetStatus(status.get(), failure.code() == Code::kMismatch ? TF_FAILED_PRECONDITION : others, failure.text());
  return status;
}

// Makes an operation of a running graph fail.
inline void fail(TF_OpKernelContext* context, const Status& failure) {
  TF_OpKernelContext_Failure(context, tf_status_of(failure, TF_ABORTED).get());
}

// For static initializers: an operation that is not registered raises a TensorFlow error when it is used.
inline void warn_unless_registered(const char* operation, const TfStatus& status) {
  if (TF_GetCode(status.get()) != TF_OK)
    std::fprintf(stderr, "hvkeras: TensorFlow failed to register op %s: %s\n", operation, TF_Message(status.get()));
}

inline Tensor input_of(TF_OpKernelContext* context, int index) {
  const TfStatus status = new_status();
  TF_Tensor* tensor = nullptr;
  TF_GetInput(context, index, &tensor, status.get());
  require_ok(status);
  return Tensor(tensor);
}

inline std::string string_attribute(TF_OpKernelConstruction* construction, const char* name) {
  const TfStatus status = new_status();
  int32_t list = 0, length = 0;
  TF_OpKernelConstruction_GetAttrSize(construction, name, &list, &length, status.get());
  require_ok(status);
  std::string value(static_cast<size_t>(length), '\0');
  TF_OpKernelConstruction_GetAttrString(construction, name, value.data(), value.size(), status.get());
  require_ok(status);
  return value;
}

// The kernel that `factory` creates, which TensorFlow passes to `destroy`. A failure becomes an error of the graph.
template <typename Factory>
void* create_kernel(TF_OpKernelConstruction* construction, Factory&& factory) {
  try {
    return factory().release();
  } catch (const std::exception& failure) {
    TF_OpKernelConstruction_Failure(construction, tf_status_of(status_of(failure), TF_INVALID_ARGUMENT).get());
    return nullptr;
  }
}

// Output `first_output + i` has the shape of input `first_input + i`; other outputs have unknown shapes.
template <int first_input = 0, int first_output = 0>
void same_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* const handle = TF_NewShapeHandle();
  if (first_output != 0) TF_ShapeInferenceContextSetUnknownShape(context, status);
  const int shift = first_output - first_input;
  for (int index = first_input; index < TF_ShapeInferenceContextNumInputs(context) && TF_GetCode(status) == TF_OK;
       ++index) {
    TF_ShapeInferenceContextGetInput(context, index, handle, status);
    if (TF_GetCode(status) == TF_OK) TF_ShapeInferenceContextSetOutput(context, index + shift, handle, status);
  }
  TF_SetStatus(status, TF_OK, "");  // the remaining inputs, which only order collectives, have no outputs
  TF_DeleteShapeHandle(handle);
}

}  // namespace hvkeras
