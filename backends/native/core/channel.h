// A piece of memory that the ranks of one host share, and the rounds in which data pass through it.
//
// In a round each rank writes its slot, says so, waits until all have said so, and reads the others' slots. There are
// two slots a rank, used in turn, so nobody waits for readers: whoever writes round r has seen all ranks write round r
// - 1, which they did after they had read round r - 2.
#pragma once

#include "copy.h"
#include "synchronization.h"

namespace hvkeras {

class Hosts;

class Channel {
 public:
  static constexpr size_t kLine = 64;  // bytes of a cache line, of which the size of an element is a fraction

  // Bytes of memory that `ranks` need with slots of this size.
  static size_t bytes(int ranks, size_t slot_bytes);
  // The size of a slot for so many ranks: cache-sized, and not too much memory for many ranks, but a line for each.
  static size_t slot_bytes_for(int ranks);

  // `base` is zeroed memory of `bytes()`, aligned to a page, the same for all ranks. Throws Failure where a slot has no
  // line for each rank.
  Channel(void* base, int rank, int ranks, size_t slot_bytes, SpinPolicy spin_policy, const AbortFlag& abort);

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  size_t slot_bytes() const { return slot_bytes_; }
  // What each rank has of a slot where it is divided among them: whole lines.
  size_t part_bytes() const { return slot_bytes_ / static_cast<size_t>(ranks_) / kLine * kLine; }
  const AbortFlag& abort() const { return abort_; }
  const SpinPolicy& spin_policy() const { return spin_policy_; }

  // The other hosts, where the group has ranks there: then `rank` and `ranks` are those of this host.
  Hosts* hosts() const { return hosts_; }
  void set_hosts(Hosts* hosts) { hosts_ = hosts; }

  // The rounds so far, of this rank; equal on all ranks between collectives.
  uint32_t round() const { return round_; }
  // A rank's slot of a round.
  char* slot(uint32_t round, int rank) const;
  // What writes this rank's slots and results.
  Writer& writer() { return writer_; }
  // Says that this rank has written its slot of the current round, and goes on to the next.
  void publish();
  // Waits until all ranks have written that round.
  void wait_written(uint32_t round);
  // The whole of a round without data of this rank's own between writing and reading.
  uint32_t exchange() {
    const uint32_t mine = round_;
    publish();
    wait_written(mine);
    return mine;
  }

  // A second kind of rounds, which run beside the first: what ranks have reduced for the others.
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
