#include "compressed_allreduce.h"

#include <algorithm>
#include <cstring>

#include "hosts.h"
#include "quantize.h"
#include "segments.h"

namespace hvkeras::between_hosts {

namespace {

// Splits elements [start, stop) into runs of blocks within one tensor, whole(span, start, stop), and blocks of several
// tensors, split(start, stop).
template <typename Whole, typename Split>
void visit_blocks(const Spans& spans, size_t start, size_t stop, Whole&& whole, Split&& split) {
  while (start < stop) {
    const size_t end = std::min(spans.end_of(start), stop);
    size_t next = end == stop ? stop : start + (end - start) / kScaledElements * kScaledElements;
    if (next != start) {
      whole(spans.within(start, next), start, next);
    } else {
      next = std::min(start + kScaledElements, stop);
      split(start, next);
    }
    start = next;
  }
}

// The steps of each segment, as in segments.h.
class CompressedSegments {
 public:
  CompressedSegments(Channel& channel, const Spans& spans, ScaleFactors factors, ErrorFeedback& feedback)
      : hosts_(*channel.hosts()),
        spans_(spans),
        factors_(factors),
        feedback_(feedback),
        is_alone_(channel.ranks() == 1),
        exact_(channel, spans, Type::kFloat32, Reduction::kSum, {factors.prescale, 1.0}, Segments::Staging::kAll),
        max_count_(std::min(channel.slot_bytes(), hosts_.buffer_bytes()) / sizeof(float) / kScaledElements *
                   kScaledElements),
        part_bytes_(round_up(encoded_bytes(part_of_count(max_count_)), Channel::kLine)) {
    if (!hosts_.is_leader()) return;
    if (feedback_.errors.size() != spans.count()) feedback_.errors.assign(spans.count(), 0.0f);
    ++feedback_.runs;
    memory_ = hosts_.leader_memory((kReceiveSlots + kSendSlots) * hosts() * part_bytes_);
  }

  bool is_leader() const { return hosts_.is_leader(); }
  size_t segments() const { return ceil_div(spans_.count(), max_count_); }
  void wait(InFlight& transfers, const Segment& segment) { transfers.wait(hosts_, segment.number); }

  Segment segment(size_t number) const {
    Segment made{number, number * max_count_, std::min((number + 1) * max_count_, spans_.count()), {}};
    const size_t length = made.stop - made.start, part = part_of_count(length);
    for (size_t index = 0; index <= hosts(); ++index) made.bounds.push_back(std::min(index * part, length));
    return made;
  }

  // Adds up the numbers of this host's ranks, unless there is only one.
  void reduce_in_host(const Segment& segment) {
    if (!is_alone_) exact_.reduce_in_host(segment);
  }
  // Leader only: posts receives of the other hosts' contributions to this host's part.
  Handles post_receives(const Segment& segment) {
    const size_t bytes = part_of(segment, hosts_.host()).bytes;
    for (const int host : hosts_.peers()) hosts_.receive(host, received(segment, host), bytes, Link::kParts);
    return hosts_.take_started();
  }
  // Leader only: encodes the other hosts' parts and sends them, and posts receives of the results, which replace the
  // numbers that were encoded.
  Handles send(const Segment& segment) {
    for (const int host : hosts_.peers()) {
      const Part part = part_of(segment, host);
      char* const out = slot(kReceiveSlots + segment.number % kSendSlots, host);
      encode(segment, part, out, {}, 0);
      hosts_.send(host, out, part.bytes, Link::kParts);
      hosts_.receive(host, part.result, part.bytes, Link::kResults);
    }
    return hosts_.take_started();
  }
  // Leader only: adds up this host's part, and sends the result.
  Handles reduce_own_part(const Segment& segment) {
    const Part own = part_of(segment, hosts_.host());
    std::vector<const char*> others;
    for (int host = 0; host < hosts_.hosts(); ++host)
      if (host != hosts_.host()) others.push_back(received(segment, host));
    encode(segment, own, own.result, std::move(others), 1);
    for (const int host : hosts_.peers()) hosts_.send(host, own.result, own.bytes, Link::kResults);
    return hosts_.take_started();
  }
  // Decodes the result, once the leader has it.
  void share_result(const Segment& segment) {
    if (is_leader()) {
      hosts_.signal_ready();
    } else {
      hosts_.wait_ready();
    }
    for (int host = 0; host < hosts_.hosts(); ++host) decode(part_of(segment, host));
  }

 private:
  static constexpr size_t kReceiveSlots = kExchangeAfter + 1 + kPrepostedSegments, kSendSlots = kReadAfter + 1;

  // A host's part of a segment: elements [start, stop) of the tensors.
  struct Part {
    size_t start, stop;
    char* result;  // where its encoded result is, in memory that this host's ranks share
    size_t bytes;  // encoded
  };

  size_t hosts() const { return static_cast<size_t>(hosts_.hosts()); }
  size_t part_of_count(size_t count) const { return round_up(ceil_div(count, hosts()), kScaledElements); }
  Part part_of(const Segment& segment, int host) const {
    const size_t index = static_cast<size_t>(host), first = segment.bounds[index], last = segment.bounds[index + 1];
    return {segment.start + first, segment.start + last, exact_.buffer(segment) + first * sizeof(float),
            encoded_bytes(last - first)};
  }
  char* slot(size_t number, int host) const {
    return memory_ + (number * hosts() + static_cast<size_t>(host)) * part_bytes_;
  }
  char* received(const Segment& segment, int host) const { return slot(segment.number % kReceiveSlots, host); }

  // Encodes this host's sum of a part, together with `others`.
  void encode(const Segment& segment, const Part& part, char* out, std::vector<const char*> others, uint32_t stage) {
    const uint32_t seed = ((2 * feedback_.runs + stage) * 65'599u + static_cast<uint32_t>(hosts_.host())) * 0x9e3779b1u;
    std::vector<const char*> from_others(others.size());
    const auto encode_range = [&](const float* numbers, size_t start, size_t stop, double factor) {
      const size_t at = encoded_bytes(start - part.start);
      for (size_t other = 0; other < others.size(); ++other) from_others[other] = others[other] + at;
      quantizer_.encode(out + at, numbers, feedback_.errors.data() + start, stop - start, static_cast<float>(factor),
                        from_others.data(), static_cast<int>(others.size()), seed + static_cast<uint32_t>(start));
    };
    if (!is_alone_) {
      const char* const sums = exact_.buffer(segment) + (part.start - segment.start) * sizeof(float);
      return encode_range(reinterpret_cast<const float*>(sums), part.start, part.stop, 1.0);
    }
    visit_blocks(
        spans_, part.start, part.stop,
        [&](const Span& span, size_t start, size_t stop) {
          encode_range(reinterpret_cast<const float*>(span.in), start, stop, factors_.prescale);
        },
        [&](size_t start, size_t stop) {
          alignas(Channel::kLine) float block[kScaledElements];
          spans_.visit(start, stop, [&](const char* in, char*, size_t byte_offset, size_t count) {
            std::memcpy(reinterpret_cast<char*>(block) + byte_offset, in, count * sizeof(float));
          });
          encode_range(block, start, stop, factors_.prescale);
        });
  }

  void decode(const Part& part) const {
    const auto decode_range = [&](float* to, size_t start, size_t stop) {
      quantizer_.decode(to, part.result + encoded_bytes(start - part.start), stop - start,
                        static_cast<float>(factors_.postscale));
    };
    visit_blocks(
        spans_, part.start, part.stop,
        [&](const Span& span, size_t start, size_t stop) {
          decode_range(reinterpret_cast<float*>(span.out), start, stop);
        },
        [&](size_t start, size_t stop) {
          alignas(Channel::kLine) float block[kScaledElements];
          decode_range(block, start, stop);
          spans_.visit(start, stop, [&](const char*, char* out, size_t byte_offset, size_t count) {
            std::memcpy(out, reinterpret_cast<const char*>(block) + byte_offset, count * sizeof(float));
          });
        });
  }

  Hosts& hosts_;
  const Spans& spans_;
  const ScaleFactors factors_;
  ErrorFeedback& feedback_;
  const bool is_alone_;  // whether this host has one rank
  Segments exact_;       // of the sums within this host
  const size_t max_count_, part_bytes_;
  const Quantizer quantizer_ = quantizer();
  char* memory_ = nullptr;
};

}  // namespace

void compressed_allreduce(Channel& channel, const Spans& spans, ScaleFactors factors, ErrorFeedback& feedback) {
  CompressedSegments segments(channel, spans, factors, feedback);
  const size_t all = segments.segments();
  InFlight receives, started;
  size_t next = 0;  // the first segment whose receives are not posted yet
  run_pipelined(
      all, kExchangeAfter, kReadAfter,
      [&](size_t number) {
        for (; segments.is_leader() && next < std::min(all, number + 1 + kPrepostedSegments); ++next)
          receives.add(next, segments.post_receives(segments.segment(next)));
        segments.reduce_in_host(segments.segment(number));
        if (segments.is_leader()) started.add(number, segments.send(segments.segment(number)));
      },
      [&](size_t number) {
        if (!segments.is_leader()) return;
        segments.wait(receives, segments.segment(number));
        started.add(number, segments.reduce_own_part(segments.segment(number)));
      },
      [&](size_t number) {
        if (segments.is_leader()) segments.wait(started, segments.segment(number));
        segments.share_result(segments.segment(number));
      });
}

}  // namespace hvkeras::between_hosts
