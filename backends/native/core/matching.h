// A common order of collectives for all ranks of a host, determined by the ranks themselves, without a coordinator.
//
// A rank posts the key of each collective that it is ready for. The rank that posts a key last appends it to a shared
// log, and all ranks run the collectives in the order of the log. So ranks may post in any order, and every collective
// in the log has been posted by all ranks: running it never waits for a rank that is not ready.
#pragma once

#include <string>
#include <vector>

#include "synchronization.h"

namespace hvkeras {

// Identifies a collective: a hash of its name, and of everything that is known about it when the graph is made.
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
  // The action of a log entry: run the collective. A small allreduce between hosts (small_allreduce.h) has two entries:
  // contribute this host's data, then finish.
  enum class Step : uint32_t { kRun, kContribute, kFinish };
  struct Entry {
    Key key;
    Step step;
    Status status;  // a mismatch, if ranks differ
  };

  static constexpr size_t kMaxDetails = 96;          // bytes stored for error messages; a hash covers all
  static constexpr size_t kMaxText = 512;            // bytes of an error message
  static constexpr uint32_t kLogCapacity = 1 << 15;  // entries that the slowest rank has not read yet

  static size_t bytes();
  // `base` is zeroed, page-aligned memory of `bytes()`, the same for all ranks. With `between_hosts`, a key that all
  // ranks of this host have posted is not appended to the log. Instead, the leader (woken by `notifier`) takes it, and
  // appends it once all hosts are ready.
  Matching(void* base, int rank, int ranks, const int* global_ranks, const AbortFlag& abort, bool between_hosts = false,
           int notifier = -1);

  // Posts a key. A rank posts the same key again only after it has read it from the log. Throws Failure if so many are
  // outstanding that the log might overflow.
  // `details` must be equal on all ranks, but is not part of the key: sizes that are known only when the graph runs,
  // one for each tensor, separated by ";". With `contributes`, this host contributes before other hosts are asked, so
  // the key is appended to the log immediately.
  void post(const Key& key, const std::string& details, bool contributes = false);
  // Whether the log has an entry that this rank has not read.
  bool ready() const;
  // Reads the next entry, which must exist.
  Entry next();
  // Waits until there is an entry, at most this long, spinning or asleep. Returns whether there is one.
  bool wait(int64_t microseconds, bool asleep);

  // The following is for the leader of a host.
  struct Ready {
    Key key;
    uint64_t details_hash;
    int rank;             // the global rank that posted these details
    std::string details;  // truncated to kMaxDetails
    Status status;        // a mismatch, if ranks of the host differ
  };
  // Takes the keys that all ranks of this host have posted since the last call, without small allreduces.
  std::vector<Ready> take_ready();
  // What this rank itself would post.
  Ready make_ready(const Key& key, const std::string& details) const;
  // Calls `sleep`, which the notifier interrupts, unless there are keys to take or entries in the log.
  template <typename Sleep>
  void sleep_unless_ready(Sleep&& sleep);
  // Appends a key to the log for which all hosts are ready.
  void append(const Key& key, Step step, const Status& status);
  // The error for two ranks whose details differ.
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
