// One order for all ranks of a host, made by the ranks themselves, without anybody who decides.
//
// A rank posts the key of each collective that it is ready for. The rank that posts a key last appends it to a log that
// all see; the log is the order in which everybody runs the collectives. So ranks may post in any order, and what is in
// the log is wanted by all: running it never waits for something that some rank has not asked for.
#pragma once

#include <string>
#include <vector>

#include "synchronization.h"

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
  // What an entry of the log asks for: to run the collective; or, where it goes the short way between hosts (small.h),
  // first to offer what this host has of it, and then to finish it.
  enum class Step : uint32_t { kRun, kContribute, kFinish };
  struct Entry {
    Key key;
    Step step;
    Status status;  // a mismatch, if ranks differ
  };

  static constexpr size_t kMaxDetails = 96;  // bytes of details that are kept for a message; a hash covers all of them
  static constexpr size_t kMaxText = 512;    // bytes of a message
  static constexpr uint32_t kLogCapacity = 1 << 15;  // entries that may be unread by the slowest rank

  static size_t bytes();
  // `base` is zeroed memory of `bytes()`, aligned to a page, the same for all ranks. With `between_hosts`, what all
  // ranks of this host have posted is not in the log yet: the host's leader, whom `notifier` wakes, takes it, and
  // appends what all hosts have.
  Matching(void* base, int rank, int ranks, const int* global_ranks, const AbortFlag& abort, bool between_hosts = false,
           int notifier = -1);

  // Posts a key. A rank posts one again only after it has read it from the log. Throws Failure where so many wait that
  // the log might not hold them.
  // `details` is what must be equal on all ranks though the key does not say it: sizes found out when the graph runs,
  // one for each tensor, separated by ";". With `offers`, the ranks of this host are to offer before other hosts are
  // asked, so that it comes into the log at once.
  void post(const Key& key, const std::string& details, bool contributes = false);
  // Whether the log has an entry that this rank has not read.
  bool ready() const;
  // Reads the next entry, which must be there.
  Entry next();
  // Waits until there is one, for at most so long; asleep, or spinning. Returns whether there is one.
  bool wait(int64_t microseconds, bool asleep);

  // What follows is for the leader of a host.
  struct Ready {
    Key key;
    uint64_t details_hash;
    int rank;             // the global rank whose details these are
    std::string details;  // the beginning of them
    Status status;        // a mismatch, if ranks of the host differ
  };
  // Takes what all ranks of this host have posted since the last time, and do not offer.
  std::vector<Ready> take_ready();
  // What this rank itself would post.
  Ready make_ready(const Key& key, const std::string& details) const;
  // Calls `sleep`, which the notifier ends, unless there is more to take, or something in the log.
  template <typename Sleep>
  void sleep_unless_ready(Sleep&& sleep);
  // Appends to the log what all hosts are ready for.
  void append(const Key& key, Step step, const Status& status);
  // The mismatch of two ranks whose details differ.
  static Status mismatch(const std::string& one, int rank_of_one, const std::string& other, int rank_of_other);

 private:
  struct Shared;
  struct Pending;
  class Lock;

  uint32_t store_error(const Status& mismatch);
  Status error_of(uint32_t number) const;
  void release_error(uint32_t number, uint32_t readers);
  void append_locked(const Key& key, Step step, uint32_t error);
  bool begin_sleep();
  void end_sleep();

  Shared* shared_;
  int rank_, ranks_;
  const int* global_ranks_;
  const AbortFlag& abort_;
  bool between_hosts_;
  int notifier_;
  uint32_t read_ = 0;
  uint32_t taken_ready_ = 0;
  std::atomic<uint32_t> unread_{0};  // posts of this rank whose last entry it has not read
};

template <typename Sleep>
void Matching::sleep_unless_ready(Sleep&& sleep) {
  if (begin_sleep()) sleep();
  end_sleep();
}

}  // namespace hvkeras
