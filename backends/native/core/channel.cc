#include "channel.h"

#include <algorithm>

namespace hvkeras {

namespace {

constexpr size_t kPair = 2 * Channel::kLine;  // processors fetch pairs of lines
constexpr size_t kLargestSlot = 512 * 1024;   // two of them and the tensors' parts fit the second cache
constexpr size_t kSmallestSlot = 64 * 1024;
constexpr size_t kAllSlots = 16 * 1024 * 1024;  // what all slots of a round may take together

size_t rounded_up(size_t bytes) { return (bytes + kPair - 1) / kPair * kPair; }

}  // namespace

size_t Channel::slot_bytes_for(int ranks) {
  const size_t all = static_cast<size_t>(ranks);
  return rounded_up(std::max(std::clamp(kAllSlots / all, kSmallestSlot, kLargestSlot), all * kLine));
}

// Laid out as: counters of rounds, counters of results, two slots for each rank, two results for each rank.
size_t Channel::bytes(int ranks, size_t slot_bytes) {
  const size_t result_bytes = rounded_up(slot_bytes / static_cast<size_t>(ranks));
  return static_cast<size_t>(ranks) * (2 * sizeof(Counter) + 2 * slot_bytes + 2 * result_bytes);
}

Channel::Channel(void* base, int rank, int ranks, size_t slot_bytes, Patience patience, const Abort& abort)
    : base_(static_cast<char*>(base)),
      rank_(rank),
      ranks_(ranks),
      slot_bytes_(slot_bytes),
      result_bytes_(rounded_up(slot_bytes / static_cast<size_t>(ranks))),
      patience_(patience),
      abort_(abort) {
  if (part_bytes() == 0)
    throw Failure("there are too many ranks for slots of " + std::to_string(slot_bytes) + " bytes");
}

Counter& Channel::written_by(int rank) const { return reinterpret_cast<Counter*>(base_)[rank]; }

Counter& Channel::result_by(int rank) const { return reinterpret_cast<Counter*>(base_)[ranks_ + rank]; }

char* Channel::slot(uint32_t round, int rank) const {
  const size_t index = static_cast<size_t>(round % 2) * static_cast<size_t>(ranks_) + static_cast<size_t>(rank);
  return base_ + 2 * static_cast<size_t>(ranks_) * sizeof(Counter) + index * slot_bytes_;
}

char* Channel::result(uint32_t round, int rank) const {
  const size_t index = static_cast<size_t>(round % 2) * static_cast<size_t>(ranks_) + static_cast<size_t>(rank);
  return base_ + 2 * static_cast<size_t>(ranks_) * (sizeof(Counter) + slot_bytes_) + index * result_bytes_;
}

void Channel::written() {
  writer_.flush();
  written_by(rank_).advance_to(++round_);
}

void Channel::await_written(uint32_t round) {
  for (int step = 1; step < ranks_; ++step) written_by((rank_ + step) % ranks_).await(round + 1, patience_, abort_);
}

void Channel::result_written() {
  writer_.flush();
  result_by(rank_).advance_to(++result_round_);
}

void Channel::await_result(uint32_t round, int rank) { result_by(rank).await(round + 1, patience_, abort_); }

}  // namespace hvkeras
