// The hosts of a group from the perspective of one rank: the placement of ranks, and staging buffers through which the
// ranks of this host exchange data with the leaders of other hosts.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "channel.h"
#include "costs.h"
#include "link.h"

namespace hvkeras {

// The ranks of a group (as indices in it) on each host. Hosts are in the order of their first ranks.
struct Placement {
  int rank = 0;
  int host = 0;
  std::vector<std::vector<int>> ranks_on;  // of each host, ascending

  int ranks() const;
  int hosts() const { return static_cast<int>(ranks_on.size()); }
  size_t max_ranks_per_host() const;
};
// `host_of` has the host number of each rank of the group.
Placement make_placement(int rank, const std::vector<int>& host_of);

class Hosts {
 public:
  static constexpr int kBuffers = 7;

  static size_t bytes(int hosts, size_t buffer_bytes);
  // `base` is zeroed, page-aligned memory of `bytes()`, the same for all ranks of the host. Only the first of them has
  // a link. Staging buffers have the same size on all hosts.
  Hosts(void* base, Placement placement, size_t buffer_bytes, const Costs& costs, Link* link, Channel& channel,
        bool oversubscribed);

  const Placement& placement() const { return placement_; }
  int host() const { return placement_.host; }
  int hosts() const { return placement_.hosts(); }
  bool is_leader() const { return link_ != nullptr; }
  // The other hosts, in a rotated order that starts after this one, so that not all hosts send to the same host at
  // once.
  const std::vector<int>& peers() const { return peers_; }
  size_t buffer_bytes() const { return buffer_bytes_; }
  // The algorithm for an allreduce of this many bytes between hosts.
  between_hosts::Algorithm choose_algorithm(size_t bytes, Type type) const {
    return between_hosts::choose_algorithm(bytes, type, hosts(), buffer_bytes_, costs_);
  }
  // The network's time to send this many bytes once.
  double seconds(size_t bytes) const { return static_cast<double>(bytes) * costs_.per_byte; }
  // A staging buffer, shared by the ranks of this host. Has `buffer_bytes` bytes, and padding to align each host's
  // part.
  char* buffer(size_t number) const;
  // Private memory of the leader, page-aligned. The same memory is returned until a call requests more.
  char* leader_memory(size_t bytes);

  // Start to send or receive; only for the leader. Nothing happens for 0 bytes, or for this host itself.
  void send(int host, const void* data, size_t bytes, Link::Stream stream = Link::kData);
  void receive(int host, void* data, size_t bytes, Link::Stream stream = Link::kData);
  // Returns and clears the transfers that were started since the last call.
  std::vector<Link::Handle> take_started();
  void wait(const std::vector<Link::Handle>& handles);
  // Sets a function that the leader calls while it waits for transfers.
  void poll_while_idle(std::function<void()> step) { poll_while_idle_ = std::move(step); }

  // The leader's signal to the ranks of its host, once per use: the staging buffers are ready to be read.
  void signal_ready();
  void wait_ready();

 private:
  struct FreeDeleter {
    void operator()(char* memory) const;
  };

  Counter& ready_counter() const { return *reinterpret_cast<Counter*>(base_); }

  char* base_;
  Placement placement_;
  size_t buffer_bytes_;
  const Costs costs_;
  Link* link_;
  Channel& channel_;
  bool oversubscribed_;
  std::vector<int> peers_;
  std::unique_ptr<char, FreeDeleter> leader_memory_;
  size_t leader_memory_bytes_ = 0;
  std::vector<Link::Handle> started_;
  std::function<void()> poll_while_idle_;
  uint32_t ready_signals_ = 0;
};

}  // namespace hvkeras
