#include "matching.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

#include "notifier.h"

namespace hvkeras {

namespace {

constexpr uint32_t kMaxPending = 1 << 15;  // keys that not all ranks have posted yet
constexpr const char* kTooManyText = "too many collectives are outstanding";
constexpr const char* kDifferText = " communicate different things: ";
constexpr uint32_t kMaxErrors = 64;  // mismatches that the slowest rank has not read yet

// The Fowler-Noll-Vo hash (FNV-1a) with a given offset basis.
uint64_t hash_of(const std::string& text, uint64_t start) {
  uint64_t hash = start;
  for (const char letter : text) {
    hash ^= static_cast<unsigned char>(letter);
    hash *= 0x100000001b3ULL;
  }
  hash ^= hash >> 32;  // finalizer, as FNV-1a alone mixes bits poorly
  hash *= 0x9e3779b97f4a7c15ULL;
  return hash ^ (hash >> 29);
}

uint64_t hash_of_details(const std::string& details) { return hash_of(details, 0xcbf29ce484222325ULL); }

}  // namespace

// Reports the first of the ";"-separated parts that differs, and its number.
Status Matching::mismatch(const std::string& one, int rank_of_one, const std::string& other, int rank_of_other) {
  const std::string ranks =
      "ranks " + std::to_string(rank_of_one) + " and " + std::to_string(rank_of_other) + kDifferText;
  size_t start_one = 0, start_other = 0;
  for (int index = 1; start_one <= one.size() && start_other <= other.size(); ++index) {
    const size_t end_one = std::min(one.find(';', start_one), one.size());
    const size_t end_other = std::min(other.find(';', start_other), other.size());
    const std::string part = one.substr(start_one, end_one - start_one);
    const std::string other_part = other.substr(start_other, end_other - start_other);
    if (part != other_part) {
      return Status(Code::kMismatch, ranks + "tensor " + std::to_string(index) + " is " + part + " on rank " +
                                         std::to_string(rank_of_one) + " and " + other_part + " on rank " +
                                         std::to_string(rank_of_other));
    }
    start_one = end_one + 1;
    start_other = end_other + 1;
  }
  return Status(Code::kMismatch, ranks + "their tensors");
}

Key key_of(const std::string& name) {
  return Key{hash_of(name, 0xcbf29ce484222325ULL), hash_of(name, 0x84222325cbf29ce4ULL)};
}

struct Matching::Pending {
  Key key;
  uint64_t details_hash;
  uint32_t posted;  // number of ranks that have posted it
  uint32_t first;   // the rank that posted first
  uint32_t error;   // 0, or the number of a stored mismatch
  uint32_t length;  // of the stored details
  char details[kMaxDetails];
};

struct Matching::Shared {
  Counter log_length;
  Counter ready_here;  // the number of keys that all ranks of this host have posted; for the leader
  alignas(128) std::atomic<uint32_t> locked;
  uint32_t pending_count;
  struct {
    Key key;
    Step step;
    uint32_t error;
  } log[kLogCapacity];
  Pending pending[kMaxPending];
  char errors[kMaxErrors][kMaxText];
  std::atomic<uint32_t> error_readers[kMaxErrors];  // ranks that have not read a text yet
};

// Held for a few hundred nanoseconds at most. Waiters yield, as the holder may have been preempted.
class Matching::Lock {
 public:
  Lock(std::atomic<uint32_t>& word, const AbortFlag& abort) : word_(word) {
    for (int spin = 1; word_.exchange(1, std::memory_order_acquire) != 0; ++spin) {
      pause();
      if (spin % 64 == 0) {
        abort.check();
        sched_yield();
      }
    }
  }
  ~Lock() { word_.store(0, std::memory_order_release); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  std::atomic<uint32_t>& word_;
};

size_t Matching::bytes() { return sizeof(Shared); }

Matching::Matching(void* base, int rank, int ranks, const int* global_ranks, const AbortFlag& abort, bool between_hosts,
                   int notifier)
    : shared_(static_cast<Shared*>(base)),
      rank_(rank),
      ranks_(ranks),
      global_ranks_(global_ranks),
      abort_(abort),
      between_hosts_(between_hosts),
      notifier_(notifier) {}

void Matching::post(const Key& key, const std::string& details, bool contributes) {
  const uint64_t hash = hash_of_details(details);
  bool is_ready = false, is_in_log = false;
  // A small allreduce takes two entries.
  if (unread_.load(std::memory_order_relaxed) >= (between_hosts_ ? kLogCapacity / 2 : kLogCapacity))
    throw Failure(kTooManyText);
  {
    const Lock lock(shared_->locked, abort_);
    Pending* const all = shared_->pending;
    Pending* const end = all + shared_->pending_count;
    Pending* found = std::find_if(all, end, [&](const Pending& one) { return one.key == key; });
    if (found == end) {
      if (shared_->pending_count == kMaxPending) throw Failure(kTooManyText);
      ++shared_->pending_count;
      const size_t kept = std::min(details.size(), kMaxDetails);
      *found = Pending{key, hash, 0, static_cast<uint32_t>(rank_), 0, static_cast<uint32_t>(kept), {}};
      std::memcpy(found->details, details.data(), kept);
    } else if (found->details_hash != hash && found->error == 0) {
      found->error = store_error(mismatch(std::string(found->details, found->length), global_ranks_[found->first],
                                          details.substr(0, kMaxDetails), global_ranks_[rank_]));
    }
    if (static_cast<int>(++found->posted) == ranks_) {
      // If ranks of this host differ, the other hosts must be informed through the negotiation.
      is_ready = between_hosts_ && (!contributes || found->error != 0);
      is_in_log = !is_ready;
    }
    unread_.fetch_add(1, std::memory_order_relaxed);
    if (is_ready) {
      shared_->ready_here.set(shared_->ready_here.value.load(std::memory_order_relaxed) + 1);
    } else if (is_in_log) {
      append_locked(key, between_hosts_ ? Step::kContribute : Step::kRun, found->error);
      *found = all[--shared_->pending_count];
    }
  }
  if (is_in_log) shared_->log_length.wake();
  // A sleeper has incremented `sleepers` before its last check.
  if ((is_ready || is_in_log) && shared_->ready_here.sleepers.load(std::memory_order_seq_cst) != 0) notify(notifier_);
}

// Stores a mismatch until all ranks of this host have read it, and returns its number. If all entries are in use, it
// stores nothing and returns a number past the last one.
uint32_t Matching::store_error(const Status& mismatch) {
  uint32_t index = 0;
  while (index < kMaxErrors && shared_->error_readers[index].load(std::memory_order_acquire) != 0) ++index;
  if (index == kMaxErrors) return kMaxErrors + 1;
  const size_t kept = std::min(std::strlen(mismatch.text()), kMaxText - 1);
  std::memcpy(shared_->errors[index], mismatch.text(), kept);
  shared_->errors[index][kept] = 0;
  shared_->error_readers[index].store(static_cast<uint32_t>(ranks_), std::memory_order_relaxed);
  return index + 1;
}

Status Matching::error_of(uint32_t number) const {
  if (number == 0) return Status();
  if (number <= kMaxErrors) return Status(Code::kMismatch, shared_->errors[number - 1]);
  return Status(Code::kMismatch, std::string("the ranks") + kDifferText + "found while " + std::to_string(kMaxErrors) +
                                     " earlier mismatches were unread; their messages have the details");
}

void Matching::release_error(uint32_t number, uint32_t readers) {
  if (number != 0 && number <= kMaxErrors)
    shared_->error_readers[number - 1].fetch_sub(readers, std::memory_order_release);
}

void Matching::append_locked(const Key& key, Step step, uint32_t error) {
  const uint32_t length = shared_->log_length.value.load(std::memory_order_relaxed);
  shared_->log[length % kLogCapacity] = {key, step, error};
  shared_->log_length.set(length + 1);  // under the lock, so that entries appear in order
}

bool Matching::ready() const { return shared_->log_length.load() != read_; }

Matching::Entry Matching::next() {
  const auto& entry = shared_->log[read_++ % kLogCapacity];
  Entry found{entry.key, entry.step, error_of(entry.error)};
  release_error(entry.error, 1);
  if (found.step != Step::kContribute) unread_.fetch_sub(1, std::memory_order_relaxed);
  return found;
}

bool Matching::wait(int64_t microseconds, bool asleep) {
  return shared_->log_length.wait_for(read_ + 1, microseconds, asleep, abort_);
}

std::vector<Matching::Ready> Matching::take_ready() {
  std::vector<Ready> ready;
  if (shared_->ready_here.load() == taken_ready_) return ready;
  const Lock lock(shared_->locked, abort_);
  taken_ready_ = shared_->ready_here.load();
  for (uint32_t index = 0; index < shared_->pending_count;) {
    Pending& one = shared_->pending[index];
    if (static_cast<int>(one.posted) != ranks_) {
      ++index;
      continue;
    }
    ready.push_back({one.key, one.details_hash, global_ranks_[one.first], std::string(one.details, one.length),
                     error_of(one.error)});
    release_error(one.error, static_cast<uint32_t>(ranks_));
    one = shared_->pending[--shared_->pending_count];
  }
  return ready;
}

Matching::Ready Matching::make_ready(const Key& key, const std::string& details) const {
  return {key, hash_of_details(details), global_ranks_[rank_], details.substr(0, kMaxDetails), Status()};
}

bool Matching::begin_sleep() {
  shared_->ready_here.sleepers.fetch_add(1, std::memory_order_seq_cst);
  return shared_->ready_here.value.load(std::memory_order_seq_cst) == taken_ready_ &&
         shared_->log_length.value.load(std::memory_order_seq_cst) == read_;
}

void Matching::end_sleep() { shared_->ready_here.sleepers.fetch_sub(1, std::memory_order_seq_cst); }

void Matching::append(const Key& key, Step step, const Status& status) {
  {
    const Lock lock(shared_->locked, abort_);
    append_locked(key, step, status.ok() ? 0 : store_error(status));
  }
  shared_->log_length.wake();
}

}  // namespace hvkeras
