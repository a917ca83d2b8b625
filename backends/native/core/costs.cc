#include "costs.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "waiting.h"

namespace hvkeras {

namespace {

constexpr int kRounds = 8, kBurst = 16;
constexpr size_t kShort = 8, kFirst = 64 * 1024, kPiece = 256 * 1024, kMost = 1024 * 1024;  // bytes
constexpr double kEnough = 10e-3;  // seconds: bytes that take so long have been measured well enough

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The two ends of a measurement: one sends and takes the time, and the other answers.
class Measuring {
 public:
  Measuring(Link& link, int other, double timeout)
      : link_(link), other_(other), end_(seconds_now() + timeout), memory_(kMost) {}

  Costs asking() {
    Costs costs;
    const double there_and_back = best_of(kRounds, [&] { asked(1, kShort); });
    const double burst = best_of(3, [&] { asked(kBurst, kShort); });
    for (size_t bytes = kFirst;; bytes *= 2) {
      const double taken = best_of(2, [&] { asked(1, bytes); });
      costs.per_byte = std::max(0.0, taken - there_and_back) / static_cast<double>(bytes);
      if (taken > kEnough || bytes == kMost) break;
    }
    asked(0, 0);
    costs.latency = there_and_back / 2;
    costs.per_message = std::max(0.0, burst - there_and_back) / (kBurst - 1);
    return costs;
  }

  void answering() {
    for (;;) {
      uint64_t what[2];
      receive(what, sizeof what);
      if (what[0] == 0) return;
      for (uint64_t message = 0; message < what[0]; ++message) receive_all(what[1]);
      send(what, 1);
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

  // So many messages of so many bytes, after one that announces them, and an answer once all are there.
  void asked(uint64_t messages, uint64_t bytes) {
    const uint64_t what[2] = {messages, bytes};
    send(what, sizeof what);
    for (uint64_t message = 0; message < messages; ++message) {
      for (size_t done = 0; done < bytes; done += kPiece) send(memory_.data(), std::min<size_t>(bytes - done, kPiece));
    }
    char answer;
    if (messages != 0) receive(&answer, 1);
  }
  void receive_all(uint64_t bytes) {
    for (size_t done = 0; done < bytes; done += kPiece)
      receive(memory_.data() + done, std::min<size_t>(bytes - done, kPiece));
  }
  void send(const void* data, size_t bytes) { await(link_.send(other_, Link::kData, data, bytes)); }
  void receive(void* data, size_t bytes) { await(link_.receive(other_, Link::kData, data, bytes)); }
  void await(Link::Ticket ticket) {
    Polling polling(false);
    while (!link_.done(ticket)) {
      if (seconds_now() > end_) throw Failure("the network's costs cannot be measured in time");
      if (!polling.goes_on()) link_.sleep(Polling::kLongestSleep, -1);
      link_.progress();
    }
  }

  Link& link_;
  const int other_;
  const double end_;
  std::vector<char> memory_;
};

}  // namespace

Costs measured(Link& link, int host, int hosts, double timeout) {
  const int other = host ^ 1;
  Costs costs{0.0, 0.0, 0.0};
  if (other >= hosts) return costs;
  Measuring measuring(link, other, timeout);
  try {
    if (host < other) {
      costs = measuring.asking();
    } else {
      measuring.answering();
    }
  } catch (const std::exception&) {
    link.give_up();  // nothing uses the memory any more
    throw;
  }
  return costs;
}

namespace between_hosts {

namespace {

constexpr size_t kMostUnordered = 16 * 1024;  // bytes, as leaders keep what comes before they are ready for it

}  // namespace

Path path_of(size_t bytes, Type type, int hosts, size_t area_bytes, const Costs& costs) {
  const double others = hosts - 1, length = static_cast<double>(bytes);
  const double whole = costs.per_message + length * costs.per_byte;
  const double part = costs.per_message + length / hosts * costs.per_byte;
  const double agreeing = 2 * (costs.latency + costs.per_message);  // on the order: there and back
  int steps = 0;
  while (2 << steps <= hosts) ++steps;
  const int folding = 1 << steps == hosts ? 0 : 2;
  // In the order of the enumeration; each step of recursive doubling would round half precisions.
  const bool halves = type == Type::kFloat16 || type == Type::kBfloat16;
  const std::pair<double, bool> ways[] = {
      {costs.latency + others * whole, bytes <= kMostUnordered},
      {agreeing + costs.latency + others * whole, bytes * static_cast<size_t>(hosts) <= area_bytes},
      {agreeing + (steps + folding) * (costs.latency + whole), bytes <= area_bytes && !halves},
      {agreeing + 2 * (costs.latency + others * part), true},
  };
  Path best = Path::kInParts;
  for (const Path path : {Path::kDoubled, Path::kAtOnce, Path::kUnordered}) {
    const auto& [seconds, is_possible] = ways[static_cast<int>(path)];
    if (is_possible && seconds <= ways[static_cast<int>(best)].first) best = path;
  }
  return best;
}

}  // namespace between_hosts

}  // namespace hvkeras
