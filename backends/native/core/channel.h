// Memory shared by the ranks of one host, and the rounds in which they exchange data through it.
//
// In a round each rank writes its slot, increments its write counter, waits for the counters of all ranks, and reads
// their slots. Each rank has two slots, used alternately, so writers need not wait for readers: a rank that writes in
// round r has seen all ranks write in round r - 1, which they did after they had read in round r - 2.
#pragma once

#include "copy.h"
#include "synchronization.h"

namespace hvkeras {

class Hosts;

class Channel {
 public:
  static constexpr size_t kLine = 64;  // bytes of a cache line, a multiple of every element size

  // Bytes of memory for `ranks` ranks with slots of this size.
  static size_t bytes(int ranks, size_t slot_bytes);
  // The size of a slot: fits into the cache, limits the total memory of many ranks, and has at least a line for each
  // rank.
  static size_t slot_bytes_for(int ranks);

  // `base` is zeroed, page-aligned memory of `bytes()`, the same for all ranks. Throws Failure if a slot has less than
  // one line for each rank.
  Channel(void* base, int rank, int ranks, size_t slot_bytes, SpinPolicy spin_policy, const AbortFlag& abort);

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  size_t slot_bytes() const { return slot_bytes_; }
  // The share of each rank if a slot is divided among all ranks, in whole lines.
  size_t part_bytes() const { return slot_bytes_ / static_cast<size_t>(ranks_) / kLine * kLine; }
  const AbortFlag& abort() const { return abort_; }
  const SpinPolicy& spin_policy() const { return spin_policy_; }

  // The other hosts, if the group spans several; then `rank` and `ranks` refer to this host.
  Hosts* hosts() const { return hosts_; }
  void set_hosts(Hosts* hosts) { hosts_ = hosts; }

  // This rank's current round; equal on all ranks between collectives.
  uint32_t round() const { return round_; }
  // A rank's slot in a round.
  char* slot(uint32_t round, int rank) const;
  // Writes this rank's slots and results.
  Writer& writer() { return writer_; }
  // Signals that this rank has written its slot of the current round, and advances to the next round.
  void publish();
  // Waits until all ranks have written their slots of this round.
  void wait_written(uint32_t round);
  // `publish` and `wait_written` together, for rounds without work between them.
  uint32_t exchange() {
    const uint32_t mine = round_;
    publish();
    wait_written(mine);
    return mine;
  }

  // A second, independent sequence of rounds, for what each rank has reduced for the others.
  uint32_t result_round() const { return result_round_; }
  char* result(uint32_t round, int rank) const;
  size_t result_bytes() const { return result_bytes_; }
  void publish_result();
  void wait_result(uint32_t round, int rank);

 private:
  Counter& written_counter(int rank) const;
  Counter& result_counter(int rank) const;

  char* base_;
  int rank_, ranks_;
  size_t slot_bytes_, result_bytes_;
  SpinPolicy spin_policy_;
  const AbortFlag& abort_;
  Hosts* hosts_ = nullptr;
  Writer writer_;
  uint32_t round_ = 0, result_round_ = 0;
};

}  // namespace hvkeras
