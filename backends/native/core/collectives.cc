#include "collectives.h"

#include <algorithm>
#include <cstring>

#include "hierarchical.h"
#include "hosts.h"

namespace hvkeras {

namespace {

constexpr size_t kOneRoundBytes = 64 * 1024;  // up to which each rank reduces all data, in one round
constexpr size_t kBlockBytes = 4 * 1024;      // reduced, then copied while in the L1 cache

// Each rank writes all of its data, and reduces the data of all ranks.
void allreduce_one_round(Channel& channel, const Spans& spans, Reducer reduce, ScaleFactors factors) {
  const uint32_t round = channel.round();
  char* const mine = channel.slot(round, channel.rank());
  const size_t size = spans.element_bytes();
  Writer& writer = channel.writer();
  writer.begin(spans.count() * size);
  spans.visit(0, spans.count(), [&](const char* in, char*, size_t byte_offset, size_t count) {
    writer.write(mine + byte_offset, in, count * size);
  });
  writer.end();
  channel.exchange();
  std::vector<const void*> sources(static_cast<size_t>(channel.ranks()));
  spans.visit(0, spans.count(), [&](const char*, char* out, size_t byte_offset, size_t count) {
    for (int rank = 0; rank < channel.ranks(); ++rank)
      sources[static_cast<size_t>(rank)] = channel.slot(round, rank) + byte_offset;
    reduce(out, sources.data(), channel.ranks(), count, factors.prescale, factors.postscale);
  });
}

// Reduce-scatter and allgather, pipelined over segments. Each rank reduces one part of a segment; before it does so, it
// writes the other ranks' parts of the next segment, so that they need not wait.
class Pipeline {
 public:
  Pipeline(Channel& channel, const Spans& spans, Reducer reduce, ScaleFactors factors)
      : channel_(channel), spans_(spans), reduce_(reduce), factors_(factors) {
    const size_t ranks = static_cast<size_t>(channel.ranks());
    const size_t size = spans.element_bytes();
    const size_t largest = std::min(channel.part_bytes(), channel.result_bytes()) / size;
    segments_ = ceil_div(spans.count(), largest * ranks);
    part_ = round_up(ceil_div(spans.count(), segments_ * ranks), Channel::kLine / size);
    segments_ = ceil_div(spans.count(), part_ * ranks);
    sources_.resize(ranks);
  }

  void run() {
    const uint32_t first = channel_.round(), first_result = channel_.result_round();
    write(0, first);
    channel_.wait_written(first);
    for (size_t segment = 0; segment < segments_; ++segment) {
      const uint32_t round = first + static_cast<uint32_t>(segment);
      const uint32_t result = first_result + static_cast<uint32_t>(segment);
      if (segment + 1 < segments_) write(segment + 1, round + 1);
      if (segment > 0) channel_.wait_written(round);
      reduce(segment, round, result);
      read(segment, result);
    }
  }

 private:
  // The elements [first, last) of a rank's part of a segment.
  std::pair<size_t, size_t> part(size_t segment, int rank) const {
    const size_t ranks = static_cast<size_t>(channel_.ranks());
    const size_t start = (segment * ranks + static_cast<size_t>(rank)) * part_;
    return {std::min(start, spans_.count()), std::min(start + part_, spans_.count())};
  }

  void write(size_t segment, uint32_t round) {
    char* const mine = channel_.slot(round, channel_.rank());
    const size_t size = spans_.element_bytes();
    Writer& writer = channel_.writer();
    writer.begin(static_cast<size_t>(channel_.ranks() - 1) * part_ * size);
    for (int step = 1; step < channel_.ranks(); ++step) {
      const int rank = (channel_.rank() + step) % channel_.ranks();
      char* const target = mine + static_cast<size_t>(rank) * part_ * size;
      const auto [start, stop] = part(segment, rank);
      spans_.visit(start, stop, [&](const char* in, char*, size_t byte_offset, size_t count) {
        writer.write(target + byte_offset, in, count * size);
      });
    }
    writer.end();
    channel_.publish();
  }

  void reduce(size_t segment, uint32_t round, uint32_t result) {
    const size_t size = spans_.element_bytes();
    const size_t block = kBlockBytes / size;
    const size_t offset = static_cast<size_t>(channel_.rank()) * part_ * size;
    char* const shared = channel_.result(result, channel_.rank());
    const auto [start, stop] = part(segment, channel_.rank());
    spans_.visit(start, stop, [&](const char* in, char* out, size_t byte_offset, size_t count) {
      for (size_t done = 0; done < count; done += block) {
        const size_t elements = std::min(block, count - done), at = byte_offset + done * size;
        for (int rank = 0; rank < channel_.ranks(); ++rank) {
          sources_[static_cast<size_t>(rank)] =
              rank == channel_.rank() ? in + done * size : channel_.slot(round, rank) + offset + at;
        }
        reduce_(out + done * size, sources_.data(), channel_.ranks(), elements, factors_.prescale, factors_.postscale);
        channel_.writer().write(shared + at, out + done * size, elements * size);
      }
    });
    channel_.publish_result();
  }

  void read(size_t segment, uint32_t result) {
    const size_t size = spans_.element_bytes();
    for (int step = 1; step < channel_.ranks(); ++step) {
      const int rank = (channel_.rank() + step) % channel_.ranks();
      channel_.wait_result(result, rank);
      const char* const theirs = channel_.result(result, rank);
      const auto [start, stop] = part(segment, rank);
      spans_.visit(start, stop, [&](const char*, char* out, size_t byte_offset, size_t count) {
        copy(out, theirs + byte_offset, count * size);
      });
    }
  }

  Channel& channel_;
  const Spans& spans_;
  Reducer reduce_;
  ScaleFactors factors_;
  size_t segments_ = 0, part_ = 0;
  std::vector<const void*> sources_;
};

// Allgathers a few sizes per rank, which all ranks must know before the data is exchanged.
std::vector<std::vector<size_t>> exchange_sizes(Channel& channel, const std::vector<size_t>& mine) {
  const uint32_t round = channel.round();
  std::memcpy(channel.slot(round, channel.rank()), mine.data(), mine.size() * sizeof(size_t));
  channel.exchange();
  std::vector<std::vector<size_t>> all(static_cast<size_t>(channel.ranks()), std::vector<size_t>(mine.size()));
  for (int rank = 0; rank < channel.ranks(); ++rank)
    std::memcpy(all[static_cast<size_t>(rank)].data(), channel.slot(round, rank), mine.size() * sizeof(size_t));
  return all;
}

// The number of elements of the largest part.
size_t max_count(const std::vector<Spans>& parts) {
  size_t max_bytes = 0;
  for (const Spans& part : parts) max_bytes = std::max(max_bytes, part.count());
  return max_bytes;
}

}  // namespace

Spans::Spans(std::vector<Span> spans, size_t element_bytes)
    : spans_(std::move(spans)), starts_{0}, element_bytes_(element_bytes) {
  for (const Span& span : spans_) starts_.push_back(starts_.back() + span.count);
}

Span Spans::within(size_t start, size_t stop) const {
  const size_t index =
      static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), start) - starts_.begin()) - 1;
  if (start >= stop || stop > starts_[index + 1]) return {nullptr, nullptr, 0};
  const size_t offset = (start - starts_[index]) * element_bytes_;
  return {spans_[index].in + offset, spans_[index].out + offset, stop - start};
}

void allreduce(Channel& channel, const Spans& spans, Type type, Reduction reduction, ScaleFactors factors) {
  const Reducer reduce = reducer_of(type, reduction);
  if (reduce == nullptr) throw Failure(std::string("unsupported reduction for dtype ") + name_of(type));
  if (spans.count() == 0) return;
  if (channel.hosts() != nullptr) return between_hosts::allreduce(channel, spans, type, reduction, factors);
  const size_t bytes = spans.count() * spans.element_bytes();
  if (bytes <= std::min(kOneRoundBytes * 2 / static_cast<size_t>(channel.ranks()), channel.slot_bytes())) {
    allreduce_one_round(channel, spans, reduce, factors);
  } else {
    Pipeline(channel, spans, reduce, factors).run();
  }
}

void broadcast(Channel& channel, const char* in, char* out, size_t bytes, int root) {
  if (channel.hosts() != nullptr) return between_hosts::broadcast(channel, in, out, bytes, root);
  for (size_t start = 0; start < bytes; start += channel.slot_bytes()) {
    const size_t length = std::min(bytes - start, channel.slot_bytes());
    if (channel.rank() == root) channel.writer().write(channel.slot(channel.round(), root), in + start, length);
    const uint32_t round = channel.exchange();
    if (channel.rank() != root) copy(out + start, channel.slot(round, root), length);
  }
  if (channel.rank() == root && in != out && bytes != 0) copy(out, in, bytes);
}

void allgather(Channel& channel, const char* in, size_t rows, size_t row_bytes, const Allocate& allocate) {
  if (channel.hosts() != nullptr) return between_hosts::allgather(channel, in, rows, row_bytes, allocate);
  std::vector<size_t> rows_of_rank;
  for (const std::vector<size_t>& sizes : exchange_sizes(channel, {rows})) rows_of_rank.push_back(sizes[0]);
  char* out = allocate(rows_of_rank);
  std::vector<Spans> parts;
  for (const size_t count : rows_of_rank) {
    parts.emplace_back(std::vector<Span>{{in, out, count * row_bytes}}, 1);
    out += count * row_bytes;
  }
  gather_parts(channel, parts);
}

void gather_parts(Channel& channel, const std::vector<Spans>& parts) {
  if (channel.hosts() != nullptr) return between_hosts::gather_parts(channel, parts);
  const size_t me = static_cast<size_t>(channel.rank()), capacity = channel.slot_bytes();
  const size_t max_bytes = max_count(parts);
  for (size_t start = 0; start < max_bytes; start += capacity) {
    char* const mine = channel.slot(channel.round(), channel.rank());
    Writer& writer = channel.writer();
    const size_t end = std::min(start + capacity, parts[me].count());
    writer.begin(start < end ? end - start : 0);
    parts[me].visit(start, end, [&](const char* in, char*, size_t byte_offset, size_t bytes) {
      writer.write(mine + byte_offset, in, bytes);
    });
    writer.end();
    const uint32_t round = channel.exchange();
    for (size_t step = 0; step < parts.size(); ++step) {
      const size_t rank = (me + step) % parts.size();
      const char* const theirs = channel.slot(round, static_cast<int>(rank));
      const bool is_mine = rank == me;
      parts[rank].visit(start, std::min(start + capacity, parts[rank].count()),
                        [&](const char* in, char* out, size_t byte_offset, size_t bytes) {
                          if (!is_mine || in != out) copy(out, is_mine ? in : theirs + byte_offset, bytes);
                        });
    }
  }
}

void alltoall(Channel& channel, const char* in, const std::vector<size_t>& rows_to, size_t row_bytes,
              const Allocate& allocate) {
  if (channel.hosts() != nullptr) return between_hosts::alltoall(channel, in, rows_to, row_bytes, allocate);
  const std::vector<std::vector<size_t>> rows = exchange_sizes(channel, rows_to);
  const size_t me = static_cast<size_t>(channel.rank()), ranks = static_cast<size_t>(channel.ranks());
  std::vector<size_t> rows_from, starts_in{0}, starts_out{0};
  size_t max_bytes = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    rows_from.push_back(rows[rank][me]);
    starts_out.push_back(starts_out.back() + rows_from.back() * row_bytes);
    starts_in.push_back(starts_in.back() + rows_to[rank] * row_bytes);
    for (const size_t sent_bytes : rows[rank]) max_bytes = std::max(max_bytes, sent_bytes * row_bytes);
  }
  char* const out = allocate(rows_from);
  const size_t capacity = channel.part_bytes();
  for (size_t start = 0; start < max_bytes; start += capacity) {
    const auto length_of = [&](size_t size) { return start < size ? std::min(size - start, capacity) : 0; };
    char* const mine = channel.slot(channel.round(), channel.rank());
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (const size_t length = length_of(rows_to[rank] * row_bytes))
        channel.writer().write(mine + rank * capacity, in + starts_in[rank] + start, length);
    }
    const uint32_t round = channel.exchange();
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (const size_t length = length_of(rows_from[rank] * row_bytes))
        copy(out + starts_out[rank] + start, channel.slot(round, static_cast<int>(rank)) + me * capacity, length);
    }
  }
}

void reduce_parts(Channel& channel, const std::vector<Spans>& parts, Type type, Reduction reduction,
                  ScaleFactors factors) {
  const Reducer reduce = reducer_of(type, reduction);
  if (reduce == nullptr) throw Failure(std::string("unsupported reduction for dtype ") + name_of(type));
  if (channel.hosts() != nullptr) return between_hosts::reduce_parts(channel, parts, type, reduction, factors);
  const size_t me = static_cast<size_t>(channel.rank()), ranks = parts.size(), size = size_of(type);
  const size_t capacity = channel.part_bytes() / size;
  const size_t max_bytes = max_count(parts);
  std::vector<const void*> sources(ranks);
  for (size_t start = 0; start < max_bytes; start += capacity) {
    const auto end_of = [&](size_t rank) { return std::min(start + capacity, parts[rank].count()); };
    char* const mine = channel.slot(channel.round(), channel.rank());
    Writer& writer = channel.writer();
    writer.begin((ranks - 1) * std::min(capacity, max_bytes - start) * size);
    for (size_t step = 1; step < ranks; ++step) {
      const size_t rank = (me + step) % ranks;
      char* const target = mine + rank * capacity * size;
      parts[rank].visit(start, end_of(rank), [&](const char* in, char*, size_t byte_offset, size_t count) {
        writer.write(target + byte_offset, in, count * size);
      });
    }
    writer.end();
    const uint32_t round = channel.exchange();
    parts[me].visit(start, end_of(me), [&](const char* in, char* out, size_t byte_offset, size_t count) {
      for (size_t rank = 0; rank < ranks; ++rank) {
        const char* const theirs = channel.slot(round, static_cast<int>(rank)) + me * capacity * size + byte_offset;
        sources[rank] = rank == me ? in : theirs;
      }
      reduce(out, sources.data(), channel.ranks(), count, factors.prescale, factors.postscale);
    });
  }
}

void reducescatter(Channel& channel, const char* in, char* out, const std::vector<size_t>& starts, Type type,
                   Reduction reduction, ScaleFactors factors) {
  const size_t size = size_of(type);
  const int mine = channel.hosts() != nullptr ? channel.hosts()->placement().rank : channel.rank();
  std::vector<Spans> parts;
  for (size_t rank = 0; rank + 1 < starts.size(); ++rank) {
    char* const target = rank == static_cast<size_t>(mine) ? out : nullptr;
    parts.emplace_back(std::vector<Span>{{in + starts[rank] * size, target, starts[rank + 1] - starts[rank]}}, size);
  }
  reduce_parts(channel, parts, type, reduction, factors);
}

void barrier(Channel& channel) {
  if (channel.hosts() != nullptr) return between_hosts::barrier(channel);
  channel.exchange();
}

}  // namespace hvkeras
