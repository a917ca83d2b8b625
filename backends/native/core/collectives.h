// The collectives. All ranks of a group run each at the same point of their common order. The functions here use the
// shared memory of one host; groups on several hosts use those in hierarchical.h.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "channel.h"
#include "reduce.h"

namespace hvkeras {

constexpr size_t kAlignElements = 64;  // parts are multiples of this, to start on a cache line

inline size_t round_up(size_t count, size_t step) { return (count + step - 1) / step * step; }
inline size_t ceil_div(size_t count, size_t by) { return (count + by - 1) / by; }

// The input and output of a tensor in a collective, which may be the same memory.
struct Span {
  const char* in;
  char* out;
  size_t count;  // elements
};

// Several tensors, treated as if they were contiguous.
class Spans {
 public:
  Spans(std::vector<Span> spans, size_t element_bytes);

  size_t count() const { return starts_.back(); }
  size_t element_bytes() const { return element_bytes_; }
  // Elements [start, stop) if they belong to one tensor; otherwise an empty span.
  Span within(size_t start, size_t stop) const;
  // The end of the tensor that has this element.
  size_t end_of(size_t element) const;
  // Calls visit(in, out, byte offset in the range, elements) for each contiguous piece of elements [start, stop).
  template <typename Visit>
  void visit(size_t start, size_t stop, Visit&& visit) const;

 private:
  std::vector<Span> spans_;
  std::vector<size_t> starts_;  // of each tensor in elements, and the end
  size_t element_bytes_;
};

inline size_t Spans::end_of(size_t element) const { return *std::upper_bound(starts_.begin(), starts_.end(), element); }

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

// Allocates the output for these numbers of rows from each rank. Called once on each rank; may throw Failure.
using Allocate = std::function<char*(const std::vector<size_t>& rows_of_rank)>;

// Factors for floating-point numbers: of each rank's input, and of the result.
struct ScaleFactors {
  double prescale = 1.0, postscale = 1.0;
};

// All arguments of an allreduce.
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
// Sends `rows_to[r]` rows to rank r, consecutively from `in`.
void alltoall(Channel& channel, const char* in, const std::vector<size_t>& rows_to, size_t row_bytes,
              const Allocate& allocate);
// Rank r gets the reduction of `parts[r]` over all ranks; all ranks pass the same partition. Outputs of other ranks'
// parts are not written.
void reduce_parts(Channel& channel, const std::vector<Spans>& parts, Type type, Reduction reduction,
                  ScaleFactors factors);
// All ranks get `parts[r]` of rank r, for each r; inputs are read only on the rank that has the part. Elements are
// bytes.
void gather_parts(Channel& channel, const std::vector<Spans>& parts);
// Rank r gets elements [starts[r], starts[r + 1]) of the reduced array.
void reducescatter(Channel& channel, const char* in, char* out, const std::vector<size_t>& starts, Type type,
                   Reduction reduction, ScaleFactors factors);
void barrier(Channel& channel);

}  // namespace hvkeras
