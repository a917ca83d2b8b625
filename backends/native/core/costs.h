// The costs of messages between hosts, and the choice of the fastest allreduce algorithm based on them.
//
// This is Hockney's model with a separate overhead of the sender: a message of m bytes takes latency + m * per_byte.
// Several messages at once start one after the other, each after the previous one's per_message and bytes.
#pragma once

#include "link.h"
#include "types.h"

namespace hvkeras {

// In seconds.
struct Costs {
  double latency = 25e-6;
  double per_message = 4e-6;
  double per_byte = 0.8e-9;
};

// Measures the costs of messages between this host's leader and its neighbor's. Leaders measure in pairs; with an odd
// number of hosts the last one measures nothing, and returns a latency of 0. All leaders call this at once, while
// nothing else is in flight. Throws Failure after `timeout` seconds.
Costs measure_costs(Link& link, int host, int hosts, double timeout);

namespace between_hosts {

enum class Algorithm {
  kUnordered,          // each host sends its data to all others as soon as its own ranks are ready: small_allreduce.h
  kDirect,             // each host sends its data to all others, in the common order
  kRecursiveDoubling,  // recursive_doubling.h
  kReduceScatter,      // each host reduces its part, then sends the result to all others: segments.h
};

// The algorithm for an allreduce of this many bytes. It is the same on all ranks, as they have the same costs. Staging
// buffers have `buffer_bytes` bytes.
Algorithm choose_algorithm(size_t bytes, Type type, int hosts, size_t buffer_bytes, const Costs& costs);

}  // namespace between_hosts

}  // namespace hvkeras
