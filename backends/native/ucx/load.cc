// Looks up UCX's functions, and disables what UCX would do in a process by default.
#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <memory>
#include <mutex>

#include "../core/synchronization.h"
#include "api.h"

namespace hvkeras::ucx {

namespace {

// Prints UCX's log lines as lines of hvkeras, each in one write.
int log_line(const char*, unsigned, const char*, int level, const void*, const char* format, va_list values) {
  char text[1024];
  std::vsnprintf(text, sizeof text, format, values);
  std::fprintf(stderr, "hvkeras: UCX %s: %s\n", level <= kWarning ? "warning" : "info", text);
  return kNoOtherHandler;
}

// The folder of a loaded library; "" if it is not loaded. Open MPI, for example, brings its own UCX.
std::string folder_of_loaded(const std::string& name) {
  void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
  link_map* found = nullptr;
  if (handle == nullptr || dlinfo(handle, RTLD_DI_LINKMAP, &found) != 0) return "";
  const std::string path = found->l_name;
  return path.substr(0, path.rfind('/'));
}

void* opened(const std::string& folder, const std::string& name) {
  const std::string path = folder.empty() ? name : folder + "/" + name;
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw Failure(std::string("failed to load UCX: ") + dlerror());
  return handle;
}

template <typename Function>
void find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) throw Failure(std::string("this UCX does not export ") + name);
}

Api* loaded_from(const std::string& chosen) {
  auto api = std::make_unique<Api>();
  // UCX's libraries find each other by name, so two versions in one process would be mixed.
  const std::string there = folder_of_loaded("libucs.so.0");
  const std::string& folder = there.empty() ? chosen : there;
  void* const services = opened(folder, "libucs.so.0");
  opened(folder, "libuct.so.0");
  void* const ucp = opened(folder, "libucp.so.0");
  find(ucp, "ucp_get_version_string", api->version);
  find(ucp, "ucp_config_read", api->config_read);
  find(ucp, "ucp_config_modify", api->config_modify);
  find(ucp, "ucp_config_release", api->config_release);
  find(ucp, "ucp_init_version", api->init);
  find(ucp, "ucp_cleanup", api->cleanup);
  find(ucp, "ucp_worker_create", api->worker_create);
  find(ucp, "ucp_worker_destroy", api->worker_destroy);
  find(ucp, "ucp_worker_get_address", api->worker_get_address);
  find(ucp, "ucp_worker_release_address", api->worker_release_address);
  find(ucp, "ucp_worker_progress", api->worker_progress);
  find(ucp, "ucp_worker_get_efd", api->worker_get_efd);
  find(ucp, "ucp_worker_arm", api->worker_arm);
  find(ucp, "ucp_worker_flush_nbx", api->worker_flush);
  find(ucp, "ucp_ep_create", api->ep_create);
  find(ucp, "ucp_ep_close_nbx", api->ep_close);
  find(ucp, "ucp_tag_send_nbx", api->tag_send);
  find(ucp, "ucp_tag_recv_nbx", api->tag_receive);
  find(ucp, "ucp_tag_probe_nb", api->tag_probe);
  find(ucp, "ucp_tag_msg_recv_nbx", api->message_receive);
  find(ucp, "ucp_request_check_status", api->request_status);
  find(ucp, "ucp_request_cancel", api->request_cancel);
  find(ucp, "ucp_request_free", api->request_free);
  find(services, "ucs_status_string", api->status_text);
  find(services, "ucs_log_push_handler", api->push_log_handler);
  find(services, "ucs_global_opts_set_value", api->set_global);
  api->push_log_handler(log_line);
  // Options that this UCX version does not have are skipped.
  for (const auto& [name, value] :
       {std::pair{"VFS_ENABLE", "n"}, {"MEMTYPE_CACHE", "n"}, {"WARN_UNUSED_ENV_VARS", "n"}})
    api->set_global(name, value);
  return api.release();  // never unloaded
}

}  // namespace

const Api& load(const std::string& folder) {
  static std::mutex mutex;
  static Api* only = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (only == nullptr) only = loaded_from(folder);
  return *only;
}

}  // namespace hvkeras::ucx
