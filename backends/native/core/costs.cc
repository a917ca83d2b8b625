#include "costs.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "synchronization.h"

namespace hvkeras {

namespace {

constexpr int kRepeats = 8, kBurst = 16;
constexpr size_t kShortBytes = 8, kFirstBytes = 64 * 1024, kPieceBytes = 256 * 1024, kMaxBytes = 1024 * 1024;
constexpr double kMaxSeconds = 10e-3;  // a message that takes this long is measured accurately

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The two ends of a measurement: the initiator sends and takes the time, the responder answers.
class CostMeasurement {
 public:
  CostMeasurement(Link& link, int other, double timeout)
      : link_(link), other_(other), end_(seconds_now() + timeout), memory_(kMaxBytes) {}

  Costs initiate() {
    Costs costs;
    const double short_round_trip = best_of(kRepeats, [&] { round_trip(1, kShortBytes); });
    const double burst = best_of(3, [&] { round_trip(kBurst, kShortBytes); });
    for (size_t bytes = kFirstBytes;; bytes *= 2) {
      const double taken = best_of(2, [&] { round_trip(1, bytes); });
      costs.per_byte = std::max(0.0, taken - short_round_trip) / static_cast<double>(bytes);
      if (taken > kMaxSeconds || bytes == kMaxBytes) break;
    }
    round_trip(0, 0);
    costs.latency = short_round_trip / 2;
    costs.per_message = std::max(0.0, burst - short_round_trip) / (kBurst - 1);
    return costs;
  }

  void respond() {
    for (;;) {
      uint64_t header[2];
      receive(header, sizeof header);
      if (header[0] == 0) return;
      for (uint64_t message = 0; message < header[0]; ++message) receive_all(header[1]);
      send(header, 1);
    }
  }

 private:
  template <typename Body>
  static double best_of(int times, Body&& body) {
    double best = 1e9;
    for (int time = 0; time < times; ++time) {
      const double start = seconds_now();
      body();
      best = std::min(best, seconds_now() - start);
    }
    return best;
  }

  // Sends a header, then `messages` messages of `bytes` bytes each, and waits for a reply once all have arrived.
  void round_trip(uint64_t messages, uint64_t bytes) {
    const uint64_t header[2] = {messages, bytes};
    send(header, sizeof header);
    for (uint64_t message = 0; message < messages; ++message) {
      for (size_t done = 0; done < bytes; done += kPieceBytes)
        send(memory_.data(), std::min<size_t>(bytes - done, kPieceBytes));
    }
    char answer;
    if (messages != 0) receive(&answer, 1);
  }
  void receive_all(uint64_t bytes) {
    for (size_t done = 0; done < bytes; done += kPieceBytes)
      receive(memory_.data() + done, std::min<size_t>(bytes - done, kPieceBytes));
  }
  void send(const void* data, size_t bytes) { wait(link_.send(other_, Link::kData, data, bytes)); }
  void receive(void* data, size_t bytes) { wait(link_.receive(other_, Link::kData, data, bytes)); }
  void wait(Link::Handle handle) {
    Polling polling(false);
    while (!link_.done(handle)) {
      if (seconds_now() > end_) throw Failure("timeout while measuring the network's costs");
      if (!polling.keep_polling()) link_.sleep(Polling::kMaxSleepMicros, -1);
      link_.progress();
    }
  }

  Link& link_;
  const int other_;
  const double end_;
  std::vector<char> memory_;
};

}  // namespace

Costs measure_costs(Link& link, int host, int hosts, double timeout) {
  const int other = host ^ 1;
  Costs costs{0.0, 0.0, 0.0};
  if (other >= hosts) return costs;
  CostMeasurement measurement(link, other, timeout);
  try {
    if (host < other) {
      costs = measurement.initiate();
    } else {
      measurement.respond();
    }
  } catch (const std::exception&) {
    link.abort();  // the network no longer accesses the buffer after this
    throw;
  }
  return costs;
}

namespace between_hosts {

namespace {

constexpr size_t kMaxUnorderedBytes = 16 * 1024;  // limited, as leaders buffer what arrives early

}  // namespace

Algorithm choose_algorithm(size_t bytes, Type type, int hosts, size_t buffer_bytes, const Costs& costs) {
  const double others = hosts - 1, length = static_cast<double>(bytes);
  const double full_message = costs.per_message + length * costs.per_byte;
  const double part_message = costs.per_message + length / hosts * costs.per_byte;
  const double negotiation = 2 * (costs.latency + costs.per_message);  // a round trip to the first host
  int steps = 0;
  while (2 << steps <= hosts) ++steps;
  const int fold_steps = 1 << steps == hosts ? 0 : 2;
  // In the order of the enumeration. Recursive doubling is not used for half precision, as each step would round.
  const bool is_half_precision = type == Type::kFloat16 || type == Type::kBfloat16;
  const std::pair<double, bool> candidates[] = {
      {costs.latency + others * full_message, bytes <= kMaxUnorderedBytes},
      {negotiation + costs.latency + others * full_message, bytes * static_cast<size_t>(hosts) <= buffer_bytes},
      {negotiation + (steps + fold_steps) * (costs.latency + full_message),
       bytes <= buffer_bytes && !is_half_precision},
      {negotiation + 2 * (costs.latency + others * part_message), true},
  };
  Algorithm best = Algorithm::kReduceScatter;
  for (const Algorithm algorithm : {Algorithm::kRecursiveDoubling, Algorithm::kDirect, Algorithm::kUnordered}) {
    const auto& [seconds, is_allowed] = candidates[static_cast<int>(algorithm)];
    if (is_allowed && seconds <= candidates[static_cast<int>(best)].first) best = algorithm;
  }
  return best;
}

}  // namespace between_hosts

}  // namespace hvkeras
