// The functions with which Python opens links, called through ctypes; see exported.h.
#include "exports.h"

#include <map>
#include <mutex>

#include "../core/costs.h"
#include "../core/synchronization.h"
#include "../exported.h"
#include "link.h"

namespace hvkeras::ucx {

namespace {

struct Links {
  std::mutex mutex;
  std::map<int64_t, std::unique_ptr<UcxLink>> by_group;
};

Links& links() {
  static Links* const only = new Links;  // never destroyed: threads may outlive the end of main()
  return *only;
}

UcxLink& link_of(int64_t group) {
  const std::lock_guard<std::mutex> lock(links().mutex);
  const auto found = links().by_group.find(group);
  if (found == links().by_group.end()) throw Failure("the group has no link");
  return *found->second;
}

}  // namespace

std::unique_ptr<Link> take_link(int64_t group) {
  const std::lock_guard<std::mutex> lock(links().mutex);
  const auto found = links().by_group.find(group);
  if (found == links().by_group.end()) throw Failure("a group on several hosts needs a link");
  std::unique_ptr<Link> link = std::move(found->second);
  links().by_group.erase(found);
  return link;
}

}  // namespace hvkeras::ucx

extern "C" {

// Loads UCX from a folder (the system's UCX if that is ""), and returns its version.
EXPORTED ExportedStatus hvkeras_ucx_load(const char* folder, const char** version) {
  using namespace hvkeras::ucx;
  return hvkeras::guarded([&] { *version = load(folder).version(); });
}

// Opens this rank's end of a group's link, and returns its address, which is valid until the link is connected.
EXPORTED ExportedStatus hvkeras_ucx_open(int64_t group, const char* settings, int hosts, const char** address,
                                         size_t* bytes) {
  using namespace hvkeras::ucx;
  return hvkeras::guarded([&] {
    auto link = std::make_unique<UcxLink>(load(""), settings, static_cast<size_t>(hosts));
    *address = link->address().data();
    *bytes = link->address().size();
    const std::lock_guard<std::mutex> lock(links().mutex);
    links().by_group[group] = std::move(link);
  });
}

// Connects a group's link to the leaders of the other hosts; all of them call this at once. `host` is this host's
// index.
EXPORTED ExportedStatus hvkeras_ucx_connect(int64_t group, int host, int hosts, const char* const* addresses,
                                            const size_t* bytes, const char* const* names, uint32_t link_id,
                                            double timeout) {
  using namespace hvkeras::ucx;
  return hvkeras::guarded([&] {
    std::vector<std::string> of_addresses, of_names;
    for (int index = 0; index < hosts; ++index) {
      of_addresses.emplace_back(addresses[index], bytes[index]);
      of_names.emplace_back(names[index]);
    }
    link_of(group).connect(host, of_addresses, of_names, link_id, timeout);
  });
}

// Measures the costs of messages to another host: the latency, the time per message and the time per byte, or zeros on
// a host that has no partner to measure with. All hosts call this at once, after the link is connected.
EXPORTED ExportedStatus hvkeras_ucx_measure(int64_t group, int host, int hosts, double timeout, double* costs) {
  using namespace hvkeras::ucx;
  return hvkeras::guarded([&] {
    const hvkeras::Costs found = hvkeras::measure_costs(link_of(group), host, hosts, timeout);
    costs[0] = found.latency;
    costs[1] = found.per_message;
    costs[2] = found.per_byte;
  });
}

// Closes a link that has not been passed to a group.
EXPORTED ExportedStatus hvkeras_ucx_close(int64_t group) {
  using namespace hvkeras::ucx;
  return hvkeras::guarded([&] {
    std::unique_ptr<UcxLink> closing;
    const std::lock_guard<std::mutex> lock(links().mutex);
    const auto found = links().by_group.find(group);
    if (found == links().by_group.end()) return;
    closing = std::move(found->second);
    links().by_group.erase(found);
  });
}

}  // extern "C"
