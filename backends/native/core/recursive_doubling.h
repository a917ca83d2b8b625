// A short allreduce among many hosts by recursive doubling: in each step, pairs of hosts exchange all their data, at
// twice the previous distance. It takes log2(hosts) steps with one message each; see costs.h for when it is used.
#pragma once

#include "hierarchical.h"
#include "hosts.h"

namespace hvkeras::between_hosts {

// Reduces `count` elements at `data` in place over all hosts. For the leader.
void recursive_doubling_allreduce(Hosts& hosts, char* data, size_t count, Type type, Reduction reduction,
                                  ScaleFactors across_hosts);

}  // namespace hvkeras::between_hosts
