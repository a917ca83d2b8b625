// Compares ucx/api.h with UCX's own headers at compile time; it is never run.
//
//   g++ -std=c++17 -fsyntax-only -I <UCX's include folder> backends/native/tests/ucx_api_test.cc
#include <ucp/api/ucp.h>
#include <ucs/config/types.h>
#include <ucs/debug/log_def.h>

#include <type_traits>

#include "../ucx/api.h"

namespace ours = hvkeras::ucx;

// The same offset and size of a field.
#define SAME(our_type, our_field, their_type, their_field)                                  \
  static_assert(offsetof(ours::our_type, our_field) == offsetof(their_type, their_field) && \
                    sizeof(ours::our_type::our_field) == sizeof(their_type::their_field),   \
                #our_type "::" #our_field)
// The same parameters and result, apart from the names of types.
template <typename Ours, typename Theirs>
struct SameCall;
template <typename OurResult, typename... OurTypes, typename TheirResult, typename... TheirTypes>
struct SameCall<OurResult (*)(OurTypes...), TheirResult (*)(TheirTypes...)> {
  template <typename Type>
  static constexpr size_t size() {
    if constexpr (std::is_void_v<Type>) {
      return 0;
    } else {
      return sizeof(Type);
    }
  }
  template <typename One, typename Other>
  static constexpr bool same = size<One>() == size<Other>() && std::is_pointer_v<One> == std::is_pointer_v<Other>;
  static constexpr bool value = same<OurResult, TheirResult> && (same<OurTypes, TheirTypes> && ...);
};
#define CALL(field, function) static_assert(SameCall<decltype(ours::Api::field), decltype(&function)>::value, #function)

static_assert(sizeof(ours::UcsStatus) == sizeof(ucs_status_t) && ours::kOk == static_cast<int>(UCS_OK) &&
              ours::kInProgress == static_cast<int>(UCS_INPROGRESS) &&
              ours::kNoElement == static_cast<int>(UCS_ERR_NO_ELEM) && ours::kBusy == static_cast<int>(UCS_ERR_BUSY) &&
              ours::kCanceled == static_cast<int>(UCS_ERR_CANCELED) && ours::kLast == static_cast<int>(UCS_ERR_LAST));

SAME(ContextParameters, mask, ucp_params_t, field_mask);
SAME(ContextParameters, features, ucp_params_t, features);
SAME(ContextParameters, mt_workers_shared, ucp_params_t, mt_workers_shared);
SAME(ContextParameters, estimated_endpoints, ucp_params_t, estimated_num_eps);
static_assert(ours::kHasFeatures == UCP_PARAM_FIELD_FEATURES &&
              ours::kHasEstimatedEndpoints == UCP_PARAM_FIELD_ESTIMATED_NUM_EPS &&
              ours::kTags == static_cast<uint64_t>(UCP_FEATURE_TAG) &&
              ours::kWakeup == static_cast<uint64_t>(UCP_FEATURE_WAKEUP));

SAME(WorkerParameters, mask, ucp_worker_params_t, field_mask);
SAME(WorkerParameters, thread_mode, ucp_worker_params_t, thread_mode);
static_assert(ours::kHasThreadMode == UCP_WORKER_PARAM_FIELD_THREAD_MODE &&
              ours::kOneThreadAtATime == UCS_THREAD_MODE_SERIALIZED);

SAME(EndpointParameters, mask, ucp_ep_params_t, field_mask);
SAME(EndpointParameters, address, ucp_ep_params_t, address);
SAME(EndpointParameters, error_mode, ucp_ep_params_t, err_mode);
SAME(EndpointParameters, on_error, ucp_ep_params_t, err_handler.cb);
SAME(EndpointParameters, argument, ucp_ep_params_t, err_handler.arg);
static_assert(ours::kHasAddress == UCP_EP_PARAM_FIELD_REMOTE_ADDRESS &&
              ours::kHasErrorMode == UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE &&
              ours::kHasOnError == UCP_EP_PARAM_FIELD_ERR_HANDLER && ours::kReportsPeers == UCP_ERR_HANDLING_MODE_PEER);

SAME(RequestParameters, mask, ucp_request_param_t, op_attr_mask);
SAME(RequestParameters, flags, ucp_request_param_t, flags);
static_assert(sizeof(ours::RequestParameters) >= sizeof(ucp_request_param_t));
static_assert(ours::kHasFlags == UCP_OP_ATTR_FIELD_FLAGS && ours::kForce == UCP_EP_CLOSE_FLAG_FORCE);

SAME(TagInfo, tag, ucp_tag_recv_info_t, sender_tag);
SAME(TagInfo, length, ucp_tag_recv_info_t, length);
static_assert(ours::kNoOtherHandler == UCS_LOG_FUNC_RC_STOP && ours::kWarning == UCS_LOG_LEVEL_WARN);

CALL(version, ucp_get_version_string);
CALL(config_read, ucp_config_read);
CALL(config_modify, ucp_config_modify);
CALL(config_release, ucp_config_release);
CALL(init, ucp_init_version);
CALL(cleanup, ucp_cleanup);
CALL(worker_create, ucp_worker_create);
CALL(worker_destroy, ucp_worker_destroy);
CALL(worker_get_address, ucp_worker_get_address);
CALL(worker_release_address, ucp_worker_release_address);
CALL(worker_progress, ucp_worker_progress);
CALL(worker_get_efd, ucp_worker_get_efd);
CALL(worker_arm, ucp_worker_arm);
CALL(worker_flush, ucp_worker_flush_nbx);
CALL(ep_create, ucp_ep_create);
CALL(ep_close, ucp_ep_close_nbx);
CALL(tag_send, ucp_tag_send_nbx);
CALL(tag_receive, ucp_tag_recv_nbx);
CALL(tag_probe, ucp_tag_probe_nb);
CALL(message_receive, ucp_tag_msg_recv_nbx);
CALL(request_status, ucp_request_check_status);
CALL(request_cancel, ucp_request_cancel);
CALL(request_free, ucp_request_free);
CALL(status_text, ucs_status_string);
CALL(push_log_handler, ucs_log_push_handler);

int main() {}
