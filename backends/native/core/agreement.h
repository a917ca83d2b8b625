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
using Parts = std::vector<std::vector<char>>;

// The part of one host's leader in it. Used by one thread at a time.
class Agreement {
 public:
  Agreement(Matching& matching, Link& link, int host, int hosts, bool oversubscribed, int notifier, const Abort& abort);
  ~Agreement();

  // Passes on what has come up since the last time, without waiting.
  void step();
  // Steps until the log has something new for this rank, for at most so long. Returns whether it has.
  bool await(int64_t microseconds);

  // Sends all hosts this one's part of a small allreduce. Once the log says that it is to be finished, `take` returns
  // the parts of all.
  void offer(const Key& key, const std::string& details, std::vector<char> part);
  Parts take(const Key& key);

 private:
  struct PreemptionSignal;
  using HostNumbers = std::vector<uint16_t>;
  // What the hosts have said of a key so far.
  struct Tally {
    HostNumbers hosts;
    Matching::Ready first;
  };
  // The parts of a key that have come so far. A host may be one run ahead of others.
  struct Offered {
    std::vector<std::deque<PreemptionSignal>> from;  // each host
    std::vector<int> unwanted;             // of each host, those yet to come that a mismatch has made useless
  };

  void on_message(const PreemptionSignal& notice, int from);
  void count(const Matching::Ready& ready, int from);
  void keep(const PreemptionSignal& notice, int from);
  void settle(const Key& key);
  void settle_mixed(const Key& key);
  void drop(const Key& key, int host);
  void forget_if_empty(const Key& key);
  void run_everywhere(const Matching::Ready& ready, const HostNumbers& offered);
  Offered& offered(const Key& key);

  Matching& matching_;
  Link& link_;
  int host_, hosts_;
  bool oversubscribed_;
  int notifier_;
  const Abort& abort_;
  std::unordered_map<Key, Tally, KeyHash> tallies_;  // the first host's leader's
  std::unordered_map<Key, Offered, KeyHash> offered_;
  std::unordered_map<Key, Parts, KeyHash> complete_;
};

}  // namespace hvkeras
