// The other hosts of a group, as a rank sees them: who is where, and memory in which the ranks of its host prepare what
// the host's leader exchanges with the other leaders.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "channel.h"
#include "costs.h"
#include "link.h"

namespace hvkeras {

// Which ranks of a group, numbered within it, are on which host; hosts in the order of their first ranks.
struct Placement {
  int rank = 0;                            // this rank
  int host = 0;                            // its host
  std::vector<std::vector<int>> ranks_on;  // for each host, ascending

  int ranks() const;
  int hosts() const { return static_cast<int>(ranks_on.size()); }
  size_t max_ranks_per_host() const;
};
// `host_of` has a number for each rank of the group that tells its host from others.
Placement make_placement(int rank, const std::vector<int>& host_of);

class Hosts {
 public:
  static constexpr int kBuffers = 7;

  static size_t bytes(int hosts, size_t buffer_bytes);
  // `base` is zeroed memory of `bytes()`, aligned to a page, the same for all ranks of the host, of which the first has
  // the link. All hosts have areas of the same size.
  Hosts(void* base, Placement placement, size_t buffer_bytes, const Costs& costs, Link* link, Channel& channel,
        bool oversubscribed);

  const Placement& placement() const { return placement_; }
  int host() const { return placement_.host; }
  int hosts() const { return placement_.hosts(); }
  bool is_leader() const { return link_ != nullptr; }
  // The hosts but this one, each beginning with the next one, so that not all send to the same host at once.
  const std::vector<int>& peers() const { return peers_; }
  size_t buffer_bytes() const { return buffer_bytes_; }
  // The way of an allreduce of so many bytes between the hosts.
  between_hosts::Algorithm choose_algorithm(size_t bytes, Type type) const {
    return between_hosts::choose_algorithm(bytes, type, hosts(), buffer_bytes_, costs_);
  }
  // Memory that the ranks of this host share, for as much as `area_bytes` and some alignment of each host's part.
  char* buffer(size_t number) const;
  // Memory of the leader's own, aligned to a cache line, the same at each call that asks for no more.
  char* leader_memory(size_t bytes);

  // The leader's steps: start to send and receive (nothing, if it is no bytes or this host), and wait for all of it.
  void send(int host, const void* data, size_t bytes, Link::Stream stream = Link::kData);
  void receive(int host, void* data, size_t bytes, Link::Stream stream = Link::kData);
  // All that was started since the last time this was asked for.
  std::vector<Link::Handle> take_started();
  void wait(const std::vector<Link::Handle>& handles);
  // What the leader does when it has waited for some time.
  void poll_while_idle(std::function<void()> step) { poll_while_idle_ = std::move(step); }

  // A word of the leader's to the ranks of its host, one after the other: the areas are ready to be read.
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
