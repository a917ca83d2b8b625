// One order for the hosts of a group: the leaders tell the first host's leader what all ranks of their hosts have
// posted, and it tells them what all hosts have, in the order in which everybody is to run it.
//
// Small allreduces need no such order: each leader sends what its host has to all others at once, whoever has the parts
// of all hosts adds them up, and nothing else waits for it meanwhile.
#pragma once

#include <deque>
#include <unordered_map>

#include "link.h"
#include "matching.h"

namespace hvkeras {

// The bytes that each host has of a small allreduce, in the order of the hosts.
using Contributions = std::vector<std::vector<char>>;

// The part of one host's leader in it. Used by one thread at a time.
class Negotiator {
 public:
  Negotiator(Matching& matching, Link& link, int host, int hosts, bool oversubscribed, int notifier,
             const AbortFlag& abort);
  ~Negotiator();

  // Passes on what has come up since the last time, without waiting.
  void step();
  // Steps until the log has something new for this rank, for at most so long. Returns whether it has.
  bool wait(int64_t microseconds);

  // Sends all hosts this one's part of a small allreduce. Once the log says that it is to be finished, `take` returns
  // the parts of all.
  void contribute(const Key& key, const std::string& details, std::vector<char> contribution);
  Contributions take_contributions(const Key& key);

 private:
  struct Message;
  using HostNumbers = std::vector<uint16_t>;
  // What the hosts have said of a key so far.
  struct ReadyHosts {
    HostNumbers hosts;
    Matching::Ready first;
  };
  // The parts of a key that have come so far. A host may be one run ahead of others.
  struct Inbox {
    std::vector<std::deque<Message>> from;  // each host
    std::vector<int> to_discard;            // of each host, those yet to come that a mismatch has made useless
  };

  void on_message(const Message& message, int from);
  void count_ready(const Matching::Ready& ready, int from);
  void store(const Message& message, int from);
  void finish_if_complete(const Key& key);
  void detect_mixed(const Key& key);
  void discard(const Key& key, int host);
  void erase_if_empty(const Key& key);
  void broadcast_run(const Matching::Ready& ready, const HostNumbers& offered);
  Inbox& inbox_of(const Key& key);

  Matching& matching_;
  Link& link_;
  int host_, hosts_;
  bool oversubscribed_;
  int notifier_;
  const AbortFlag& abort_;
  std::unordered_map<Key, ReadyHosts, KeyHash> ready_hosts_;  // the first host's leader's
  std::unordered_map<Key, Inbox, KeyHash> inboxes_;
  std::unordered_map<Key, Contributions, KeyHash> complete_;
};

}  // namespace hvkeras
