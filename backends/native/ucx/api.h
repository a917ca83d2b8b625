// The subset of UCX's C interface (https://openucx.org, UCP 1.12 and later 1.x) that the engine calls, so that it
// compiles without UCX, and loads it only for jobs on several hosts. UCX keeps this interface compatible: structures
// only grow at their ends, and a mask says which fields are set. tests/ucx_api_test.cc compares it with UCX's own
// headers.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <string>

namespace hvkeras::ucx {

struct Config;
struct Context;
struct Worker;
struct Endpoint;
struct Address;
struct Message;

// UCX's ucs_status_t: negative numbers are errors. Its size is part of the ABI.
enum UcsStatus : int8_t { kOk = 0, kInProgress = 1, kNoElement = -12, kBusy = -15, kCanceled = -16, kLast = -100 };

struct ContextParameters {
  uint64_t mask;
  uint64_t features;
  size_t request_size;
  void (*request_init)(void*);
  void (*request_cleanup)(void*);
  uint64_t tag_sender_mask;
  int mt_workers_shared;
  size_t estimated_endpoints;
};
constexpr uint64_t kHasFeatures = 1 << 0, kHasEstimatedEndpoints = 1 << 6;
constexpr uint64_t kTags = 1 << 0, kWakeup = 1 << 4;  // features

struct WorkerParameters {
  uint64_t mask;
  int thread_mode;
};
constexpr uint64_t kHasThreadMode = 1 << 0;
constexpr int kOneThreadAtATime = 1;

struct EndpointParameters {
  uint64_t mask;
  const Address* address;
  int error_mode;
  void (*on_error)(void* argument, Endpoint* endpoint, UcsStatus status);
  void* argument;
};
constexpr uint64_t kHasAddress = 1 << 0, kHasErrorMode = 1 << 1, kHasOnError = 1 << 2;
constexpr int kReportsPeers = 1;

struct RequestParameters {
  uint32_t mask;
  uint32_t flags;
  void* rest[11];
};
constexpr uint32_t kHasFlags = 1 << 4;
constexpr uint32_t kForce = 1 << 0;  // UCP_EP_CLOSE_FLAG_FORCE

struct TagInfo {
  uint64_t tag;
  size_t length;
};

// Nonblocking functions return nullptr (done), an encoded error, or a request.
inline bool is_request(const void* pointer) {
  const uintptr_t value = reinterpret_cast<uintptr_t>(pointer);
  return value - 1 < static_cast<uintptr_t>(static_cast<intptr_t>(kLast)) - 1;
}
inline UcsStatus status_of(const void* pointer) {
  return is_request(pointer) ? kInProgress : static_cast<UcsStatus>(reinterpret_cast<intptr_t>(pointer));
}

using LogHandler = int (*)(const char* file, unsigned line, const char* function, int level, const void* component,
                           const char* format, va_list values);
constexpr int kNoOtherHandler = 0;
constexpr int kWarning = 2;  // log level; errors have smaller numbers

// Function pointers into the loaded libraries.
struct Api {
  const char* (*version)();
  UcsStatus (*config_read)(const char* prefix, const char* file, Config** config);
  UcsStatus (*config_modify)(Config* config, const char* name, const char* value);
  void (*config_release)(Config* config);
  UcsStatus (*init)(unsigned major, unsigned minor, const ContextParameters* parameters, const Config* config,
                    Context** context);
  void (*cleanup)(Context* context);
  UcsStatus (*worker_create)(Context* context, const WorkerParameters* parameters, Worker** worker);
  void (*worker_destroy)(Worker* worker);
  UcsStatus (*worker_get_address)(Worker* worker, Address** address, size_t* bytes);
  void (*worker_release_address)(Worker* worker, Address* address);
  unsigned (*worker_progress)(Worker* worker);
  UcsStatus (*worker_get_efd)(Worker* worker, int* descriptor);
  UcsStatus (*worker_arm)(Worker* worker);
  void* (*worker_flush)(Worker* worker, const RequestParameters* parameters);
  UcsStatus (*ep_create)(Worker* worker, const EndpointParameters* parameters, Endpoint** endpoint);
  void* (*ep_close)(Endpoint* endpoint, const RequestParameters* parameters);
  void* (*tag_send)(Endpoint* endpoint, const void* data, size_t bytes, uint64_t tag,
                    const RequestParameters* parameters);
  void* (*tag_receive)(Worker* worker, void* data, size_t bytes, uint64_t tag, uint64_t mask,
                       const RequestParameters* parameters);
  Message* (*tag_probe)(Worker* worker, uint64_t tag, uint64_t mask, int remove, TagInfo* info);
  void* (*message_receive)(Worker* worker, void* data, size_t bytes, Message* message,
                           const RequestParameters* parameters);
  UcsStatus (*request_status)(void* request);
  void (*request_cancel)(Worker* worker, void* request);
  void (*request_free)(void* request);
  const char* (*status_text)(UcsStatus status);
  void (*push_log_handler)(LogHandler handler);
  UcsStatus (*set_global)(const char* name, const char* value);
};

// Loads UCX from a folder, or the system's UCX if that is "". It is never unloaded. Throws Failure.
const Api& load(const std::string& folder);

}  // namespace hvkeras::ucx
