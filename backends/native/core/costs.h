// What messages between hosts cost, and the way of an allreduce that takes the least time by it.
//
// The model is Hockney's (docs/projection.md), with the sender's own work apart: a message of m bytes takes
// latency + m * per_byte, and of several messages at once each begins per_message, and the time of its bytes, after the
// one before.
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

// Measures what this host's leader and its neighbour's take: leaders are paired in their order, and one of an odd
// number measures nothing, which gives a latency of 0. All leaders call this at once, when nothing else is under way.
// Throws Failure after so many seconds.
Costs measure_costs(Link& link, int host, int hosts, double timeout);

namespace between_hosts {

enum class Algorithm {
  kUnordered,          // each host sends all others what it has, as soon as its own ranks are there: small.h
  kDirect,             // the same in the common order
  kRecursiveDoubling,  // recursive doubling: doubling.h
  kReduceScatter,      // each host adds up its part of the data: segments.h
};

// The way of an allreduce of so many bytes; the same on all ranks, as they know the same costs. Areas have
// `area_bytes`.
Algorithm choose_algorithm(size_t bytes, Type type, int hosts, size_t buffer_bytes, const Costs& costs);

}  // namespace between_hosts

}  // namespace hvkeras
