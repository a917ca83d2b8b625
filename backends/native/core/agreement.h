// One order for the hosts of a group: the leaders tell the first host's leader what all ranks of their hosts have
// posted, and it tells them what all hosts have, in the order in which everybody is to run it.
#pragma once

#include <unordered_map>

#include "link.h"
#include "matching.h"

namespace hvkeras {

// The part of one host's leader in it. Used by one thread at a time.
class Agreement {
 public:
  Agreement(Matching& matching, Link& link, int host, int hosts, bool crowded, const Abort& abort)
      : matching_(matching), link_(link), host_(host), hosts_(hosts), crowded_(crowded), abort_(abort) {}

  // Passes on what has come up since the last time, without waiting.
  void step();
  // Steps until the log has something new for this rank, for at most so long. Returns whether it has.
  bool await(int64_t microseconds);

 private:
  struct Notice;
  // What the hosts have told of a key so far.
  struct Tally {
    int hosts = 0;
    Matching::Ready first;
  };

  void count(const Matching::Ready& ready);

  Matching& matching_;
  Link& link_;
  int host_, hosts_;
  bool crowded_;
  const Abort& abort_;
  std::unordered_map<Key, Tally, KeyHash> tallies_;  // the first host's leader's
};

}  // namespace hvkeras
