// One order for all ranks of a host, made by the ranks themselves, without anybody who decides.
//
// A rank posts the key of each collective that it is ready for. The rank that posts a key last appends it to a log that
// all see; the log is the order in which everybody runs the collectives. So ranks may post in any order, and what is in
// the log is wanted by all: running it never waits for something that some rank has not asked for.
#pragma once

#include <string>

#include "waiting.h"

namespace hvkeras {

// What tells a collective from others: a hash of its name and of all that is known of it when a graph is made.
struct Key {
  uint64_t high = 0, low = 0;
  bool operator==(const Key& other) const { return high == other.high && low == other.low; }
};
Key key_of(const std::string& name);

struct KeyHash {
  size_t operator()(const Key& key) const { return static_cast<size_t>(key.low); }
};

class Matching {
 public:
  struct Entry {
    Key key;
    std::string error;  // what differs between ranks; empty if nothing does
  };

  static size_t bytes();
  // `base` is zeroed memory of `bytes()`, aligned to a page, the same for all ranks.
  Matching(void* base, int rank, int ranks, const int* global_ranks, const Abort& abort);

  // Posts a key. A rank posts one again only after it has read it from the log.
  // `details` is what must be equal on all ranks though the key does not say it: sizes found out when the graph runs,
  // one for each tensor, separated by ";".
  void post(const Key& key, const std::string& details);
  // Whether the log has an entry that this rank has not read.
  bool ready() const;
  // Reads the next entry, which must be there.
  Entry next();
  // Waits until there is one, for at most so long; asleep, or spinning. Returns whether there is one.
  bool await(int64_t microseconds, bool asleep);

 private:
  struct Shared;
  struct Pending;
  class Lock;

  Shared* shared_;
  int rank_, ranks_;
  const int* global_ranks_;
  const Abort& abort_;
  uint32_t read_ = 0;
};

}  // namespace hvkeras
