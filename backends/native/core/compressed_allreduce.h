// Sums of float32 between hosts that are sent in 8 bits (quantize.h), with the rounding errors added to the next sum.
//
// The ranks of a host add up exactly. Each host's leader then encodes its parts for the other hosts; the owner of a
// part adds up what it has received, to its own exact part, and encodes the result, which all hosts decode. So all
// ranks have the same result. A leader keeps the rounding errors of what it has encoded: those of its host's
// contribution to the parts of other hosts, and those of the results of its own part (H. Tang et al., DoubleSqueeze,
// 2019).
#pragma once

#include <vector>

#include "collectives.h"

namespace hvkeras {

// The rounding errors of an allreduce of this host, in the order of its elements; empty if there are none.
struct ErrorFeedback {
  std::vector<float> errors;
  uint32_t runs = 0;  // so that each run rounds differently
};

namespace between_hosts {

// `feedback` is used by the leader.
void compressed_allreduce(Channel& channel, const Spans& spans, ScaleFactors factors, ErrorFeedback& feedback);

}  // namespace between_hosts

}  // namespace hvkeras
