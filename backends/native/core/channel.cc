#include "channel.h"

#include <algorithm>

namespace hvkeras {

namespace {

constexpr size_t kLinePair = 2 * Channel::kLine;  // the adjacent-line prefetcher fetches lines in pairs
constexpr size_t kMaxSlotBytes = 512 * 1024;  // two slots and the matching parts of the tensors fit into the L2 cache
constexpr size_t kMinSlotBytes = 64 * 1024;
constexpr size_t kMaxTotalBytes = 16 * 1024 * 1024;  // limit for the slots of all ranks in one round

size_t round_up_to_line_pair(size_t bytes) { return (bytes + kLinePair - 1) / kLinePair * kLinePair; }

}  // namespace

size_t Channel::slot_bytes_for(int ranks) {
  const size_t all = static_cast<size_t>(ranks);
  return round_up_to_line_pair(std::max(std::clamp(kMaxTotalBytes / all, kMinSlotBytes, kMaxSlotBytes), all * kLine));
}

// Memory layout: write counters, result counters, two slots per rank, two result buffers per rank.
size_t Channel::bytes(int ranks, size_t slot_bytes) {
  const size_t result_bytes = round_up_to_line_pair(slot_bytes / static_cast<size_t>(ranks));
  return static_cast<size_t>(ranks) * (2 * sizeof(Counter) + 2 * slot_bytes + 2 * result_bytes);
}

Channel::Channel(void* base, int rank, int ranks, size_t slot_bytes, SpinPolicy spin_policy, const AbortFlag& abort)
    : base_(static_cast<char*>(base)),
      rank_(rank),
      ranks_(ranks),
      slot_bytes_(slot_bytes),
      result_bytes_(round_up_to_line_pair(slot_bytes / static_cast<size_t>(ranks))),
      spin_policy_(spin_policy),
      abort_(abort) {
  if (part_bytes() == 0)
    throw Failure("too many ranks for the slot size. Received: slot_bytes=" + std::to_string(slot_bytes));
}

Counter& Channel::written_counter(int rank) const { return reinterpret_cast<Counter*>(base_)[rank]; }

Counter& Channel::result_counter(int rank) const { return reinterpret_cast<Counter*>(base_)[ranks_ + rank]; }

char* Channel::slot(uint32_t round, int rank) const {
  const size_t index = static_cast<size_t>(round % 2) * static_cast<size_t>(ranks_) + static_cast<size_t>(rank);
  return base_ + 2 * static_cast<size_t>(ranks_) * sizeof(Counter) + index * slot_bytes_;
}

char* Channel::result(uint32_t round, int rank) const {
  const size_t index = static_cast<size_t>(round % 2) * static_cast<size_t>(ranks_) + static_cast<size_t>(rank);
  return base_ + 2 * static_cast<size_t>(ranks_) * (sizeof(Counter) + slot_bytes_) + index * result_bytes_;
}

void Channel::publish() {
  writer_.flush();
  written_counter(rank_).advance_to(++round_);
}

void Channel::wait_written(uint32_t round) {
  for (int step = 1; step < ranks_; ++step)
    written_counter((rank_ + step) % ranks_).wait(round + 1, spin_policy_, abort_);
}

void Channel::publish_result() {
  writer_.flush();
  result_counter(rank_).advance_to(++result_round_);
}

void Channel::wait_result(uint32_t round, int rank) { result_counter(rank).wait(round + 1, spin_policy_, abort_); }

}  // namespace hvkeras
