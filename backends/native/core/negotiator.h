// A common order of collectives for the hosts of a group. Each leader reports to the first host's leader which keys all
// ranks of its host have posted. The first leader answers, in the order in which all run them, with the keys for which
// all hosts are ready.
//
// Small allreduces need no such order: each leader sends its host's data to all others immediately, and reduces the
// data of all hosts when it has arrived, without blocking other collectives.
#pragma once

#include <deque>
#include <unordered_map>

#include "link.h"
#include "matching.h"

namespace hvkeras {

// The bytes that each host contributes to a small allreduce, by host.
using Contributions = std::vector<std::vector<char>>;

// The negotiation on one host's leader. Used by one thread at a time.
class Negotiator {
 public:
  Negotiator(Matching& matching, Link& link, int host, int hosts, bool oversubscribed, int notifier,
             const AbortFlag& abort);
  ~Negotiator();

  // Processes new posts and messages, without waiting.
  void step();
  // Calls `step` until the log has an entry for this rank, at most this long. Returns whether it has.
  bool wait(int64_t microseconds);

  // Sends this host's contribution to a small allreduce to all hosts. Once the log has its kFinish entry,
  // `take_contributions` returns those of all hosts.
  void contribute(const Key& key, const std::string& details, std::vector<char> contribution);
  Contributions take_contributions(const Key& key);

 private:
  struct Message;
  using HostNumbers = std::vector<uint16_t>;
  // The hosts that are ready for a key.
  struct ReadyHosts {
    HostNumbers hosts;
    Matching::Ready first;
  };
  // The contributions for a key that have arrived. A host may be one run ahead of others.
  struct Inbox {
    std::vector<std::deque<Message>> from;  // by host
    std::vector<int> to_discard;            // by host: contributions to discard on arrival, after a mismatch
  };

  void on_message(const Message& message, int from);
  void count_ready(const Matching::Ready& ready, int from);
  void store(const Message& message, int from);
  void finish_if_complete(const Key& key);
  void detect_mixed(const Key& key);
  void discard(const Key& key, int host);
  void erase_if_empty(const Key& key);
  void broadcast_run(const Matching::Ready& ready, const HostNumbers& contributors);
  Inbox& inbox_of(const Key& key);

  Matching& matching_;
  Link& link_;
  int host_, hosts_;
  bool oversubscribed_;
  int notifier_;
  const AbortFlag& abort_;
  std::unordered_map<Key, ReadyHosts, KeyHash> ready_hosts_;  // only on the first host
  std::unordered_map<Key, Inbox, KeyHash> inboxes_;
  std::unordered_map<Key, Contributions, KeyHash> complete_;
};

}  // namespace hvkeras
