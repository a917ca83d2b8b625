// The collectives, each run by all ranks of a group at the same point of their common order. What is here goes through
// the memory that the ranks of one host share; groups on several hosts take the ways in hierarchy.h.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "channel.h"
#include "reduce.h"

namespace hvkeras {

constexpr size_t kAlignElements = 64;  // elements to which parts are rounded up, so that all start on a cache line

inline size_t round_up(size_t count, size_t step) { return (count + step - 1) / step * step; }
inline size_t ceil_div(size_t count, size_t by) { return (count + by - 1) / by; }

// A tensor that is reduced: where it comes from and where it goes to, which may be the same.
struct Span {
  const char* in;
  char* out;
  size_t count;  // elements
};

// Several tensors, treated as one after the other.
class Spans {
 public:
  Spans(std::vector<Span> spans, size_t element_bytes);

  size_t count() const { return starts_.back(); }
  size_t element_bytes() const { return element_bytes_; }
  // Elements [start, stop), if they are of one tensor; else a span without any.
  Span within(size_t start, size_t stop) const;
  // Calls visit(in, out, bytes before it in the range, elements) for each piece of elements [start, stop).
  template <typename Visit>
  void visit(size_t start, size_t stop, Visit&& visit) const;

 private:
  std::vector<Span> spans_;
  std::vector<size_t> starts_;  // of each tensor, and the end
  size_t element_bytes_;
};

template <typename Visit>
void Spans::visit(size_t start, size_t stop, Visit&& visit) const {
  if (start >= stop) return;
  size_t index = static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), start) - starts_.begin()) - 1;
  for (size_t at = start; at < stop; ++index) {
    const size_t end = std::min(stop, starts_[index + 1]);
    if (end == at) continue;  // an empty tensor
    const size_t offset = (at - starts_[index]) * element_bytes_;
    visit(spans_[index].in + offset, spans_[index].out + offset, (at - start) * element_bytes_, end - at);
    at = end;
  }
}

// Where a received tensor of so many rows from each rank goes; called once on each rank, may throw Failure.
using Allocate = std::function<char*(const std::vector<size_t>& rows_of_rank)>;

// How floating-point numbers are scaled: each rank's before the reduction, and the result after it.
struct ScaleFactors {
  double prescale = 1.0, postscale = 1.0;
};

// An allreduce as a whole.
struct Allreduce {
  Spans spans;
  Type type;
  Reduction reduction;
  ScaleFactors factors;

  size_t bytes() const { return spans.count() * spans.element_bytes(); }
};

void allreduce(Channel& channel, const Spans& spans, Type type, Reduction reduction, ScaleFactors factors);
inline void allreduce(Channel& channel, const Allreduce& all) {
  allreduce(channel, all.spans, all.type, all.reduction, all.factors);
}
void broadcast(Channel& channel, const char* in, char* out, size_t bytes, int root);
void allgather(Channel& channel, const char* in, size_t rows, size_t row_bytes, const Allocate& allocate);
// `rows_to[r]` rows go to rank r, one after the other from `in`.
void alltoall(Channel& channel, const char* in, const std::vector<size_t>& rows_to, size_t row_bytes,
              const Allocate& allocate);
// Rank r gets `parts[r]` of what all ranks have there, reduced; all ranks have the same parts. What the outputs of
// other ranks' parts hold is not touched.
void reduce_parts(Channel& channel, const std::vector<Spans>& parts, Type type, Reduction reduction,
                  ScaleFactors factors);
// Gives all ranks what rank r has in `parts[r]`, for each r; only r reads the inputs of that. Elements are bytes.
void gather_parts(Channel& channel, const std::vector<Spans>& parts);
// Rank r gets elements [starts[r], starts[r + 1]) of the reduced array.
void reducescatter(Channel& channel, const char* in, char* out, const std::vector<size_t>& starts, Type type,
                   Reduction reduction, ScaleFactors factors);
void barrier(Channel& channel);

}  // namespace hvkeras
