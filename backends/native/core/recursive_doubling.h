// A short allreduce among many hosts by recursive doubling: hosts exchange all they have in pairs, at twice the
// distance each time. It takes as many steps as the number of hosts has binary digits, with one message each; costs.h
// says when it is the fastest way.
#pragma once

#include "hierarchical.h"
#include "hosts.h"

namespace hvkeras::between_hosts {

// Adds up `count` elements at `data`, this host's, with those of all other hosts. For the leader.
void recursive_doubling_allreduce(Hosts& hosts, char* data, size_t count, Type type, Reduction reduction,
                                  ScaleFactors across_hosts);

}  // namespace hvkeras::between_hosts
